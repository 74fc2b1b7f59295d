"""The plugin between a kubelet and the real daemon on a simulated host."""

from __future__ import annotations

import signal

import grpc
import pytest
from yunion_mps.kubernetes.device_plugin.lease_names import lease_name
from yunion_mps.kubernetes.kubelet import device_plugin_api as api
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import (
    DevicePluginOptions,
    Empty,
    NUMANode,
    TopologyInfo,
)

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leases_of, take
from kubernetes.conftest import StartContainer
from kubernetes.kubelet import RESOURCE, Kubelet, KubeletPlugin

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


def refused(kubelet: Kubelet, devices: tuple[str, ...]) -> tuple[grpc.StatusCode, str]:
    """The status and reason for which a container with these devices may not start."""
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.permit(devices)
    return caught.value.code(), str(caught.value.details())


def test_the_plugin_registers_and_lists_healthy_devices(kubelet: Kubelet, plugin: KubeletPlugin) -> None:
    assert kubelet.wait_healthy(4) == ADDRESSES
    (request,) = kubelet.registrations
    assert (request.version, request.resource_name) == ("v1beta1", RESOURCE)
    assert request.options == kubelet.call(api.GET_OPTIONS, Empty())
    assert request.options == DevicePluginOptions(
        pre_start_required=True, get_preferred_allocation_available=True
    )
    assert plugin.end(signal.SIGTERM) == 0
    assert kubelet.registrations == [request]


@pytest.mark.gpus({"kind": "v100", "count": 6, "virtual_number": 48})
def test_devices_that_are_read_in_pages_are_all_listed(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    names = {f"00:{gpu:02x}.0-{slot}" for gpu in range(6, 12) for slot in range(48)}
    assert set(kubelet.wait_healthy(288)) == names
    take(ready_daemon, "devices=00:0b.0-47&holder.name=job&holder.ttl_s=600")
    assert names - set(kubelet.wait_healthy(287)) == {"00:0b.0-47"}


def test_the_plugin_waits_for_a_kubelet(ready_daemon: Daemon) -> None:
    with KubeletPlugin(ready_daemon.host) as plugin:
        eventually(lambda: "No such file or directory; trying again" in plugin.log, "the report")
        with Kubelet(ready_daemon.host) as kubelet:
            assert kubelet.wait_healthy(4) == ADDRESSES


def test_health_follows_the_gpu(kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon) -> None:
    kubelet.wait_healthy(4)
    ready_daemon.host.gpus[0].lose()
    eventually(lambda: ready_daemon.polls() and not kubelet.healthy, "the loss of the devices")
    assert set(kubelet.health) == set(ADDRESSES)
    ready_daemon.host.gpus[0].restore()
    eventually(lambda: ready_daemon.polls() and len(kubelet.healthy) == 4, "the devices")


def test_health_follows_the_daemon(kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon) -> None:
    kubelet.wait_healthy(4)
    for end in (ready_daemon.stop, ready_daemon.kill):
        end()
        kubelet.wait_healthy(0)
        assert set(kubelet.health) == set(ADDRESSES)
        ready_daemon.start().wait_ready()
        kubelet.wait_healthy(4)


def test_devices_that_others_lease_are_not_healthy(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    lease = take(ready_daemon, f"holder.name=job&holder.ttl_s=600&devices={ADDRESSES[2]}")
    assert kubelet.wait_healthy(3) == [ADDRESSES[0], ADDRESSES[1], ADDRESSES[3]]
    code, reason = refused(kubelet, (ADDRESSES[2],))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"device {ADDRESSES[2]} cannot be allocated now: 1 of 1 leased" in reason
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    kubelet.wait_healthy(4)


def test_a_container_has_its_budget_and_its_lease_until_it_ends(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, start_container: StartContainer
) -> None:
    kubelet.wait_healthy(4)
    pod = kubelet.admit("trainer", kubelet.preferred(1))
    assert pod.answer.envs == {"YUNION_MPS_MEMORY_MIB": "4096", "YUNION_MPS_SM_PERCENT": "25"}
    assert leases_of(ready_daemon) == [], "an allocation takes nothing yet"
    for _ in range(2):  # the second container is the first one, started again
        kubelet.start_container(pod)
        (lease,) = leases_of(ready_daemon)
        assert (lease["name"], lease["pid"]) == (lease_name(pod.resource, pod.devices), None)
        container = start_container(pod)
        (lease,) = leases_of(ready_daemon)
        assert (lease["devices"], lease["pid"]) == (list(pod.devices), container.pid)
        assert kubelet.wait_healthy(4) == ADDRESSES, "ours are healthy while they are used"
        assert "the previous container still runs" in refused(kubelet, pod.devices)[1]
        container.close()
        eventually(lambda: not leases_of(ready_daemon), "the end of the lease")


def test_several_devices_become_one_budget(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, start_container: StartContainer
) -> None:
    kubelet.wait_healthy(4)
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.run_pod("trainer", 2)
    assert "set cuda_mps_combine: 2 in host.conf" in str(caught.value.details())
    ready_daemon.configure(cuda_mps_combine=2)
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    kubelet.wait_healthy(4)
    pod = kubelet.run_pod("trainer", 2)
    assert pod.answer.envs == {"YUNION_MPS_MEMORY_MIB": "8192", "YUNION_MPS_SM_PERCENT": "50"}
    container = start_container(pod)
    assert container.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    (lease,) = leases_of(ready_daemon)
    assert (tuple(lease["devices"]), lease["pid"]) == (pod.devices, container.pid)


def test_an_impossible_allocation_is_refused_with_the_reason(kubelet: Kubelet, plugin: KubeletPlugin) -> None:
    kubelet.wait_healthy(4)
    for devices, reason in (((), "no such devices"), (("00:99.0-1",), "no such devices: 00:99.0-1")):
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.admit("trainer", devices)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in str(caught.value.details())


def test_a_request_that_is_malformed_is_refused(kubelet: Kubelet, plugin: KubeletPlugin) -> None:
    kubelet.wait_healthy(4)
    for rpc in (api.ALLOCATE, api.PRE_START_CONTAINER, api.GET_PREFERRED_ALLOCATION):
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.channel.unary_unary(rpc.path)(b"\x0a\xff", timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert kubelet.healthy == ADDRESSES


def test_a_device_that_is_allocated_again_is_taken_from_a_pod_that_is_gone(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    ready_daemon.configure(cuda_mps_combine=2)
    assert ready_daemon.ask("POST", "/v1/reload")[0] == 200
    kubelet.wait_healthy(4)
    gone = kubelet.run_pod("gone", 2)
    del kubelet.pods["gone"]
    pod = kubelet.admit("next", gone.devices[:1])
    kubelet.start_container(pod)
    assert [lease["devices"] for lease in leases_of(ready_daemon)] == [[gone.devices[0]]]


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_binpack_is_the_default_and_spread_can_be_chosen(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    options = host.root / "etc/yunion/kubelet-plugin.yml"
    with Kubelet(host) as kubelet:
        for text, gpus in (("", 1), ("preferred: spread\n", 2)):
            options.write_text(text)
            with KubeletPlugin(host):
                kubelet.wait_healthy(8)
                pods = [kubelet.admit(f"pod-{number}", kubelet.preferred(1)) for number in range(2)]
                assert len({pod.devices[0].rpartition("-")[0] for pod in pods}) == gpus
            kubelet.pods.clear()
            eventually(lambda: not kubelet.lists, "the plugin's end")


def test_a_container_can_be_limited_to_one_device(ready_daemon: Daemon) -> None:
    options = ready_daemon.host.root / "etc/yunion/kubelet-plugin.yml"
    options.write_text("failRequestsGreaterThanOne: true\n")
    with Kubelet(ready_daemon.host) as kubelet, KubeletPlugin(ready_daemon.host):
        kubelet.wait_healthy(4)
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.admit("trainer", kubelet.preferred(2))
        assert "failRequestsGreaterThanOne is set" in str(caught.value.details())
        assert len(kubelet.run_pod("trainer", 1).devices) == 1


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_only_reserved_devices_are_offered_if_there_are_any(daemon: Daemon) -> None:
    path = daemon.host.root / "etc/yunion/host_container_device.yml"
    path.write_text(path.read_text().rstrip("\n") + "\n  reserved_for: kubernetes\n")
    daemon.start().wait_ready()
    with Kubelet(daemon.host) as kubelet, KubeletPlugin(daemon.host):
        assert kubelet.wait_healthy(4) == [f"00:07.0-{slot}" for slot in range(4)]
        pod = kubelet.run_pod("trainer", 1)
        assert [lease["devices"] for lease in leases_of(daemon)] == [list(pod.devices)]


@pytest.mark.gpus({"kind": "v100", "virtual_number": 48, "numa_node": 1, "count": 3})
def test_each_device_has_the_numa_node_of_its_gpu(kubelet: Kubelet, plugin: KubeletPlugin) -> None:
    assert len(kubelet.wait_healthy(144)) == 144
    message = kubelet.lists[-1]
    assert all(device.topology == TopologyInfo(nodes=[NUMANode(ID=1)]) for device in message.devices)
    assert len(set(kubelet.preferred(48))) == 48
