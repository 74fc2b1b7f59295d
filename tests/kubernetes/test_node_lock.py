"""Only one plugin serves a node; another one waits until it ends."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from yunion_mps.kubernetes.node_lock import NodeLock, run_alone

from integration.daemon_host import Daemon, eventually
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import DraKubelet, DraPlugin, add_node
from kubernetes.kubelet import Kubelet, KubeletPlugin

OTHER = "another yunion-mps-kubelet-plugin serves this node"
PATIENCE_S = 60.0


def test_the_work_starts_again_if_the_directory_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "device-plugins"
    told: list[str] = []
    starts: list[bool] = []

    async def work() -> None:
        other = NodeLock(str(directory))
        starts.append(other.take())
        if len(starts) == 1:
            directory.rename(tmp_path / "former")
            assert other.take(), "the lock is on the former directory"
            asyncio.get_running_loop().call_later(0.1, other.release)  # once the work has been cancelled
            await asyncio.Event().wait()

    async def run() -> None:
        await asyncio.wait_for(run_alone(str(directory), OTHER, told.append, work), PATIENCE_S)

    asyncio.run(run())
    assert starts == [False, False]
    assert told in ([], [OTHER])


def test_a_directory_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    directory = tmp_path / "device-plugins"
    directory.write_text("")
    told: list[str] = []

    def report(cause: str) -> None:
        told.append(cause)
        asyncio.get_running_loop().call_soon(directory.unlink)

    async def run() -> None:
        work = asyncio.sleep
        await asyncio.wait_for(run_alone(str(directory), OTHER, report, lambda: work(0)), PATIENCE_S)

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
