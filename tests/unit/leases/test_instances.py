"""Requests for MIG instances on different GPUs: two instances of one GPU are not."""

from __future__ import annotations

import pytest
from yunion_mps.core.enums import BINPACK, SPREAD
from yunion_mps.core.errors import InfeasibleError
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest

from unit.leases.lease_builders import device, lease, refuse_if_infeasible, reservation_for


def instances(gpu: int, *numbers: int, domain: str = "") -> list[Candidate]:
    """Whole MIG instances of a GPU."""
    return [
        Candidate(
            device(gpu, 0)._replace(
                id=f"{gpu}-g{number}",
                addr=f"0{gpu}:00.0-g{number}",
                gpu_uuid=f"MIG-{gpu}-{number}",
                domain=domain,
            )
        )
        for number in numbers
    ]


def test_devices_across_gpus_are_not_two_instances_of_one_gpu() -> None:
    two, host = LeaseRequest(2, across=True), Candidates([*instances(0, 1, 2), *instances(1, 3)])
    assert [one.addr for one in Allocator(Ledger()).choose(two, host)] == ["00:00.0-g1", "01:00.0-g3"]
    assert reservation_for(Ledger(), two, host).devices == {"0-g1", "1-g3"}
    with pytest.raises(InfeasibleError, match="the host has 2 such devices on 1 GPU"):
        refuse_if_infeasible(two, Candidates(instances(0, 1, 2)))


def test_a_request_for_devices_of_one_gpu_counts_its_instances() -> None:
    there = "2 devices of GPU 00:00.0 can never be allocated: the host has 3 such devices on 3 MIG instances"
    with pytest.raises(InfeasibleError, match=there):
        refuse_if_infeasible(LeaseRequest(2, gpu="00:00.0"), Candidates(instances(0, 1, 2, 3)))
    with pytest.raises(InfeasibleError, match="has 3 such devices on 1 GPU and 2 MIG instances"):
        refuse_if_infeasible(LeaseRequest(4), Candidates([*instances(0, 1, 2), Candidate(device(1, 0))]))


@pytest.mark.parametrize("domain", ["", "host"])
def test_a_whole_gpu_and_an_instance_are_never_in_one_lease(domain: str) -> None:
    whole = [Candidate(device(gpu, 0)._replace(domain=domain)) for gpu in (2, 3)]
    host = Candidates([*instances(0, 1), *whole])
    two = LeaseRequest(2, across=True)
    assert [one.gpu_uuid for one in Allocator(Ledger()).choose(two, host)] == ["GPU-2", "GPU-3"]
    both = Candidates([*instances(0, 1, domain=domain and "00:00.0-g1"), whole[0]])
    for request in (two, LeaseRequest(devices=("00:00.0-g1", "02:00.0-0")), LeaseRequest(devices=("all",))):
        with pytest.raises(InfeasibleError, match="some of these devices are on MIG instances and some are"):
            refuse_if_infeasible(request, both)


def test_instances_with_control_daemons_cannot_be_served_together() -> None:
    each = [*instances(0, 1, domain="00:00.0-g1"), *instances(1, 3, domain="01:00.0-g3")]
    with pytest.raises(InfeasibleError, match="different control daemons") as caught:
        refuse_if_infeasible(LeaseRequest(2, across=True), Candidates(each))
    assert caught.value.hint == "request devices of one MIG instance; each has a control daemon of its own"


@pytest.mark.parametrize(("placement", "address"), [(SPREAD, "01:00.0-g3"), (BINPACK, "00:00.0-g2")])
@pytest.mark.parametrize("order", [1, -1])
def test_placement_goes_by_the_gpu_and_not_by_its_instances(placement: str, address: str, order: int) -> None:
    of_first, of_second = instances(0, 1, 2), instances(1, 3, 4)
    host = Candidates([one for some in (of_first, of_second)[::order] for one in some])
    ledger = Ledger([lease("a", of_first[0].device)])
    (placed,) = Allocator(ledger).choose(LeaseRequest(placement=placement), host)
    assert placed.addr == address


@pytest.mark.parametrize(("placement", "address"), [(SPREAD, "00:00.0-g2-0"), (BINPACK, "00:00.0-g1-1")])
def test_on_the_chosen_gpu_placement_goes_by_the_instance(placement: str, address: str) -> None:
    shares = [
        Candidate(
            one.device._replace(id=f"{one.device.id}-{slot}", addr=f"{one.device.addr}-{slot}", slot=slot)
        )
        for one in instances(0, 1, 2)
        for slot in range(4)
    ]
    ledger = Ledger([lease("a", shares[0].device)])
    (placed,) = Allocator(ledger).choose(LeaseRequest(placement=placement), Candidates(shares))
    assert placed.addr == address


def test_different_gpus_are_whole_ones_rather_than_instances() -> None:
    whole = [Candidate(device(gpu, slot)) for gpu in (2, 3) for slot in range(4)]
    host, two = Candidates([*instances(0, 1), *instances(1, 3), *whole]), LeaseRequest(2, across=True)
    allocator = Allocator(Ledger())
    assert [one.gpu_uuid for one in allocator.choose(two, host)] == ["GPU-2", "GPU-3"]
    allocator.ledger.add(lease("a", *(one.device for one in whole[:4])))
    assert [one.addr for one in allocator.choose(two, host)] == ["00:00.0-g1", "01:00.0-g3"]


def test_what_is_reserved_on_different_gpus_can_be_in_one_lease() -> None:
    whole = Candidate(device(2, 0))
    host, two = Candidates([whole, *instances(0, 1), *instances(1, 3)]), LeaseRequest(2, across=True)
    allocator = Allocator(Ledger([lease("a", host.devices[1].device)]))
    assert reservation_for(allocator.ledger, two, host).devices == {"1-g3"}
