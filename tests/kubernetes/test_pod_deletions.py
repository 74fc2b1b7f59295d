"""MPS clients of pods that are deleted: terminated just before the kubelet kills them, and no others."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from yunion_mps.kubernetes.pod_deletions import Deletions, Pod

from control_groups import ControlGroup
from integration.daemon_host import Daemon, eventually
from kubernetes.cluster import Cluster
from kubernetes.kubelet import Kubelet, KubeletPlugin
from packages.machine import systemd_hierarchies
from simhost import SimHost
from simhost.mps import Client, StandIns

NODE = "node-1"
PODS = "/api/v1/pods"
START_S, NOON_S = 1000.0, 1_800_000_000.0
A, B = "a" * 64, "b" * 64


def time_of(utc_s: float) -> str:
    return datetime.fromtimestamp(utc_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(*containers: str, deleted: float | None = None, grace_s: int = 30, **more: Any) -> Pod:
    """A pod, `deleted` at a time in seconds after noon."""
    metadata: Any = {"name": "trainer", "namespace": "default", **more}
    if deleted is not None:
        metadata["deletionGracePeriodSeconds"] = grace_s
        metadata["deletionTimestamp"] = time_of(NOON_S + deleted + grace_s)
    statuses: Any = [{"containerID": f"containerd://{one}"} for one in containers]
    return {"metadata": metadata, "status": {"phase": "Running", "containerStatuses": statuses}}


class Clock:
    """Deletions, and a time in seconds after noon."""

    def __init__(self) -> None:
        self.deletions = Deletions()

    def update(self, at_s: float, **pods: Pod) -> None:
        self.deletions.update(pods, START_S + at_s, NOON_S + at_s)

    def next_s(self) -> float | None:
        next_s = self.deletions.next_s()
        return None if next_s is None else next_s - START_S

    def due(self, at_s: float) -> list[frozenset[str]]:
        return [end.containers for end in self.deletions.take_due(START_S + at_s)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_deleted_pod_is_due_shortly_before_its_grace_period_ends(clock: Clock) -> None:
    clock.update(0, p=pod(A))
    assert clock.next_s() is None
    clock.update(5, p=pod(A, B, deleted=5))
    assert clock.next_s() == 32
    assert clock.due(31) == []
    assert clock.due(32) == [{A, B}]
    clock.update(33, p=pod(A, B, deleted=5))
    assert (clock.due(40), clock.next_s()) == ([], None)


@pytest.mark.parametrize(("grace_s", "due_s"), [(30, 27), (4, 2), (1, 0.5), (0, 0)])
def test_at_least_half_of_a_short_grace_period_is_left(clock: Clock, grace_s: int, due_s: float) -> None:
    clock.update(0, p=pod(A, deleted=0, grace_s=grace_s))
    assert clock.next_s() == due_s


def test_a_pod_that_was_deleted_before_the_start_is_due_in_time(clock: Clock) -> None:
    clock.update(20, p=pod(A, deleted=0), q=pod(B, deleted=-60))
    assert clock.due(20) == [{B}]
    assert clock.next_s() == 27


def test_a_slow_clock_does_not_extend_the_grace_period(clock: Clock) -> None:
    clock.update(0, p=pod(A, deleted=500))
    assert clock.next_s() == 27


def test_a_shorter_period_counts_when_a_pod_is_deleted_again(clock: Clock) -> None:
    clock.update(0, p=pod(A, deleted=0, grace_s=600))
    clock.update(10, p=pod(A, deleted=10, grace_s=2))
    assert clock.next_s() == 11


def test_a_pod_that_is_gone_is_due_at_once(clock: Clock) -> None:
    """Its deletion was forced, or missed while the API server was unreachable."""
    clock.update(0, p=pod(A), q=pod(B, deleted=0))
    clock.update(1)
    assert sorted(map(sorted, clock.due(1))) == [[A], [B]]
    clock.update(2)
    assert (clock.due(2), clock.next_s()) == ([], None)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_pod_is_not_due_when_it_is_deleted(clock: Clock, phase: str) -> None:
    ended = pod(A)
    ended["status"]["phase"] = phase
    clock.update(0, p=ended)
    clock.update(1)
    assert clock.next_s() is None


def test_deleting_a_mirror_pod_does_not_end_its_static_pod(clock: Clock) -> None:
    mirror: Any = {"annotations": {"kubernetes.io/config.mirror": "hash"}}
    clock.update(0, p=pod(A, **mirror))
    clock.update(1, p=pod(A, deleted=1, **mirror))
    clock.update(2)
    assert clock.next_s() is None


def test_a_container_that_was_started_later_belongs_to_its_pod(clock: Clock) -> None:
    clock.update(0, p=pod(A, deleted=0))
    clock.update(1, p=pod(B, deleted=0))
    assert clock.due(27) == [{B}]


# -- with the daemon, a control daemon and an API server


class Container:
    """A client in the control group of a container."""

    def __init__(self, jobs: StandIns, daemon: Daemon) -> None:
        self.id = uuid.uuid4().hex * 2
        self.client: Client = jobs.attached(daemon.pipe_directory)
        self._group = ControlGroup(f"cri-containerd-{self.id}.scope", systemd_hierarchies()).make()
        self._group.add(self.client.pid)

    def close(self) -> None:
        self.client.end()
        self._group.close()


@pytest.fixture
def jobs(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as jobs:
        yield jobs


@pytest.fixture
def containers(jobs: StandIns, ready_daemon: Daemon) -> Iterator[list[Container]]:
    """Two containers, which share an MPS server."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            try:
                made.append(Container(jobs, ready_daemon))
            except OSError as error:
                pytest.skip(f"needs control groups: {error}")
            stack.callback(made[-1].close)
        yield made


@pytest.fixture
def cluster(cluster: Cluster, host: SimHost, containers: list[Container]) -> Cluster:
    """An API server that the plugin asks for the pods of its node; each has one of the containers."""
    kubeconfig = cluster.write_kubeconfig(host.root / "etc/kubeconfig")
    options = host.root / "etc/yunion/kubelet-plugin.yml"
    options.write_text(f"kubeconfig: {kubeconfig}\nnodeName: {NODE}\n")
    for name, container in zip(("ending", "neighbour"), containers):
        cluster.add(PODS, api_pod(name, container.id))
    return cluster


@pytest.fixture
def plugin(ready_daemon: Daemon, cluster: Cluster) -> Iterator[KubeletPlugin]:
    """The plugin, which watches the pods."""
    with KubeletPlugin(ready_daemon.host) as plugin:
        eventually(lambda: cluster.requests["GET"] >= 2, "a list and a watch of the pods")
        yield plugin


def api_pod(name: str, container: str) -> dict[str, Any]:
    status = {"phase": "Running", "containerStatuses": [{"containerID": f"containerd://{container}"}]}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"nodeName": NODE}, "status": status}


def delete(cluster: Cluster, name: str, grace_s: int) -> None:
    """Ask for the end of a pod, as `kubectl delete` does."""
    found = cluster.get(PODS, name, "default")
    times = {"deletionGracePeriodSeconds": grace_s, "deletionTimestamp": time_of(time.time() + grace_s)}
    cluster.replace(PODS, {**found, "metadata": {**found["metadata"], **times}})


def wait_terminated(plugin: KubeletPlugin, ending: Container) -> None:
    """Wait until the plugin reports that the server has disconnected the client."""
    report = f"pod default/ending: terminated PID {ending.client.pid} before the kubelet kills it: "
    how = "its MPS server disconnected it"
    eventually(lambda: report + how in plugin.log, "the end of the client")


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_only_the_clients_of_a_deleted_pod_are_terminated(
    containers: list[Container], plugin: KubeletPlugin, ready_daemon: Daemon, cluster: Cluster
) -> None:
    ending, neighbour = containers
    delete(cluster, "ending", 2)
    wait_terminated(plugin, ending)
    listed = ready_daemon.get("/v1/clients")[1]["clients"]
    assert [client["pid"] for client in listed] == [neighbour.client.pid]


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_pods_that_a_list_wrongly_lacks_keep_their_clients(
    containers: list[Container], plugin: KubeletPlugin, cluster: Cluster
) -> None:
    ending, neighbour = containers
    listing = cluster.listing
    lists = [{}, {**listing(PODS, lambda _: False), "items": [{}]}]
    cluster.listing = lambda *asked: lists.pop(0) if lists else listing(*asked)  # type: ignore[method-assign]
    with cluster.changed:  # so that the watch ends, and the pods are listed again
        cluster.add(PODS, api_pod("other", "c"))
        cluster.forget_changes()
    eventually(lambda: "pods.metadata.name is missing" in plugin.log, "the second list")
    delete(cluster, "ending", 0)
    wait_terminated(plugin, ending)
    assert f"PID {neighbour.client.pid}" not in plugin.log


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_clients_are_terminated_once_the_daemon_is_back(
    containers: list[Container], plugin: KubeletPlugin, ready_daemon: Daemon, cluster: Cluster
) -> None:
    ending, _ = containers
    ready_daemon.kill()
    delete(cluster, "ending", 0)
    ready_daemon.start().wait_ready()
    wait_terminated(plugin, ending)


@pytest.mark.processes
@pytest.mark.gpus({"kind": "v100"})
def test_deletions_during_an_api_server_outage_are_noticed_later(
    containers: list[Container], ready_daemon: Daemon, cluster: Cluster
) -> None:
    ending, _ = containers
    cluster.refusals["GET"] = [403]  # the rights are missing at first
    with KubeletPlugin(ready_daemon.host) as plugin, Kubelet(ready_daemon.host) as kubelet:
        eventually(lambda: cluster.requests["GET"] >= 3, "the watch of the pods")
        assert (
            f"refused by the test (if this node is not {NODE}, correct nodeName); trying again" in plugin.log
        )
        cluster.stop()
        delete(cluster, "ending", 0)
        eventually(lambda: "cannot be reached" in plugin.log, "the report")
        assert len(kubelet.wait_healthy(4)) == 4
        cluster.start()
        wait_terminated(plugin, ending)
        eventually(lambda: f"watching the pods of node {NODE} again" in plugin.log, "the report")
