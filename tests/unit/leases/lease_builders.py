"""Devices of made-up GPUs, for the ledger and the allocator."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.models import Device, DomainPlan, Holder, Lease, PlannedGpu, Pool
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import NO_RESERVATION, Reservation, no_reservation, select
from yunion_mps.leases.refusals import refuse_infeasible
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, PoolCandidate
from yunion_mps.leases.targets import best_target

GPU_MIB = 1200
HOLDER = Holder("process", 1000, 4260, 77)


def device(gpu: int, slot: int, number: int = 4) -> Device:
    """The `slot`-th of `number` equal shares of a GPU."""
    return Device(
        id=f"id-{gpu}-{number}-{slot}",
        addr=f"0{gpu}:00.0-{slot}",
        gpu_uuid=f"GPU-{gpu}",
        slot=slot,
        memory_limit_mib=GPU_MIB // number,
        memory_total_mib=GPU_MIB,
        thread_percentage=100 / number,
        budget_enforced=True,
        domain="host",
    )


def leases_on(*gpu_uuids: str, sharing: str = NOT_SHARED) -> list[Lease]:
    """Leases, taken by name, of one device of each of these GPUs or MIG instances."""
    leases = []
    for uuid in gpu_uuids:
        leased = device(0, 0)._replace(id=uuid, gpu_uuid=uuid, sharing=sharing)
        leases.append(Lease(uuid, (leased,), Holder("name", 0, name="job"), 0.0))
    return leases


def candidates(gpus: int, number: int = 4, reason: Reason = NO_REASON, **most_mib: int) -> Candidates:
    """The devices of so many GPUs; `most_mib` is what one process may get of a GPU, where that is limited."""
    limited = tuple(PlannedGpu(f"GPU-{name[-1]}", mib) for name, mib in most_mib.items())
    return Candidates(
        [Candidate(device(gpu, slot, number), reason) for gpu in range(gpus) for slot in range(number)],
        domains={"host": DomainPlan("host", "/pipe", "/log", limited, 100.0)},
    )


def pool(
    gpu: int,
    unit_mib: int = 100,
    reserve_mib: int = 0,
    clients: int = 48,
    thread_percentage: int = 0,
    overcommit: float | None = 1.0,
) -> PoolCandidate:
    """A GPU's memory in units."""
    made = Pool(
        f"GPU-{gpu}", "host", unit_mib, GPU_MIB, GPU_MIB, reserve_mib, clients, overcommit, thread_percentage
    )

    def make(units: int, slot: int) -> Device:
        name = f"0{gpu}:00.0-m{slot}"
        share = device(gpu, slot)._replace(id=f"id-{gpu}-m{slot}", addr=name, reserve_mib=reserve_mib)
        threads = float(thread_percentage) or share.thread_percentage
        return share._replace(memory_limit_mib=units * unit_mib, thread_percentage=threads)

    return PoolCandidate(made, f"0{gpu}:00.0", make)


def requests(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[LeaseRequest]:
    """Requests with these fields; `st.builds` by itself draws the others at random, defaults or not."""
    fixed: dict[str, Any] = {name: st.just(value) for name, value in LeaseRequest()._asdict().items()}
    varied = {"placement": st.sampled_from(["binpack", "spread"]), "allow_unlimited": st.booleans()}
    return st.builds(LeaseRequest, **{**fixed, **varied, **fields})


def refuse_if_infeasible(request: LeaseRequest, candidates: Candidates) -> None:
    """Raise an error if the request is infeasible."""
    refuse_infeasible(select(request, candidates))


def reservation_for(
    ledger: Ledger, request: LeaseRequest, candidates: Candidates, earlier: Reservation = NO_RESERVATION
) -> Reservation:
    """What is reserved for a request that does not fit yet."""
    target = best_target(Allocator(ledger).match(request, candidates, earlier), Ledger())
    return target.reservation if target else no_reservation()


def lease(name: str, *devices: Device) -> Lease:
    return Lease(name, devices, HOLDER, 1.5)
