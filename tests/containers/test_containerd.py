"""Containers with devices on the real containerd, and the plugin's gRPC client with a server in Go."""

from __future__ import annotations

import os
import signal

import pytest
from grpclib.const import Status
from yunion_mps.kubernetes.device_plugin.lease_names import lease_name
from yunion_mps.kubernetes.kubelet import grpc

from containers import cri_api, cri_pb2
from containers.containerd import Container, Containerd
from integration.daemon_host import Daemon, eventually
from integration.device_nodes import make_nodes, nodes_in, nodes_of
from integration.lease_host import leases_of
from kubernetes.kubelet import MEMORY, RESOURCE, Kubelet, KubeletPlugin
from simhost import SimHost
from simhost.gpu import SimGpu
from simhost.host import IN_UNITS
from simhost.mps import ASK

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


@pytest.fixture
def host(host: SimHost) -> SimHost:
    """A host whose driver's nodes are device nodes."""
    try:
        make_nodes(host)
    except PermissionError as error:
        pytest.skip(f"needs to make device nodes: {error}")
    return host


def assert_has_gpu(container: Container, gpu: SimGpu) -> None:
    """It has the device nodes of this GPU and the driver alone, and shares memory with the MPS server."""
    assert nodes_in(container.root) == nodes_of(gpu)
    assert os.path.samefile(container.root / "dev/shm", "/dev/shm")


def test_our_client_talks_to_containerd_s_server_in_go(containerd: Containerd) -> None:
    version = containerd.call(cri_api.VERSION, cri_pb2.Empty())
    assert (version.runtime_name, version.runtime_api_version) == ("containerd", "v1")
    status = containerd.call(cri_api.STATUS, cri_pb2.Empty()).status
    assert next(one.status for one in status.conditions if one.type == "RuntimeReady")
    with pytest.raises(grpc.RpcError) as caught:
        containerd.call(cri_api.CONTAINER_STATUS, cri_pb2.ContainerStatusRequest(container_id="ü" * 1000))
    assert (caught.value.status, "not found" in caught.value.message) == (Status.NOT_FOUND, True)


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_container_has_its_device_and_nothing_of_the_others(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(8)
    pod = kubelet.admit("trainer", ("00:07.0-1",))
    kubelet.start_container(pod)
    container = containerd.run(pod)
    device = ready_daemon.get("/v1/devices/00:07.0-1")[1]
    expected = {**device["client_environment"], **pod.answer.envs, "YUNION_MPS_DEVICE": "00:07.0-1"}
    found = container.environment
    assert {name: found.get(name) for name in expected} == expected
    assert_has_gpu(container, ready_daemon.host.gpus[1])
    (lease,) = leases_of(ready_daemon)
    assert (lease["name"], lease["devices"]) == (lease_name(pod.resource, pod.devices), ["00:07.0-1"])
    assert (lease["binding"], lease["pid"], lease["id"]) == (
        "container", container.pid, found["YUNION_MPS_LEASE"],
    )  # fmt: skip
    assert containerd.inside(container, "sh", "-c", ASK).split() == ["25.0"], "the control daemon is reached"


def test_the_answer_of_allocate_suffices_without_cdi(ready_daemon: Daemon, containerd: Containerd) -> None:
    host = ready_daemon.host
    (host.root / "etc/yunion/kubelet-plugin.yml").write_text("deviceListStrategy: environment\n")
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(4)
        pod = kubelet.run_pod("trainer", 1)
        container = containerd.run(pod)
        expected = dict(pod.answer.envs)
        assert {name: container.environment.get(name) for name in expected} == expected
        assert_has_gpu(container, host.gpus[0])
        assert containerd.inside(container, "sh", "-c", ASK).split() == ["25.0"]


def test_every_view_names_the_namespace_the_pod_and_the_container(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    container = containerd.run(kubelet.run_pod("trainer", 1))
    name = "pod default/trainer/main"
    (lease,) = leases_of(ready_daemon)
    assert (lease["container"], lease["container_id"]) == (name, container.id)
    assert f"{name}: sleep infinity" in ready_daemon.host.run(["yunion-mps", "who"]).stdout
    for words in (["list"], ["events"], ["top", "--once"]):
        assert name in ready_daemon.host.run(["yunion-mps", *words]).stdout, words
    labels = 'claim="",container="main"', 'namespace="default",pod="trainer"'
    metrics = ready_daemon.host.run(["yunion-mps", "metrics"]).stdout
    (sample,) = (line for line in metrics.splitlines() if line.startswith("yunion_mps_device_pod_info{"))
    assert all(label in sample for label in labels), sample
    assert f'device="{lease["devices"][0]}"' in sample


def test_a_lease_ends_with_its_container_and_comes_back_with_the_next(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    pod = kubelet.run_pod("trainer", 1)
    container = containerd.run(pod)
    for _ in range(2):
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: not leases_of(ready_daemon), "the end of the lease")
        kubelet.start_container(pod)  # the kubelet starts it again
        container = containerd.run(pod)
        (lease,) = leases_of(ready_daemon)
        assert (lease["devices"], lease["pid"]) == (list(pod.devices), container.pid)
    containerd.remove_pod(pod)
    eventually(lambda: not leases_of(ready_daemon), "the end of the lease")
    assert not container.is_running


def test_units_of_memory_become_a_device_of_the_container(
    ready_daemon: Daemon, containerd: Containerd
) -> None:
    ready_daemon.host.divide(IN_UNITS)
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    with Kubelet(ready_daemon.host, MEMORY, RESOURCE) as kubelet, KubeletPlugin(ready_daemon.host):
        kubelet.wait_healthy(16)
        container = containerd.run(kubelet.run_pod("trainer", 6))
        assert container.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6144M"
        (lease,) = leases_of(ready_daemon)
        assert ([one["memory_mib"] for one in lease["budgets"]], lease["pid"]) == ([6144], container.pid)
        assert len(kubelet.wait_healthy(16)) == 16, "ours are healthy while they are used"


def test_four_pods_share_a_gpu_and_a_fifth_one_follows_the_first(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    pods = [kubelet.run_pod(f"trainer-{number}", 1) for number in range(4)]
    containers = [containerd.run(pod) for pod in pods]
    leased = {tuple(lease["devices"]): lease["pid"] for lease in leases_of(ready_daemon)}
    assert leased == {pod.devices: container.pid for pod, container in zip(pods, containers)}
    assert kubelet.preferred(1) == ()
    containerd.remove_pod(pods[0])
    del kubelet.pods["trainer-0"]
    fifth = kubelet.run_pod("trainer-4", 1)
    assert fifth.devices == pods[0].devices
    assert containerd.run(fifth).environment["YUNION_MPS_DEVICE"] == fifth.devices[0]
    assert all(container.is_running for container in containers[1:])
