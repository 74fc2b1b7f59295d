"""The queue: first come, first served, and no request is starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import ALL, DomainPlan, Holder, Lease, PlannedGpu
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import NO_RESERVATION, Match, Reservation, no_reservation
from yunion_mps.leases.queue import RESERVES_S, Queue
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, QueuedRequest

from unit.leases.lease_builders import HOLDER, candidates, device, lease, pool, requests, reservation_for

#: Another user than that of the leases.
OTHER = HOLDER._replace(uid=HOLDER.uid + 1)


def queue(
    record: Ledger | Allocator, *requests: LeaseRequest, holder: Holder = OTHER, waited_s: float = 0.0
) -> Queue:
    """Requests of one user that have waited so long."""
    allocator = record if isinstance(record, Allocator) else Allocator(record)
    made = Queue(allocator, clock=lambda: 1000.0 + waited_s)
    made.requests = [
        QueuedRequest(request, holder, position=number, since_s=1000.0)
        for number, request in enumerate(requests)
    ]
    return made


def served_in_order(waiting: Queue, ledger: Ledger, gpus: int) -> list[int]:
    """Who is served now, in this order."""
    order = []
    while found := waiting.next(candidates(gpus)):
        queued, devices = found
        ledger.add(lease(f"w{queued.position}", *devices))
        waiting.requests.remove(queued)
        order.append(queued.position)
    return order


def test_requests_that_fit_are_served_in_order() -> None:
    ledger = Ledger([lease("a", device(0, 0), device(0, 1))])
    waiting = queue(ledger, LeaseRequest(), LeaseRequest(), LeaseRequest())
    assert served_in_order(waiting, ledger, 1) == [0, 1]
    ledger.remove("a")
    assert served_in_order(waiting, ledger, 1) == [2]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    ledger = Ledger([lease(str(slot), device(0, slot)) for slot in range(4)])
    waiting = queue(ledger, LeaseRequest(3), LeaseRequest(), LeaseRequest())
    for slot in (0, 1):
        ledger.remove(str(slot))
        assert served_in_order(waiting, ledger, 1) == [], "what is free is reserved for the first"
    ledger.remove("2")
    assert served_in_order(waiting, ledger, 1) == [0]
    ledger.remove("3")
    assert served_in_order(waiting, ledger, 1) == [1]


def test_a_request_for_one_gpu_does_not_hold_up_one_for_another() -> None:
    ledger = Ledger([lease("a", *(device(0, slot) for slot in range(4)))])
    waiting = queue(ledger, LeaseRequest(gpu="GPU-0"), LeaseRequest(gpu="GPU-1"))
    assert served_in_order(waiting, ledger, 2) == [1]


def test_devices_reserved_for_the_queue_are_not_leased_to_others() -> None:
    ledger = Ledger([lease("a", device(0, 0), device(0, 1), device(0, 2))])
    waiting = queue(ledger, LeaseRequest(2))
    assert waiting.reservation(candidates(1)).devices == {"id-0-4-3"}
    kept = "3 of 4 leased; 1 reserved for earlier requests"
    with pytest.raises(NothingFreeError, match=f"cannot be allocated now: {kept}"):
        Allocator(ledger).choose(LeaseRequest(), candidates(1), waiting.reservation(candidates(1)))


def test_nothing_is_reserved_for_what_the_requester_s_own_leases_block() -> None:
    own = Ledger([lease("a", device(0, 0))])
    for request in (LeaseRequest(4), LeaseRequest(devices=(ALL,))):
        assert queue(own, request, holder=HOLDER).reservation(candidates(1)).devices == set()
        assert len(queue(own, request).reservation(candidates(1)).devices) == 3


def test_own_leases_elsewhere_do_not_end_a_reservation() -> None:
    both = Ledger([lease("a", device(1, 0)), lease("b", device(0, 0))])
    waiting = queue(both, LeaseRequest(4, gpu="GPU-0"))
    own = lease("c", device(1, 1))
    both.add(own._replace(holder=OTHER))
    assert len(waiting.reservation(candidates(2)).devices) == 3


@pytest.mark.parametrize(
    ("waited_s", "reserved"),
    [(0, 3), (RESERVES_S - 1, 3), (RESERVES_S, 0), (2 * RESERVES_S - 1, 0), (2 * RESERVES_S, 3), (-5, 3)],
)
def test_a_request_reserves_for_an_hour_of_two(waited_s: float, reserved: int) -> None:
    """A clock that was set back counts as no time."""
    waiting = queue(Ledger([lease("a", device(0, 0))]), LeaseRequest(4), waited_s=waited_s)
    assert len(waiting.reservation(candidates(1)).devices) == reserved


def test_later_requests_pass_one_that_reserves_nothing() -> None:
    ledger = Ledger([lease("a", device(0, 0))])
    assert served_in_order(
        queue(ledger, LeaseRequest(4), LeaseRequest(), waited_s=RESERVES_S), ledger, 1
    ) == [1]


def test_a_request_for_many_threads_is_not_starved_by_others() -> None:
    there = Candidates(pools=[pool(0, thread_percentage=20)])
    ledger = Ledger([lease("a", pool(0, thread_percentage=50).make(1, 0))])
    waiting = queue(
        ledger,
        LeaseRequest(memory_mib=100, thread_percentage=80),
        LeaseRequest(memory_mib=100),
    )
    assert waiting.next(there) is None
    ledger.remove("a")
    found = waiting.next(there)
    assert found
    assert (found[0].position, found[1][0].thread_percentage) == (0, 80)


def test_a_request_for_memory_of_slices_reserves_them() -> None:
    """On one GPU and on different ones; later requests get nothing of it."""
    devices = [device(gpu, slot) for gpu in (0, 1) for slot in range(4)]
    limits = (PlannedGpu("GPU-0", 600), PlannedGpu("GPU-1", 600))
    slices = Candidates(
        [Candidate(share, is_slice=True) for share in devices],
        domains={"host": DomainPlan("host", "/pipe", "/log", limits, 100.0)},
    )
    for request in (LeaseRequest(2, memory_mib=300), LeaseRequest(2, memory_mib=300, across=True)):
        ledger = Ledger([lease(share.id, share) for share in devices])
        waiting = queue(ledger, request, LeaseRequest(), LeaseRequest(memory_mib=100))
        ledger.remove("id-0-4-0")
        assert waiting.next(slices) is None
        ledger.remove("id-1-4-0" if request.across else "id-0-4-1")
        assert waiting.next(slices) == (
            waiting.requests[0],
            (device(0, 0), device(1, 0) if request.across else device(0, 1)),
        )


def test_memory_that_a_slice_lacks_is_reserved_while_a_former_lease_has_it() -> None:
    """The GPU is divided again: 400 MiB are left, in which the smaller slice would fit."""
    sizes = [device(0, slot)._replace(memory_limit_mib=mib) for slot, mib in ((1, 600), (2, 300))]
    slices = candidates(0)._replace(devices=[Candidate(share, is_slice=True) for share in sizes])
    ledger = Ledger([lease("before", device(0, 0)._replace(id="former", memory_limit_mib=800))])
    waiting = queue(ledger, LeaseRequest(memory_mib=500), LeaseRequest(memory_mib=100))
    assert waiting.next(slices) is None
    ledger.remove("before")
    assert waiting.next(slices) == (waiting.requests[0], (sizes[0],))


def test_clients_of_a_pool_are_reserved() -> None:
    there = Candidates(pools=[pool(0, clients=2)])
    ledger = Ledger([lease("a", pool(0).make(1, 0))])
    waiting = queue(ledger, LeaseRequest(2, memory_mib=100), LeaseRequest(memory_mib=100))
    assert waiting.next(there) is None
    first, second = (waiting.why_not(queued, there).message for queued in waiting.requests)
    assert first.endswith("1100 MiB free on GPU 00:00.0 for 1 client")
    assert second.endswith("0 MiB free on GPU 00:00.0 (200 MiB reserved for earlier requests)")
    ledger.remove("a")
    granted = waiting.next(there)
    assert granted
    assert granted[0].position == 0


def test_a_request_of_a_gpu_that_later_ones_block_goes_to_another() -> None:
    """GPU 0 has more free devices, but a later lease has one of them."""
    later = lease("later", device(0, 0))._replace(requested_s=1001.0)
    earlier = lease("earlier", device(1, 0), device(1, 1))._replace(requested_s=999.0)
    waiting = queue(Ledger([later, earlier]), LeaseRequest(4), holder=HOLDER._replace(unit="job.service"))
    assert waiting.reservation(candidates(2)).devices == {"id-1-4-2", "id-1-4-3"}


def test_equal_requests_reserve_while_the_first_lets_others_pass() -> None:
    waiting = queue(Ledger([lease("a", device(0, 0))]), LeaseRequest(4), LeaseRequest(4), waited_s=RESERVES_S)
    waiting.requests[1] = waiting.requests[1]._replace(since_s=1000.0 + RESERVES_S)
    assert len(waiting.reservation(candidates(1)).devices) == 3


REQUESTS = requests(number=st.integers(1, 4), across=st.booleans())


@given(st.lists(REQUESTS, max_size=12))
def test_every_request_is_served_in_the_end(queued: list[LeaseRequest]) -> None:
    """Whatever is requested, as long as it can be met at all, and leases end."""
    ledger = Ledger()
    waiting = queue(ledger, *queued)
    order: list[int] = []
    for _ in range(len(queued) + 1):
        order += served_in_order(waiting, ledger, 4)
        for name in list(ledger.leases)[:1]:
            ledger.remove(name)
    for name in list(ledger.leases):
        ledger.remove(name)
        order += served_in_order(waiting, ledger, 4)
    assert sorted(order) == list(range(len(queued)))


class Watched(Allocator):
    """An allocator that remembers what it was asked for."""

    def __init__(self, *leases: Lease) -> None:
        super().__init__(Ledger(leases))
        self.searches: list[LeaseRequest] = []

    def match(
        self,
        request: LeaseRequest,
        candidates: Candidates,
        reserved: Reservation = NO_RESERVATION,
        uid: int | None = None,
    ) -> Match:
        self.searches.append(request)
        return super().match(request, candidates, reserved, uid)


def test_hundreds_of_different_requests_do_not_cost_a_search_each() -> None:
    """This is done at every lease's coming and end: a crowd would keep the daemon from all else."""
    allocator = Watched(lease("a", *(device(0, slot) for slot in range(4))))
    waiting = queue(
        allocator, *(LeaseRequest(number, gpu="GPU-0") for number in range(1, 200)), LeaseRequest(gpu="GPU-1")
    )
    found = waiting.next(candidates(2))
    assert found is not None
    assert found[0].request == LeaseRequest(gpu="GPU-1")
    assert allocator.searches == [LeaseRequest(gpu="GPU-1")]


@pytest.mark.parametrize(("leased_units", "searches"), [(12, 0), (10, 1)])
def test_hundreds_of_requests_for_leased_memory_cost_one_search(leased_units: int, searches: int) -> None:
    """None if all is leased. What is left of it is reserved for the first, and then nothing is left."""
    there = pool(0)
    allocator = Watched(lease("a", there.make(leased_units, 0)))
    waiting = queue(allocator, *[LeaseRequest(memory_mib=300)] * 100)
    assert waiting.next(Candidates((), [there])) is None
    assert len(allocator.searches) == searches


@given(
    st.lists(st.one_of(REQUESTS, requests(gpu=st.sampled_from(["GPU-0", "GPU-1"]))), max_size=12),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3))),
    st.booleans(),
)
def test_the_queue_serves_the_request_that_an_exhaustive_search_finds(
    queued: list[LeaseRequest], taken: set[tuple[int, int]], whole: bool
) -> None:
    """Also where a lease of a division before has half of a GPU's memory."""
    held = [lease(f"{gpu}-{slot}", device(gpu, slot)) for gpu, slot in sorted(taken)]
    ledger = Ledger([*held, *([] if taken or whole else [lease("before", device(0, 0, 2))])])
    waiting, allocator, expected = queue(ledger, *queued), Allocator(ledger), None
    earlier = no_reservation()
    for one in waiting.requests:
        try:
            expected = (one, allocator.choose(one.request, candidates(2), earlier))
            break
        except NothingFreeError:
            earlier.add(reservation_for(ledger, one.request, candidates(2), earlier))
    assert waiting.next(candidates(2)) == expected
