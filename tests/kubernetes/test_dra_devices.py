"""What devices of a host become in ResourceSlices, and what an allocation of them asks the daemon for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from yunion_mps.core.errors import InfeasibleError
from yunion_mps.kubernetes.api.quantities import memory_quantity, percentage_quantity, quantity
from yunion_mps.kubernetes.dra.resource_objects import AllocatedDevice
from yunion_mps.kubernetes.dra.slice_devices import (
    ClaimRequest,
    architecture_of,
    bus_id,
    offered_devices,
    requested_by,
    semantic_version,
)

from kubernetes.offered_devices import H100, V100, facts, instance, lease, mig_uuid_of, pool, share, uuid_of
from kubernetes.slice_rules import check_policy


def test_a_share_has_its_attributes_and_budget() -> None:
    (one,) = offered_devices(facts([share(0x3B, 2, thread_percentage=33.3)]))
    assert (one.name, one.address, one.taint) == ("3b-00-0-2", "3b:00.0-2", "")
    assert one.device == {
        "name": "3b-00-0-2",
        "attributes": {
            "uuid": {"string": uuid_of(0x3B)},
            "productName": {"string": V100},
            "architecture": {"string": "Ampere"},
            "mpsDomain": {"string": "host"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
            "cudaComputeCapability": {"version": "8.6.0"},
            "driverVersion": {"version": "535.104.5"},
            "numaNode": {"int": 1},
            "address": {"string": "3b:00.0-2"},
            "type": {"string": "share"},
            "budgetEnforced": {"bool": True},
            "sharing": {"string": "mps"},
            "combinable": {"int": 1},
        },
        "capacity": {"memory": {"value": "4Gi"}, "smPercentage": {"value": "33300m"}},
    }


def test_a_share_of_unknown_memory_has_no_capacity_of_it() -> None:
    (one,) = offered_devices(facts([share(0x3B, 2, memory_mib=None, sharing="time-slicing")]))
    assert one.device["capacity"].keys() == {"smPercentage"}


def test_a_name_is_cut_to_what_an_attribute_can_hold() -> None:
    (one,) = offered_devices(facts([share(6, 0, model="N" * 65)]))
    assert one.device["attributes"]["productName"] == {"string": "N" * 64}


def test_a_mig_instance_is_known_by_its_profile_and_its_gpu() -> None:
    (one,) = offered_devices(facts([instance(6, 3, "1g.10gb")]))
    attributes = one.device["attributes"]
    assert one.name == "06-00-0-g3"
    expected = {
        "type": "mig",
        "sharing": "none",
        "profile": "1g.10gb",
        "uuid": mig_uuid_of(6, 3),
        "parentUUID": uuid_of(6),
        "productName": H100,
        "resource.kubernetes.io/pciBusID": "0000:06:00.0",
    }
    assert {name: attributes[name]["string"] for name in expected} == expected
    assert "combinable" not in attributes


@pytest.mark.parametrize("sharing", ["mps", "time-slicing"])
def test_a_share_of_an_instance_is_a_share_with_a_profile(sharing: str) -> None:
    (one,) = offered_devices(facts([instance(6, 3, "1g.10gb", addr="06:00.0-g3-1", sharing=sharing)]))
    attributes = one.device["attributes"]
    found = [attributes[name]["string"] for name in ("type", "sharing", "profile", "address")]
    assert found == ["share", sharing, "1g.10gb", "06:00.0-g3-1"]
    assert ("combinable" in attributes) == (sharing == "mps"), "nothing limits the others"


@pytest.mark.parametrize(
    ("limit_mib", "percentage", "number"),
    [(4096, 25.0, 1), (8192, 50.0, 2), (12288, 74.9, 2), (12288, 75.0, 3), (16384, 100.0, 4),
     (8191, 100.0, 1), (None, 100.0, 1)],
)  # fmt: skip
def test_a_share_tells_how_many_of_its_size_can_be_combined(
    limit_mib: int | None, percentage: float, number: int
) -> None:
    (one,) = offered_devices(facts([share(6, 0)], memory_limit_mib=limit_mib, thread_percentage=percentage))
    assert one.device["attributes"]["combinable"] == {"int": number}


def test_a_pool_is_one_device_whose_memory_is_consumed_in_units() -> None:
    (one,) = offered_devices(facts(pools=[pool(6)]))
    assert one.device["allowMultipleAllocations"]
    assert "numaNode" not in one.device["attributes"], "the host has no NUMA nodes"
    policy = {"default": "128Mi", "validRange": {"min": "128Mi", "step": "128Mi"}}
    assert one.device["capacity"] == {"memory": {"value": "16Gi", "requestPolicy": policy}}


def test_a_reserve_beside_each_lease_is_part_of_what_is_consumed() -> None:
    (one,) = offered_devices(facts(pools=[pool(6, memory_reserve_mib=300, memory_mib=16000)]))
    memory = one.device["capacity"]["memory"]
    assert memory["value"] == memory_quantity(127 * 128), "16300 MiB in whole units"
    assert memory["requestPolicy"]["validRange"] == {"min": "512Mi", "step": "128Mi"}
    allocated = allocated_device(one.name, memory="6Gi")
    request = requested_by([allocated], {one.name: one}, "node")
    assert request == ClaimRequest((), "06:00.0", 6144 - 384)


@pytest.mark.parametrize("reserve_mib", [0, 300])
def test_a_pool_of_one_unit_is_consumed_by_one_claim(reserve_mib: int) -> None:
    (one,) = offered_devices(
        facts(pools=[pool(6, memory_unit_mib=1024, memory_mib=1024, memory_reserve_mib=reserve_mib)])
    )
    value = one.device["capacity"]["memory"]["value"]
    assert one.device["capacity"]["memory"]["requestPolicy"] == {
        "default": value,
        "validRange": {"min": value},
    }
    assert (
        requested_by([allocated_device(one.name, memory=value)], {one.name: one}, "node").memory_mib == 1024
    )
    assert one.taint == "", "nothing is leased to other programs"


def test_an_allocation_from_before_the_reserve_still_has_some_memory() -> None:
    (one,) = offered_devices(facts(pools=[pool(6, memory_reserve_mib=300)]))
    request = requested_by([allocated_device(one.name, memory="128Mi")], {one.name: one}, "node")
    assert request == ClaimRequest((), "06:00.0", 1)


@pytest.mark.parametrize(
    ("changed", "taint", "is_healthy"),
    [
        ({"state": "free"}, "", True),
        ({"state": "reserved"}, "", True),
        ({"state": "leased", "lease": "ours, or ended", "holder": "alice (job)"}, "", True),
        ({"state": "leased", "lease": "theirs", "holder": "alice (job)"}, "leased", True),
        ({"state": "no memory"}, "no_memory", True),
        ({"state": "unavailable", "reason_code": "gpu_lost"}, "gpu_lost", False),
    ],
)
def test_a_device_that_no_pod_should_get_has_a_taint(
    changed: dict[str, str], taint: str, is_healthy: bool
) -> None:
    (one,) = offered_devices(facts([share(6, 0, **changed)], other_leases=[lease(6, 4096)]))
    assert (one.taint, one.is_healthy) == (taint, is_healthy)
    assert bool(one.reason) == bool(taint)


def test_a_pool_that_does_not_serve_has_a_taint() -> None:
    (one,) = offered_devices(facts(pools=[pool(6, state="unavailable", reason="x", reason_code="gpu_lost")]))
    assert (one.taint, one.reason, one.is_healthy) == ("gpu_lost", "x", False)


@pytest.mark.parametrize(
    ("leased_mib", "left_mib", "taint"),
    [(0, 3072, ""), (512, 2048, ""), (1024, 2048, ""), (2000, 1024, ""), (2049, 1024, "leased"),
     (3072, 1024, "leased")],
)  # fmt: skip
def test_a_pool_lacks_the_memory_that_others_have_leased(leased_mib: int, left_mib: int, taint: str) -> None:
    leases = [lease(6, leased_mib), lease(7, 3072, "of another GPU")]
    leases = leases if leased_mib else leases[1:]
    (one,) = offered_devices(
        facts(pools=[pool(6, memory_unit_mib=1024, memory_mib=3072)], other_leases=leases)
    )
    memory = one.device["capacity"]["memory"]
    assert memory["value"] == memory_quantity(left_mib)
    check_policy(dict(memory), is_shared=True)
    assert (one.taint, bool(one.reason), one.is_healthy) == (taint, bool(taint), True)


@pytest.mark.parametrize(
    ("total", "taken", "value", "amounts", "taint"),
    [
        (100.0, 0.0, "100", {"min": "1", "step": "1"}, ""),
        (100.0, 33.3, "66", {"min": "1", "step": "1"}, ""),
        (100.0, 90.0, "10", {"min": "1", "step": "1"}, ""),
        (100.0, 95.0, "10", {"min": "1", "step": "1"}, "leased"),
        (200.0, 0.0, "200", {"min": "1", "step": "1", "max": "100"}, ""),
    ],
)
def test_a_pool_that_counts_threads_has_them_as_a_capacity(
    total: float, taken: float, value: str, amounts: dict[str, str], taint: str
) -> None:
    leases = [lease(6, 1024, thread_percentage=taken)] if taken else []
    counting = pool(6, thread_percentage=10, thread_percentage_total=total)
    (one,) = offered_devices(facts(pools=[counting], other_leases=leases))
    threads = one.device["capacity"]["smPercentage"]
    assert threads == {"value": value, "requestPolicy": {"default": "10", "validRange": amounts}}
    check_policy(dict(threads), is_shared=True)
    assert (one.taint, bool(one.reason)) == (taint, bool(taint))


def test_a_pool_with_a_single_percent_has_no_step() -> None:
    counting = pool(6, thread_percentage=1, thread_percentage_total=100.0)
    (one,) = offered_devices(facts(pools=[counting], other_leases=[lease(6, 1024, thread_percentage=99.0)]))
    threads = one.device["capacity"]["smPercentage"]
    assert threads == {"value": "1", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}}
    check_policy(dict(threads), is_shared=True)


@pytest.mark.parametrize(
    ("device", "consumed", "memory_mib", "percentage"),
    [
        ("08-00-0", {"memory": "1Gi", "smPercentage": "25"}, 1024, 25),
        ("08-00-0", {"mps.yunion.io/memory": "1Gi", "mps.yunion.io/smPercentage": "1"}, 1024, 1),
        ("08-00-0", {"memory": "1Gi"}, 1024, 0),  # allocated before the pool counted threads
        ("08-00-0", {}, 16384, 100),
        ("09-00-0", {"memory": "1Gi", "smPercentage": "25"}, 1024, 0),  # it no longer counts them
    ],
)
def test_a_claim_asks_for_the_threads_that_it_consumes(
    device: str, consumed: dict[str, str], memory_mib: int, percentage: int
) -> None:
    pools = [pool(8, thread_percentage=10, thread_percentage_total=150.0), pool(9)]
    offered = {one.name: one for one in offered_devices(facts(pools=pools))}
    allocated = allocated_device(device)
    allocated["consumedCapacity"] = consumed
    made = requested_by([allocated], offered, "node")
    assert (made.memory_mib, made.thread_percentage) == (memory_mib, percentage)


def test_what_is_reserved_beside_the_leases_of_others_is_no_capacity() -> None:
    reserving = pool(6, memory_unit_mib=1024, memory_reserve_mib=1024, memory_mib=15360)
    for leases, left in (([], "16Gi"), ([lease(6, 2048)], "13Gi"), ([lease(6, 14336)], "2Gi")):
        (one,) = offered_devices(facts(pools=[reserving], other_leases=leases))
        assert (one.device["capacity"]["memory"]["value"], one.taint) == (
            left,
            "leased" if left == "2Gi" else "",
        )


def test_only_reserved_gpus_are_offered_if_there_are_any() -> None:
    devices = [share(6, 0), share(7, 0, reserved_for="kubernetes"), share(8, 0)]
    assert [one.address for one in offered_devices(facts(devices))] == ["07:00.0-0"]
    reserved = offered_devices(facts(devices[:1], [pool(9, reserved_for="kubernetes"), pool(10)]))
    assert [one.address for one in reserved] == ["09:00.0"]
    host = facts(devices)
    without_devices = host._replace(devices=[devices[0], devices[2]])
    assert offered_devices(without_devices) == [], "as long as a MIG layout is pending"


def test_devices_that_are_made_for_leases_are_not_offered() -> None:
    made = offered_devices(facts([share(6, 0, addr="06:00.0-m0")], [pool(6)]))
    assert [one.address for one in made] == ["06:00.0"]


def test_a_device_of_a_gpu_that_was_replaced_is_not_offered() -> None:
    old = share(6, 0, gpu_uuid=uuid_of(99), state="unavailable")
    (made,) = offered_devices(facts([share(6, 0), old]))
    assert (made.gpu, made.taint) == (uuid_of(6), "")


def allocated_device(device: str, memory: str = "", in_pool: str = "node") -> AllocatedDevice:
    made: AllocatedDevice = {"request": "gpu", "driver": "mps.yunion.io", "pool": in_pool, "device": device}
    if memory:
        made["consumedCapacity"] = {"memory": memory}
    return made


EXAMPLES = Path(__file__).parents[2].joinpath("etc/kubernetes/examples")
OFFERED = {
    one.name: one
    for one in offered_devices(
        facts(
            [
                *(share(6, 0), share(6, 1), share(7, 0), instance(11, 1, "1g.10gb")),
                share(12, 0, sharing="time-slicing"),
            ],
            [pool(8), pool(9), pool(10, thread_percentage=10, thread_percentage_total=100)],
        )
    )
}


@pytest.mark.parametrize(
    ("results", "request_"),
    [
        ([allocated_device("06-00-0-0")], ClaimRequest(("06:00.0-0",))),
        (
            [allocated_device("07-00-0-0"), allocated_device("06-00-0-1")],
            ClaimRequest(("06:00.0-1", "07:00.0-0")),
        ),
        ([allocated_device("08-00-0", "6Gi")], ClaimRequest((), "08:00.0", 6144)),
        (
            [allocated_device("08-00-0", "2Gi"), allocated_device("08-00-0", "1Gi")],
            ClaimRequest((), "08:00.0", 3072),
        ),
        ([allocated_device("08-00-0")], ClaimRequest((), "08:00.0", 16384)),
    ],
)
def test_an_allocation_asks_for_one_lease(results: list[AllocatedDevice], request_: ClaimRequest) -> None:
    assert requested_by(results, OFFERED, "node") == request_


def test_a_qualified_name_of_a_capacity_is_understood() -> None:
    allocated = allocated_device("08-00-0")
    allocated["consumedCapacity"] = {"mps.yunion.io/memory": "1Gi"}
    assert requested_by([allocated], OFFERED, "node").memory_mib == 1024


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([allocated_device("06-00-0-9")], "there is no device 06-00-0-9"),
        ([allocated_device("06-00-0-0", in_pool="other")], "in the pool other on this node"),
        ([allocated_device("06-00-0-0"), allocated_device("08-00-0", "1Gi")], "but not both"),
        ([allocated_device("08-00-0", "1Gi"), allocated_device("09-00-0", "1Gi")], "of only one GPU"),
        ([allocated_device("06-00-0-0"), allocated_device("0b-00-0-g1")], "through MPS and some are not"),
        (
            [allocated_device("08-00-0", "1Gi"), allocated_device("0b-00-0-g1")],
            "through MPS and some are not",
        ),
        (
            [allocated_device("0b-00-0-g1"), allocated_device("0c-00-0-0")],
            "on MIG instances and some are not",
        ),
        ([allocated_device("08-00-0", "lots")], "is not a quantity"),
        ([allocated_device("08-00-0", "9" * 309)], "is not a quantity"),
    ],
)
def test_a_claim_that_cannot_be_one_lease_is_refused(results: list[AllocatedDevice], reason: str) -> None:
    with pytest.raises(InfeasibleError, match=reason):
        requested_by(results, OFFERED, "node")


def test_quantities_are_written_as_the_api_server_stores_them() -> None:
    sizes = {4096: "4Gi", 5760: "5760Mi", 1: "1Mi", 1 << 20: "1Ti", 1536 << 10: "1536Gi"}
    assert {mib: memory_quantity(mib) for mib in sizes} == sizes
    assert [percentage_quantity(one) for one in (100.0, 25.0, 33.3, 0.1)] == ["100", "25", "33300m", "100m"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6Gi", 6 << 30), ("1.5Gi", 3 << 29), ("500M", 5e8), ("1e3", 1000), ("1E3", 1000), ("2k", 2000),
        ("128974848", 128974848), ("1500m", 1.5), ("2E", 2e18), ("1Ei", 1 << 60), (".5Ki", 512),
    ],
)  # fmt: skip
def test_every_form_of_quantity_is_parsed(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "1Xi", "-1", "1 Gi", "one", "1e100", "9" * 309, "9" * 5000, "1e99", "8Ei", "\u0663"],
    ids=len,
)
def test_what_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(InfeasibleError):
        quantity(text)


@pytest.mark.parametrize(
    ("capability", "name"),
    [("7.0", "Volta"), ("7.5", "Turing"), ("8.0", "Ampere"), ("8.6", "Ampere"), ("8.9", "Ada Lovelace"),
     ("9.0", "Hopper"), ("10.0", "Blackwell"), ("12.1", "Blackwell"), ("6.1", "Pascal"), ("2.0", ""),
     (None, "")],
)  # fmt: skip
def test_architectures_are_known_by_the_compute_capability(capability: str | None, name: str) -> None:
    assert architecture_of(capability) == name


def test_versions_and_addresses_are_in_kubernetes_form() -> None:
    assert [semantic_version(text) for text in ("535.104.05", "8.6", "570", "")] == [
        "535.104.5",
        "8.6.0",
        "570.0.0",
        "",
    ]
    addresses = ("00000000:3B:00.0", "0001:3b:00.0", "3b:00.0-g1")
    assert [bus_id(one) for one in addresses] == ["0000:3b:00.0", "0001:3b:00.0", "0000:3b:00.0"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("dra-*.yaml")), ids=lambda path: str(path.stem))
def test_the_claims_of_the_examples_name_what_devices_have(path: Path) -> None:
    text = path.read_text()
    devices = [one.device for one in OFFERED.values()]
    attributes = {name for device in devices for name in device["attributes"]}
    capacities = {name for device in devices for name in device["capacity"]}
    named = re.findall(r'attributes\["mps.yunion.io"\]\.(\w+)|Attribute: mps.yunion.io/(\w+)', text)
    assert {one or other for one, other in named} <= attributes
    sizes = re.findall(r'capacity\["mps.yunion.io"\]\.(\w+)|(?:capacity: {requests: {|Gi, )(\w+): ', text)
    assert {one or other for one, other in sizes} <= capacities
    classes = yaml.safe_load_all(EXAMPLES.with_name("dra").joinpath("device-classes.yaml").read_text())
    requested = set(re.findall(r"deviceClassName: (.*)", text))
    assert requested
    assert requested <= {one["metadata"]["name"] for one in classes}
