"""Waiting: first come, first served, and nobody is overtaken for good."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.ledger import NOTHING_KEPT, Kept, Ledger
from yunion_mps.leases.offers import Offers
from yunion_mps.leases.queue import Queue, Waiter
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Device, Lease

from unit.leases.shares import device, lease, offers, pool


def queue(ledger: Ledger, *requests: LeaseRequest) -> Queue:
    made: Queue = Queue(ledger)
    made.waiters = [Waiter(request, float(number), number) for number, request in enumerate(requests)]
    return made


def served(waiting: Queue, ledger: Ledger, gpus: int) -> list[int]:
    """Who is served now, in this order."""
    order = []
    while found := waiting.next(offers(gpus)):
        waiter, devices = found
        ledger.add(lease(f"w{waiter.whose}", *devices))
        waiting.waiters.remove(waiter)
        order.append(waiter.whose)
    return order


def test_those_who_fit_are_served_in_the_order_of_their_coming() -> None:
    ledger = Ledger([lease("a", device(0, 0), device(0, 1))])
    waiting = queue(ledger, LeaseRequest(), LeaseRequest(), LeaseRequest())
    assert served(waiting, ledger, 1) == [0, 1]
    ledger.remove("a")
    assert served(waiting, ledger, 1) == [2]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    ledger = Ledger([lease(str(slot), device(0, slot)) for slot in range(4)])
    waiting = queue(ledger, LeaseRequest(3), LeaseRequest(), LeaseRequest())
    for slot in (0, 1):
        ledger.remove(str(slot))
        assert served(waiting, ledger, 1) == [], "what is free is kept for the first"
    ledger.remove("2")
    assert served(waiting, ledger, 1) == [0]
    ledger.remove("3")
    assert served(waiting, ledger, 1) == [1]


def test_who_waits_for_one_gpu_holds_up_nobody_who_wants_another() -> None:
    ledger = Ledger([lease("a", *(device(0, slot) for slot in range(4)))])
    waiting = queue(ledger, LeaseRequest(gpu="GPU-0"), LeaseRequest(gpu="GPU-1"))
    assert served(waiting, ledger, 2) == [1]


def test_what_is_kept_for_those_who_wait_is_not_given_to_who_comes_now() -> None:
    ledger = Ledger([lease("a", device(0, 0), device(0, 1), device(0, 2))])
    waiting = queue(ledger, LeaseRequest(2))
    assert waiting.spoken_for(offers(1)).devices == {"id-0-4-3"}
    kept = "3 of 4 in use; 1 kept for those who have waited longer"
    with pytest.raises(NothingFreeError, match=f"cannot be had now: {kept}"):
        ledger.choose(LeaseRequest(), offers(1), waiting.spoken_for(offers(1)))


REQUESTS = st.builds(
    LeaseRequest, number=st.integers(1, 4), device=st.just(""), gpu=st.just(""), across=st.booleans(),
    placement=st.sampled_from(["binpack", "spread"]), memory_mib=st.just(0),
)  # fmt: skip


@given(st.lists(REQUESTS, max_size=12))
def test_everybody_is_served_in_the_end(requests: list[LeaseRequest]) -> None:
    """Whatever is requested, as long as it can be met at all, and leases end."""
    ledger = Ledger()
    waiting = queue(ledger, *requests)
    order: list[int] = []
    for _ in range(len(requests) + 1):
        order += served(waiting, ledger, 4)
        for name in list(ledger.leases)[:1]:
            ledger.remove(name)
    for name in list(ledger.leases):
        ledger.remove(name)
        order += served(waiting, ledger, 4)
    assert sorted(order) == list(range(len(requests)))


class Watched(Ledger):
    """A ledger that remembers what it was searched for."""

    def __init__(self, leases: Iterable[Lease]) -> None:
        super().__init__(leases)
        self.searches: list[LeaseRequest] = []

    def choose(
        self, request: LeaseRequest, offers: Offers, kept: Kept = NOTHING_KEPT, *, has_waited: bool = False
    ) -> tuple[Device, ...]:
        self.searches.append(request)
        return super().choose(request, offers, kept, has_waited=has_waited)


def test_hundreds_who_each_wait_for_something_else_cost_no_search_each() -> None:
    """This is done at every lease's coming and end: a crowd would keep the daemon from all else."""
    ledger = Watched([lease("a", *(device(0, slot) for slot in range(4)))])
    waiting = queue(
        ledger, *(LeaseRequest(number, gpu="GPU-0") for number in range(1, 200)), LeaseRequest(gpu="GPU-1")
    )
    found = waiting.next(offers(2))
    assert found is not None
    assert found[0].request == LeaseRequest(gpu="GPU-1")
    assert ledger.searches == [LeaseRequest(gpu="GPU-1")]


def test_hundreds_who_wait_for_memory_that_is_handed_out_cost_no_more_than_one() -> None:
    full = pool(0)
    ledger = Watched([lease("a", full.make(12, 0))])
    waiting = queue(ledger, *[LeaseRequest(memory_mib=300)] * 100)
    assert waiting.next(Offers((), [full])) is None
    assert len(ledger.searches) == 1


@given(
    st.lists(
        st.one_of(REQUESTS, st.builds(LeaseRequest, gpu=st.sampled_from(["GPU-0", "GPU-1"]))), max_size=12
    ),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3))),
    st.booleans(),
)
def test_who_is_served_next_is_who_a_search_for_each_would_find(
    requests: list[LeaseRequest], taken: set[tuple[int, int]], whole: bool
) -> None:
    """Also where a lease of a division before has half of a GPU's memory."""
    held = [lease(f"{gpu}-{slot}", device(gpu, slot)) for gpu, slot in sorted(taken)]
    ledger = Ledger([*held, *([] if taken or whole else [lease("before", device(0, 0, 2))])])
    waiting, kept, expected = queue(ledger, *requests), NOTHING_KEPT, None
    for waiter in waiting.waiters:
        try:
            expected = (waiter, ledger.choose(waiter.request, offers(2), kept))
            break
        except NothingFreeError:
            kept |= ledger.claims(waiter.request, offers(2), kept)
    assert waiting.next(offers(2)) == expected
