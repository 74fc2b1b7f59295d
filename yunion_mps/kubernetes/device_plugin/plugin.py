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

from grpclib.const import Status

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
)
from yunion_mps.kubernetes.kubelet.grpc import Method, RpcError, answered_by, streamed_by
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import (
    AllocateRequest,
    AllocateResponse,
    CDIDevice,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    DevicePluginOptions,
    DeviceSpec,
    Empty,
    ListAndWatchResponse,
    Mount,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)
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
        self._message = ListAndWatchResponse()

    def methods(self) -> list[Method]:
        """Return the methods of the device plugin."""
        return [
            answered_by(GET_OPTIONS, self._get_options),
            answered_by(GET_PREFERRED_ALLOCATION, self._get_preferred_allocation),
            answered_by(ALLOCATE, self._allocate),
            answered_by(PRE_START_CONTAINER, self._pre_start_container),
            streamed_by(LIST_AND_WATCH, self._list_and_watch),
        ]

    async def _list_and_watch(self, _: Empty) -> AsyncIterator[ListAndWatchResponse]:
        sent: ListAndWatchResponse | None = None
        while True:
            changed = self.resource.changed
            message = self._list()
            if self.resource.status and message != sent:
                yield message
                sent = message
            await changed.wait()

    def _list(self) -> ListAndWatchResponse:
        """Return the message with all devices, which is made once for each change."""
        offers = self.resource.offers
        if self._listed is not offers:
            self._message = ListAndWatchResponse()
            for name, offer in offers.items():
                device = self._message.devices.add(ID=name, health=UNHEALTHY if offer.cause else HEALTHY)
                if offer.numa_node is not None and offer.numa_node >= 0:
                    device.topology.nodes.add(ID=offer.numa_node)
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
            candidates = set(container.available_deviceIDs)
            chosen = preferred(
                available=[name for name in gpu_of if name in candidates],  # in the order of the GPUs
                required=container.must_include_deviceIDs,
                size=container.allocation_size,
                gpu_of=gpu_of,
                placement=self._placement,
            )
            answers.append(ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return PreferredAllocationResponse(container_responses=answers)

    async def _allocate(self, request: AllocateRequest) -> AllocateResponse:
        """Name each container's lease, without taking it; refuse what can never be leased."""
        answers = []
        for container in request.container_requests:
            try:
                answers.append(await self._allocate_one(container.devices_ids))
            except RpcError:
                self.counts.allocations[self.resource.name, REFUSED] += 1
                raise
            self.counts.allocations[self.resource.name, DONE] += 1
        return AllocateResponse(container_responses=answers)

    async def _allocate_one(self, ids: Sequence[str]) -> ContainerAllocateResponse:
        self.resource.refuse(ids)
        preview = await self._preview(ids)
        budget = self.resource.budget(ids)
        if self._uses_cdi:
            device = CDIDevice(name=f"{CDI_KIND}={self.resource.lease_name(ids)}")
            return ContainerAllocateResponse(envs=budget, cdi_devices=[device])
        if preview is None:
            text = f"{_named(ids)} cannot be allocated now, and deviceListStrategy is {ENVIRONMENT}"
            raise RpcError(Status.UNAVAILABLE, text)
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
            mounts=[Mount(container_path=path, host_path=path) for path in mounts],
            devices=[DeviceSpec(container_path=path, host_path=path, permissions="rw") for path in nodes],
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

    async def _pre_start_container(self, request: PreStartContainerRequest) -> PreStartContainerResponse:
        began_s = time.perf_counter()
        result = REFUSED
        try:
            await self._permit_start(request.devices_ids)
            result = DONE
        finally:
            self.counts.note_start(self.resource.name, result, time.perf_counter() - began_s)
        return PreStartContainerResponse()

    async def _permit_start(self, ids: Sequence[str]) -> None:
        """Take the container's lease. The kubelet tries again to start a container that is refused."""
        unknown = RpcError(Status.UNAVAILABLE, "the daemon has not said yet which devices there are")
        await within(_DAEMON_START_S, self.resource.known.wait(), unknown)
        try:
            lease: LeaseRecordJson = await self._leases.take(self.resource, ids)
        except YunionError as error:
            log.warning("%s: a container cannot start: %s", _named(ids), error.message)
            raise _refusal(error) from None
        if lease["pid"] is not None:
            text = f"{_named(ids)}: the previous container still runs (PID {lease['pid']})"
            raise RpcError(Status.FAILED_PRECONDITION, text)
        self._leases.permit(lease)
        log.info("%s: leased to a container, as %s", _named(lease["devices"]), lease["name"])


def _named(ids: Sequence[str]) -> str:
    named = printable(", ".join(ids[:_MAX_NAMED]))
    more = len(ids) - _MAX_NAMED
    return f"{named} and {count(more, 'other')}" if more > 0 else named


def _refusal(error: YunionError) -> RpcError:
    status = Status.FAILED_PRECONDITION
    if isinstance(error, UnreachableError):
        status = Status.UNAVAILABLE
    return RpcError(status, printable(error.message_with_hint))
