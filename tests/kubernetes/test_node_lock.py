"""Only one plugin serves a node; another one waits until it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.kubernetes.node_lock import NodeLock, run_alone

from integration.daemon_host import Daemon, eventually
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import DraKubelet, DraPlugin, add_node
from kubernetes.kubelet import Kubelet, KubeletPlugin

OTHER = "another yunion-mps-kubelet-plugin serves this node"
PATIENCE_S, POLL_S = 60.0, 0.01


@pytest.mark.parametrize("removes", [Path.rmdir, lambda path: path.rename(path.with_name("former"))])
def test_the_plugin_ends_if_the_directory_is_removed_or_replaced(
    tmp_path: Path, removes: Callable[[Path], object]
) -> None:
    directory = tmp_path / "device-plugins"
    ends = []

    async def work() -> None:
        assert not NodeLock(str(directory)).take()
        removes(directory)
        directory.mkdir()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def run() -> None:
        await asyncio.wait_for(run_alone(str(directory), OTHER, print, work, POLL_S), PATIENCE_S)

    with pytest.raises(HostError, match="device-plugins was removed or replaced"):
        asyncio.run(run())
    assert ends == ["cancelled"]


#: What ProtectSystem=strict and ReadWritePaths= of the unit do with the kubelet's directories, of which $1 is
#: the parent.
_UNIT = """\
set -e
kubelet=$1; shift
mount --bind "$kubelet" "$kubelet"
for name in device-plugins plugins plugins_registry; do
    mkdir -p "$kubelet/$name"
    mount --bind "$kubelet/$name" "$kubelet/$name"
done
mount -o remount,bind,ro "$kubelet"
exec "$@"
"""


class MountedPlugin(KubeletPlugin):
    """The program in a mount namespace, as in its unit."""

    def start(self) -> None:
        folder = self._host.root / "var/lib/kubelet"
        command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _UNIT, "sh", str(folder)]
        with self._log.open("a") as log:
            self.process = self._host.popen([*command, "yunion-mps-kubelet-plugin"], stdout=log, stderr=log)


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.gpus({"kind": "v100"})
def test_the_unit_serves_again_once_the_kubelet_has_new_directories(ready_daemon: Daemon) -> None:
    """As after `kubeadm reset` and `kubeadm join`; systemd starts it again."""
    folder = ready_daemon.host.root / "var/lib/kubelet"
    with (
        Kubelet(ready_daemon.host) as kubelet,
        MountedPlugin(ready_daemon.host) as plugin,
        MountedPlugin(ready_daemon.host) as waiting,
    ):
        kubelet.wait_healthy(4)
        eventually(lambda: OTHER in plugin.log, "the report")
        kubelet.stop()
        for path in folder.iterdir():
            shutil.rmtree(path)
        with Kubelet(ready_daemon.host) as kubelet:
            assert plugin.process.wait(PATIENCE_S) == waiting.process.wait(PATIENCE_S) == 1
            assert plugin.log.count("device-plugins was removed or replaced") == 2
            plugin.start()
            assert len(kubelet.wait_healthy(4)) == 4


class MountedDriver(MountedPlugin, DraPlugin):
    """The program as a DRA driver in such a namespace."""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.gpus({"kind": "v100"})
@pytest.mark.parametrize("name", ["plugins", "plugins_registry"])
def test_the_driver_ends_if_a_directory_of_its_sockets_is_removed(ready_daemon: Daemon, name: str) -> None:
    host = ready_daemon.host
    with Cluster() as cluster, DraKubelet(host, cluster) as kubelet, MountedDriver(host, cluster) as driver:
        add_node(cluster)
        kubelet.register()
        folder = host.root / "var/lib/kubelet" / name
        shutil.rmtree(folder)
        folder.mkdir()
        assert driver.process.wait(PATIENCE_S) == 1
        assert f"/{name} was removed or replaced" in driver.log
        driver.start()
        kubelet.register()
        kubelet.wait_published(4)


def test_a_directory_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    directory = tmp_path / "device-plugins"
    directory.write_text("")
    told: list[str] = []

    def report(cause: str) -> None:
        told.append(cause)
        asyncio.get_running_loop().call_soon(directory.unlink)

    async def run() -> None:
        work = asyncio.sleep
        await asyncio.wait_for(run_alone(str(directory), OTHER, report, lambda: work(0), POLL_S), PATIENCE_S)

    asyncio.run(run())
    assert told == [f"{directory}: File exists"]


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_second_plugin_serves_once_the_first_has_ended(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    kubelet.wait_healthy(4)
    with KubeletPlugin(ready_daemon.host) as second:
        eventually(lambda: OTHER in second.log, "the report")
        kubelet.restart()
        kubelet.wait_registered(2)
        kubelet.wait_healthy(4)
        assert plugin.end(signal.SIGKILL) < 0
        kubelet.wait_registered(3)
        kubelet.wait_healthy(4)
        assert len(kubelet.registrations) == 3, "the first registered twice, and the second once"
        assert second.log.count(OTHER) == 1
        assert second.end(signal.SIGTERM) == 0


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_plugin_that_waits_for_another_one_can_be_stopped(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    with KubeletPlugin(ready_daemon.host) as second:
        eventually(lambda: OTHER in second.log, "the report")
        assert second.end(signal.SIGTERM) == 0
    with KubeletPlugin(ready_daemon.host, "--check") as check:
        assert check.process.wait(PATIENCE_S) == 0
    assert kubelet.wait_healthy(4)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_a_dra_driver_waits_for_the_device_plugin_of_its_node(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    with Cluster() as cluster, DraKubelet(host, cluster) as kubelet, KubeletPlugin(host) as plugin:
        add_node(cluster)
        eventually(lambda: "cannot register" in plugin.log, "the plugin's attempt to serve")
        with DraPlugin(host, cluster) as driver:
            eventually(lambda: OTHER in driver.log, "the report")
            assert plugin.end(signal.SIGTERM) == 0
            kubelet.register()
            kubelet.wait_published(4)
