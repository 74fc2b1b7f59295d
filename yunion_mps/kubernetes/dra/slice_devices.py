"""What the host offers as devices of ResourceSlices, and which lease an allocation of them requires.

Nothing here does I/O.

Source: all names and limits are those of the API group resource.k8s.io/v1 (k8s.io/api/resource/v1/types.go).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.addresses import full_address, is_on_instance, physical_gpu
from yunion_mps.core.enums import AVAILABLE, LEASED, MIG, MPS, NOT_SHARED, UNAVAILABLE
from yunion_mps.core.errors import InfeasibleError
from yunion_mps.kubernetes.api.quantities import memory_quantity, percentage_quantity, quantity
from yunion_mps.kubernetes.dra.resource_objects import (
    AllocatedDevice,
    DeviceAttribute,
    DeviceCapacity,
    RequestPolicy,
    RequestRange,
    SliceDevice,
)
from yunion_mps.kubernetes.offered import KnownDevice, select_offered, unhealthy_cause

if TYPE_CHECKING:
    from yunion_mps import answers

#: The driver's name, to which unqualified names of attributes and capacities belong.
DRIVER = "mps.yunion.io"
NO_SCHEDULE = "NoSchedule"
#: The types of devices. The third is MIG, for whole instances, as in NVIDIA's DRA driver.
SHARE = "share"
POOL = "pool"
#: The capacities.
MEMORY = "memory"
SM_PERCENTAGE = "smPercentage"
#: Kubernetes' own attributes (k8s.io/dynamic-resource-allocation, deviceattribute).
_PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
_PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
#: The longest text and version in an attribute.
_MAX_VALUE = 64
#: NVIDIA's architectures by the first compute capability of each, from the newest on (CUDA C++ Programming
#: Guide, section "Compute Capabilities").
_ARCHITECTURES = (
    ((12, 0), "Blackwell"),
    ((10, 0), "Blackwell"),
    ((9, 0), "Hopper"),
    ((8, 9), "Ada Lovelace"),
    ((8, 0), "Ampere"),
    ((7, 5), "Turing"),
    ((7, 0), "Volta"),
    ((6, 0), "Pascal"),
    ((5, 0), "Maxwell"),
    ((3, 0), "Kepler"),
)

_SEPARATE = "use a separate claim and container for each"

#: The attributes that all devices of a GPU have, by its UUID.
GpuAttributes = dict[str, dict[str, DeviceAttribute]]


class OfferedDevice(NamedTuple):
    """A device that can be allocated: a share, a MIG instance, or a GPU whose memory is leased in units.

    The attributes of the GPU and the capacity are the same objects for many devices, because a host may have
    thousands.
    """

    #: Its name in slices and claims, a DNS label.
    name: str
    #: Its address; that of a pool is its GPU's.
    address: str
    #: The UUID of its GPU or MIG instance.
    gpu: str
    #: SHARE, POOL or MIG.
    type: str
    gpu_attributes: Mapping[str, DeviceAttribute]
    budget_enforced: bool
    capacity: Mapping[str, DeviceCapacity]
    #: Why no other pod should get it, as a reason code or a state; empty if one may.
    taint: str
    #: The same in words.
    reason: str
    is_healthy: bool
    #: The part of a pool's allocation that its lease does not get, in MiB.
    reserve_mib: int = 0
    #: How many shares of this size a claim can have of its GPU.
    combinable: int = 1
    sharing: str = MPS

    @property
    def is_pool(self) -> bool:
        return self.type == POOL

    @property
    def device(self) -> SliceDevice:
        """The device as slices have it.

        Source: Kubernetes API, ResourceSlice, Device.
        """
        attributes: dict[str, DeviceAttribute] = {
            **self.gpu_attributes,
            "address": {"string": self.address},
            "type": {"string": self.type},
            "budgetEnforced": {"bool": self.budget_enforced},
            "sharing": {"string": self.sharing},
        }
        device: SliceDevice = {
            "name": self.name,
            "attributes": attributes,
            "capacity": dict(self.capacity),
        }
        if self.is_pool:
            device["allowMultipleAllocations"] = True
        elif self.sharing == MPS:
            attributes["combinable"] = {"int": self.combinable}
        if self.taint:
            device["taints"] = [{"key": f"{DRIVER}/{self.taint}", "effect": NO_SCHEDULE}]
        return device


class HostDevice(KnownDevice):
    """The members of a `Device` that are used here."""

    model: str | None
    reason_code: str
    budget_enforced: bool


class HostFacts(NamedTuple):
    """What the daemon says about the host."""

    devices: Sequence[HostDevice]
    pools: Sequence[answers.PoolJson]
    #: The GPUs and MIG instances, by UUID.
    gpus: Mapping[str, answers.GpuJson]
    #: The domain of each GPU, by UUID.
    domains: Mapping[str, answers.DomainJson]
    #: The root of each GPU's PCI hierarchy, by UUID; empty if it is unknown.
    pcie_roots: Mapping[str, str]
    driver_version: str
    #: The leases that are not of claims, by id.
    other_leases: Mapping[str, answers.LeaseRecordJson]


class ClaimRequest(NamedTuple):
    """What to lease for a claim: these devices, or this much memory of one GPU."""

    #: Their addresses.
    devices: tuple[str, ...] = ()
    #: The address of the GPU.
    gpu: str = ""
    memory_mib: int = 0
    #: Of the SM threads; 0 leaves it to the daemon.
    thread_percentage: int = 0


def offered_devices(facts: HostFacts) -> list[OfferedDevice]:
    """Return the devices, GPU by GPU; only those of reserved GPUs if there are any."""
    devices, pools = select_offered(facts.devices, facts.pools, facts.gpus.values())
    common: GpuAttributes = {}
    for gpu in (*devices, *pools):
        if gpu["gpu_uuid"] not in common:
            common[gpu["gpu_uuid"]] = _attributes(gpu["gpu_uuid"], gpu["model"], gpu["numa_node"], facts)
    offered = [_share(device, facts, common) for device in devices]
    offered += [_pool(pool, facts, common) for pool in pools]
    return offered


def device_name(address: str) -> str:
    """Return the address as a DNS label: 0001:3b:00.0-1 becomes 0001-3b-00-0-1.

    Source: Kubernetes API, ResourceSlice, Device, name.
    """
    return re.sub(r"[^a-z0-9]", "-", address.lower())


def requested_by(
    results: Sequence[AllocatedDevice], offered: Mapping[str, OfferedDevice], pool: str
) -> ClaimRequest:
    """Return the lease that the allocated devices of a claim add up to.

    `offered` are the node's devices by name, and `pool` is the name of its pool.

    Raises InfeasibleError if there is no such lease.
    """
    devices: list[OfferedDevice] = []
    for result in results:
        if result["pool"] != pool or result["device"] not in offered:
            message = f"there is no device {result['device']} in the pool {result['pool']} on this node"
            hint = "delete the pod: the GPUs were divided differently when its claim was allocated"
            raise InfeasibleError(message, hint)
        devices.append(offered[result["device"]])
    _require_one_kind(devices)
    pools = {device.gpu for device in devices if device.is_pool}
    if not pools:
        addresses = {device.address for device in devices}
        return ClaimRequest(devices=tuple(sorted(addresses)))
    if len(pools) > 1 or not all(device.is_pool for device in devices):
        message = "a claim can have memory of only one GPU, or whole devices, but not both"
        raise InfeasibleError(message, _SEPARATE)
    memory_mib = 0
    percentage = 0
    for result, device in zip(results, devices):
        consumed = _consumed(result, device)
        memory_mib += round(quantity(consumed[MEMORY])) >> 20
        percentage += round(quantity(consumed.get(SM_PERCENTAGE, "0")))
    memory_mib -= devices[0].reserve_mib
    return ClaimRequest(
        gpu=devices[0].address,
        memory_mib=max(1, memory_mib),
        thread_percentage=min(100, percentage),
    )


def _require_one_kind(devices: Sequence[OfferedDevice]) -> None:
    """Raise InfeasibleError if one process cannot use all of these devices."""
    if len({device.sharing == MPS for device in devices}) > 1:
        message = "some of these devices are shared through MPS and some are not"
        hint = (
            f"a process uses MPS on all of its GPUs or on none: request devices of one class, or {_SEPARATE}"
        )
        raise InfeasibleError(message, hint)
    if len({is_on_instance(device.address) for device in devices}) > 1:
        message = "some of these devices are on MIG instances and some are not; a process can use one kind"
        raise InfeasibleError(message, _SEPARATE)


def _consumed(result: AllocatedDevice, offered: OfferedDevice) -> dict[str, str]:
    """Return the capacities of a pool that are allocated; all of them if the cluster does not share devices.

    Those that the pool had when it was allocated, and no longer has, are left out.
    """
    consumed: dict[str, str] = {}
    for name, value in result.get("consumedCapacity", {}).items():
        consumed[name.rpartition("/")[2]] = value  # without the driver's name
    if MEMORY not in consumed:
        consumed = {name: capacity["value"] for name, capacity in offered.capacity.items()}
    return {name: value for name, value in consumed.items() if name in offered.capacity}


# -- devices


def _share(device: HostDevice, facts: HostFacts, common: GpuAttributes) -> OfferedDevice:
    cause = unhealthy_cause(device, facts.other_leases)
    taint = device["reason_code"] or device["state"] if cause else ""
    address = _copied(device["addr"])
    return OfferedDevice(
        name=device_name(address),
        address=address,
        gpu=common[device["gpu_uuid"]]["uuid"]["string"],
        type=MIG if device["sharing"] == NOT_SHARED else SHARE,
        gpu_attributes=common[device["gpu_uuid"]],
        budget_enforced=device["budget_enforced"],
        capacity=_budget(device["memory_mib"], device["thread_percentage"]),
        taint=taint.replace(" ", "_"),
        reason=cause,
        is_healthy=device["state"] != UNAVAILABLE,
        combinable=_combinable(device, facts.domains.get(device["gpu_uuid"])),
        sharing=_copied(device["sharing"]),
    )


def _combinable(device: HostDevice, domain: answers.DomainJson | None) -> int:
    """Return how many such devices of its GPU can be one budget, by the limits of its control daemon."""
    if domain is None:
        return 1
    limit_mib = domain["memory_limits_mib"][domain["gpus"].index(device["gpu_uuid"])]
    number = (limit_mib or 0) // (device["memory_mib"] or 1)
    if domain["thread_percentage"] < 100:
        # in tenths, as whole numbers: a quotient of floats may be just below the next number
        limit_tenths = round(domain["thread_percentage"] * 10)
        number = min(number, limit_tenths // round(device["thread_percentage"] * 10))
    return max(1, number)


@lru_cache
def _budget(memory_mib: int | None, percentage: float) -> Mapping[str, DeviceCapacity]:
    """Return the capacities of a device, without its memory if that is unknown."""
    capacity: dict[str, DeviceCapacity] = {}
    if memory_mib is not None:
        capacity[MEMORY] = {"value": memory_quantity(memory_mib)}
    capacity[SM_PERCENTAGE] = {"value": percentage_quantity(percentage)}
    return capacity


def _copied(text: str) -> str:
    """Return a copy of a string in the daemon's answer, whose memory is only freed as a whole."""
    return text.encode().decode()


def _pool(pool: answers.PoolJson, facts: HostFacts, common: GpuAttributes) -> OfferedDevice:
    """Return a GPU whose memory can be allocated many times, and its SM threads if not in proportion.

    The capacities are what claims can have together, so they lack what other programs have leased. What is
    consumed includes the memory that is reserved in addition to each lease, in whole units. Otherwise, the
    scheduler would allocate more than there is.
    """
    unit_mib = pool["memory_unit_mib"]
    reserve_mib = _in_units(pool["memory_reserve_mib"], unit_mib)
    least_mib = unit_mib + reserve_mib
    taken_mib, taken_percentage = _taken(pool, facts.other_leases.values())
    left_mib = (pool["memory_mib"] + pool["memory_reserve_mib"] - taken_mib) // unit_mib * unit_mib
    capacity = {
        MEMORY: _consumable(memory_quantity, default=least_mib, least=least_mib, step=unit_mib, left=left_mib)
    }
    percentage = pool["thread_percentage"]
    lacks_threads = False
    if percentage is not None:
        percentage_left = int((pool["thread_percentage_total"] or 0) - taken_percentage)
        capacity[SM_PERCENTAGE] = _consumable(
            percentage_quantity, default=percentage, least=1, step=1, left=percentage_left, most=100
        )
        lacks_threads = percentage_left < percentage
    is_healthy = pool["state"] == AVAILABLE
    taint = ""
    reason = ""
    if not is_healthy:
        taint = pool["reason_code"] or pool["state"]
        reason = pool["reason"]
    elif taken_mib and left_mib < least_mib:
        taint = LEASED
        reason = "its memory is leased to other programs"
    elif lacks_threads:
        taint = LEASED
        reason = "its SM threads are leased to other programs"
    return OfferedDevice(
        name=device_name(pool["addr"]),
        address=pool["addr"],
        gpu=pool["gpu_uuid"],
        type=POOL,
        gpu_attributes=common[pool["gpu_uuid"]],
        budget_enforced=pool["budget_enforced"],
        capacity=capacity,
        taint=taint.replace(" ", "_"),
        reason=reason,
        is_healthy=is_healthy,
        reserve_mib=reserve_mib,
    )


def _consumable(
    quantity_of: Callable[[int], str],
    *,
    default: int,
    least: int,
    step: int,
    left: int,
    most: int | None = None,
) -> DeviceCapacity:
    """Return a capacity that claims consume in steps.

    Source: Kubernetes API, ResourceSlice, CapacityRequestPolicy: the default is within the range, the maximum
    and the value are not below it, and a step leads to a value.
    """
    value = max(default, left)  # not less than the default
    amounts: RequestRange = {"min": quantity_of(least)}
    if least + step <= value:
        amounts["step"] = quantity_of(step)
    if most is not None and most < value:
        amounts["max"] = quantity_of(most)
    policy: RequestPolicy = {"default": quantity_of(default), "validRange": amounts}
    return {"value": quantity_of(value), "requestPolicy": policy}


def _taken(pool: answers.PoolJson, other_leases: Iterable[answers.LeaseRecordJson]) -> tuple[int, float]:
    """Return the MiB and percentage of the pool that no claim can have, because other holders have them."""
    memory_mib = 0
    percentage = 0.0
    for lease in other_leases:
        for budget in lease["budgets"]:
            if budget["gpu"] == pool["addr"]:
                memory_mib += (budget["memory_mib"] or 0) + pool["memory_reserve_mib"]
                percentage += budget["thread_percentage"]
    return memory_mib, percentage


def _in_units(mib: int, unit_mib: int) -> int:
    """Return the amount, rounded up to whole units."""
    return -(-mib // unit_mib) * unit_mib


def _attributes(
    uuid: str, model: str | None, numa_node: int | None, facts: HostFacts
) -> dict[str, DeviceAttribute]:
    """Return the attributes of all devices of a GPU; a MIG instance has its GPU's product name.

    Source: NVIDIA's DRA driver (github.com/NVIDIA/k8s-dra-driver-gpu), for the names and values that are its.
    """
    gpu = facts.gpus.get(uuid)
    texts = {"uuid": uuid, "productName": model or "", _PCIE_ROOT: facts.pcie_roots.get(uuid, "")}
    versions = {"driverVersion": semantic_version(facts.driver_version)}
    if gpu:
        parent = facts.gpus.get(gpu["parent"]) if gpu["parent"] else None
        if parent:
            texts["productName"] = parent["name"] or ""
        texts["parentUUID"] = gpu["parent"] or ""
        texts["profile"] = gpu["mig_profile"] or ""
        texts["architecture"] = architecture_of(gpu["compute_capability"])
        texts[_PCI_BUS_ID] = bus_id(gpu["pci_address"])
        versions["cudaComputeCapability"] = semantic_version(gpu["compute_capability"] or "")
    if uuid in facts.domains:
        texts["mpsDomain"] = facts.domains[uuid]["name"]
    attributes: dict[str, DeviceAttribute] = {}
    for name, text in texts.items():
        if text:
            attributes[name] = {"string": _copied(text[:_MAX_VALUE])}
    for name, text in versions.items():
        if text:
            attributes[name] = {"version": text}
    if numa_node is not None and numa_node >= 0:
        attributes["numaNode"] = {"int": numa_node}
    return attributes


def architecture_of(compute_capability: str | None) -> str:
    """Return the architecture's name, empty if it is unknown."""
    if not compute_capability:
        return ""
    major, _, minor = compute_capability.partition(".")
    capability = (int(major), int(minor or 0))
    for first, name in _ARCHITECTURES:
        if capability >= first:
            return name
    return ""


def bus_id(address: str) -> str:
    """Return the GPU's address in extended BDF notation: 0000:00:06.0, and as in sysfs for longer domains.

    Kubernetes' helper for drivers knows domains of four digits only, but the API accepts any text.

    Source: Kubernetes: Standard Device Attributes for Dynamic Resource Allocation, pciBusID, which has to be
    unique on the node.
    """
    return full_address(physical_gpu(address))


def semantic_version(text: str) -> str:
    """Return the version as three numbers without leading zeros; empty if it has no number.

    Source: Semantic Versioning 2.0.0, section 2.
    """
    numbers = [str(int(number)) for number in re.findall(r"[0-9]+", text)[:3]]
    if not numbers:
        return ""
    while len(numbers) < 3:
        numbers.append("0")
    return ".".join(numbers)
