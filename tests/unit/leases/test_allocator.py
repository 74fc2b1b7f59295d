"""Which devices a request gets: never one that is leased, and never more memory than a GPU has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from yunion_mps.core.enums import SPREAD
from yunion_mps.core.errors import HostError, InfeasibleError, NothingFreeError
from yunion_mps.core.models import ServedUser
from yunion_mps.core.reasons import (
    DOMAIN_NOT_READY,
    GPU_LOST,
    LIMITS_PENDING,
    MIG_ENABLED,
    NO_REASON,
    Reason,
    hint_of,
)
from yunion_mps.host.proc import user_name
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger, needs_mib
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, Unenforced

from unit.leases.lease_builders import (
    GPU_MIB,
    candidates,
    device,
    lease,
    pool,
    refuse_if_infeasible,
    requests,
    reservation_for,
)

LOST = Reason("lost", GPU_LOST)
NOT_READY = Reason("its domain is failed: no", DOMAIN_NOT_READY)


def chosen_addresses(ledger: Ledger, request: LeaseRequest, found: Candidates) -> list[str]:
    return [one.addr for one in Allocator(ledger).choose(request, found)]


def why_not(ledger: Ledger, request: LeaseRequest, found: Candidates) -> tuple[str, str]:
    with pytest.raises(NothingFreeError) as caught:
        Allocator(ledger).choose(request, found)
    assert caught.value.exit_code == 5
    return caught.value.message, caught.value.hint


def test_a_gpu_is_filled_before_the_next_one_is_used() -> None:
    ledger = Ledger([lease("a", device(1, 0))])
    assert chosen_addresses(ledger, LeaseRequest(), candidates(2)) == ["01:00.0-1"]
    assert chosen_addresses(ledger, LeaseRequest(2), candidates(2)) == ["01:00.0-1", "01:00.0-2"]
    assert chosen_addresses(ledger, LeaseRequest(4), candidates(2)) == [
        "00:00.0-0",
        "00:00.0-1",
        "00:00.0-2",
        "00:00.0-3",
    ]


def test_spread_takes_from_the_gpu_with_the_most_left() -> None:
    ledger = Ledger([lease("a", device(0, 0))])
    assert chosen_addresses(ledger, LeaseRequest(placement=SPREAD), candidates(2)) == ["01:00.0-0"]


def test_devices_across_gpus_are_each_on_a_different_gpu() -> None:
    ledger = Ledger([lease("a", *(device(1, slot) for slot in range(4)))])
    assert chosen_addresses(ledger, LeaseRequest(2, across=True), candidates(3)) == ["00:00.0-0", "02:00.0-0"]
    message, _ = why_not(ledger, LeaseRequest(3, across=True), candidates(3))
    assert (
        message
        == "3 devices on different GPUs cannot be allocated now: 4 of 12 leased; 8 free, at most 4 on one GPU"
    )


@pytest.mark.parametrize("name", ["01:00.0-2", "id-1-4-2"])
def test_one_device_is_named_by_address_or_id(name: str) -> None:
    assert chosen_addresses(Ledger(), LeaseRequest(devices=(name,)), candidates(2)) == ["01:00.0-2"]
    message, hint = why_not(Ledger([lease("a", device(1, 2))]), LeaseRequest(devices=(name,)), candidates(2))
    assert message == f"device {name} cannot be allocated now: 1 of 1 leased"
    assert hint == "see who holds the devices: yunion-mps who"


@pytest.mark.parametrize("name", ["01:00.0", "GPU-1"])
def test_a_gpu_is_named_by_address_or_uuid(name: str) -> None:
    assert chosen_addresses(Ledger(), LeaseRequest(gpu=name), candidates(2)) == ["01:00.0-0"]


def test_unserved_devices_are_refused_with_the_reason() -> None:
    message, hint = why_not(Ledger(), LeaseRequest(), candidates(1, reason=NOT_READY))
    assert (
        message == "1 device cannot be allocated now: 4 unavailable (GPU 00:00.0: its domain is failed: no)"
    )
    assert hint == "see: yunion-mps status"


def test_devices_that_a_gpu_s_fault_makes_unavailable_have_its_code() -> None:
    with pytest.raises(NothingFreeError) as caught:
        Allocator(Ledger()).choose(LeaseRequest(gpu="GPU-1"), candidates(2, reason=LOST))
    error = caught.value
    assert (error.code, error.hint, error.exit_code) == (GPU_LOST, hint_of(GPU_LOST), 1)


def test_each_reason_names_the_gpus_that_it_applies_to() -> None:
    mig = Reason("in MIG mode", MIG_ENABLED)
    reasons = {"GPU-0": LOST, "GPU-1": mig, "GPU-2": mig, "GPU-3": NO_REASON}
    devices = [one._replace(reason=reasons[one.device.gpu_uuid]) for one in candidates(4).devices]
    full = Ledger([lease("a", *(device(3, slot) for slot in range(4)))])
    message, _ = why_not(full, LeaseRequest(), Candidates(devices, [pool(4)._replace(reason=LOST)]))
    assert message == (
        "1 device cannot be allocated now: 4 of 16 leased; "
        "8 unavailable (GPU 01:00.0, 02:00.0: in MIG mode); 4 unavailable (GPU 00:00.0: lost)"
    )


def test_leases_of_a_previous_division_count_against_the_gpus_memory() -> None:
    """Half a GPU is in use as one of two: of the four quarters that there are now, only two fit beside it."""
    ledger = Ledger([lease("a", device(0, 0, 2))])
    assert len(Allocator(ledger).choose(LeaseRequest(2), candidates(1))) == 2
    message, _ = why_not(ledger, LeaseRequest(3), candidates(1))
    assert message == (
        "3 devices on one GPU cannot be allocated now: 2 pending (the new division of the GPU waits for "
        f"lease a of {user_name(1000)} (PID 4260) to end); 2 free, at most 2 on one GPU"
    )


def test_memory_is_given_in_units_of_the_pool_with_the_least_left() -> None:
    both = Candidates(pools=[pool(0), pool(1)])
    ledger = Ledger()
    (first,) = Allocator(ledger).choose(LeaseRequest(memory_mib=250), both)
    assert (first.addr, first.memory_limit_mib) == ("00:00.0-m0", 300)
    ledger.add(lease("a", first))
    (second,) = Allocator(ledger).choose(LeaseRequest(memory_mib=900), both)
    assert second.addr == "00:00.0-m1"
    assert (
        Allocator(ledger).choose(LeaseRequest(memory_mib=900, placement=SPREAD), both)[0].addr == "01:00.0-m0"
    )
    ledger.add(lease("b", second))
    message, _ = why_not(ledger, LeaseRequest(memory_mib=100, gpu="GPU-0"), both)
    assert message == "100 MiB of GPU GPU-0 cannot be allocated now: 0 MiB free on GPU 00:00.0"
    ledger.remove("a")
    assert (
        Allocator(ledger).choose(LeaseRequest(memory_mib=300, gpu="GPU-0"), both)[0].addr == "00:00.0-m0"
    ), "its slot is free"


def test_several_amounts_of_memory_come_from_one_pool_or_across_pools() -> None:
    both = Candidates(pools=[pool(0), pool(1)])
    ledger = Ledger([lease("a", pool(0).make(3, 1))])
    two, across = LeaseRequest(2, memory_mib=400), LeaseRequest(2, memory_mib=400, across=True)
    given = Allocator(ledger).choose(two, both)
    assert [(one.addr, one.memory_limit_mib) for one in given] == [("00:00.0-m0", 400), ("00:00.0-m2", 400)]
    given = Allocator(ledger).choose(across, both)
    assert [one.addr for one in given] == ["00:00.0-m0", "01:00.0-m0"]
    assert reservation_for(ledger, across, both).memory_mib == {"GPU-0": 400, "GPU-1": 400}
    assert reservation_for(ledger, two, both).memory_mib == {"GPU-0": 800}
    refuse_if_infeasible(LeaseRequest(3, memory_mib=400), both)
    for number, each in ((3, LeaseRequest(3, memory_mib=401)), (3, across._replace(number=3))):
        with pytest.raises(NothingFreeError, match=f"^{number} devices of 40[01] MiB on .* can never"):
            refuse_if_infeasible(each, both)


def test_every_client_of_a_pool_takes_the_reserve_too() -> None:
    some = Candidates(pools=[pool(0, reserve_mib=50, clients=3)])
    ledger = Ledger()
    for name in "abc":
        ledger.add(lease(name, *Allocator(ledger).choose(LeaseRequest(memory_mib=300), some)))
    assert why_not(ledger, LeaseRequest(memory_mib=100), some)[0].endswith("0 MiB free on GPU 00:00.0")
    ledger.remove("a")
    assert why_not(ledger, LeaseRequest(memory_mib=500), some)[0].endswith("400 MiB free on GPU 00:00.0")


def test_a_request_for_memory_gets_the_smallest_slice_and_no_equal_share() -> None:
    equal = candidates(1)
    with pytest.raises(NothingFreeError, match="neither a GPU whose memory is leased in units nor a slice"):
        refuse_if_infeasible(LeaseRequest(memory_mib=100), equal)
    large, small = device(0, 0, 2), device(0, 1, 4)
    slices = Candidates([Candidate(large, is_slice=True), Candidate(small, is_slice=True)])
    assert Allocator(Ledger()).choose(LeaseRequest(memory_mib=100), slices) == (small,)
    assert Allocator(Ledger([lease("a", small)])).choose(LeaseRequest(memory_mib=100), slices) == (large,)
    with pytest.raises(NothingFreeError, match="can never be allocated"):
        refuse_if_infeasible(LeaseRequest(memory_mib=700), slices)


def test_several_devices_come_from_a_gpu_that_combines_them() -> None:
    """GPU 0 is fuller, and any two of its devices are more than its control daemon allows a process."""
    there = candidates(2, gpu_0=300)
    ledger = Ledger([lease("a", device(0, 0))])
    assert {one.gpu_uuid for one in Allocator(ledger).choose(LeaseRequest(), there)} == {"GPU-0"}
    assert {one.gpu_uuid for one in Allocator(ledger).choose(LeaseRequest(2), there)} == {"GPU-1"}
    full = Ledger([lease("a", device(1, 0), device(1, 1), device(1, 2))])
    with pytest.raises(NothingFreeError, match="3 of 4 leased"):
        Allocator(full).choose(LeaseRequest(2), there)
    assert reservation_for(full, LeaseRequest(2), there).devices == {"id-1-4-3"}, (
        "nothing is kept that is of no use"
    )


def test_a_pending_limit_is_not_requested_again() -> None:
    there = candidates(1, gpu_0=300)
    with pytest.raises(InfeasibleError, match=r"not 600 MiB$") as caught:
        refuse_if_infeasible(LeaseRequest(2), there)
    assert caught.value.hint.endswith("set cuda_mps_combine: 2 in host.conf")
    there = there._replace(planned=candidates(1, gpu_0=600).domains)
    with pytest.raises(InfeasibleError, match=r"yet: .* once the MPS servers with the old") as caught:
        refuse_if_infeasible(LeaseRequest(2), there)
    assert (caught.value.code, caught.value.hint) == (LIMITS_PENDING, hint_of(LIMITS_PENDING))


@pytest.mark.parametrize("placement", ["binpack", "spread"])
def test_memory_with_enforced_budgets_is_given_before_other_memory(placement: str) -> None:
    there = Candidates(
        [],
        [pool(0), pool(1), pool(2)],
        {name: Unenforced(name[-1], "older than Volta") for name in ("GPU-0", "GPU-2")},
    )
    ledger = Ledger()
    gpus = []
    for number in range(3):
        request = LeaseRequest(memory_mib=1200, placement=placement, allow_unlimited=True)
        (got,) = Allocator(ledger).choose(request, there)
        ledger.add(lease(str(number), got))
        gpus.append(got.gpu_uuid)
    assert gpus[0] == "GPU-1"
    with pytest.raises(NothingFreeError, match=r"0 MiB free on GPU 01:00\.0"):
        Allocator(ledger).choose(LeaseRequest(memory_mib=100), there)
    only = there._replace(pools=[pool(0)])
    with pytest.raises(HostError, match="no budget is enforced on GPU 0, which is older than Volta"):
        refuse_if_infeasible(LeaseRequest(memory_mib=100), only)


def test_memory_is_reserved_for_requests_that_need_more_of_it() -> None:
    one = Candidates(pools=[pool(0)])
    ledger = Ledger([lease("a", pool(0).make(6, 0))])
    kept = reservation_for(ledger, LeaseRequest(memory_mib=900), one)
    assert kept.memory_mib == {"GPU-0": 600}
    with pytest.raises(NothingFreeError):
        Allocator(ledger).choose(LeaseRequest(memory_mib=100), one, kept)
    with pytest.raises(
        NothingFreeError, match="1300 MiB can never be allocated: the host has at most 1200 MiB"
    ):
        refuse_if_infeasible(LeaseRequest(memory_mib=1300), one)


def test_a_pool_with_a_thread_percentage_counts_the_threads() -> None:
    one = Candidates(pools=[pool(0, thread_percentage=40)])
    ledger = Ledger()
    (default,) = Allocator(ledger).choose(LeaseRequest(memory_mib=100), one)
    ledger.add(lease("a", default))
    (named,) = Allocator(ledger).choose(LeaseRequest(memory_mib=100, thread_percentage=35), one)
    ledger.add(lease("b", named))
    assert (default.thread_percentage, named.thread_percentage) == (40, 35)
    with pytest.raises(NothingFreeError, match=r"now: 1000 MiB and 25 % of the threads free on GPU 00:00\.0"):
        Allocator(ledger).choose(LeaseRequest(memory_mib=100), one)
    (last,) = Allocator(ledger).choose(LeaseRequest(memory_mib=100, thread_percentage=25), one)
    assert last.thread_percentage == 25


@pytest.mark.parametrize(("overcommit", "leases"), [(1.0, 2), (2.0, 4), (1.25, 2), (None, 5)])
def test_threads_are_leased_as_often_as_they_may_be(overcommit: float | None, leases: int) -> None:
    """Without a limit for them, as many clients as MPS serves may have all."""
    one = Candidates(pools=[pool(0, clients=5, thread_percentage=50, overcommit=overcommit)])
    ledger = Ledger()
    for number in range(leases):
        ledger.add(lease(str(number), *Allocator(ledger).choose(LeaseRequest(memory_mib=100), one)))
    with pytest.raises(NothingFreeError):
        Allocator(ledger).choose(LeaseRequest(memory_mib=100), one)


def test_several_devices_of_a_pool_each_take_the_thread_percentage() -> None:
    one = Candidates(pools=[pool(0, thread_percentage=10), pool(1)])
    requested = LeaseRequest(number=2, memory_mib=100, thread_percentage=50)
    made = Allocator(Ledger()).choose(requested, one)
    assert [share.thread_percentage for share in made] == [50, 50]
    with pytest.raises(NothingFreeError, match="2 devices of 100 MiB with 50 % of the threads"):
        Allocator(Ledger([lease("a", pool(0, thread_percentage=1).make(1, 0))])).choose(requested, one)


def test_threads_are_reserved_on_the_gpu_that_lacks_the_fewest() -> None:
    """The GPU with more memory left has fewer threads left."""
    one = Candidates(pools=[pool(0, thread_percentage=90), pool(1, thread_percentage=60)])
    ledger = Ledger([lease("a", pool(0, thread_percentage=90).make(1, 0))])
    ledger.add(lease("b", pool(1, thread_percentage=60).make(6, 0)))
    kept = reservation_for(ledger, LeaseRequest(memory_mib=100, thread_percentage=50), one)
    assert (kept.memory_mib, kept.thread_tenths) == ({"GPU-1": 100}, {"GPU-1": 400})
    with pytest.raises(NothingFreeError):
        Allocator(ledger).choose(LeaseRequest(memory_mib=100, thread_percentage=20, gpu="GPU-1"), one, kept)
    assert Allocator(ledger).choose(LeaseRequest(memory_mib=100, thread_percentage=10), one, kept)


@given(
    requests(
        number=st.integers(1, 3),
        memory_mib=st.sampled_from([0, 100, 300, 500]),
        thread_percentage=st.sampled_from([0, 25, 50]),
        gpu=st.sampled_from(["", "GPU-0", "00:00.0"]),
    )
)
def test_devices_are_selected_as_if_each_was_looked_at(request_: LeaseRequest) -> None:
    """Though those of a GPU with equal budgets are looked at once."""
    there: list[Candidate] = []
    for gpu in range(2):
        for slot, mib in enumerate((300, 600, 300)):
            part = device(gpu, slot)._replace(memory_limit_mib=mib, thread_percentage=mib / 12)
            there.append(Candidate(part, is_slice=gpu == 0))
    found = Candidates(there)
    selected = Allocator(Ledger()).select(request_._replace(across=True), found).devices
    suitable = [candidate.device for candidate in found.suitable(request_)]
    assert sorted(selected) == sorted(suitable)
    if request_.memory_mib:
        of_first = [part for part in selected if part.gpu_uuid == "GPU-0"]
        assert of_first == sorted(of_first, key=needs_mib)


def test_what_fits_a_request_is_kept_until_a_device_changes() -> None:
    allocator = Allocator(Ledger())
    there = candidates(2)
    first = allocator.select(LeaseRequest(), there)
    served = there._replace(users={"host": [ServedUser(1001, 0.0)]})
    again = allocator.select(LeaseRequest(), served)
    assert again.gpus is first.gpus
    assert again.candidates is served
    lost = allocator.select(LeaseRequest(), candidates(2, reason=LOST))
    assert {gpu.reason for gpu in lost.gpus} == {LOST}


def test_what_fits_many_different_requests_is_not_all_kept() -> None:
    allocator = Allocator(Ledger())
    there = candidates(1)
    first = allocator.select(LeaseRequest(), there)
    for number in range(2, 1500):
        allocator.select(LeaseRequest(number), there)
    assert allocator.select(LeaseRequest(), there).gpus is not first.gpus


GPU_NAMES = st.sampled_from(["", "GPU-0", "01:00.0"])
REQUESTS = requests(number=st.integers(1, 5), across=st.booleans(), gpu=GPU_NAMES)
MEMORY = requests(
    memory_mib=st.integers(1, 1300),
    gpu=GPU_NAMES,
    number=st.integers(1, 3),
    across=st.booleans(),
    thread_percentage=st.sampled_from([0, 0, 1, 45]),
)


class LedgerMachine(RuleBasedStateMachine):
    """Requests, ends and other divisions of the GPUs at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.number = 4
        self.count = 0

    @rule(request=REQUESTS)
    def take(self, request: LeaseRequest) -> None:
        try:
            devices = Allocator(self.ledger).choose(request, candidates(3, self.number))
        except NothingFreeError:
            return
        gpus = {one.gpu_uuid for one in devices}
        assert len(devices) == request.number
        assert len(gpus) == (request.number if request.across else 1)
        assert all(request.matches(one) for one in devices)
        self.count += 1
        self.ledger.add(lease(str(self.count), *devices))

    @rule(request=MEMORY)
    def take_memory(self, request: LeaseRequest) -> None:
        try:
            made = Allocator(self.ledger).choose(
                request, Candidates(pools=[pool(0, 100, 7), pool(1, 64, thread_percentage=30), pool(2, 100)])
            )
        except NothingFreeError:
            return
        gpus = {one.gpu_uuid for one in made}
        assert len(made) == request.number
        assert len(gpus) == (request.number if request.across else 1)
        assert all(needs_mib(one) >= request.memory_mib for one in made)
        self.count += 1
        self.ledger.add(lease(str(self.count), *made))
        if "GPU-1" in gpus:
            devices = [one for one_lease in self.ledger.leases.values() for one in one_lease.devices]
            assert sum(one.thread_percentage for one in devices if one.gpu_uuid == "GPU-1") <= 100

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.ledger.leases:
            self.ledger.remove(data.draw(st.sampled_from(sorted(self.ledger.leases))))

    @rule(number=st.sampled_from([1, 2, 3, 4, 6]))
    def divide(self, number: int) -> None:
        self.number = number

    @invariant()
    def no_gpu_is_given_away_twice(self) -> None:
        used: Counter[str] = Counter()
        owned: Counter[str] = Counter()
        for one in self.ledger.leases.values():
            for share in one.devices:
                used[share.gpu_uuid] += needs_mib(share)
                owned[share.id] += 1
        assert all(mib <= GPU_MIB for mib in used.values())
        assert set(owned.values()) <= {1}
        assert self.ledger.lease_of.keys() == owned.keys()

    @invariant()
    def what_counts_as_free_is_what_can_be_had(self) -> None:
        found = candidates(3, self.number)
        free = self.ledger.free_devices(one.device for one in found.devices)
        had = Ledger(self.ledger.leases.values())
        for name in range(len(free)):
            had.add(lease(f"more {name}", *Allocator(had).choose(LeaseRequest(), found)))
        with pytest.raises(NothingFreeError):
            Allocator(had).choose(LeaseRequest(), found)
        assert free == had.lease_of.keys() - self.ledger.lease_of.keys()


TestLedger = LedgerMachine.TestCase


@given(REQUESTS)
def test_devices_reserved_for_a_request_are_free_and_match(requested: LeaseRequest) -> None:
    ledger = Ledger([lease("a", device(0, 0)), lease("b", *(device(1, slot) for slot in range(3)))])
    kept = reservation_for(ledger, requested, candidates(2)).devices
    found = {offer.device.id: offer.device for offer in candidates(2).devices}
    assert len(kept) <= requested.number
    assert all(requested.matches(found[one]) and one not in ledger.lease_of for one in kept)


def test_a_request_gets_all_its_devices_or_none() -> None:
    everything = [f"0{gpu}:00.0-{slot}" for gpu in range(2) for slot in range(4)]
    assert chosen_addresses(Ledger(), LeaseRequest(devices=("all",)), candidates(2)) == everything
    ledger = Ledger([lease("a", device(1, 2))])
    message, _ = why_not(ledger, LeaseRequest(devices=("all",)), candidates(2))
    assert message.startswith("all devices cannot be allocated now: 1 of 8 leased; 7 free")
    kept = reservation_for(ledger, LeaseRequest(devices=("all",)), candidates(2))
    assert len(kept.devices) == 7, "a request for all of them is not starved"
    message, _ = why_not(Ledger(), LeaseRequest(devices=("all",)), candidates(2, reason=NOT_READY))
    assert message == (
        "all devices cannot be allocated now: 8 unavailable (GPU 00:00.0, 01:00.0: its domain is failed: no)"
    )
