"""Hosts with the daemon, as in the tests of integration, a kubelet and the plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes import service
from yunion_mps.kubernetes.node import PROGRAM
from yunion_mps.kubernetes.options import PluginOptions, read_options

from integration.conftest import daemon, host, make_daemon, make_host, ready_daemon
from integration.daemon_host import Daemon, eventually
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import DraKubelet, DraPlugin, DriverInThread, add_node
from kubernetes.grpc_peers import Loop
from kubernetes.kubelet import Container, Kubelet, KubeletPlugin, Pod
from simhost import SimHost

__all__ = ["daemon", "host", "make_daemon", "make_host", "ready_daemon"]

StartContainer = Callable[[Pod], Container]
Read = Callable[[str], PluginOptions]
RunProgram = Callable[..., "tuple[object, list[str]]"]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What the plugin reads of this text of its file."""

    def written(text: str) -> PluginOptions:
        path = tmp_path / "etc/yunion/kubelet-plugin.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return read_options(Paths(str(tmp_path)))

    return written


@pytest.fixture
def run_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> RunProgram:
    """How the program ends on the host of `read`, and what it prints, without a process.

    It must end by itself: with a valid file and without `--check`, it would serve the node.
    """

    def run(*options: str) -> tuple[object, list[str]]:
        monkeypatch.setenv("YUNION_MPS_ROOT", str(tmp_path))
        monkeypatch.setattr(sys, "argv", [PROGRAM, *options])
        status: object = 0
        try:
            service.main()
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, (captured.out + captured.err).splitlines()

    return run


@pytest.fixture
def kubelet(ready_daemon: Daemon) -> Iterator[Kubelet]:
    with Kubelet(ready_daemon.host) as kubelet:
        yield kubelet


@pytest.fixture
def plugin(kubelet: Kubelet, ready_daemon: Daemon) -> Iterator[KubeletPlugin]:
    """The plugin, which has registered, and whose devices are known."""
    with KubeletPlugin(ready_daemon.host) as plugin:
        kubelet.wait_registered()
        yield plugin


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def dra_kubelet(ready_daemon: Daemon, cluster: Cluster) -> Iterator[DraKubelet]:
    add_node(cluster)
    with DraKubelet(ready_daemon.host, cluster) as kubelet:
        yield kubelet


@pytest.fixture
def driver(dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster) -> Iterator[DriverInThread]:
    """The DRA driver, which has registered, and whose devices are published."""
    with DriverInThread(ready_daemon.host, cluster) as driver:
        dra_kubelet.register()
        eventually(dra_kubelet.devices, "its devices in slices")
        yield driver


@pytest.fixture
def driver_process(dra_kubelet: DraKubelet, ready_daemon: Daemon, cluster: Cluster) -> Iterator[DraPlugin]:
    """The DRA driver as a process of its own, which can be killed; registered, with its devices published."""
    with DraPlugin(ready_daemon.host, cluster) as process:
        dra_kubelet.register()
        eventually(dra_kubelet.devices, "its devices in slices")
        yield process


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop() as loop:
        yield loop


@pytest.fixture
def start_container(host: SimHost) -> Iterator[StartContainer]:
    started: list[Container] = []

    def start(pod: Pod) -> Container:
        started.append(Container(host, pod))
        return started[-1]

    yield start
    for container in started:
        container.close()
