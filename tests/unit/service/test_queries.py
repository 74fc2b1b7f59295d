"""The status: its state is the worst of what it lists, and each reason stands with what it is true of."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.enums import READY
from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.reasons import CONTROL_DAEMON_SILENT, GPU_LOST, LEASE_OUTDATED, MIG_IN_USE, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import select
from yunion_mps.leases.refusals import refuse_infeasible
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.service.queries import Queries

from unit import builders
from unit.http.fake_services import status_of
from unit.http.snapshots import H100, P40, RESERVED_POOL, snapshot, with_conditions


def warnings(status: Any) -> list[Any]:
    return [one for one in status["problems"] if one["level"] == "warning"]


def test_a_pool_shows_its_memory_and_what_it_is_reserved_for() -> None:
    sound = snapshot(P40, entries=[RESERVED_POOL])
    (pool,) = Queries(lambda: sound, 0.0, 1).pools()["pools"]
    assert (pool["addr"], pool["memory_unit_mib"], pool["memory_mib"]) == ("00:06.0", 1024, 22528)
    assert (pool["memory_free_mib"], pool["state"]) == (22528, "available")
    assert pool["reserved_for"] == "kubernetes"
    silent = P40._replace(reason=Reason("it is lost", GPU_LOST))
    lost = with_conditions(sound._replace(inventory=builders.inventory(silent)))
    (pool,) = Queries(lambda: lost, 0.0, 1).pools()["pools"]
    assert (pool["memory_free_mib"], pool["state"], pool["reason"]) == (0, "unavailable", "it is lost")
    gone = sound._replace(inventory=builders.inventory())
    assert Queries(lambda: gone, 0.0, 1).pools() == {"pools": [], "total": 0}


def test_a_gpu_of_unknown_compute_capability_is_not_called_old() -> None:
    unknown = H100._replace(compute_capability=None)
    queries = Queries(lambda: snapshot(unknown), 0.0, 1)
    (unenforced,) = queries.candidates().unenforced.values()
    assert unenforced.why == "of unknown compute capability"


def test_a_request_for_a_gpu_that_never_served_waits_for_its_return() -> None:
    lost = H100._replace(reason=Reason("it is lost", GPU_LOST))
    now = snapshot(P40, lost)
    assert lost.uuid not in now.plan.offered
    queries = Queries(lambda: now, 0.0, 1)
    request = queries.resolved(LeaseRequest(gpu=H100.address))
    refuse_infeasible(select(request, queries.candidates()))
    with pytest.raises(NothingFreeError, match=r"cannot be allocated now: GPU 0001:e1:00\.0: it is lost"):
        Allocator(Ledger()).choose(request, queries.candidates())


def test_a_lease_of_a_gpu_that_no_entry_divides_any_more_is_outdated() -> None:
    """As when the entry was removed while vfio-pci had the GPU, and the GPU is back."""
    before = snapshot(P40, H100)
    device = next(one for one in before.plan.devices if one.gpu_uuid == H100.uuid)
    now = snapshot(P40)._replace(inventory=before.inventory)
    ledger = Ledger([Lease("a", (device,), Holder("name", 0, name="job"), 0.0)])
    queries = Queries(lambda: now, 0.0, 1, ledger=ledger)
    (row,) = (one for one in queries.all_devices() if one["lease"])
    assert (row["addr"], row["state"], row["reason_code"]) == (device.addr, "unavailable", LEASE_OUTDATED)


def test_readiness_names_a_pending_layout_once() -> None:
    why = Reason("its MIG layout waits for lease job of root to end", MIG_IN_USE)
    sound, line = snapshot(P40), f"GPU 00:06.0: {why}"
    plan = sound.plan._replace(devices=(), domains=(), unavailable={P40.pci_address: why})
    waits = {P40.uuid: why}
    now = with_conditions(sound._replace(plan=plan, domains=()), layouts=waits)
    assert Queries(lambda: now, 0.0, 1).not_ready_reasons() == [line]


SILENT = Reason("it does not answer", CONTROL_DAEMON_SILENT)


@pytest.mark.parametrize("state", sorted(LEGAL_CHANGES.keys() - {READY}))
@pytest.mark.parametrize(("broken", "worst"), [(1, "degraded"), (2, "failed")])
def test_a_domain_that_does_not_serve_degrades_the_state(state: str, broken: int, worst: str) -> None:
    sound = snapshot(P40, H100, scope="gpu")
    domains = [one._replace(state=state, reason=SILENT) for one in sound.domains[:broken]]
    now = with_conditions(sound._replace(domains=(*domains, *sound.domains[broken:])))
    good, bad = status_of(Queries(lambda: sound, 0.0, 1)), status_of(Queries(lambda: now, 0.0, 1))
    assert (good["state"], bad["state"]) == ("ready", worst)
    assert [one["reason"] for one in bad["domains"]] == [SILENT] * broken + [""] * (2 - broken)
    assert bad["devices"]["unavailable"] == 4 * broken
    assert warnings(bad) == warnings(good) != [], "they are of what runs"
