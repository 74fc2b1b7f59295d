"""What serves the node, with the configuration that is chosen for it: device plugins or the DRA driver."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from yunion_mps.errors import ConfigError, Problem, YunionError
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.kubernetes import grpc, kubelet_api
from yunion_mps.kubernetes.failures import Failures
from yunion_mps.kubernetes.features import FeatureFile
from yunion_mps.kubernetes.leases import ContainerLeases
from yunion_mps.kubernetes.metrics import DAEMON, KUBELET, Counts, MetricsPage, serve
from yunion_mps.kubernetes.options import CLUSTER_VARIABLE, PluginOptions
from yunion_mps.kubernetes.plugin import DevicePlugin, OfferWatch
from yunion_mps.kubernetes.registration import DirectoryWatch, Registration
from yunion_mps.kubernetes.resources import DeviceResource, MemoryResource, ResourceHealth
from yunion_mps.kubernetes.selection import Selector
from yunion_mps.paths import Paths
from yunion_mps.tasks import first_of

if TYPE_CHECKING:
    from yunion_mps.kubernetes.api_server import ApiServer
    from yunion_mps.kubernetes.credentials import ApiCredentials

log = logging.getLogger(__name__)

PROGRAM = "yunion-mps-kubelet-plugin"
#: The node's name, which a DaemonSet sets from `spec.nodeName`.
NODE_VARIABLE = "NODE_NAME"
#: How often systemd's status is updated, and leases are compared with the kubelet's pods, in s.
_POLL_S = 1.0
_RECONCILE_S = 10.0

#: What runs without end.
Work = Sequence[Coroutine[object, object, object]]


class NodeService:
    """Serves the node. What its configurations have in common outlives a change from one to another."""

    def __init__(
        self, options: PluginOptions, paths: Paths, notifier: Notifier, name: str = "", labels_file: str = ""
    ) -> None:
        """`name` and `labels_file` are the program's `--config` and `--node-labels`."""
        self._paths = paths
        self._notifier = notifier
        self._daemon = AsyncDaemonClient(paths)
        self._counts = Counts()
        self._leases = ContainerLeases(self._daemon, paths)
        self._registered = asyncio.Event()
        self._api = api_server(options, paths)
        self._selector = Selector(options, name, self._daemon, labels_file, self._api, self._counts.errors)

    async def run(self) -> None:
        """Run without end."""
        work = [self._selector.run(), self._follow_choice(), self._reconcile()]
        if self._api:
            from yunion_mps.kubernetes.pod_deletions import PodDeletionWatch  # others need no TLS

            work.append(PodDeletionWatch(*self._api, self._daemon, self._counts).run())
        await first_of(*work)

    async def _follow_choice(self) -> None:
        while True:
            changed, choice = self._selector.changed, self._selector.choice
            work: Work = ()
            try:
                if choice and choice.options:
                    options = choice.options
                    work = self._dra(options) if options.dra else self._device_plugins(options)
                else:
                    self._notifier.status(choice.cause if choice else self._selector.waiting)
            except ConfigError as error:  # of a choice that can change, unlike what the program refuses
                log.warning("nothing is offered: %s", error.message)
                self._notifier.status(f"nothing is offered: {error.message}")
            await first_of(*work, changed.wait())

    async def _reconcile(self) -> None:
        """Compare the leases with the kubelet's pods regularly and at each registration."""
        failures = Failures(log, self._counts.errors)
        while True:
            self._registered.clear()
            try:
                await self._leases.reconcile()
                failures.clear()
            except (YunionError, grpc.RpcError, kubelet_api.DecodeError) as error:
                program = DAEMON if isinstance(error, YunionError) else KUBELET
                failures.report(f"cannot compare leases with the kubelet's pods: {error}", program)
            await first_of(self._registered.wait(), asyncio.sleep(_RECONCILE_S))

    def _dra(self, options: PluginOptions) -> Work:
        """The DRA driver, which takes the place of the device plugins: both would offer the same devices."""
        from yunion_mps.kubernetes.dra_driver import DraService

        credentials = dra_credentials(options, self._paths)
        service = DraService(credentials, node_name(options), self._paths, self._notifier, self._counts)
        return [service.run(), *self._metrics(options, service.health)]

    def _device_plugins(self, options: PluginOptions) -> Work:
        devices, memory = DeviceResource(options), MemoryResource(options)
        plugins = (DevicePlugin(one, self._leases, options, self._counts) for one in (devices, memory))
        watch = DirectoryWatch(self._paths.device_plugins)
        first, second = (Registration(one, self._paths, watch, self._registered) for one in plugins)
        file = options.feature_file
        return [
            OfferWatch(self._daemon, devices, memory, self._leases, self._counts).run(),
            watch.run(),
            first.run(),
            second.run_once_offered(),
            self._notify(first, second),
            *([FeatureFile(self._paths.under(file), devices, memory).run()] if file else []),
            *self._metrics(options, devices.health, memory.health),
        ]

    def _metrics(self, options: PluginOptions, *resources: ResourceHealth) -> Work:
        address = options.metrics_address
        return [serve(address, MetricsPage(self._counts, resources))] if address else []

    async def _notify(self, *registrations: Registration) -> None:
        """Keep systemd's status current."""
        while True:
            self._notifier.status("; ".join(dict.fromkeys(one.status for one in registrations)))
            await asyncio.sleep(_POLL_S)


def node_name(options: PluginOptions) -> str:
    return options.node_name or os.environ.get(NODE_VARIABLE) or socket.gethostname().lower()


def api_server(options: PluginOptions, paths: Paths) -> tuple[ApiServer, str] | None:
    """The API server and the node's name, None without access to it."""
    if not options.kubeconfig and CLUSTER_VARIABLE not in os.environ:
        return None
    from yunion_mps.kubernetes.api_server import ApiServer  # others need no TLS
    from yunion_mps.kubernetes.credentials import find_credentials

    return ApiServer(find_credentials(options.kubeconfig or "", paths, os.environ)), node_name(options)


def dra_credentials(options: PluginOptions, paths: Paths) -> ApiCredentials:
    """The credentials for the API server, without which there is no DRA; raises ConfigError."""
    from yunion_mps.kubernetes.credentials import find_credentials  # the device plugins need no TLS

    try:
        return find_credentials(options.kubeconfig or "", paths, os.environ)
    except YunionError as error:
        what = f"dra is set, but {error.message}"
        raise config_error(paths, what, "set kubeconfig, or remove dra") from None


def config_error(paths: Paths, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(paths.kubelet_plugin, None, what, hint)], check=f"{PROGRAM} --check")
