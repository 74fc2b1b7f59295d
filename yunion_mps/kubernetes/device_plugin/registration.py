"""A device plugin's socket, and its registration with the kubelet.

Source: Kubernetes: Device Plugins, section "Device plugin registration".
"""

from __future__ import annotations

import asyncio
import logging
import os

from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.host.log import Failures
from yunion_mps.kubernetes.device_plugin.plugin import OPTIONS, DevicePlugin
from yunion_mps.kubernetes.kubelet import device_plugin_api
from yunion_mps.kubernetes.kubelet.directory import DirectoryWatch
from yunion_mps.kubernetes.kubelet.grpc import RpcError, RpcServer, call_rpc
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import RegisterRequest
from yunion_mps.kubernetes.metrics import DONE, KUBELET, REFUSED

log = logging.getLogger(__name__)

_KUBELET = "kubelet.sock"
#: How often the sockets are checked even if no change is reported, in s.
_POLL_S = 1.0
#: The first and the longest time until a failed attempt is repeated, in s: a starting kubelet creates its
#: socket a moment before it listens.
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
#: How long the kubelet has to answer a registration, in s.
_REGISTER_S = 10.0


class Registration:
    """Serves the methods of a resource's plugin, and keeps it registered; it sets `registered` each time."""

    def __init__(
        self, plugin: DevicePlugin, paths: Paths, watch: DirectoryWatch, registered: asyncio.Event
    ) -> None:
        self.resource = plugin.resource
        self._kubelet = os.path.join(paths.device_plugins, _KUBELET)
        self._endpoint = os.path.join(paths.device_plugins, self.resource.endpoint)
        self._server = RpcServer(plugin.methods())
        self._watch = watch
        self._registered = registered
        self._counts = plugin.counts
        self._failures = Failures(log, plugin.counts.errors, "waiting for the kubelet")

    @property
    def status(self) -> str:
        """Return the health of the resource, or why it is not registered."""
        return self._failures.cause or f"{self.resource.name}: {self.resource.status}"

    async def run(self) -> None:
        """Serve and register, without end: a kubelet that starts removes the sockets of plugins.

        Source: Kubernetes: Device Plugins, section "Handling kubelet restarts".
        """
        retry_s = 0.0
        kubelet: FileVersion | None = None
        while True:
            before = kubelet
            kubelet = version_of(self._kubelet)
            has_failed_before = retry_s > 0 and kubelet == before
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S) if has_failed_before else _FIRST_RETRY_S
            try:
                await self._server.open(self._endpoint)
                await self._register_and_wait()
            except OSError as error:
                self._failures.report(f"{self._endpoint}: {error.strerror or error}")
                await self._wait_for_start(kubelet, retry_s)
            except RpcError as error:
                self._counts.registrations[self.resource.name, REFUSED] += 1
                text = f"cannot register {self.resource.name} with the kubelet: {error.message}"
                self._failures.report(text, KUBELET)
                await self._wait_for_start(kubelet, retry_s)
            finally:
                await self._server.close()

    async def _wait_for_start(self, kubelet: FileVersion | None, retry_s: float) -> None:
        """Wait until the kubelet has replaced this socket of its own, or the next attempt is due."""

        async def replaced() -> None:
            while version_of(self._kubelet) == kubelet:
                await self._watch.changed.wait()

        await first_of(replaced(), asyncio.sleep(retry_s))

    async def _register_and_wait(self) -> None:
        """Register, and return when that has to be repeated; raises RpcError if the kubelet refuses."""
        kubelet = version_of(self._kubelet)
        name = self.resource.name
        request = RegisterRequest(
            version=device_plugin_api.VERSION,
            endpoint=self.resource.endpoint,
            resource_name=name,
            options=OPTIONS,
        )
        await call_rpc(self._kubelet, device_plugin_api.REGISTER, request, _REGISTER_S)
        log.info("registered %s with the kubelet", name)
        self._failures.clear()
        self._counts.registrations[name, DONE] += 1
        self._registered.set()
        while self._server.is_reachable and version_of(self._kubelet) == kubelet:
            await self._watch.changed.wait()
        log.info("%s: the kubelet has restarted, or the socket was removed", name)
