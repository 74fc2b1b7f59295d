"""A device plugin's socket, and its registration with the kubelet."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.host.log import Failures
from yunion_mps.kubernetes import grpc, kubelet_api
from yunion_mps.kubernetes.metrics import DONE, KUBELET, REFUSED
from yunion_mps.kubernetes.plugin import OPTIONS, DevicePlugin
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

_KUBELET = "kubelet.sock"
#: How often the sockets are checked, in s. About a second after it starts, the kubelet refuses those of its
#: pods whose resource is not registered yet, such as those that it finds after a restart of the node.
_POLL_S = 0.2
#: How soon a failed attempt is repeated, unless the kubelet starts earlier, in s.
_RETRY_S = 1.0
#: How long the kubelet has to answer a registration, in s.
_REGISTER_S = 10.0


class Registration:
    """Serves the methods of a resource's plugin, and keeps it registered; it sets `registered` each time."""

    def __init__(
        self, plugin: DevicePlugin, paths: Paths, registered: asyncio.Event, retry_s: float = _RETRY_S
    ) -> None:
        self.resource = plugin.resource
        self._kubelet = os.path.join(paths.device_plugins, _KUBELET)
        self._endpoint = os.path.join(paths.device_plugins, self.resource.endpoint)
        self._server = grpc.RpcServer(plugin.methods())
        self._registered = registered
        self._retry_s = retry_s
        self._counts = plugin.counts
        self._failures = Failures(log, plugin.counts.errors, "waiting for the kubelet")

    @property
    def status(self) -> str:
        """The health of the resource, or why it is not registered."""
        return self._failures.cause or f"{self.resource.name}: {self.resource.status}"

    async def run(self) -> None:
        """Serve and register, without end: a kubelet that starts removes the sockets of plugins."""
        while True:
            kubelet = version_of(self._kubelet)
            try:
                await self._server.open(self._endpoint)
                await self._register_and_wait()
            except OSError as error:
                self._failures.report(f"{self._endpoint}: {error.strerror or error}")
                await self._wait_for_start(kubelet)
            except grpc.RpcError as error:
                self._counts.registrations[self.resource.name, REFUSED] += 1
                what = f"cannot register {self.resource.name} with the kubelet: {error.message}"
                self._failures.report(what, KUBELET)
                await self._wait_for_start(kubelet)
            finally:
                await self._server.close()

    async def run_once_offered(self) -> None:
        """Like `run`, once there is anything to offer, so that other nodes do not show the resource."""
        while not self.resource.offers:
            await self.resource.changed.wait()
        await self.run()

    async def _wait_for_start(self, kubelet: FileVersion | None) -> None:
        """Wait until the kubelet has replaced this socket of its own, or the next attempt is due."""
        end_s = time.monotonic() + self._retry_s
        while version_of(self._kubelet) == kubelet and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _register_and_wait(self) -> None:
        """Register, and return when that has to be repeated; raises RpcError if the kubelet refuses."""
        kubelet = version_of(self._kubelet)
        name, endpoint = self.resource.name, self.resource.endpoint
        request = kubelet_api.RegisterRequest(kubelet_api.VERSION, endpoint, name, OPTIONS)
        await grpc.call(self._kubelet, kubelet_api.REGISTER.path, request.encode(), _REGISTER_S)
        log.info("registered %s with the kubelet", name)
        self._failures.clear()
        self._counts.registrations[name, DONE] += 1
        self._registered.set()
        # Nothing announces that the kubelet has started.
        while self._server.is_reachable and version_of(self._kubelet) == kubelet:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        log.info("%s: the kubelet has restarted, or the socket was removed", name)
