"""The program yunion-mps-kubelet-plugin: registers with the kubelet whenever it starts, and serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

import click

from yunion_mps.errors import ConfigError, Problem, YunionError
from yunion_mps.host.files import version_of
from yunion_mps.host.log import set_up_log
from yunion_mps.host.malloc import tune_malloc
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.kubernetes import grpc, kubelet_api
from yunion_mps.kubernetes.features import FeatureFile, is_foreign
from yunion_mps.kubernetes.leases import ContainerLeases
from yunion_mps.kubernetes.metrics import DAEMON, DONE, KUBELET, REFUSED, Counts, MetricsPage, serve
from yunion_mps.kubernetes.node_lock import run_alone
from yunion_mps.kubernetes.options import PluginOptions, read_options
from yunion_mps.kubernetes.plugin import OPTIONS, DevicePlugin, OfferWatch
from yunion_mps.kubernetes.resources import (
    DeviceResource,
    ExtendedResource,
    MemoryResource,
    ResourceHealth,
)
from yunion_mps.kubernetes.selection import Selector
from yunion_mps.paths import Paths
from yunion_mps.program import print_error, program_command, run_command
from yunion_mps.tasks import first_of

if TYPE_CHECKING:
    from yunion_mps.kubernetes.api_server import ApiServer
    from yunion_mps.kubernetes.credentials import ApiCredentials

log = logging.getLogger(__name__)

PROGRAM = "yunion-mps-kubelet-plugin"
#: The node's name, which a DaemonSet sets from `spec.nodeName`.
NODE_VARIABLE = "NODE_NAME"
#: One of these says where the API server is, unless the option `kubeconfig` does.
_CLUSTER_VARIABLES = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
_HELP = """\
Offer the MPS devices of this host to Kubernetes, as a device plugin or a DRA driver.

The plugin runs in the foreground, and is normally started by systemd:
systemctl enable --now yunion-mps-kubelet-plugin

It reads /etc/yunion/kubelet-plugin.yml, and needs a running yunion-mps-daemon and kubelet; it waits for both.
"""
_STATUSES = """\b
Exit status:
  0 stopped cleanly; 1 failure; 2 wrong usage; 6 invalid configuration
"""
#: What a plugin reports while it waits for another one.
_OTHER_PLUGIN = f"""\
another {PROGRAM} serves this node; waiting until it ends. Run the service or the DaemonSet, not both; \
see: systemctl status {PROGRAM}; \
kubectl get pods -A -l app.kubernetes.io/name={PROGRAM} --field-selector spec.nodeName={{node}}"""
_KUBELET = "kubelet.sock"
#: How often the sockets are checked, and leases are compared with the kubelet's pods, in s.
_POLL_S = 1.0
_RECONCILE_S = 10.0
#: How long the kubelet has to answer a registration, in s.
_REGISTER_S = 10.0


class KubeletService:
    """Serves the methods of a resource's plugin, and keeps it registered."""

    def __init__(self, plugin: DevicePlugin, paths: Paths, registered: asyncio.Event) -> None:
        self.resource = plugin.resource
        self._kubelet = os.path.join(paths.device_plugins, _KUBELET)
        self._endpoint = os.path.join(paths.device_plugins, self.resource.endpoint)
        self._server = grpc.RpcServer(plugin.methods())
        self._registered = registered
        self._counts = plugin.counts
        #: Why the resource is not registered now; empty if it is.
        self.failure = "waiting for the kubelet"

    async def follow(self) -> None:
        """Serve and register, without end: a kubelet that starts removes the sockets of plugins."""
        while True:
            try:
                await self._server.open(self._endpoint)
                await self._register_and_wait()
            except OSError as error:
                await self._report(f"{self._endpoint}: {error.strerror or error}")
            except grpc.RpcError as error:
                self._counts.registrations[self.resource.name, REFUSED] += 1
                self._counts.errors[KUBELET] += 1
                await self._report(f"cannot register {self.resource.name} with the kubelet: {error.message}")
            finally:
                await self._server.close()

    async def follow_once_offered(self) -> None:
        """Like `follow`, once there is anything to offer, so that other nodes do not show the resource."""
        while not self.resource.offers:
            await self.resource.changed.wait()
        await self.follow()

    async def _register_and_wait(self) -> None:
        """Register, and return once the kubelet has restarted; raises RpcError if it does not register."""
        kubelet = version_of(self._kubelet)
        name, endpoint = self.resource.name, self.resource.endpoint
        request = kubelet_api.RegisterRequest(kubelet_api.VERSION, endpoint, name, OPTIONS)
        await grpc.call(self._kubelet, kubelet_api.REGISTER.path, request.encode(), _REGISTER_S)
        log.info("registered %s with the kubelet", name)
        self.failure = ""
        self._counts.registrations[name, DONE] += 1
        self._registered.set()
        # Nothing announces that the kubelet starts.
        while self._server.is_reachable and version_of(self._kubelet) == kubelet:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        log.info("the kubelet has restarted")

    async def _report(self, failure: str) -> None:
        """Log a failure once, and wait before everything is tried again."""
        if failure != self.failure:
            log.warning("%s; trying again every %g s", failure, _POLL_S)
        self.failure = failure
        await asyncio.sleep(_POLL_S)


async def _reconcile(leases: ContainerLeases, registered: asyncio.Event, counts: Counts) -> None:
    """Compare the leases with the kubelet's pods, at each registration and regularly from then on."""
    await registered.wait()
    while True:
        registered.clear()
        try:
            await leases.reconcile()
        except (YunionError, grpc.RpcError, kubelet_api.DecodeError) as error:
            counts.errors[DAEMON if isinstance(error, YunionError) else KUBELET] += 1
            log.warning("cannot compare leases with the kubelet's pods now: %s", error)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(registered.wait(), _RECONCILE_S)


async def _log_health(resource: ExtendedResource) -> None:
    """Log each change of the resource's health."""
    while True:
        changed = resource.changed
        if resource.status:
            log.info("%s: %s", resource.name, resource.status)
        await changed.wait()


async def _notify(services: Sequence[KubeletService], notifier: Notifier) -> None:
    """Keep systemd's status current."""
    told = ""
    while True:
        states = (one.failure or f"{one.resource.name}: {one.resource.status}" for one in services)
        status = "; ".join(dict.fromkeys(states))
        if status != told:
            notifier.status(status)
        told = status
        await asyncio.sleep(_POLL_S)


#: What runs without end.
Work = Sequence[Coroutine[object, object, object]]


def _dra(options: PluginOptions, paths: Paths, notifier: Notifier, counts: Counts) -> Work:
    """The DRA driver, which takes the place of the device plugins: both would offer the same devices."""
    from yunion_mps.kubernetes.dra_driver import DraService

    credentials = _dra_credentials(options, paths)
    service = DraService(credentials, _node(options), paths, notifier, counts)
    return [service.run(), *_metrics(options, counts, [service.health])]


def _dra_credentials(options: PluginOptions, paths: Paths) -> ApiCredentials:
    from yunion_mps.kubernetes.credentials import find_credentials  # the device plugins need no TLS

    try:
        return find_credentials(options.kubeconfig or "", paths, os.environ)
    except YunionError as error:
        what = f"dra is set, but {error.message}"
        raise _config_error(paths, what, "set kubeconfig, or remove dra") from None


def _node(options: PluginOptions) -> str:
    return options.node_name or os.environ.get(NODE_VARIABLE) or socket.gethostname().lower()


def _device_plugins(options: PluginOptions, paths: Paths, notifier: Notifier, counts: Counts) -> Work:
    daemon, registered = AsyncDaemonClient(paths), asyncio.Event()
    devices, memory = DeviceResource(options), MemoryResource(options)
    leases = ContainerLeases(daemon, paths)
    first, second = (
        KubeletService(DevicePlugin(one, leases, options, counts), paths, registered)
        for one in (devices, memory)
    )
    file = options.feature_file
    labels = [FeatureFile(paths.under(file), devices, memory).run()] if file else []
    return [
        *labels,
        OfferWatch(daemon, devices, memory, leases, counts).run(),
        first.follow(),
        second.follow_once_offered(),
        _reconcile(leases, registered, counts),
        _log_health(devices),
        _log_health(memory),
        _notify((first, second), notifier),
        *_metrics(options, counts, (devices.health, memory.health)),
    ]


def _metrics(options: PluginOptions, counts: Counts, resources: Sequence[ResourceHealth]) -> Work:
    address = options.metrics_address
    return [serve(address, MetricsPage(counts, resources))] if address else []


async def run(options: PluginOptions, paths: Paths, name: str = "", labels_file: str = "") -> None:
    """Run until SIGTERM or SIGINT, once no other plugin serves the node."""
    notifier = Notifier()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notifier.ready("waiting for the kubelet")
    api = _api_server(options, paths)
    counts = Counts()

    async def serve_node() -> None:
        selector = Selector(options, name, AsyncDaemonClient(paths), labels_file, api)
        work = [selector.run(), _follow_choice(selector, paths, notifier, counts)]
        if api:
            from yunion_mps.kubernetes.pod_deletions import PodDeletionWatch  # others need no TLS

            work.append(PodDeletionWatch(*api, AsyncDaemonClient(paths), counts).run())
        await first_of(*work)

    other = _OTHER_PLUGIN.format(node=_node(options))
    await first_of(run_alone(paths.device_plugins, other, notifier.status, serve_node), stop.wait())


async def _follow_choice(selector: Selector, paths: Paths, notifier: Notifier, counts: Counts) -> None:
    """Serve with the configuration that is chosen for the node now, without end."""
    while True:
        changed, choice = selector.changed, selector.choice
        work: Work = ()
        try:
            if choice and choice.options:
                work = _work(choice.options, paths, notifier, counts)
            else:
                notifier.status(choice.cause if choice else selector.waiting)
        except ConfigError as error:  # of a choice that can change, unlike what `_check` refuses
            log.warning("nothing is offered: %s", error.message)
            notifier.status(f"nothing is offered: {error.message}")
        await first_of(*work, changed.wait())


def _check(options: PluginOptions, paths: Paths, name: str, labels_file: str) -> None:
    """Raise ConfigError for what this host does not allow, unless the node's label or GPUs choose it."""
    if options.only_with_node_label and not labels_file and _api_server(options, paths) is None:
        what = "onlyWithNodeLabel is set, but the node's labels cannot be read"
        raise _config_error(paths, what, "set kubeconfig, or start the plugin with --node-labels FILE")
    if options.configs and not name:
        return
    options = next((one.options for one in options.configs if one.name == name), options)
    if options.dra:
        _dra_credentials(options, paths)
    file = options.feature_file
    if file and is_foreign(paths.under(file)):
        what = f"featureFile is {file}, where there is a file that is not this plugin's"
        raise _config_error(paths, what, "remove that file, or write another path")


def _check_kubeconfig(options: PluginOptions, paths: Paths) -> None:
    """Raise ConfigError if the file cannot be used; the start only waits, because it may come later."""
    if options.kubeconfig:
        from yunion_mps.kubernetes.credentials import Kubeconfig

        try:
            Kubeconfig(options.kubeconfig).access()
        except YunionError as error:
            raise _config_error(paths, f"kubeconfig: {error.message}", "correct it") from None


def _config_error(paths: Paths, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(paths.kubelet_plugin, None, what, hint)], check=f"{PROGRAM} --check")


def _work(options: PluginOptions, paths: Paths, notifier: Notifier, counts: Counts) -> Work:
    if options.dra:
        return _dra(options, paths, notifier, counts)
    return _device_plugins(options, paths, notifier, counts)


def _api_server(options: PluginOptions, paths: Paths) -> tuple[ApiServer, str] | None:
    """The API server and the node's name, None without access to it."""
    if not (options.kubeconfig or any(name in os.environ for name in _CLUSTER_VARIABLES)):
        return None
    from yunion_mps.kubernetes.api_server import ApiServer  # others need no TLS
    from yunion_mps.kubernetes.credentials import find_credentials

    return ApiServer(find_credentials(options.kubeconfig or "", paths, os.environ)), _node(options)


def command() -> click.Command:
    """The program with its options; its callback raises YunionError."""

    def start(*, check: bool, config: str, node_labels: str) -> None:
        paths = Paths.from_environment()
        options = read_options(paths)
        names = [one.name for one in options.configs]
        if config and config not in names:
            which = f"the configurations are {', '.join(names)}" if names else "configs is not set"
            raise click.BadParameter(f"there is no configuration {config}: {which}", param_hint="'--config'")
        _check(options, paths, config, node_labels)
        if check:
            _check_kubeconfig(options, paths)
        else:
            tune_malloc()
            set_up_log("info")
            asyncio.run(run(options, paths, config, node_labels))

    return program_command(
        PROGRAM,
        start,
        _HELP,
        _STATUSES,
        click.option("--check", is_flag=True, help="Check the configuration, and exit."),
        click.option(
            "--config", default="", metavar="NAME", help="The configuration to use, of those in configs."
        ),
        click.option(
            "--node-labels", default="", metavar="FILE",
            help="A file with the node's labels, NAME=VALUE on each line, instead of the API server.",
        ),
    )  # fmt: skip


def main() -> None:
    try:
        run_command(command(), PROGRAM)
    except YunionError as error:
        sys.exit(print_error(PROGRAM, error))
