"""The peaks of leases: of each device since its lease began, also across daemons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.storage import MemoryPeaks
from yunion_mps.paths import Paths

from unit.leases.shares import device, lease

TWO = lease("a", device(0, 0), device(0, 1))
ONE, OTHER = (one.addr for one in TWO.devices)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(Paths(str(tmp_path)))) as made:
        yield made


def test_the_most_of_each_device_is_kept(store: Store) -> None:
    peaks = MemoryPeaks(Ledger([TWO]), store)
    assert peaks.of(TWO) == [None, None]
    for used in ({ONE: 10}, {ONE: 300, OTHER: 5}, {ONE: 20}, {}):
        peaks.note(used)
    assert peaks.of(TWO) == [300, 5]
    assert peaks.by_device() == {ONE: 300, OTHER: 5}


def test_the_next_daemon_continues_with_it(store: Store) -> None:
    ledger = Ledger([TWO])
    MemoryPeaks(ledger, store).note({ONE: 300})
    after = MemoryPeaks(ledger, store)
    after.restore()
    after.note({ONE: 20, OTHER: 7})
    assert after.of(TWO) == [300, 7]


def test_the_next_lease_of_a_device_has_a_peak_of_its_own(store: Store) -> None:
    ledger = Ledger([TWO])
    peaks = MemoryPeaks(ledger, store)
    peaks.note({ONE: 300})
    ledger.remove("a")
    later = lease("b", device(0, 0))
    ledger.add(later)
    assert peaks.by_device() == {}
    peaks.note({ONE: 40})
    assert peaks.of(later) == [40]
    assert store.read("SELECT lease, mib FROM memory_peak") == [("b", 40)]


def test_a_state_file_that_fails_costs_no_peak_now(store: Store) -> None:
    peaks = MemoryPeaks(Ledger([TWO]), store)
    store.close()
    peaks.restore()
    peaks.note({ONE: 300})
    assert peaks.of(TWO) == [300, None]
