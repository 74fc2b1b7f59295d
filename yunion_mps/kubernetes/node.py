"""What serves the node, with the configuration that is chosen for it: device plugins or the DRA driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence

from yunion_mps.core.errors import ConfigError, Problem, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.host.log import Failures
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.kubernetes.api.credentials import ApiCredentials, find_credentials
from yunion_mps.kubernetes.api.server import ApiServer
from yunion_mps.kubernetes.device_plugin.container_leases import ContainerLeases
from yunion_mps.kubernetes.device_plugin.node_resources import NodeResources, OfferWatch
from yunion_mps.kubernetes.device_plugin.plugin import DevicePlugin
from yunion_mps.kubernetes.device_plugin.registration import Registration
from yunion_mps.kubernetes.device_plugin.resources import ExtendedResource
from yunion_mps.kubernetes.dra.driver import DraService
from yunion_mps.kubernetes.features import FeatureFile, labels_of
from yunion_mps.kubernetes.kubelet.directory import DirectoryWatch
from yunion_mps.kubernetes.kubelet.grpc import RpcError
from yunion_mps.kubernetes.metrics import DAEMON, KUBELET, Counts, MetricsPage, ResourceHealth, serve_metrics
from yunion_mps.kubernetes.options import CLUSTER_VARIABLE, PluginOptions
from yunion_mps.kubernetes.pod_deletions import PodDeletionWatch
from yunion_mps.kubernetes.selection import Selector

log = logging.getLogger(__name__)

PROGRAM = "yunion-mps-kubelet-plugin"
#: The node's name, which a DaemonSet sets from `spec.nodeName`.
NODE_VARIABLE = "NODE_NAME"
#: How often systemd's status is updated, and leases are compared with the kubelet's pods, in s.
_POLL_S = 1.0
_RECONCILE_S = 10.0

#: What runs without end.
Work = list[Coroutine[object, object, object]]


class NodeService:
    """Serves the node. What its configurations have in common outlives a change from one to another."""

    def __init__(
        self,
        options: PluginOptions,
        paths: Paths,
        notifier: Notifier,
        name: str = "",
        labels_file: str = "",
        reconcile_s: float = _RECONCILE_S,
    ) -> None:
        """`name` and `labels_file` are the program's `--config` and `--node-labels`.

        `reconcile_s` is how often leases are compared with the kubelet's pods.
        """
        self._options = options
        self._paths = paths
        self._notifier = notifier
        self._reconcile_s = reconcile_s
        self._daemon = AsyncDaemonClient(paths)
        self._counts = Counts()
        self._leases = ContainerLeases(self._daemon, paths)
        self._registered = asyncio.Event()
        self._may_have_claims = options.dra or any(config.options.dra for config in options.configs)
        self._api = find_api_server(options, paths)
        self._selector = Selector(
            options,
            name,
            daemon=self._daemon,
            labels_file=labels_file,
            api=self._api,
            errors=self._counts.errors,
        )

    async def run(self) -> None:
        """Run without end."""
        work = [self._selector.run(), self._follow_choice(), self._reconcile()]
        if self._api:
            server, node = self._api
            work.append(PodDeletionWatch(server, node, self._daemon, self._counts).run())
        await first_of(*work)

    async def _follow_choice(self) -> None:
        while True:
            changed = self._selector.changed
            work = Work()
            try:
                work += self._work()
            except ConfigError as error:  # not fatal: the labels may yet select another configuration
                log.warning("nothing is offered: %s", error.message)
                self._notifier.status(f"nothing is offered: {error.message}")
            work.append(changed.wait())
            await first_of(*work)

    def _work(self) -> Work:
        """Return the coroutines that serve the node with the current choice; raises ConfigError."""
        choice = self._selector.choice
        options = choice.options if choice else None
        if options and options.dra:
            return self._dra(options)
        cause = choice.cause if choice else self._selector.waiting
        work: Work = [self._end_claims(cause)] if self._may_have_claims else []
        if options:
            work += self._device_plugins(options)
        else:
            self._notifier.status(cause)
        return work

    async def _reconcile(self) -> None:
        """Compare the leases with the kubelet's pods regularly and at each registration."""
        failures = Failures(log, self._counts.errors)
        while True:
            self._registered.clear()
            try:
                await self._leases.reconcile()
                failures.clear()
            except (YunionError, RpcError) as error:
                program = DAEMON if isinstance(error, YunionError) else KUBELET
                failures.report(f"cannot compare leases with the kubelet's pods: {error}", program)
            await first_of(self._registered.wait(), asyncio.sleep(self._reconcile_s))

    def _dra(self, options: PluginOptions) -> Work:
        """Return what runs the DRA driver and no device plugins: both would offer the same devices."""
        service = self._dra_service()
        work: Work = [service.run(), self._notify([service])]
        work += self._feature_file(options, service.labels, lambda: service.changes)
        work += self._metrics(options, [service.health])
        return work

    def _dra_service(self, refusal: str = "") -> DraService:
        """Return the DRA driver; raises ConfigError if there are no credentials."""
        credentials = dra_credentials(self._options, self._paths)
        return DraService(
            credentials, kubernetes_node_name(self._options), self._paths, self._counts, refusal
        )

    async def _end_claims(self, cause: str) -> None:
        """Serve the claims that were prepared before the choice changed until they end; then wait forever."""
        with contextlib.suppress(ConfigError):  # without credentials, no claim was prepared
            await self._dra_service(cause).run_while_used()
        await asyncio.Event().wait()

    def _device_plugins(self, options: PluginOptions) -> Work:
        resources = NodeResources(options)
        watch = DirectoryWatch(self._paths.device_plugins)
        services: list[Registration] = []

        async def register(resource: ExtendedResource) -> None:
            plugin = DevicePlugin(resource, self._leases, options, self._counts)
            services.append(Registration(plugin, self._paths, watch, self._registered))
            await services[-1].run()

        def labels() -> dict[str, str]:
            units = resources.memory.offers.values()
            pools = {unit.gpu for unit in units}
            return labels_of(resources.devices, pools, len(units), options.mig_strategy)

        work: Work = [
            OfferWatch(self._daemon, resources, self._leases, self._counts).run(),
            watch.run(),
            resources.run(register),
            self._notify(services),
        ]
        work += self._feature_file(options, labels, lambda: resources.changes)
        work += self._metrics(options, resources.healths)
        return work

    def _feature_file(
        self,
        options: PluginOptions,
        labels: Callable[[], dict[str, str]],
        changes: Callable[[], Iterable[asyncio.Event]],
    ) -> Work:
        path = options.feature_file
        return [FeatureFile(self._paths.under(path), labels, changes).run()] if path else []

    def _metrics(self, options: PluginOptions, resources: Sequence[ResourceHealth]) -> Work:
        address = options.metrics_address
        return [serve_metrics(address, MetricsPage(self._counts, resources))] if address else []

    async def _notify(self, services: Sequence[Registration | DraService]) -> None:
        """Keep systemd's status current."""
        while True:
            self._notifier.status("; ".join(dict.fromkeys(service.status for service in services)))
            await asyncio.sleep(_POLL_S)


def kubernetes_node_name(options: PluginOptions) -> str:
    """Return the node's name: as configured, as its pod was told, or the host's in lower case.

    Source: kubelet, option --hostname-override: by default, the name of a node is that of its host.
    """
    return options.node_name or os.environ.get(NODE_VARIABLE) or socket.gethostname().lower()


def find_api_server(options: PluginOptions, paths: Paths) -> tuple[ApiServer, str] | None:
    """Return the API server and the node's name, None without access to it; raises ApiServerError."""
    if not options.kubeconfig and CLUSTER_VARIABLE not in os.environ:
        return None
    return ApiServer(find_credentials(options.kubeconfig or "", paths, os.environ)), kubernetes_node_name(
        options
    )


def dra_credentials(options: PluginOptions, paths: Paths) -> ApiCredentials:
    """Return the credentials for the API server; raises ConfigError, because without them there is no DRA."""
    try:
        return find_credentials(options.kubeconfig or "", paths, os.environ)
    except YunionError as error:
        text = f"dra is set, but {error.message}"
        raise config_error(paths, text, "set kubeconfig, or remove dra") from None


def config_error(paths: Paths, message: str, hint: str) -> ConfigError:
    """Return the error of the plugin's configuration file, with the command that checks it."""
    return ConfigError([Problem(paths.kubelet_plugin, None, message, hint)], check=f"{PROGRAM} --check")
