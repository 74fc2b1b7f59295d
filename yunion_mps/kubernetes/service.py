"""The program yunion-mps-kubelet-plugin: registers with the kubelet whenever it starts, and serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time

import click

from yunion_mps.errors import YunionError
from yunion_mps.host.log import set_up_log
from yunion_mps.host.systemd import Notifier
from yunion_mps.kubernetes import grpc, kubelet_api
from yunion_mps.kubernetes.options import PluginOptions, read_options
from yunion_mps.kubernetes.plugin import OPTIONS, Plugin
from yunion_mps.paths import Paths
from yunion_mps.program import print_error, program_command, run_command

log = logging.getLogger(__name__)

PROGRAM = "yunion-mps-kubelet-plugin"
_HELP = """\
Offer the MPS devices of this host to Kubernetes, as a device plugin of the kubelet.

The plugin runs in the foreground, and is normally started by systemd:
systemctl enable --now yunion-mps-kubelet-plugin

It reads /etc/yunion/kubelet-plugin.yml, and needs a running yunion-mps-daemon and kubelet; it waits for both.
"""
_STATUSES = """\b
Exit status:
  0 stopped cleanly; 1 failure; 2 wrong usage; 6 invalid configuration
"""
#: The names of our socket and the kubelet's in the directory of device plugins.
ENDPOINT, _KUBELET = "yunion-mps.sock", "kubelet.sock"
#: How often the sockets are looked at, and leases are compared with the kubelet's pods, in s.
_POLL_S = 1.0
_RECONCILE_S = 10.0
#: How long the kubelet has to answer a registration, in s.
_REGISTER_S = 10.0


class KubeletService:
    """Serves the plugin's methods, and keeps it registered."""

    def __init__(self, plugin: Plugin, options: PluginOptions, paths: Paths, notifier: Notifier) -> None:
        self._plugin = plugin
        self._resource = options.resource_name
        self._kubelet = os.path.join(paths.device_plugins, _KUBELET)
        self._endpoint = os.path.join(paths.device_plugins, ENDPOINT)
        self._server = grpc.RpcServer(plugin.methods())
        self._notifier = notifier
        self._failure = ""

    async def follow(self) -> None:
        """Serve and register, without end: a kubelet that starts removes the sockets of plugins."""
        while True:
            try:
                await self._server.open(self._endpoint)
                await self._register_and_wait()
            except OSError as error:
                await self._report(f"{self._endpoint}: {error.strerror or error}")
            except grpc.RpcError as error:
                await self._report(f"the kubelet does not register {self._resource}: {error.message}")
            finally:
                await self._server.close()

    async def _register_and_wait(self) -> None:
        """Register, and return once the kubelet has restarted; raises RpcError if it does not register."""
        sockets = self._sockets()
        request = kubelet_api.RegisterRequest(kubelet_api.VERSION, ENDPOINT, self._resource, OPTIONS)
        await grpc.call(self._kubelet, kubelet_api.REGISTER.path, request.encode(), _REGISTER_S)
        log.info("registered %s with the kubelet", self._resource)
        self._failure = ""
        reconcile_s = 0.0
        while self._sockets() == sockets:
            self._notifier.status(f"{self._resource}: {self._plugin.status}")
            if time.monotonic() >= reconcile_s:
                await self._reconcile()
                reconcile_s = time.monotonic() + _RECONCILE_S
            await asyncio.sleep(_POLL_S)
        log.info("the kubelet has restarted")

    async def _reconcile(self) -> None:
        try:
            await self._plugin.reconcile()
        except (YunionError, grpc.RpcError, kubelet_api.DecodeError) as error:
            log.warning("leases are not compared with the kubelet's pods now: %s", error)

    def _sockets(self) -> list[tuple[int, int, int] | None]:
        """What tells our socket and the kubelet's from later ones of the same names."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self._endpoint, self._kubelet):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.append((status.st_dev, status.st_ino, status.st_ctime_ns))
        return found

    async def _report(self, failure: str) -> None:
        """Log a failure once, and wait before everything is tried again."""
        self._notifier.status(failure)
        if failure != self._failure:
            log.warning("%s; trying again every %g s", failure, _POLL_S)
        self._failure = failure
        await asyncio.sleep(_POLL_S)


async def run(options: PluginOptions, paths: Paths) -> None:
    """Run until SIGTERM or SIGINT."""
    notifier = Notifier()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    plugin = Plugin(options, paths)
    service = KubeletService(plugin, options, paths, notifier)
    notifier.ready("waiting for the kubelet")
    tasks = [asyncio.ensure_future(one) for one in (plugin.watch(), service.follow(), stop.wait())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def command() -> click.Command:
    """The program with its options; its callback raises YunionError."""

    def start(*, check: bool) -> None:
        paths = Paths.from_environment()
        options = read_options(paths)
        if not check:
            set_up_log("info")
            asyncio.run(run(options, paths))

    check = click.option("--check", is_flag=True, help="Check the configuration, and exit.")
    return program_command(PROGRAM, start, _HELP, _STATUSES, check)


def main() -> None:
    try:
        run_command(command(), PROGRAM)
    except YunionError as error:
        sys.exit(print_error(PROGRAM, error))
