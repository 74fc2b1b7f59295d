"""What the host offers as devices of ResourceSlices, and which lease an allocation of them requires.

All names and limits are those of the API group resource.k8s.io/v1 (k8s.io/api/resource/v1/types.go). Nothing
here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.addresses import full_address, is_on_instance, physical_gpu
from yunion_mps.enums import AVAILABLE, LEASED, MIG, MPS, NOT_SHARED, UNAVAILABLE
from yunion_mps.errors import InfeasibleError
from yunion_mps.kubernetes.api.quantities import memory_quantity, percentage_quantity, quantity
from yunion_mps.kubernetes.devices import KnownDevice, select_offered, unhealthy_cause
from yunion_mps.kubernetes.dra.objects import (
    AllocatedDevice,
    DeviceAttribute,
    DeviceCapacity,
    RequestPolicy,
    RequestRange,
    SliceDevice,
)

if TYPE_CHECKING:
    from yunion_mps import answers

#: The driver's name, to which unqualified names of attributes and capacities belong.
DRIVER = "mps.yunion.io"
NO_SCHEDULE = "NoSchedule"
#: The types of devices. The third is MIG, for whole instances, as in NVIDIA's DRA driver.
SHARE, POOL = "share", "pool"
#: The capacities.
MEMORY, SM_PERCENTAGE = "memory", "smPercentage"
_PCI_BUS_ID, _PCIE_ROOT = "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot"
#: The longest text and version in an attribute.
_MAX_VALUE = 64
#: NVIDIA's architectures by the first compute capability of each (docs.nvidia.com/cuda, "Compute
#: Capabilities").
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

    `taint` is why no other pod should get it, as a reason code or a state; empty if one may. `reason` says so
    in words. `reserve_mib` is the part of a pool's allocation that its lease does not get; `combinable` is
    how many shares of this size a claim can have of its GPU. The attributes of the GPU and the capacity are
    the same objects for many devices, because a host may have thousands.
    """

    name: str
    address: str
    gpu: str
    type: str
    gpu_attributes: Mapping[str, DeviceAttribute]
    budget_enforced: bool
    capacity: Mapping[str, DeviceCapacity]
    taint: str
    reason: str
    is_healthy: bool
    reserve_mib: int = 0
    combinable: int = 1
    sharing: str = MPS

    @property
    def is_pool(self) -> bool:
        return self.type == POOL

    @property
    def device(self) -> SliceDevice:
        """The device as slices have it."""
        attributes: dict[str, DeviceAttribute] = {
            **self.gpu_attributes,
            "address": {"string": self.address},
            "type": {"string": self.type},
            "budgetEnforced": {"bool": self.budget_enforced},
            "sharing": {"string": self.sharing},
        }
        made: SliceDevice = {"name": self.name, "attributes": attributes, "capacity": {**self.capacity}}
        if self.is_pool:
            made["allowMultipleAllocations"] = True
        elif self.sharing == MPS:
            attributes["combinable"] = {"int": self.combinable}
        if self.taint:
            made["taints"] = [{"key": f"{DRIVER}/{self.taint}", "effect": NO_SCHEDULE}]
        return made


class HostDevice(KnownDevice):
    """The members of a `Device` that are used here."""

    model: str | None
    reason_code: str
    budget_enforced: bool


class HostFacts(NamedTuple):
    """What the daemon says about the host; `gpus`, `domains` and `pcie_roots` are by GPU UUID."""

    devices: Sequence[HostDevice]
    pools: Sequence[answers.Pool]
    gpus: Mapping[str, answers.Gpu]
    domains: Mapping[str, answers.Domain]
    pcie_roots: Mapping[str, str]
    driver_version: str
    other_leases: Mapping[str, answers.LeaseRecord]


class ClaimRequest(NamedTuple):
    """What to lease for a claim: these devices, or this much memory of one GPU.

    A `thread_percentage` of 0 leaves it to the daemon.
    """

    devices: tuple[str, ...] = ()
    gpu: str = ""
    memory_mib: int = 0
    thread_percentage: int = 0


def offered_devices(facts: HostFacts) -> list[OfferedDevice]:
    """The devices, GPU by GPU; only those of reserved GPUs if there are any."""
    devices, pools = select_offered(facts.devices, facts.pools, facts.gpus.values())
    common: GpuAttributes = {}
    for gpu in (*devices, *pools):
        if gpu["gpu_uuid"] not in common:
            common[gpu["gpu_uuid"]] = _attributes(gpu["gpu_uuid"], gpu["model"], gpu["numa_node"], facts)
    return [*(_share(one, facts, common) for one in devices), *(_pool(one, facts, common) for one in pools)]


def device_name(address: str) -> str:
    """A DNS label: 0001:3b:00.0-1 becomes 0001-3b-00-0-1."""
    return re.sub(r"[^a-z0-9]", "-", address.lower())


def requested_by(
    results: Sequence[AllocatedDevice], offered: Mapping[str, OfferedDevice], pool: str
) -> ClaimRequest:
    """The lease that the allocated devices of a claim add up to, by name; raises InfeasibleError."""
    for one in results:
        if one["pool"] != pool or one["device"] not in offered:
            what = f"there is no device {one['device']} in the pool {one['pool']} on this node"
            hint = "delete the pod: the GPUs were divided differently when its claim was allocated"
            raise InfeasibleError(what, hint)
    found = [offered[one["device"]] for one in results]
    if len({one.sharing == MPS for one in found}) > 1:
        what = "some of these devices are shared through MPS and some are not"
        hint = (
            f"a process uses MPS on all of its GPUs or on none: request devices of one class, or {_SEPARATE}"
        )
        raise InfeasibleError(what, hint)
    if len({is_on_instance(one.address) for one in found}) > 1:
        what = "some of these devices are on MIG instances and some are not; a process can use one kind"
        raise InfeasibleError(what, _SEPARATE)
    pools = {one.gpu for one in found if one.is_pool}
    if not pools:
        return ClaimRequest(tuple(sorted({one.address for one in found})))
    if len(pools) > 1 or not all(one.is_pool for one in found):
        what = "a claim can have memory of only one GPU, or whole devices, but not both"
        raise InfeasibleError(what, _SEPARATE)
    consumed = [_consumed(result, one) for result, one in zip(results, found)]
    mib = sum(round(quantity(one[MEMORY])) >> 20 for one in consumed) - found[0].reserve_mib
    percentage = sum(round(quantity(one[SM_PERCENTAGE])) for one in consumed if SM_PERCENTAGE in one)
    return ClaimRequest((), found[0].address, max(1, mib), min(100, percentage))


def _consumed(result: AllocatedDevice, offered: OfferedDevice) -> dict[str, str]:
    """The capacities of a pool that are allocated; all of them if the cluster does not share devices.

    Those that the pool had when it was allocated, and no longer has, are left out.
    """
    found = {name.rpartition("/")[2]: value for name, value in result.get("consumedCapacity", {}).items()}
    if MEMORY not in found:
        found = {name: capacity["value"] for name, capacity in offered.capacity.items()}
    return {name: value for name, value in found.items() if name in offered.capacity}


# -- devices


def _share(one: HostDevice, facts: HostFacts, common: GpuAttributes) -> OfferedDevice:
    cause = unhealthy_cause(one, facts.other_leases)
    taint = one["reason_code"] or one["state"] if cause else ""
    address = _copied(one["addr"])
    return OfferedDevice(
        name=device_name(address),
        address=address,
        gpu=common[one["gpu_uuid"]]["uuid"]["string"],
        type=MIG if one["sharing"] == NOT_SHARED else SHARE,
        gpu_attributes=common[one["gpu_uuid"]],
        budget_enforced=one["budget_enforced"],
        capacity=_budget(one["memory_mib"], one["thread_percentage"]),
        taint=taint.replace(" ", "_"),
        reason=cause,
        is_healthy=one["state"] != UNAVAILABLE,
        combinable=_combinable(one, facts.domains.get(one["gpu_uuid"])),
        sharing=_copied(one["sharing"]),
    )


def _combinable(one: HostDevice, domain: answers.Domain | None) -> int:
    """How many such devices of its GPU can be one budget, by the limits of its control daemon."""
    if domain is None:
        return 1
    limit_mib = domain["memory_limits_mib"][domain["gpus"].index(one["gpu_uuid"])]
    number = (limit_mib or 0) // (one["memory_mib"] or 1)
    if domain["thread_percentage"] < 100:
        number = min(number, round(domain["thread_percentage"] * 10) // round(one["thread_percentage"] * 10))
    return max(1, number)


@lru_cache
def _budget(memory_mib: int | None, percentage: float) -> Mapping[str, DeviceCapacity]:
    """The capacities of a device, without its memory if that is unknown."""
    memory: dict[str, DeviceCapacity] = {}
    if memory_mib is not None:
        memory[MEMORY] = {"value": memory_quantity(memory_mib)}
    return {**memory, SM_PERCENTAGE: {"value": percentage_quantity(percentage)}}


def _copied(text: str) -> str:
    """A copy of a string in the daemon's answer, whose memory is only freed as a whole."""
    return text.encode().decode()


def _pool(one: answers.Pool, facts: HostFacts, common: GpuAttributes) -> OfferedDevice:
    """A GPU whose memory can be allocated many times, and its SM threads if they are not in proportion.

    The capacities are what claims can have together, so they lack what other programs have leased. What is
    consumed includes the memory that is reserved in addition to each lease, in whole units. Otherwise, the
    scheduler would allocate more than there is.
    """
    unit_mib = one["memory_unit_mib"]
    reserve_mib = _in_units(one["memory_reserve_mib"], unit_mib)
    least_mib = unit_mib + reserve_mib
    taken_mib, taken_percentage = _taken(one, facts.other_leases.values())
    left_mib = (one["memory_mib"] + one["memory_reserve_mib"] - taken_mib) // unit_mib * unit_mib
    capacity = {MEMORY: _consumable(least_mib, least_mib, unit_mib, left_mib, memory_quantity)}
    percentage, lacks_threads = one["thread_percentage"], False
    if percentage is not None:
        left = int((one["thread_percentage_total"] or 0) - taken_percentage)
        capacity[SM_PERCENTAGE] = _consumable(percentage, 1, 1, left, percentage_quantity, most=100)
        lacks_threads = left < percentage
    is_healthy = one["state"] == AVAILABLE
    taint, reason = "", ""
    if not is_healthy:
        taint, reason = one["reason_code"] or one["state"], one["reason"]
    elif taken_mib and left_mib < least_mib:
        taint, reason = LEASED, "its memory is leased to other programs"
    elif lacks_threads:
        taint, reason = LEASED, "its SM threads are leased to other programs"
    return OfferedDevice(
        name=device_name(one["addr"]),
        address=one["addr"],
        gpu=one["gpu_uuid"],
        type=POOL,
        gpu_attributes=common[one["gpu_uuid"]],
        budget_enforced=one["budget_enforced"],
        capacity=capacity,
        taint=taint.replace(" ", "_"),
        reason=reason,
        is_healthy=is_healthy,
        reserve_mib=reserve_mib,
    )


def _consumable(
    default: int, least: int, step: int, left: int, quantity_of: Callable[[int], str], most: int | None = None
) -> DeviceCapacity:
    """A capacity that claims consume in steps; the API server has rules for the values of a policy."""
    value = max(default, left)  # not less than the default
    amounts: RequestRange = {"min": quantity_of(least)}
    if least + step <= value:
        amounts["step"] = quantity_of(step)
    if most is not None and most < value:
        amounts["max"] = quantity_of(most)
    policy: RequestPolicy = {"default": quantity_of(default), "validRange": amounts}
    return {"value": quantity_of(value), "requestPolicy": policy}


def _taken(pool: answers.Pool, other_leases: Iterable[answers.LeaseRecord]) -> tuple[int, float]:
    """The memory and percentage of the pool that no claim can have, because other holders have them."""
    budgets = [
        budget for lease in other_leases for budget in lease["budgets"] if budget["gpu"] == pool["addr"]
    ]
    memory_mib = sum((budget["memory_mib"] or 0) + pool["memory_reserve_mib"] for budget in budgets)
    return memory_mib, sum(budget["thread_percentage"] for budget in budgets)


def _in_units(mib: int, unit_mib: int) -> int:
    """The amount, rounded up to whole units."""
    return -(-mib // unit_mib) * unit_mib


def _attributes(
    uuid: str, model: str | None, numa_node: int | None, facts: HostFacts
) -> dict[str, DeviceAttribute]:
    """Those of NVIDIA's DRA driver have its names and values; a MIG instance has its GPU's product name."""
    gpu = facts.gpus.get(uuid)
    parent = facts.gpus.get(gpu["parent"]) if gpu and gpu["parent"] else None
    texts = {
        "uuid": uuid,
        "parentUUID": (gpu["parent"] if gpu else None) or "",
        "profile": (gpu["mig_profile"] if gpu else None) or "",
        "productName": (parent["name"] if parent else model) or "",
        "architecture": architecture_of(gpu["compute_capability"] if gpu else None),
        "mpsDomain": facts.domains[uuid]["name"] if uuid in facts.domains else "",
        _PCI_BUS_ID: bus_id(gpu["pci_address"]) if gpu else "",
        _PCIE_ROOT: facts.pcie_roots.get(uuid, ""),
    }
    versions = {
        "cudaComputeCapability": semantic_version((gpu["compute_capability"] if gpu else None) or ""),
        "driverVersion": semantic_version(facts.driver_version),
    }
    attributes: dict[str, DeviceAttribute] = {
        name: {"string": _copied(text[:_MAX_VALUE])} for name, text in texts.items() if text
    }
    attributes.update({name: {"version": text} for name, text in versions.items() if text})
    if numa_node is not None and numa_node >= 0:
        attributes["numaNode"] = {"int": numa_node}
    return attributes


def architecture_of(compute_capability: str | None) -> str:
    """Its name, empty if it is unknown."""
    if not compute_capability:
        return ""
    major, _, minor = compute_capability.partition(".")
    known = (int(major), int(minor or 0))
    return next((name for first, name in _ARCHITECTURES if known >= first), "")


def bus_id(address: str) -> str:
    """The address of the GPU in extended BDF notation: 0000:00:06.0, and as in sysfs for longer domains.

    "Standard Device Attributes for Dynamic Resource Allocation" requires it to be unique on the node.
    Kubernetes' helper for drivers knows domains of four digits only, but the API accepts any text.
    """
    return full_address(physical_gpu(address))


def semantic_version(text: str) -> str:
    """The version as semver.org spells it: three numbers without leading zeros; empty if it is none."""
    numbers = re.findall(r"[0-9]+", text)[:3]
    return ".".join(str(int(number)) for number in [*numbers, "0", "0"][:3]) if numbers else ""
