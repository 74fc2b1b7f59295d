"""MIG instances as extended resources of their own, one for each profile, named as NVIDIA's plugin does.

With the strategy `mixed`, a pod requests `nvidia.com/mig-1g.10gb: 1` if `resource` is in that domain. Which
profiles a node has is only known from its devices, so a resource begins to exist when the first one is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from yunion_mps.kubernetes.options import MIXED, NONE, PluginOptions
from yunion_mps.kubernetes.resources import DeviceResource, KnownDevice, ResourceHealth
from yunion_mps.tasks import cancel, first_of

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord


class ProfileResources:
    """The resources of MIG profiles; none unless the strategy is `mixed`."""

    def __init__(self, options: PluginOptions, healths: list[ResourceHealth]) -> None:
        """The health of each resource is appended to `healths`."""
        self._options = options
        self._healths = healths
        self.by_profile: dict[str, DeviceResource] = {}
        #: Set when there is another one, and then replaced.
        self.added = asyncio.Event()

    @property
    def changes(self) -> list[asyncio.Event]:
        """What is set when another one is offered, or one of them has changed."""
        return [self.added, *(resource.changed for resource in self.by_profile.values())]

    def update(self, devices: Sequence[KnownDevice], leases: Sequence[LeaseRecord]) -> Sequence[KnownDevice]:
        """Offer the instances among the devices as the strategy says; return what is left."""
        if self._options.mig_strategy == NONE:
            return [device for device in devices if device["mig_profile"] is None]
        if self._options.mig_strategy != MIXED:
            return devices
        found: dict[str, list[KnownDevice]] = {profile: [] for profile in self.by_profile}
        for device in devices:
            if device["mig_profile"] is not None:
                found.setdefault(device["mig_profile"], []).append(device)
        for profile, instances in found.items():
            if profile not in self.by_profile:
                self._add(profile)
            self.by_profile[profile].update(instances, leases)
        return [device for device in devices if device["mig_profile"] is None]

    def lose(self, cause: str) -> None:
        for resource in self.by_profile.values():
            resource.lose(cause)

    async def run(self, serve: Callable[[DeviceResource], Coroutine[object, object, object]]) -> None:
        """Call `serve` for each resource, once; without end."""
        served: dict[str, asyncio.Future[object]] = {}
        try:
            while True:
                added = self.added
                for profile, resource in self.by_profile.items():
                    if profile not in served:
                        served[profile] = asyncio.ensure_future(serve(resource))
                await first_of(added.wait(), *map(asyncio.shield, served.values()))
        finally:
            await cancel(served.values())

    def _add(self, profile: str) -> None:
        suffix = f"mig-{profile.replace('+', '.')}"
        domain = self._options.resource.partition("/")[0]
        resource = DeviceResource(self._options, f"{domain}/{suffix}", f"yunion-mps-{suffix}.sock")
        self.by_profile[profile] = resource
        self._healths.append(resource.health)
        added, self.added = self.added, asyncio.Event()
        added.set()
