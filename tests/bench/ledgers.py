"""The ledger by itself, with 10,000 devices: finding one, adding and removing a lease, queued requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import Device, Lease
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.queue import Queue
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, QueuedRequest

from bench.values import BenchError, Line, Rounds, Settings
from unit.leases.lease_builders import HOLDER, device, lease

GPUS, OF_EACH = 200, 50
#: As many requests as the daemon has connections for users.
QUEUED = 448
_PASS = "a pass over the devices"


def lines(settings: Settings) -> Iterator[Line]:
    """One line for each thing that is done at every lease."""
    devices = [device(gpu, slot, OF_EACH) for gpu in range(GPUS) for slot in range(OF_EACH)]
    candidates = Candidates([Candidate(one) for one in devices])
    leases = [lease(f"lease-{one.id}", one) for one in devices]
    ledger, last = Ledger(leases[:-1]), leases[-1]
    if _choose(ledger, candidates) != last.devices:
        raise BenchError("the ledger does not find the one device that is free")
    full = Ledger(leases)
    queue = Queue(Allocator(full), clock=lambda: 0.0)
    queue.requests = [QueuedRequest(LeaseRequest(), HOLDER, position=number) for number in range(QUEUED)]
    some = f"of {len(devices):,} devices"
    choose, walk = partial(_choose, ledger, candidates), partial(_pass, candidates)
    add, entry = partial(_add_and_remove, ledger, last), partial(_entry, ledger.lease_of)
    steps: tuple[tuple[str, str, str, Callable[[], object], Callable[[], object]], ...] = (
        (f"the free one {some}", "ms", _PASS, choose, walk),
        (f"none {some}, and why", "ms", _PASS, partial(_why_not, full, candidates), walk),
        (f"none {some}, {QUEUED} queued", "ms", _PASS, partial(queue.next, candidates), walk),
        (f"a lease added and removed {some}", "us", "a dict's entry made and deleted", add, entry),
    )
    for what, unit, floor, work, least in steps:
        rounds = Rounds(unit)
        factor = {"ms": 1e3, "us": 1e6}[unit]
        count = settings.rounds(200, 30) if unit == "ms" else settings.rounds(5000, 1000)
        rounds.run(
            count, [("work", partial(_taken, work, factor)), ("floor", partial(_taken, least, factor))]
        )
        yield Line(what, rounds.of("work"), rounds.of("floor"), floor)


def _taken(work: Callable[[], object], factor: float) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * factor


def _pass(candidates: Candidates) -> None:
    for _ in candidates.devices:
        pass


def _choose(ledger: Ledger, candidates: Candidates) -> tuple[Device, ...]:
    return Allocator(ledger).choose(LeaseRequest(), candidates)


def _why_not(ledger: Ledger, candidates: Candidates) -> str:
    try:
        _choose(ledger, candidates)
    except NothingFreeError as error:
        return error.message
    raise BenchError("the ledger gives a device that is leased")


def _add_and_remove(ledger: Ledger, lease: Lease) -> None:
    ledger.add(lease)
    ledger.remove(lease.id)


def _entry(owners: dict[str, str]) -> None:
    owners["another"] = "another"
    del owners["another"]
