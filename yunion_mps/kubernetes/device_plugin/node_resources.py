"""The extended resources of the node: one for each kind of device, and one for memory.

A pod chooses the kind of device by the resource that it requests. Only a node's devices show which kinds it
has, so a resource is created when its first device is seen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from yunion_mps.core.errors import YunionError
from yunion_mps.core.tasks import cancel, first_of
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operations import GET_GPUS
from yunion_mps.kubernetes.daemon_watch import DaemonWatch
from yunion_mps.kubernetes.device_plugin.container_leases import ContainerLeases
from yunion_mps.kubernetes.device_plugin.resources import DeviceResource, ExtendedResource, MemoryResource
from yunion_mps.kubernetes.features import GpuKind
from yunion_mps.kubernetes.metrics import Counts, ResourceHealth
from yunion_mps.kubernetes.offered import KnownDevice, select_offered
from yunion_mps.kubernetes.options import PluginOptions

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson, PoolJson

#: How long the daemon may be unreachable, as in a re-exec, before all devices are unhealthy, in s.
_OUTAGE_S = 0.5


class NodeResources:
    """The resources, in the order of their creation; they stay, with or without devices.

    `resource` of the options exists from the start.
    """

    def __init__(self, options: PluginOptions) -> None:
        self._options = options
        self.memory = MemoryResource(options)
        self.all: list[ExtendedResource] = []
        self.healths: list[ResourceHealth] = []
        #: The number of devices that are offered, by GPU.
        self.devices = Counter[GpuKind]()
        #: Set when a resource is added, and then replaced.
        self.added = asyncio.Event()
        self._by_name: dict[str, DeviceResource] = {}
        self._resource(options.resource)

    @property
    def changes(self) -> list[asyncio.Event]:
        """Return the events that are set when a resource is added or has changed."""
        return [self.added] + [resource.changed for resource in self.all]

    def update(
        self, devices: Sequence[KnownDevice], pools: Sequence[PoolJson], leases: Sequence[LeaseRecordJson]
    ) -> None:
        """Offer these devices and the memory of these pools; `leases` are all leases, read after them."""
        by_resource: dict[str, list[KnownDevice]] = {name: [] for name in self._by_name}
        self.devices.clear()
        for device in devices:
            name = self._options.resource_of(device["sharing"], device["mig_profile"])
            if name:
                by_resource.setdefault(name, []).append(device)
                self.devices[GpuKind(device["gpu_uuid"], device["sharing"], device["mig_profile"])] += 1
        for name, resource_leases in by_resource.items():
            self._resource(name).update(resource_leases, leases)
        self.memory.update(pools, leases)
        if self.memory.offers and self.memory not in self.all:
            self._add(self.memory)

    def lose(self, cause: str) -> None:
        """Offer nothing until the daemon answers again."""
        for resource in self.all:
            resource.lose(cause)

    async def run(self, serve: Callable[[ExtendedResource], Coroutine[object, object, object]]) -> None:
        """Call `serve` for each resource, once; without end."""
        served: list[asyncio.Future[object]] = []
        try:
            while True:
                added = self.added
                served += [asyncio.ensure_future(serve(resource)) for resource in self.all[len(served) :]]
                work: list[Awaitable[object]] = [asyncio.shield(task) for task in served]
                work.append(added.wait())
                await first_of(*work)
        finally:
            await cancel(served)

    def _resource(self, name: str) -> DeviceResource:
        """Return the resource of that name; it is created if it does not exist."""
        if name not in self._by_name:
            self._by_name[name] = DeviceResource(name, self._options)
            self._add(self._by_name[name])
        return self._by_name[name]

    def _add(self, resource: ExtendedResource) -> None:
        self.all.append(resource)
        self.healths.append(resource.health)
        self.added.set()
        self.added = asyncio.Event()


class OfferWatch:
    """Keeps what is offered current. While the daemon is away, nothing is healthy."""

    def __init__(
        self, daemon: AsyncDaemonClient, resources: NodeResources, leases: ContainerLeases, counts: Counts
    ) -> None:
        self._daemon = daemon
        self._resources = resources
        self._leases = leases
        self._watch = DaemonWatch(daemon, counts, self._read, self._lose, _OUTAGE_S)

    async def run(self) -> None:
        """Follow the daemon, without end."""
        await self._watch.run()

    async def _read(self) -> None:
        pools = await self._watch.pools()
        devices = await self._watch.devices(KnownDevice)
        leases = await self._leases.all()  # after the devices, as DeviceResource.update needs them
        gpus = (await self._daemon.call(GET_GPUS))["gpus"]
        offered_devices, offered_pools = select_offered(devices, pools, gpus)
        self._resources.update(offered_devices, offered_pools, leases)

    def _lose(self, error: YunionError) -> None:
        self._resources.lose(error.message)
