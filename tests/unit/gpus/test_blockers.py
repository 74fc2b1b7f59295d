"""Who keeps a GPU as it is: one answer, from the ledger, and from the state file before there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from yunion_mps.core.enums import MPS, TIME_SLICING
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.paths import Paths
from yunion_mps.core.waits import NO_USERS
from yunion_mps.gpus.blockers import UNUSED, WITHOUT_MPS, Blockers, Needs
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.storage import LeaseStorage, recorded_ledger

from unit.builders import gpu
from unit.leases.lease_builders import device

ONE, TWO = gpu(1, uuid="GPU-1"), gpu(2, uuid="GPU-2")
INSTANCE = gpu(1, uuid="MIG-1", parent="GPU-1")
GPUS = (ONE, INSTANCE, TWO)
#: As to restore a compute mode that lets one process in.
A_STRICT_MODE = Needs(leases=WITHOUT_MPS, processes=True)
A_TIME_SLICE = Needs(leases=WITHOUT_MPS, processes=True, spares_mps=True)


def lease(uuid: str, sharing: str = TIME_SLICING, name: str = "job") -> Lease:
    leased = device(0, 0)._replace(id=name, gpu_uuid=uuid, sharing=sharing)
    return Lease(name, (leased,), Holder("name", 0, name=name), 0.0)


@pytest.fixture
def store(paths: Paths) -> Iterator[Store]:
    with closing(Store(paths)) as store:
        yield store


def put(store: Store, *texts: str) -> None:
    store.write("INSERT INTO lease VALUES (?, ?)", [(f"row-{n}", text) for n, text in enumerate(texts)])


def test_a_lease_without_mps_keeps_the_mode_and_the_time_slice() -> None:
    blockers = Blockers.of(Ledger([lease("GPU-1")]), gpus=GPUS)
    for needs in (A_STRICT_MODE, A_TIME_SLICE):
        assert str(blockers.against("GPU-1", needs).users) == "lease job of root"
        assert not blockers.against("GPU-2", needs)
    assert not blockers.against("GPU-1", Needs(servers=True))


def test_a_lease_through_mps_keeps_neither(store: Store) -> None:
    """However its row is spaced: it is read, not compared as text."""
    LeaseStorage(store).write(lease("GPU-1", MPS))
    (row,) = store.read("SELECT value FROM lease")
    for separators in ((",", ":"), (", ", ": "), (" , ", " : ")):
        store.write("UPDATE lease SET value = ?", [(json.dumps(json.loads(row[0]), separators=separators),)])
        blockers = Blockers.of(recorded_ledger(store), gpus=GPUS)
        assert not blockers.against("GPU-1", A_STRICT_MODE)
        assert blockers.of_gpu("GPU-1")


@pytest.mark.parametrize(
    "row",
    [
        '{"shares": [{"gpu": "GPU-1"}]}',
        '{"devices": ["GPU-1"]}',
        '{"devices": [{"gpu_uuid": "GPU-1", "sharing": "mps"}]}',
        '{"devices": [{"gpu_uuid": "GPU-1", "shar',
    ],
)
def test_a_row_that_cannot_be_read_keeps_the_gpus_that_it_names(store: Store, row: str) -> None:
    put(store, "{", row)
    ledger = recorded_ledger(store)
    assert ledger.ways_kept() == {"GPU-1": MPS}
    blockers = Blockers.of(ledger, gpus=GPUS)
    for needs in (A_STRICT_MODE, A_TIME_SLICE):
        assert str(blockers.against("GPU-1", needs).users) == "lease row-1"
        assert not blockers.against("GPU-2", needs)


def test_a_damaged_row_hides_no_other_lease(store: Store) -> None:
    put(store, "{", "[]")
    LeaseStorage(store).write(lease("GPU-2"))
    assert recorded_ledger(store).ways_kept() == {"GPU-2": TIME_SLICING}


def test_a_lease_whose_way_of_sharing_is_new_may_need_the_mode(store: Store) -> None:
    LeaseStorage(store).write(lease("GPU-1", "new"))
    ledger = recorded_ledger(store)
    assert Blockers.of(ledger, gpus=GPUS).against("GPU-1", A_STRICT_MODE)
    assert ledger.ways_kept() == {"GPU-1": MPS}


def test_a_lease_whose_process_has_ended_keeps_nothing(store: Store) -> None:
    ended = lease("GPU-1")._replace(holder=Holder("process", 0, os.getpid(), 1))
    LeaseStorage(store).write(ended)
    assert recorded_ledger(store).holds() == []


def test_what_uses_an_instance_keeps_its_gpu() -> None:
    leased = Blockers.of(Ledger([lease("MIG-1")]), gpus=GPUS)
    assert leased.against("GPU-1", A_STRICT_MODE)
    busy = Blockers.of(Ledger(), gpus=GPUS, processes={"MIG-1": [7], "GPU-2": []})
    assert busy.against("GPU-1", A_STRICT_MODE).users.processes == (7,)
    assert not busy.against("GPU-2", A_STRICT_MODE)


def test_the_lease_of_an_instance_does_not_keep_mig_mode_off() -> None:
    leased = Blockers.of(Ledger([lease("MIG-1")]), gpus=GPUS)
    assert leased.against("MIG-1", UNUSED)
    assert not leased.against("GPU-1", UNUSED)


def test_without_the_driver_the_lease_of_an_instance_may_be_on_any_gpu() -> None:
    blockers = Blockers.of(Ledger([lease("MIG-1")]))
    assert blockers.against("GPU-1", A_STRICT_MODE)
    assert blockers.against("GPU-2", A_STRICT_MODE)


def test_a_control_daemon_left_running_keeps_the_mode_but_no_time_slice() -> None:
    blockers = Blockers.of(Ledger(), gpus=GPUS, left={"GPU-1"}, processes={"GPU-1": [7]})
    keepers = blockers.against("GPU-1", Needs(servers=True))
    assert (keepers.left, keepers.users) == (True, NO_USERS)
    assert keepers
    assert not blockers.against("GPU-1", A_TIME_SLICE)
