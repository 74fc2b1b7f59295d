"""What the kubelet is answered: the devices and their health, which to prefer, and a lease for a container.

The kubelet allocates devices to containers; a lease makes that known to the daemon. Allocate only names it,
because it happens once and containers start often: `PreStartContainer` takes the lease, the container's hook
binds it (containers/hook), and it ends with the container.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from yunion_mps.client.transport import Retrier
from yunion_mps.enums import FREE, KUBERNETES, LEASED, PLACEMENTS, RESERVED
from yunion_mps.errors import (
    BusyError,
    InfeasibleError,
    NothingFreeError,
    UnreachableError,
    YunionError,
)
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operation import Operation, Value
from yunion_mps.http.operations import END_LEASE, GET_DEVICES, GET_LEASES, TAKE_LEASE
from yunion_mps.kubernetes import grpc, kubelet_api
from yunion_mps.kubernetes.grpc import Method, RpcError, Status
from yunion_mps.kubernetes.kubelet_api import (
    HEALTHY,
    UNHEALTHY,
    AnswerT,
    DecodeError,
    NumaNode,
    PluginDevice,
    RequestT,
    Rpc,
    TopologyInfo,
)
from yunion_mps.kubernetes.options import PluginOptions
from yunion_mps.models import CDI_KIND
from yunion_mps.paths import Paths

if TYPE_CHECKING:
    from yunion_mps.answers import Device, LeaseRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The container's budget, in its environment; CUDA does not read it.
MEMORY_VARIABLE, SM_VARIABLE = "YUNION_MPS_MEMORY_MIB", "YUNION_MPS_SM_PERCENT"

OPTIONS = kubelet_api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
#: The beginning of the names of our leases; the rest is a hash of the devices.
_PREFIX = "k8s-"
_HASH_LENGTH = 16
#: How long each request for a change of the devices waits, in s.
_CHANGE_WAIT_S = 60
_RETRY_S = 0.1
#: The daemon may be unreachable for this long, as in a re-exec, before the devices are unhealthy, in s.
_OUTAGE_S = 0.5
#: How long a container's start waits for a daemon that restarts, and for the kubelet's answers, in s.
_RESTART_S = 10.0
_KUBELET_S = 10.0
#: How long a lease is kept for a container that the kubelet does not list, such as an init container, in s.
_START_S = 120.0
_MAX_NAMED = 4


def lease_name(devices: Iterable[str]) -> str:
    """The name of the lease of a container with these devices: no other container has the same ones."""
    return _PREFIX + sha256(" ".join(sorted(devices)).encode()).hexdigest()[:_HASH_LENGTH]


def preferred(
    available: Sequence[str], required: Sequence[str], size: int, gpu_of: Mapping[str, str], placement: str
) -> list[str]:
    """`size` of the available devices, with the required ones, on as few GPUs as possible.

    Among the GPUs with enough devices, binpack prefers the one with the fewest, spread the one with the most.
    """
    chosen = list(required)
    by_gpu: dict[str, list[str]] = {}
    for device in available:
        if device not in chosen:
            by_gpu.setdefault(gpu_of.get(device, ""), []).append(device)
    begun = {gpu_of.get(device, "") for device in chosen}
    while len(chosen) < size and by_gpu:
        missing = size - len(chosen)

        def rank(gpu: str, missing: int = missing) -> tuple[bool, bool, int]:
            number = len(by_gpu[gpu])
            is_enough = number >= missing
            ascending = is_enough and placement == PLACEMENTS[0]
            return gpu not in begun, not is_enough, number if ascending else -number

        chosen += by_gpu.pop(min(by_gpu, key=rank))[:missing]
    return chosen


class Plugin:
    """The devices that are offered to the kubelet, and the leases of its containers."""

    def __init__(self, options: PluginOptions, paths: Paths) -> None:
        self._options = options
        self._paths = paths
        self._daemon = AsyncDaemonClient(paths)
        self._devices: dict[str, Device] = {}
        self._health: dict[str, str] = {}
        #: Set when the health changes, and then replaced.
        self._changed = asyncio.Event()
        #: The health in one line; empty until the daemon was asked.
        self.status = ""
        #: Whether a container may be awaited; so that idle hosts are not asked.
        self._awaits_containers = True
        #: When the start of a container was last permitted (monotonic), by the name of its lease.
        self._permitted_s: dict[str, float] = {}

    def methods(self) -> dict[str, Method]:
        """The methods of the device plugin, by their paths."""
        return dict(
            (
                _method(kubelet_api.GET_OPTIONS, self._get_options),
                _method(kubelet_api.GET_PREFERRED_ALLOCATION, self._get_preferred_allocation),
                _method(kubelet_api.ALLOCATE, self._allocate),
                _method(kubelet_api.PRE_START_CONTAINER, self._pre_start_container),
                (kubelet_api.LIST_AND_WATCH.path, Method(self._list_and_watch, is_stream=True)),
            )
        )

    # -- devices and their health

    async def watch(self) -> None:
        """Follow the daemon's devices, without end. While it is unreachable, all are unhealthy."""
        condition: dict[str, Any] = {}
        failing_since_s = 0.0
        while True:
            try:
                result = await self._daemon.call_if_changed(GET_DEVICES, limit=0, **condition)
                answer, etag = result
                if answer is not None:
                    self._update(answer["isolated_devices"], await self._our_leases())
                condition, failing_since_s = {"if_none_match": etag, "wait_s": _CHANGE_WAIT_S}, 0.0
            except YunionError as error:
                condition = {}
                failing_since_s = failing_since_s or time.monotonic()
                if time.monotonic() - failing_since_s >= _OUTAGE_S:
                    self._publish(
                        dict.fromkeys(self._health, UNHEALTHY), f"no device is healthy: {error.message}"
                    )
                await asyncio.sleep(_RETRY_S)

    def _update(self, devices: Iterable[Device], our_leases: Sequence[LeaseRecord]) -> None:
        self._awaits_containers = any(lease["pid"] is None for lease in our_leases)
        ids = {lease["id"] for lease in our_leases}
        offered = [one for one in devices if not _is_made_for_a_lease(one)]
        reserved = [one for one in offered if one["reserved_for"] == KUBERNETES]
        self._devices = {one["addr"]: one for one in reserved or offered}
        causes = {address: _unhealthy_cause(one, ids) for address, one in self._devices.items()}
        counts = Counter(filter(None, causes.values()))
        parts = [f"{len(causes) - sum(counts.values())} of {len(causes)} devices are healthy"]
        parts += [f"{number} not: {cause}" for cause, number in counts.most_common(_MAX_NAMED)]
        health = {address: UNHEALTHY if cause else HEALTHY for address, cause in causes.items()}
        self._publish(health, "; ".join(parts))

    def _publish(self, health: dict[str, str], status: str) -> None:
        if status != self.status:
            log.info("%s", status)
        self._health, self.status = health, status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _list_and_watch(self, _: bytes) -> AsyncIterator[bytes]:
        sent: bytes | None = None
        while True:
            changed = self._changed
            devices = tuple(
                PluginDevice(address, health, _topology(self._devices[address]))
                for address, health in self._health.items()
            )
            message = kubelet_api.ListAndWatchResponse(devices).encode()
            if self.status and message != sent:
                yield message
                sent = message
            await changed.wait()

    # -- allocation

    async def _get_options(self, _: kubelet_api.Empty) -> kubelet_api.DevicePluginOptions:
        return OPTIONS

    async def _get_preferred_allocation(
        self, request: kubelet_api.PreferredAllocationRequest
    ) -> kubelet_api.PreferredAllocationResponse:
        gpu_of = {address: device["gpu_uuid"] for address, device in self._devices.items()}
        answers = []
        for one in request.container_requests:
            asked = set(one.available_device_ids)
            available = [address for address in gpu_of if address in asked]  # in the order of the GPUs
            required, size = one.must_include_device_ids, one.allocation_size
            chosen = preferred(available, required, size, gpu_of, self._options.preferred)
            answers.append(kubelet_api.ContainerPreferredAllocationResponse(tuple(chosen)))
        return kubelet_api.PreferredAllocationResponse(tuple(answers))

    async def _allocate(self, request: kubelet_api.AllocateRequest) -> kubelet_api.AllocateResponse:
        """Name each container's lease, without taking it; refuse what can never be leased."""
        answers = []
        for one in request.container_requests:
            await self._refuse_infeasible(one.device_ids)
            envs = _budget([self._devices[address] for address in one.device_ids])
            device = kubelet_api.CdiDevice(f"{CDI_KIND}={lease_name(one.device_ids)}")
            answers.append(kubelet_api.ContainerAllocateResponse(envs, (device,)))
        return kubelet_api.AllocateResponse(tuple(answers))

    async def _refuse_infeasible(self, devices: Sequence[str]) -> None:
        """Raise RpcError if a container can never have these devices; its pod fails for good."""
        if len(devices) > 1 and self._options.fail_requests_greater_than_one:
            what = f"a container may have one device, not {len(devices)}: failRequestsGreaterThanOne is set"
            raise RpcError(Status.INVALID_ARGUMENT, what)
        if not devices or not self._devices.keys() >= set(devices):
            raise RpcError(Status.INVALID_ARGUMENT, f"there are no such devices: {', '.join(devices)}")
        try:
            await self._daemon.call(TAKE_LEASE, **_lease_request(devices), dry_run=True)
        except InfeasibleError as error:
            raise _refusal(error) from None
        except (NothingFreeError, BusyError, UnreachableError) as error:
            log.info("%s: allocated, but not available yet: %s", ", ".join(devices), error.message)
        except YunionError as error:
            raise _refusal(error) from None

    # -- leases

    async def _pre_start_container(self, request: kubelet_api.PreStartContainerRequest) -> kubelet_api.Empty:
        """Take the container's lease. The kubelet tries again to start a container that is refused."""
        devices = request.device_ids
        try:
            lease = await self._take(devices)
        except YunionError as error:
            log.warning("%s: a container cannot start: %s", ", ".join(devices), error.message)
            raise _refusal(error) from None
        if lease["pid"] is not None:
            what = f"{', '.join(devices)}: the previous container still runs (PID {lease['pid']})"
            raise RpcError(Status.FAILED_PRECONDITION, what)
        self._permitted_s[lease_name(devices)] = time.monotonic()
        log.info("%s: leased to a container, as %s", ", ".join(devices), lease_name(devices))
        return kubelet_api.Empty()

    async def _take(self, devices: Sequence[str]) -> LeaseRecord:
        request = _lease_request(devices)
        try:
            return await self._call(TAKE_LEASE, **request)
        except NothingFreeError:
            # The kubelet has allocated the devices again, so no earlier container will start with them.
            await self._release_awaited(lambda lease: not set(devices).isdisjoint(lease["devices"]))
            return await self._call(TAKE_LEASE, **request)

    async def reconcile(self) -> None:
        """Release the leases of containers that have not started and, as the kubelet says, never will."""
        if not self._awaits_containers:
            return
        before = {lease["name"] for lease in await self._our_leases()}  # before the kubelet is asked
        data = await grpc.call(
            self._paths.pod_resources, kubelet_api.LIST_POD_RESOURCES.path, b"", _KUBELET_S
        )
        listed = kubelet_api.LIST_POD_RESOURCES.answer.decode(data)
        names = {
            lease_name(
                address
                for devices in container.devices
                if devices.resource_name == self._options.resource_name
                for address in devices.device_ids
            )
            for pod in listed.pod_resources
            for container in pod.containers
        }
        earliest_s = time.monotonic() - _START_S
        self._permitted_s = {name: at_s for name, at_s in self._permitted_s.items() if at_s > earliest_s}
        gone = before - names - self._permitted_s.keys()
        await self._release_awaited(lambda lease: lease["name"] in gone)

    async def _release_awaited(self, is_stale: Callable[[LeaseRecord], bool]) -> None:
        for lease in await self._our_leases():
            if lease["pid"] is None and is_stale(lease):
                log.info("%s: released, because its container has not started", ", ".join(lease["devices"]))
                await self._call(END_LEASE, lease=lease["id"])

    async def _our_leases(self) -> list[LeaseRecord]:
        leases = (await self._daemon.call(GET_LEASES))["leases"]
        return [
            lease
            for lease in leases
            if lease["binding"] == "container" and (lease["name"] or "").startswith(_PREFIX)
        ]

    async def _call(self, operation: Operation[T], **arguments: Value) -> T:
        """The daemon's answer; waits while the daemon restarts. Raises YunionError."""
        return await Retrier(self._daemon, _RESTART_S, log.info).call(operation, None, **arguments)


def _method(
    rpc: Rpc[RequestT, AnswerT], answer: Callable[[RequestT], Awaitable[AnswerT]]
) -> tuple[str, Method]:
    async def answers(data: bytes) -> AsyncIterator[bytes]:
        try:
            request = rpc.request.decode(data)
        except DecodeError as error:
            raise RpcError(Status.INVALID_ARGUMENT, f"the request cannot be decoded: {error}") from None
        yield (await answer(request)).encode()

    return rpc.path, Method(answers)


def _is_made_for_a_lease(device: Device) -> bool:
    """Whether the device is part of a pool; it ends with its lease, so nothing can be promised of it."""
    return device["addr"].rpartition("-")[2].startswith("m")


def _unhealthy_cause(device: Device, our_leases: Collection[str]) -> str:
    """Why no container may get the device, empty if one may, or has it."""
    if device["state"] in (FREE, RESERVED) or (device["state"] == LEASED and device["lease"] in our_leases):
        return ""
    return device["reason"] or (f"leased to {device['holder']}" if device["holder"] else device["state"])


def _topology(device: Device) -> TopologyInfo | None:
    node = device["numa_node"]
    return None if node is None or node < 0 else TopologyInfo((NumaNode(node),))


def _budget(devices: Sequence[Device]) -> dict[str, str]:
    """What the container may use of each of its GPUs; the least if that differs."""
    memory_mib = Counter[str]()
    percentage: dict[str, float] = defaultdict(float)
    for device in devices:
        memory_mib[device["gpu_uuid"]] += device["memory_mib"]
        percentage[device["gpu_uuid"]] += device["thread_percentage"]
    sm = min(100.0, *percentage.values())
    return {MEMORY_VARIABLE: str(min(memory_mib.values())), SM_VARIABLE: f"{sm:g}"}


def _lease_request(devices: Sequence[str]) -> dict[str, Any]:
    """As the hook, it takes devices of GPUs that do not enforce budgets: the operator has offered them."""
    holder = {"kind": "container", "name": lease_name(devices)}
    which = {"devices": sorted(devices), "reserved_for": KUBERNETES, "allow_unlimited": True}
    return {**which, "cdi": True, "holder": holder}


def _refusal(error: YunionError) -> RpcError:
    status = Status.UNAVAILABLE if isinstance(error, UnreachableError) else Status.FAILED_PRECONDITION
    return RpcError(status, f"{error.message}{f' ({error.hint})' if error.hint else ''}")
