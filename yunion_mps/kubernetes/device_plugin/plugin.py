"""What the kubelet is answered about a resource: its devices and their health, which to prefer, and a lease.

Allocate only names the lease, because it happens once and containers start often: `PreStartContainer` takes
it, before each start.

Source: Kubernetes: Device Plugins, section "Device plugin implementation".
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from yunion_mps.containers.spec import SHARED_MEMORY
from yunion_mps.core.errors import BusyError, InfeasibleError, NothingFreeError, UnreachableError, YunionError
from yunion_mps.core.models import CDI_KIND
from yunion_mps.core.tasks import within
from yunion_mps.core.text import count, printable
from yunion_mps.kubernetes.device_plugin.container_leases import ContainerLeases
from yunion_mps.kubernetes.device_plugin.resources import (
    ExtendedResource,
    Offer,
    preferred,
)
from yunion_mps.kubernetes.kubelet.device_plugin_api import (
    ALLOCATE,
    GET_OPTIONS,
    GET_PREFERRED_ALLOCATION,
    HEALTHY,
    LIST_AND_WATCH,
    PRE_START_CONTAINER,
    UNHEALTHY,
    AllocateRequest,
    AllocateResponse,
    CdiDevice,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    DevicePluginOptions,
    DeviceSpec,
    ListAndWatchResponse,
    MountSpec,
    NumaNode,
    PluginDevice,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    TopologyInfo,
)
from yunion_mps.kubernetes.kubelet.grpc import Method, RpcError, StatusCode
from yunion_mps.kubernetes.kubelet.protobuf import Empty
from yunion_mps.kubernetes.kubelet.rpc import answered_by
from yunion_mps.kubernetes.metrics import DONE, REFUSED, Counts
from yunion_mps.kubernetes.options import CDI, ENVIRONMENT, PluginOptions

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson

log = logging.getLogger(__name__)

OPTIONS = DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
#: How long a container's start waits for a daemon that has not answered since the plugin started, in s.
_DAEMON_START_S = 10.0
_MAX_NAMED = 4
#: NVIDIA's container runtime adds the driver's libraries for these GPUs.
_NVIDIA_RUNTIME = "NVIDIA_VISIBLE_DEVICES"


class DevicePlugin:
    """The kubelet's device plugin of one resource."""

    def __init__(
        self, resource: ExtendedResource, leases: ContainerLeases, options: PluginOptions, counts: Counts
    ) -> None:
        """`leases` are those of all resources, and `counts` those of the program."""
        self.resource = resource
        self.counts = counts
        self._leases = leases
        self._placement = options.preferred
        self._uses_cdi = options.device_list_strategy == CDI
        #: What the last message lists, and the message.
        self._listed: Mapping[str, Offer] | None = None
        self._message = b""

    def methods(self) -> dict[str, Method]:
        """Return the methods of the device plugin, by their paths."""
        preferred_allocation = answered_by(GET_PREFERRED_ALLOCATION, self._get_preferred_allocation)
        return {
            GET_OPTIONS.path: answered_by(GET_OPTIONS, self._get_options),
            GET_PREFERRED_ALLOCATION.path: preferred_allocation,
            ALLOCATE.path: answered_by(ALLOCATE, self._allocate),
            PRE_START_CONTAINER.path: answered_by(PRE_START_CONTAINER, self._pre_start_container),
            LIST_AND_WATCH.path: Method(self._list_and_watch, is_stream=True),
        }

    async def _list_and_watch(self, _: bytes) -> AsyncIterator[bytes]:
        sent: bytes | None = None
        while True:
            changed = self.resource.changed
            message = self._list()
            if self.resource.status and message != sent:
                yield message
                sent = message
            await changed.wait()

    def _list(self) -> bytes:
        """Return the message with all devices, encoded once for each change, device by device to save memory.

        Encoded messages with one device each are together one message with all of them.
        """
        offers = self.resource.offers
        if self._listed is not offers:
            message = bytearray()
            for name, offer in offers.items():
                message += ListAndWatchResponse((_plugin_device(name, offer),)).encode()
            self._message = bytes(message)
            self._listed = offers
        return self._message

    async def _get_options(self, _: Empty) -> DevicePluginOptions:
        return OPTIONS

    async def _get_preferred_allocation(
        self, request: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        gpu_of = {name: offer.gpu for name, offer in self.resource.offers.items()}
        answers = []
        for container in request.container_requests:
            candidates = set(container.available_device_ids)
            chosen = preferred(
                available=[name for name in gpu_of if name in candidates],  # in the order of the GPUs
                required=container.must_include_device_ids,
                size=container.allocation_size,
                gpu_of=gpu_of,
                placement=self._placement,
            )
            answers.append(ContainerPreferredAllocationResponse(tuple(chosen)))
        return PreferredAllocationResponse(tuple(answers))

    async def _allocate(self, request: AllocateRequest) -> AllocateResponse:
        """Name each container's lease, without taking it; refuse what can never be leased."""
        answers = []
        for container in request.container_requests:
            try:
                answers.append(await self._allocate_one(container.device_ids))
            except RpcError:
                self.counts.allocations[self.resource.name, REFUSED] += 1
                raise
            self.counts.allocations[self.resource.name, DONE] += 1
        return AllocateResponse(tuple(answers))

    async def _allocate_one(self, ids: Sequence[str]) -> ContainerAllocateResponse:
        self.resource.refuse(ids)
        preview = await self._preview(ids)
        budget = self.resource.budget(ids)
        if self._uses_cdi:
            device = CdiDevice(f"{CDI_KIND}={self.resource.lease_name(ids)}")
            return ContainerAllocateResponse(budget, cdi_devices=(device,))
        if preview is None:
            text = f"{_named(ids)} cannot be allocated now, and deviceListStrategy is {ENVIRONMENT}"
            raise RpcError(StatusCode.UNAVAILABLE, text)
        environment = {**preview["environment"], **budget}
        for name in self.resource.undecided:
            environment.pop(name, None)
        gpus = environment["CUDA_VISIBLE_DEVICES"]
        try:
            nodes = await self._leases.device_nodes(gpus.split(","))
        except YunionError as error:
            raise _refusal(error) from None
        pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY")  # none if the GPU does not use MPS
        mounts = (pipe_directory, SHARED_MEMORY) if pipe_directory else ()
        return ContainerAllocateResponse(
            envs={**environment, _NVIDIA_RUNTIME: gpus},
            mounts=tuple(MountSpec(path, path) for path in mounts),
            devices=tuple(DeviceSpec(path, path, "rw") for path in nodes),
        )

    async def _preview(self, ids: Sequence[str]) -> LeaseRecordJson | None:
        """Return the lease to come, None if it cannot be taken now; raises RpcError if it never can."""
        try:
            return await self._leases.preview(self.resource, ids)
        except InfeasibleError as error:
            raise _refusal(error) from None
        except (NothingFreeError, BusyError, UnreachableError) as error:
            log.info("%s: allocated, but not available yet: %s", _named(ids), error.message)
            return None
        except YunionError as error:
            raise _refusal(error) from None

    async def _pre_start_container(self, request: PreStartContainerRequest) -> Empty:
        began_s = time.perf_counter()
        result = REFUSED
        try:
            await self._permit_start(request.device_ids)
            result = DONE
        finally:
            self.counts.note_start(self.resource.name, result, time.perf_counter() - began_s)
        return Empty()

    async def _permit_start(self, ids: Sequence[str]) -> None:
        """Take the container's lease. The kubelet tries again to start a container that is refused."""
        unknown = RpcError(StatusCode.UNAVAILABLE, "the daemon has not said yet which devices there are")
        await within(_DAEMON_START_S, self.resource.known.wait(), unknown)
        try:
            lease: LeaseRecordJson = await self._leases.take(self.resource, ids)
        except YunionError as error:
            log.warning("%s: a container cannot start: %s", _named(ids), error.message)
            raise _refusal(error) from None
        if lease["pid"] is not None:
            text = f"{_named(ids)}: the previous container still runs (PID {lease['pid']})"
            raise RpcError(StatusCode.FAILED_PRECONDITION, text)
        self._leases.permit(lease)
        log.info("%s: leased to a container, as %s", _named(lease["devices"]), lease["name"])


def _named(ids: Sequence[str]) -> str:
    named = printable(", ".join(ids[:_MAX_NAMED]))
    more = len(ids) - _MAX_NAMED
    return f"{named} and {count(more, 'other')}" if more > 0 else named


def _plugin_device(name: str, offer: Offer) -> PluginDevice:
    return PluginDevice(
        id=name,
        health=UNHEALTHY if offer.cause else HEALTHY,
        topology=_topology(offer.numa_node),
    )


def _topology(numa_node: int | None) -> TopologyInfo | None:
    if numa_node is None or numa_node < 0:
        return None
    return TopologyInfo((NumaNode(numa_node),))


def _refusal(error: YunionError) -> RpcError:
    status = StatusCode.FAILED_PRECONDITION
    if isinstance(error, UnreachableError):
        status = StatusCode.UNAVAILABLE
    return RpcError(status, printable(error.message_with_hint))
