"""Requests that could not be satisfied if everything were free: refused at once, with what would do."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import HostError, InfeasibleError, NothingFreeError
from yunion_mps.core.reasons import BUDGET_NOT_ENFORCED, GPU_LOST, INFEASIBLE, MIG_IN_USE, Reason, hint_of
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import (
    Candidate,
    Candidates,
    LeaseRequest,
    PoolCandidate,
    Unenforced,
    WaitingGpu,
)

from unit.leases.lease_builders import candidates, device, lease, pool, refuse_if_infeasible


@pytest.mark.parametrize(
    ("requested", "there"),
    [
        (LeaseRequest(5), "4 such devices on 1 GPU"),
        (LeaseRequest(2, across=True), "4 such devices on 1 GPU"),
        (LeaseRequest(devices=("nosuch",)), "no such devices"),
    ],
)
def test_an_infeasible_request_is_refused_at_once(requested: LeaseRequest, there: str) -> None:
    with pytest.raises(NothingFreeError, match=f"can never be allocated: the host has {there}"):
        refuse_if_infeasible(requested, candidates(1))
    refuse_if_infeasible(LeaseRequest(4), candidates(1, reason=Reason("lost", GPU_LOST)))


@pytest.mark.parametrize(
    ("mib", "pools", "hint"),
    [
        (300, [], "request a device without an amount of memory, such as 01:00.0-0 with 300 MiB; or divide"),
        (90_000, [], "divide a GPU by memory_unit or slices: man yunion-mps-host_container_device.yml"),
        (90_000, [pool(0)], "request less memory"),
        (90_000, [pool(0, thread_percentage=10)], "request less memory, or a lower percentage"),
    ],
)
def test_the_hint_for_infeasible_memory_names_what_is_feasible(
    mib: int, pools: list[PoolCandidate], hint: str
) -> None:
    found = candidates(2)
    old = [one._replace(device=one.device._replace(budget_enforced=False)) for one in found.devices[:4]]
    there = found._replace(devices=[*old, *found.devices[4:]], pools=pools)
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(LeaseRequest(memory_mib=mib), there)
    assert hint in caught.value.hint


def test_the_hint_names_the_first_of_equal_devices_in_pci_order() -> None:
    first, second, *_ = candidates(1).devices
    names = ("e1:00.0-0", "10003:00:00.0-0")
    devices = [
        one._replace(device=one.device._replace(addr=name)) for one, name in zip((first, second), names)
    ]
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(LeaseRequest(memory_mib=300), candidates(1)._replace(devices=devices))
    assert "such as e1:00.0-0 with" in caught.value.hint


@pytest.mark.parametrize(
    ("pools", "number", "message", "hint"),
    [
        (
            [pool(0)],
            1,
            "300 MiB with 60 % of the threads can never be allocated: the host has neither",
            "omit the percentage, or add thread_percentage to the entry of the GPU that has memory_unit",
        ),
        (
            [pool(0, thread_percentage=10)],
            2,
            "the host has at most 1200 MiB and 100 % of the threads of GPU 00:00.0",
            "request less memory, or a lower percentage",
        ),
        ([], 1, "the host has neither", "divide a GPU by memory_unit or slices"),
    ],
)
def test_more_threads_than_any_gpu_leases_are_infeasible(
    pools: list[PoolCandidate], number: int, message: str, hint: str
) -> None:
    there = candidates(1)._replace(devices=[], pools=pools)
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(LeaseRequest(number, memory_mib=300, thread_percentage=60), there)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.code == INFEASIBLE


def test_a_slice_satisfies_a_request_for_at_most_its_threads() -> None:
    found = candidates(1)
    there = found._replace(devices=[one._replace(is_slice=True) for one in found.devices])
    refuse_if_infeasible(LeaseRequest(memory_mib=300, thread_percentage=25), there)
    with pytest.raises(InfeasibleError):
        refuse_if_infeasible(LeaseRequest(memory_mib=300, thread_percentage=26), there)


def test_devices_across_gpus_are_infeasible_if_all_memory_is_in_pools() -> None:
    requested, handed_out = LeaseRequest(2, across=True), Candidates((), [pool(0), pool(1)])
    with pytest.raises(NothingFreeError, match="can never be allocated") as caught:
        refuse_if_infeasible(requested, handed_out)
    assert "an amount of memory" in caught.value.hint


def test_devices_that_no_process_gets_together_are_infeasible() -> None:
    there = candidates(2, gpu_0=300, gpu_1=300)
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(LeaseRequest(2), there)
    most = "the control daemon limits each process to 300 MiB of GPU 01:00.0, not 600 MiB"
    assert caught.value.message == f"2 devices cannot be combined into one budget: {most}"
    for request in (LeaseRequest(), LeaseRequest(2, across=True), LeaseRequest(devices=("all",))):
        refuse_if_infeasible(request, there)
    refuse_if_infeasible(LeaseRequest(2), candidates(2, gpu_0=300))


def test_devices_of_several_control_daemons_are_infeasible() -> None:
    there = candidates(1)
    other = Candidate(device(1, 0)._replace(domain="other"))
    both = {**there.domains, "other": there.domains["host"]._replace(name="other")}
    with pytest.raises(InfeasibleError, match="these devices have different control daemons"):
        refuse_if_infeasible(
            LeaseRequest(devices=("all",)), there._replace(devices=[*there.devices, other], domains=both)
        )


def test_a_request_that_needs_an_unenforced_gpu_needs_permission() -> None:
    """One of the two GPUs with MPS is too old for limits; the third GPU is not shared through MPS."""
    old = Candidate(device(1, 0)._replace(budget_enforced=False))
    whole = Candidate(device(2, 0)._replace(domain=""))
    there = candidates(1)
    host = there._replace(
        devices=[*there.devices, old, whole],
        unenforced={"GPU-1": Unenforced("01:00.0 (P40)", "older than Volta")},
    )
    two = LeaseRequest(2, across=True)
    with pytest.raises(HostError, match=r"no budget is enforced on GPU 01:00\.0") as caught:
        refuse_if_infeasible(two, host)
    assert caught.value.code == BUDGET_NOT_ENFORCED
    refuse_if_infeasible(two._replace(allow_unlimited=True), host)
    with pytest.raises(InfeasibleError, match="some of these devices are shared through MPS"):
        refuse_if_infeasible(two, host._replace(devices=[*there.devices, whole]))


def test_all_devices_get_at_most_what_one_process_may_use() -> None:
    there = candidates(1, gpu_0=600)
    devices = [one.device for one in there.devices]
    limit = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    assert there.environment(LeaseRequest(devices=("all",)), devices)[limit] == "0=600M"
    assert there.environment(LeaseRequest(2), devices[:2])[limit] == "0=600M"
    assert there.environment(LeaseRequest(), devices[:1])[limit] == "0=300M"


RESERVED = {"GPU-1": "kubernetes"}


@pytest.mark.parametrize(
    "requested",
    [
        LeaseRequest(devices=("01:00.0-0",)),
        LeaseRequest(devices=("00:00.0-0", "01:00.0-0")),
        LeaseRequest(devices=("all",)),
        LeaseRequest(gpu="GPU-1"),
        LeaseRequest(2, across=True),
    ],
)
def test_a_request_that_needs_reserved_devices_is_refused_as_such(requested: LeaseRequest) -> None:
    there = candidates(2)._replace(reserved=RESERVED)
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(requested, there)
    assert caught.value.message == f"{requested} cannot be allocated: reserved for kubernetes"
    assert caught.value.code == "reserved"
    refuse_if_infeasible(requested._replace(reserved_for="kubernetes"), there)


def test_the_refusal_names_an_unenforced_gpu_that_is_not_reserved() -> None:
    old, reserved = Candidate(device(0, 0)._replace(budget_enforced=False)), Candidate(device(1, 0))
    unenforced = {"GPU-0": Unenforced("00:00.0 (P40)", "older than Volta")}
    there = candidates(2)._replace(devices=[old, reserved], reserved=RESERVED, unenforced=unenforced)
    with pytest.raises(HostError, match=r"no budget is enforced on GPU 00:00\.0") as caught:
        refuse_if_infeasible(LeaseRequest(), there)
    assert caught.value.code == BUDGET_NOT_ENFORCED
    refuse_if_infeasible(LeaseRequest(allow_unlimited=True), there)


@pytest.mark.parametrize("allow_unlimited", [False, True])
def test_a_reserved_gpu_without_enforcement_is_refused_as_reserved(allow_unlimited: bool) -> None:
    old = Candidate(device(1, 0)._replace(budget_enforced=False))
    unenforced = {"GPU-1": Unenforced("01:00.0 (P40)", "older than Volta")}
    there = candidates(1)
    there = there._replace(devices=[*there.devices, old], reserved=RESERVED, unenforced=unenforced)
    for requested in (LeaseRequest(gpu="GPU-1"), LeaseRequest(devices=("01:00.0-0",))):
        with pytest.raises(InfeasibleError) as caught:
            refuse_if_infeasible(requested._replace(allow_unlimited=allow_unlimited), there)
        assert (caught.value.code, "--allow-unlimited" in caught.value.hint) == ("reserved", False)


def test_reserved_devices_are_left_to_what_they_are_reserved_for() -> None:
    there = candidates(2, 1)._replace(reserved=RESERVED)
    allocator = Allocator(Ledger())
    assert [one.gpu_uuid for one in allocator.choose(LeaseRequest(), there)] == ["GPU-0"]
    allocator.ledger.add(lease("a", device(0, 0, 1)))
    with pytest.raises(NothingFreeError, match="1 of 1 leased"):
        allocator.choose(LeaseRequest(), there)
    (chosen,) = allocator.choose(LeaseRequest(reserved_for="kubernetes"), there)
    assert chosen.gpu_uuid == "GPU-1"


def test_a_reserved_pool_is_left_to_what_it_is_reserved_for() -> None:
    there = Candidates(pools=[pool(1)], reserved=RESERVED)
    request = LeaseRequest(memory_mib=200)
    with pytest.raises(InfeasibleError) as caught:
        refuse_if_infeasible(request, there)
    assert caught.value.message == "200 MiB cannot be allocated: reserved for kubernetes"
    with pytest.raises(NothingFreeError):
        Allocator(Ledger()).choose(request, there)
    (chosen,) = Allocator(Ledger()).choose(request._replace(reserved_for="kubernetes"), there)
    assert chosen.addr == "01:00.0-m0"


def test_a_refusal_that_no_reservation_causes_is_explained_as_before() -> None:
    there = candidates(2)._replace(reserved=RESERVED)
    with pytest.raises(InfeasibleError, match="can never be allocated: the host has"):
        refuse_if_infeasible(LeaseRequest(5), there)


def test_on_a_host_without_devices_the_hint_names_status() -> None:
    with pytest.raises(NothingFreeError, match="the host has no such devices") as caught:
        refuse_if_infeasible(LeaseRequest(), Candidates())
    assert caught.value.hint == "see why: yunion-mps status"


def test_a_request_for_a_gpu_whose_layout_is_pending_is_feasible() -> None:
    host = candidates(1)._replace(waiting=[WaitingGpu("09:00.0", Reason("its layout waits", MIG_IN_USE))])
    there, elsewhere = LeaseRequest(gpu="09:00.0"), LeaseRequest(gpu="08:00.0")
    refuse_if_infeasible(there, host)
    with pytest.raises(InfeasibleError, match="the host has no such devices"):
        refuse_if_infeasible(elsewhere, host)
    with pytest.raises(NothingFreeError) as caught:
        Allocator(Ledger()).choose(there, host)
    assert caught.value.message.endswith("cannot be allocated now: GPU 09:00.0: its layout waits")
    assert (caught.value.code, caught.value.hint) == (MIG_IN_USE, hint_of(MIG_IN_USE, gpu="09:00.0"))


def test_a_request_does_not_wait_for_the_layout_of_a_reserved_gpu() -> None:
    waiting = [WaitingGpu("09:00.0", Reason("its layout waits", MIG_IN_USE), "slurm")]
    host = candidates(1)._replace(waiting=waiting)
    refuse_if_infeasible(LeaseRequest(gpu="09:00.0", reserved_for="slurm"), host)
    with pytest.raises(InfeasibleError, match="the host has no such devices"):
        refuse_if_infeasible(LeaseRequest(gpu="09:00.0"), host)
