"""What pods can request: devices, and units of the memory of pools; with the health of each.

The kubelet knows only devices that a container has or has not, so each unit of memory is one to it. All units
of a container come from one GPU and become one lease. A unit's id names its size, so that a container that is
started again gets the memory that its pod was promised, whatever is configured meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from grpclib.const import Status

from yunion_mps.containers import Share, budget_variables
from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import AVAILABLE, BINPACK, NOT_SHARED
from yunion_mps.core.models import LEASE_VARIABLE
from yunion_mps.core.text import count, printable
from yunion_mps.kubernetes.device_plugin.lease_names import (
    is_container_lease,
    lease_name,
    lease_prefix,
    resource_digest,
)
from yunion_mps.kubernetes.kubelet.device_plugin_api import HEALTHY, UNHEALTHY
from yunion_mps.kubernetes.kubelet.grpc import RpcError
from yunion_mps.kubernetes.metrics import ResourceHealth
from yunion_mps.kubernetes.offered import KnownDevice, unhealthy_cause
from yunion_mps.kubernetes.options import PluginOptions
from yunion_mps.planning.division import pool_percentage
from yunion_mps.planning.environment import DEVICE_VARIABLE

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson, PoolJson

log = logging.getLogger(__name__)

_MAX_NAMED = 4
_UNIT_ID = re.compile(r"(?P<gpu>.+)-u(?P<mib>[1-9][0-9]*)-(?P<number>[0-9]+)")
_TAKEN = "its memory is leased to other programs, or reserved in addition to each lease"


class LeaseSource(TypedDict, total=False):
    """Those arguments of TAKE_LEASE that say what is leased: devices, or an amount of a GPU's memory."""

    devices: list[str]
    gpu: str
    memory_mib: int


class Offer(NamedTuple):
    """One of the kubelet's devices."""

    #: The UUID of its GPU or MIG instance.
    gpu: str
    numa_node: int | None
    #: Why no container may get it; empty if one may.
    cause: str = ""


def preferred(
    available: Sequence[str], required: Sequence[str], size: int, gpu_of: Mapping[str, str], placement: str
) -> list[str]:
    """Return `size` of the available ids, with the required ones, on as few GPUs as possible.

    `gpu_of` is the GPU or MIG instance of each id. Of the GPUs with enough of them, the `placement` binpack
    prefers the one with the fewest, spread the one with the most. The same applies to the MIG instances of a
    GPU. Whole GPUs and instances are not mixed if avoidable.
    """
    chosen = list(required)
    chosen_ids = set(chosen)
    remaining: dict[str, list[str]] = {}
    for name in available:
        if name not in chosen_ids:
            remaining.setdefault(gpu_of.get(name, ""), []).append(name)
    while len(chosen) < size and remaining:
        missing = size - len(chosen)
        rank = _ranking(remaining.values(), chosen, missing, gpu_of, placement)
        best = min(remaining.values(), key=rank)
        chosen += remaining.pop(gpu_of.get(best[0], ""))[:missing]
    return chosen


def _ranking(
    remaining: Iterable[Sequence[str]],
    chosen: Sequence[str],
    missing: int,
    gpu_of: Mapping[str, str],
    placement: str,
) -> Callable[[Sequence[str]], tuple[object, ...]]:
    """Return the key that sorts the ids that are left of each GPU or instance by preference."""
    begun = {gpu_of.get(name, "") for name in chosen}
    begun_gpus = set(map(physical_gpu, chosen))
    begun_kinds = set(map(_is_on_instance, chosen))
    of_gpu = Counter[str]()
    of_kind = Counter[bool]()
    for names in remaining:
        of_gpu[physical_gpu(names[0])] += len(names)
        of_kind[_is_on_instance(names[0])] += len(names)

    def by_number(number: int) -> tuple[bool, int]:
        is_enough = number >= missing
        # Of those with too few, the one with the most leaves the fewest GPUs to add.
        prefers_fewest = is_enough and placement == BINPACK
        return not is_enough, number if prefers_fewest else -number

    def rank(names: Sequence[str]) -> tuple[object, ...]:
        first = names[0]
        gpu = physical_gpu(first)
        kind = _is_on_instance(first)
        return (
            gpu_of.get(first, "") not in begun,
            bool(begun_kinds) and kind not in begun_kinds,
            len(names) < missing,
            of_kind[kind] < missing,
            gpu not in begun_gpus,
            by_number(of_gpu[gpu]),
            by_number(len(names)),
        )

    return rank


def _is_on_instance(name: str) -> bool:
    """Return whether the id is that of a MIG instance, or of a part of one."""
    return "-g" in name


class ExtendedResource:
    """An extended resource of the node: what of it is offered to the kubelet, by id.

    Source: Kubernetes: Extended Resources; Device Plugins, section "Device plugin registration".
    """

    #: Variables of a lease that are known only once it is taken.
    undecided: tuple[str, ...] = (LEASE_VARIABLE,)

    def __init__(self, name: str, noun: str) -> None:
        self.name = name
        #: The name of its socket in the kubelet's directory; a resource's name may be too long for a path.
        self.endpoint = f"yunion-mps-{resource_digest(name)}.sock"
        self._noun = noun
        self.offers: dict[str, Offer] = {}
        #: The health in one line; empty until the daemon was asked.
        self.status = ""
        self.health = ResourceHealth(name)
        #: Set once the daemon has said what there is.
        self.known = asyncio.Event()
        #: Set when an offer changes, and then replaced.
        self.changed = asyncio.Event()

    def lease_name(self, ids: Iterable[str]) -> str:
        """Return the name of the lease of a container with these ids."""
        return lease_name(self.name, ids)

    def _ours(self, leases: Iterable[LeaseRecordJson]) -> Iterator[LeaseRecordJson]:
        """Return the leases that the kubelet counts as this resource's.

        After a resource was renamed, containers may still have devices under its former name; the kubelet
        would allocate those again if they were offered under the new one.
        """
        prefix = lease_prefix(self.name)
        return (lease for lease in leases if is_container_lease(lease, prefix))

    def lease_source(self, ids: Sequence[str]) -> LeaseSource:
        """Return what the container's lease is of; raises RpcError if there can be no such lease."""
        raise NotImplementedError

    def budget(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the container's environment; all ids have to be offered."""
        raise NotImplementedError

    def refuse(self, ids: Sequence[str]) -> None:
        """Raise RpcError if no container may have these together, whatever the daemon says."""
        if not ids or not self.offers.keys() >= set(ids):
            missing = [name for name in ids if name not in self.offers][:_MAX_NAMED]
            text = f"there are no such {self._noun}: {printable(', '.join(missing))}"
            raise RpcError(Status.INVALID_ARGUMENT, text)

    def lose(self, cause: str) -> None:
        """Offer nothing until the daemon answers again."""
        offers = {name: offer._replace(cause=cause) for name, offer in self.offers.items()}
        self._publish(offers, f"none of the {self._noun} is healthy: {cause}")

    def _offer(self, offers: dict[str, Offer]) -> None:
        self.known.set()
        causes = Counter(offer.cause for offer in offers.values() if offer.cause)
        parts = [f"{len(offers) - sum(causes.values())} of {len(offers)} {self._noun} are healthy"]
        parts += [f"{number} not: {cause}" for cause, number in causes.most_common(_MAX_NAMED)]
        self._publish(offers, "; ".join(parts))

    def _publish(self, offers: dict[str, Offer], status: str) -> None:
        if offers == self.offers and status == self.status:
            return
        if status != self.status:
            log.info("%s: %s", self.name, status)
        self.health.update(_health(self.offers), _health(offers))
        self.offers = offers
        self.status = status
        self.changed.set()
        self.changed = asyncio.Event()


def _health(offers: Mapping[str, Offer]) -> dict[str, str]:
    return {name: UNHEALTHY if offer.cause else HEALTHY for name, offer in offers.items()}


class DeviceResource(ExtendedResource):
    """Devices of one kind, whose ids are their addresses."""

    def __init__(self, name: str, options: PluginOptions) -> None:
        super().__init__(name, "devices")
        self._options = options
        #: The GPU, memory in MiB and percentage of SM threads of each device that has a budget.
        self._budgets: dict[str, Share] = {}

    def update(self, devices: Sequence[KnownDevice], leases: Sequence[LeaseRecordJson]) -> None:
        """Offer these devices; `leases` are all leases, read after the devices."""
        own_leases = {lease["id"] for lease in self._ours(leases)}
        others = {lease["id"] for lease in leases} - own_leases
        self._budgets = {}
        offers: dict[str, Offer] = {}
        for device in devices:
            gpu = device["gpu_uuid"]
            offers[device["addr"]] = Offer(gpu, device["numa_node"], unhealthy_cause(device, others))
            if device["sharing"] != NOT_SHARED:
                self._budgets[device["addr"]] = (gpu, device["memory_mib"], device["thread_percentage"])
        self._offer(offers)

    def lease_source(self, ids: Sequence[str]) -> LeaseSource:
        missing = sorted(set(ids) - self.offers.keys())
        if missing:  # or of another kind: its pod was promised this one
            text = f"no longer devices of {self.name}: {', '.join(missing[:_MAX_NAMED])} (delete the pod)"
            raise RpcError(Status.FAILED_PRECONDITION, text)
        kinds = {_is_on_instance(name): name for name in sorted(ids, reverse=True)}
        if len(kinds) > 1:
            named = f"{kinds[False]}, {kinds[True]}"
            text = f"a process can use whole GPUs or MIG instances, but not both: {named}"
            hint = "request fewer devices, or set migStrategy: mixed, which counts them separately"
            raise RpcError(Status.FAILED_PRECONDITION, f"{text} ({hint})")
        return {"devices": sorted(ids)}

    def refuse(self, ids: Sequence[str]) -> None:
        if len(ids) > 1 and self._options.fail_requests_greater_than_one:
            text = f"a container may have one device, not {len(ids)}: failRequestsGreaterThanOne is set"
            raise RpcError(Status.INVALID_ARGUMENT, text)
        super().refuse(ids)

    def budget(self, ids: Sequence[str]) -> dict[str, str]:
        budgets = [self._budgets[address] for address in ids if address in self._budgets]
        return budget_variables(budgets) if budgets else {}


class MemoryResource(ExtendedResource):
    """Units of the memory of pools, with ids such as `00:06.0-u1024-17`: GPU, MiB, number."""

    undecided = (LEASE_VARIABLE, DEVICE_VARIABLE)

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options.memory_resource, "units of memory")
        self._unit_mib = options.memory_unit_mib
        self._pools: dict[str, PoolJson] = {}

    def update(self, pools: Sequence[PoolJson], leases: Sequence[LeaseRecordJson]) -> None:
        """Offer the memory of these pools; `leases` are all leases.

        What others have leased, or is reserved in addition to each lease, is not healthy, so the scheduler
        counts only what a pod can get. It does not matter which units these are, only how many.
        """
        self._pools = {pool["addr"]: pool for pool in pools}
        unit_mib = self._unit_mib or max((pool["memory_unit_mib"] for pool in pools), default=0)
        leased_mib = Counter[str]()
        for lease in self._ours(leases):
            for budget in lease["budgets"]:
                leased_mib[budget["gpu"]] += budget["memory_mib"] or 0  # known: a pool's
        offers: dict[str, Offer] = {}
        for pool in pools:
            usable = _usable_units(pool, unit_mib, leased_mib[pool["addr"]])
            cause = _unoffered_cause(pool, unit_mib)
            for place in range(pool["memory_mib"] // unit_mib):
                if not cause and place >= usable:
                    cause = _TAKEN
                offer = Offer(pool["gpu_uuid"], pool["numa_node"], cause)
                offers[f"{pool['addr']}-u{unit_mib}-{place}"] = offer
        self._offer(offers)

    def lease_source(self, ids: Sequence[str]) -> LeaseSource:
        gpu, unit_mib = self._source(ids)
        return {"gpu": gpu, "memory_mib": unit_mib * len(ids)}

    def refuse(self, ids: Sequence[str]) -> None:
        super().refuse(ids)
        self._source(ids)

    def budget(self, ids: Sequence[str]) -> dict[str, str]:
        gpu, unit_mib = self._source(ids)
        pool = self._pools[gpu]
        memory_mib = unit_mib * len(ids)
        least = pool["thread_percentage"] or 0
        percentage = pool_percentage(least, memory_mib, pool["gpu_memory_mib"], pool["thread_overcommit"])
        return budget_variables([(gpu, memory_mib, percentage)])

    def _source(self, ids: Sequence[str]) -> tuple[str, int]:
        """Return the GPU's address and the size of a unit in MiB.

        Raises RpcError unless all units have the same.
        """
        matches = [_UNIT_ID.fullmatch(unit) for unit in ids]
        sources = {(match["gpu"], int(match["mib"])) for match in matches if match}
        if not sources or None in matches:
            text = f"there are no such units: {printable(', '.join(ids[:_MAX_NAMED]))}"
            raise RpcError(Status.INVALID_ARGUMENT, text)
        if len(sources) > 1:
            gpus = ", ".join(sorted({gpu for gpu, _ in sources}))
            text = f"no GPU has {count(len(ids), 'unit')} of {self.name} left: they would come from {gpus}"
            hint = "request less memory; the scheduler knows only the sum of all GPUs of a node"
            raise RpcError(Status.FAILED_PRECONDITION, f"{text} ({hint})")
        return sources.pop()


def _usable_units(pool: PoolJson, unit_mib: int, leased_mib: int) -> int:
    """Return how many units of the pool containers have or can get; `leased_mib` is what they have."""
    has_threads = (pool["thread_percentage_free"] or 0) >= (pool["thread_percentage"] or 0)
    free_mib = pool["memory_free_mib"] if has_threads else 0
    return (leased_mib + free_mib) // unit_mib


def _unoffered_cause(pool: PoolJson, unit_mib: int) -> str:
    """Return why no container may get memory of the pool; empty if one may."""
    if unit_mib % pool["memory_unit_mib"]:
        return f"memoryUnit is not a multiple of the memory_unit of GPU {pool['addr']}"
    return "" if pool["state"] == AVAILABLE else pool["reason"]
