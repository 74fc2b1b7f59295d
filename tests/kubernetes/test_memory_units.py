"""Pods that request memory: units of a pool, which all come from one GPU and become one lease."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from yunion_mps.kubernetes.device_plugin.lease_names import lease_name
from yunion_mps.kubernetes.selection import CONFIG_LABEL

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of, restart, take
from kubernetes.conftest import StartContainer
from kubernetes.kubelet import MEMORY, RESOURCE, Kubelet, KubeletPlugin, Reconciler
from simhost.host import IN_UNITS

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]

TWO_GPUS = pytest.mark.gpus({"kind": "v100", "count": 2})
IN_SMALL_UNITS = IN_UNITS.replace("1GiB", "128MiB")
ACK = "memoryResource: aliyun.com/gpu-mem\nmemoryUnit: 128MiB\n"


class Node:
    """A node whose GPUs are divided as given, with its daemon, kubelet and plugin."""

    def __init__(self, daemon: Daemon, stack: ExitStack) -> None:
        self._stack = stack
        self.daemon = daemon
        self.options = daemon.host.root / "etc/yunion/kubelet-plugin.yml"

    def start(
        self, *divisions: object, options: str = "", resource: str = MEMORY, arguments: Sequence[object] = ()
    ) -> Kubelet:
        self.daemon.host.divide(*divisions)
        self.options.write_text(options)
        self.daemon.start().wait_ready()
        self.kubelet = self._stack.enter_context(Kubelet(self.daemon.host, resource, RESOURCE))
        self.plugin = self._stack.enter_context(KubeletPlugin(self.daemon.host, *map(str, arguments)))
        return self.kubelet


@pytest.fixture
def node(daemon: Daemon) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(daemon, stack)


def refused(kubelet: Kubelet, units: tuple[str, ...]) -> tuple[grpc.StatusCode, str]:
    """The status and reason for which a pod does not get these units."""
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.admit("refused", units)
    return caught.value.code(), str(caught.value.details())


def memory_of(lease: Any) -> list[int]:
    """The memory of each device of the lease."""
    return [one["memory_mib"] for one in lease["budgets"]]


def units_of(gpu: str, numbers: range, mib: int = 1024) -> tuple[str, ...]:
    return tuple(f"{gpu}-u{mib}-{number}" for number in numbers)


def test_16_units_of_128_mib_are_2_gib_as_in_ack(node: Node, start_container: StartContainer) -> None:
    kubelet = node.start(IN_SMALL_UNITS, options=ACK, resource="aliyun.com/gpu-mem")
    kubelet.wait_healthy(128)
    pod = kubelet.run_pod("trainer", 16)
    assert pod.answer.envs == {"YUNION_MPS_MEMORY_MIB": "2048", "YUNION_MPS_SM_PERCENT": "12.5"}
    container = start_container(pod)
    assert container.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert container.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    (lease,) = leases_of(node.daemon)
    assert (memory_of(lease), lease["pid"]) == ([2048], container.pid)
    assert len(kubelet.wait_healthy(128)) == 128, "ours are healthy while they are used"
    container.close()
    eventually(lambda: not leases_of(node.daemon), "the end of the lease")


@TWO_GPUS
def test_all_units_of_a_container_come_from_one_gpu(node: Node) -> None:
    kubelet = node.start(IN_UNITS, IN_UNITS)
    kubelet.wait_healthy(32)
    assert kubelet.run_pod("a", 6).devices == units_of("00:06.0", range(6))
    assert kubelet.run_pod("b", 12).devices == units_of("00:07.0", range(12))
    assert kubelet.run_pod("c", 4).devices == units_of("00:07.0", range(12, 16)), "binpack"
    assert sorted(memory_of(lease) for lease in leases_of(node.daemon)) == [[4096], [6144], [12288]]
    mixed = (*units_of("00:06.0", range(6, 8)), "00:07.0-u1024-15")
    why = "no GPU has 3 units of yunion.io/mps-memory left: they would come from 00:06.0, 00:07.0 "
    why += "(request less memory; the scheduler knows only the sum of all GPUs of a node)"
    assert refused(kubelet, mixed) == (grpc.StatusCode.FAILED_PRECONDITION, why)
    assert refused(kubelet, ("00:08.0-u1024-0",))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(kubelet, ())[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_memory_that_others_lease_is_not_healthy(node: Node) -> None:
    kubelet = node.start(IN_UNITS)
    kubelet.wait_healthy(16)
    kubelet.run_pod("trainer", 8)
    lease = take(node.daemon, "memory_mib=3000&holder.name=job&holder.ttl_s=600")
    assert kubelet.wait_healthy(13) == list(units_of("00:06.0", range(13)))
    assert node.daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    kubelet.wait_healthy(16)


def test_memory_reserved_beside_leases_is_not_offered(node: Node) -> None:
    kubelet = node.start(f"{IN_UNITS}\n  memory_reserve: 512MiB")
    kubelet.wait_healthy(15)
    for number in range(3):
        kubelet.run_pod(f"pod-{number}", 1)
    assert len(kubelet.wait_healthy(14)) == 14, "of 16384 MiB, 4 x 512 MiB are reserved"


def test_pods_have_the_thread_percentage_of_the_pool(node: Node, start_container: StartContainer) -> None:
    kubelet = node.start(f"{IN_UNITS}\n  thread_percentage: 40")
    kubelet.wait_healthy(16)
    pods = [kubelet.run_pod(name, units) for name, units in (("small", 1), ("large", 4))]
    for pod in pods:
        assert pod.answer.envs["YUNION_MPS_SM_PERCENT"] == "40"
        assert start_container(pod).environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert len(kubelet.wait_healthy(5)) == 5, "without threads, no more memory is of use"


def test_the_health_of_memory_follows_its_gpu(node: Node) -> None:
    kubelet = node.start(IN_UNITS)
    kubelet.wait_healthy(16)
    node.daemon.host.gpus[0].lose()
    eventually(lambda: node.daemon.polls() and not kubelet.healthy, "the loss of the memory")
    assert len(kubelet.health) == 16
    assert refused_start(kubelet, units_of("00:06.0", range(2)))
    node.daemon.host.gpus[0].restore()
    eventually(lambda: node.daemon.polls() and len(kubelet.healthy) == 16, "the memory")


def refused_start(kubelet: Kubelet, units: tuple[str, ...]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.permit(units)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def test_the_health_of_memory_follows_the_daemon(node: Node) -> None:
    kubelet = node.start(IN_UNITS)
    kubelet.wait_healthy(16)
    node.daemon.kill()
    kubelet.wait_healthy(0)
    node.daemon.start().wait_ready()
    kubelet.wait_healthy(16)


@TWO_GPUS
def test_one_plugin_offers_devices_and_memory(node: Node) -> None:
    kubelet = node.start(4, IN_UNITS)
    kubelet.wait_healthy(16)
    memory = kubelet.run_pod("memory", 2)
    kubelet.resource = RESOURCE
    kubelet.wait_healthy(4)
    device = kubelet.run_pod("device", 1)
    assert {lease["name"] for lease in leases_of(node.daemon)} == {
        lease_name(memory.resource, memory.devices),
        lease_name(device.resource, device.devices),
    }
    kubelet.restart()
    kubelet.wait_registered(4)
    kubelet.wait_healthy(4)
    kubelet.resource = MEMORY
    kubelet.wait_healthy(16)


@TWO_GPUS
def test_nothing_but_a_reserved_pool_is_offered_if_there_is_one(node: Node) -> None:
    kubelet = node.start(4, f"{IN_UNITS}\n  reserved_for: kubernetes")
    kubelet.wait_healthy(16)
    kubelet.run_pod("memory", 16)
    kubelet.resource = RESOURCE
    eventually(lambda: kubelet.lists, "the list of devices")
    assert kubelet.health == {}


def test_a_node_without_pools_does_not_register_memory(node: Node) -> None:
    kubelet = node.start(4)
    kubelet.resource = RESOURCE
    kubelet.wait_healthy(4)
    assert [one.resource_name for one in kubelet.registrations] == [RESOURCE]


def test_a_container_keeps_its_memory_if_the_unit_changes(node: Node) -> None:
    kubelet = node.start(IN_SMALL_UNITS)
    kubelet.wait_healthy(128)
    pod = kubelet.run_pod("trainer", 16)
    assert node.plugin.end(signal.SIGTERM) == 0
    restart(node.daemon)
    (lease,) = leases_of(node.daemon)
    assert node.daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    node.options.write_text("memoryUnit: 1GiB\n")
    node.plugin.start()
    kubelet.wait_healthy(16)
    kubelet.start_container(pod)
    (lease,) = leases_of(node.daemon)
    assert memory_of(lease) == [2048]


def test_a_pool_whose_unit_does_not_fit_says_so(node: Node) -> None:
    kubelet = node.start(IN_UNITS, options="memoryUnit: 128MiB\n")
    eventually(lambda: kubelet.health, "the list")
    assert kubelet.healthy == []
    why = "128 not: memoryUnit is not a multiple of the memory_unit of GPU 00:06.0"
    eventually(lambda: why in node.plugin.log, "the reason")


def test_memory_of_a_pod_that_is_gone_is_released(node: Node) -> None:
    kubelet = node.start(IN_UNITS)
    kubelet.wait_healthy(16)
    gone, there = kubelet.run_pod("gone", 10), kubelet.run_pod("there", 2)
    del kubelet.pods["gone"]
    pod = kubelet.admit("next", gone.devices[:9])
    kubelet.start_container(pod)  # the kubelet allocates the units again
    assert {lease["name"] for lease in leases_of(node.daemon)} == {
        lease_name(pod.resource, pod.devices),
        lease_name(there.resource, there.devices),
    }
    del kubelet.pods["next"]
    Reconciler(node.daemon.host).release_missing()
    assert [lease["name"] for lease in leases_of(node.daemon)] == [lease_name(there.resource, there.devices)]


def test_memory_is_released_after_a_label_has_chosen_another_configuration(node: Node) -> None:
    labels = node.options.with_name("labels")
    labels.write_text(f"{CONFIG_LABEL}=first\n")
    options = "configs: {first: {}, other: {preferred: spread}}\n"
    kubelet = node.start(IN_UNITS, options=options, arguments=["--node-labels", labels])
    kubelet.wait_healthy(16)
    gone = kubelet.run_pod("gone", 10)
    del kubelet.pods["gone"]
    kubelet.wait_registered(2)
    labels.write_text(f"{CONFIG_LABEL}=other\n")
    kubelet.wait_registered(4)
    kubelet.wait_healthy(16)
    pod = kubelet.admit("next", gone.devices[:9])
    kubelet.start_container(pod)
    assert [lease["name"] for lease in leases_of(node.daemon)] == [lease_name(pod.resource, pod.devices)]
