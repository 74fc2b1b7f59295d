"""Pods on a real cluster when a part of it fails, and after that has recovered."""

from __future__ import annotations

import os
import signal

import pytest

from cluster.node import Node
from cluster.objects import pod
from containers.test_containerd_faults import assert_leased_to, is_recovered
from integration.daemon_host import eventually
from integration.lease_host import holders, leases_of
from kubernetes.kubelet import KubeletPlugin

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


@pytest.fixture
def plugin(node: Node) -> KubeletPlugin:
    plugin = node.start_plugin()
    node.wait_allocatable(4)
    return plugin


def wait_registered(plugin: KubeletPlugin, times: int) -> None:
    told = "registered yunion.io/mps with the kubelet"
    eventually(lambda: plugin.log.count(told) == times, f"{times} registrations", trouble=lambda: plugin.log)


def test_a_kubelet_restart_changes_no_pod(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.kubelet.restart()
    wait_registered(plugin, 2)
    node.wait_allocatable(4)
    assert_leased_to(node.daemon, container, node.run(pod("another")))


def test_a_pod_starts_if_the_plugin_is_killed_after_its_allocation(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.containerd.signal(signal.SIGSTOP)  # it creates the sandbox between Allocate and PreStartContainer
    node.create(pod("next"))
    eventually(lambda: "startTime" in node.pod("next")["status"], "Allocate")
    plugin.restart()
    wait_registered(plugin, 2)
    node.containerd.signal(signal.SIGCONT)
    assert_leased_to(node.daemon, container, node.wait_running("next"))


def test_a_pod_starts_if_the_plugin_is_killed_after_its_lease(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.create(pod("next"))
    eventually(lambda: len(leases_of(node.daemon)) == 2, "the lease")
    plugin.restart()
    wait_registered(plugin, 2)
    assert_leased_to(node.daemon, container, node.wait_running("next"))


def test_killing_the_daemon_does_not_affect_pods(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.daemon.kill()
    node.wait_allocatable(0)
    node.daemon.start().wait_ready()
    node.wait_allocatable(4)
    assert_leased_to(node.daemon, container, node.run(pod("another")))


def test_reexecuting_the_daemon_does_not_affect_pods(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.create(pod("next"))
    node.daemon.reexec()
    assert_leased_to(node.daemon, container, node.wait_running("next"))


def test_pods_wait_for_a_daemon_that_is_stopped(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    assert node.daemon.stop() == 0
    node.wait_allocatable(0)
    node.create(pod("next"))
    node.wait_pending("next", "Insufficient yunion.io/mps")
    assert container.is_running
    node.daemon.start().wait_ready()
    assert_leased_to(node.daemon, container, node.wait_running("next"))


def test_a_container_waits_for_a_daemon_that_is_stopped(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    assert node.daemon.stop() == 0
    node.wait_allocatable(0)
    os.kill(container.pid, signal.SIGKILL)
    node.wait_pending("trainer", "the daemon is not running")
    node.daemon.start().wait_ready()
    assert_leased_to(node.daemon, node.wait_restarted("trainer", container))


def test_killing_the_control_daemon_ends_no_pod(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    os.kill(node.daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: is_recovered(node.daemon), "a control daemon that serves")
    eventually(lambda: is_admitted(node, "another"), "a pod that the kubelet admits")
    assert_leased_to(node.daemon, container, node.wait_running("another"))


def is_admitted(node: Node, name: str) -> bool:
    """Create a pod; delete it if the kubelet refuses it: it may not know yet that devices are healthy."""
    node.create(pod(name))
    eventually(lambda: node.phase(name) != "Pending", f"the kubelet's decision about pod {name}")
    if node.phase(name) == "Failed":
        node.delete(name)
        return False
    return True


def test_a_lost_gpu_ends_no_pod_and_gets_no_new_ones(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.daemon.host.gpus[0].lose()
    eventually(lambda: node.daemon.polls() and node.allocatable() == 0, "the loss of the devices")
    node.create(pod("next"))
    node.wait_pending("next", "Insufficient yunion.io/mps")
    assert container.is_running
    node.daemon.host.gpus[0].restore()
    eventually(lambda: node.daemon.polls() and node.allocatable() == 4, "the devices")
    assert_leased_to(node.daemon, container, node.wait_running("next"))


def test_a_restart_of_containerd_ends_no_pod(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.containerd.restart()
    assert_leased_to(node.daemon, container, node.run(pod("another")))


def test_pods_lease_again_after_the_node_has_restarted(node: Node, plugin: KubeletPlugin) -> None:
    before = [node.run(pod(name)) for name in ("first", "second")]
    node.cut_power()
    node.boot()
    after = [node.wait_restarted(name, container) for name, container in zip(("first", "second"), before)]
    assert_leased_to(node.daemon, *after)


def test_containers_start_again_while_the_api_server_is_down(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    node.cluster.api_server.kill()
    try:
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: holders(node.daemon) - {None, container.pid}, "the next container")
    finally:
        node.cluster.start_api_server()
    after = node.wait_restarted("trainer", container)
    assert_leased_to(node.daemon, after, node.run(pod("another")))


def test_a_pod_deleted_by_force_without_the_plugin_leaves_no_lease(node: Node, plugin: KubeletPlugin) -> None:
    stays, _ = (node.run(pod(name)) for name in ("stays", "deleted"))
    plugin.end()
    node.delete("deleted", gracePeriodSeconds=0)
    eventually(lambda: len(leases_of(node.daemon)) == 1, "the end of the lease")
    plugin.start()
    wait_registered(plugin, 2)
    node.wait_allocatable(4)
    assert_leased_to(node.daemon, stays, *(node.run(pod(f"next-{number}")) for number in range(3)))


def test_removed_sockets_are_created_again(node: Node, plugin: KubeletPlugin) -> None:
    container = node.run(pod("trainer"))
    plugin.socket.unlink()
    wait_registered(plugin, 2)
    node.wait_allocatable(4)
    assert_leased_to(node.daemon, container, node.run(pod("another")))
