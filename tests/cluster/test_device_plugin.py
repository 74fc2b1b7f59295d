"""Pods with devices on a real cluster, by the device plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control_plane import NODE, ControlPlane
from cluster.node import Node
from cluster.objects import pod
from containers.image import make_image
from containers.test_containerd_faults import assert_leased_to
from integration.daemon_host import Daemon, eventually, is_running
from integration.lease_host import leases_of
from kubernetes.kubelet import MEMORY
from simhost import SimHost
from simhost.host import IN_UNITS
from simhost.mps import StandIns

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


@pytest.fixture
def jobs(host: SimHost, image_folder: Path) -> Iterator[StandIns]:
    make_image(image_folder, host)  # of NVIDIA's programs, before scripts are in their place
    with StandIns(host) as jobs:
        yield jobs


def test_four_pods_run_and_a_fifth_follows_the_first(node: Node) -> None:
    plugin = node.start_plugin()
    node.wait_allocatable(4)
    names = [f"trainer-{number}" for number in range(5)]
    for name in names[:4]:
        node.create(pod(name))
    containers = [node.wait_running(name) for name in names[:4]]
    assert_leased_to(node.daemon, *containers)
    node.create(pod(names[4]))
    node.wait_pending(names[4], "Insufficient yunion.io/mps")
    node.delete(names[0])
    assert_leased_to(node.daemon, *containers[1:], node.wait_running(names[4]))
    assert "3 of 4 devices" not in plugin.log, "none was unhealthy when its container ended"


def test_of_two_pods_that_race_for_the_last_device_one_runs(node: Node) -> None:
    node.start_plugin()
    node.wait_allocatable(4)
    containers = [node.run(pod(f"other-{number}")) for number in range(3)]
    racing = {"first", "second"}
    for name in racing:
        node.create(pod(name, nodeName=NODE))  # without the scheduler, which would let one wait
    eventually(lambda: {node.phase(name) for name in racing} == {"Running", "Failed"}, "the end of the race")
    (winner,) = (name for name in racing if node.phase(name) == "Running")
    (loser,) = racing - {winner}
    assert "UnexpectedAdmissionError" in node.why(loser)
    assert_leased_to(node.daemon, *containers, node.wait_running(winner))


def test_units_of_memory_become_a_device_of_the_pod(node: Node) -> None:
    node.daemon.host.divide(IN_UNITS)
    assert node.daemon.ask("POST", "/v1/reload")[0] == 200
    node.start_plugin()
    node.wait_allocatable(16, MEMORY)
    container = node.run(pod("trainer", 6, resource=MEMORY))
    (lease,) = leases_of(node.daemon)
    assert ([one["memory_mib"] for one in lease["budgets"]], lease["pid"]) == ([6144], container.pid)
    node.create(pod("large", 11, resource=MEMORY))
    node.wait_pending("large", "Insufficient yunion.io/mps-memory")
    assert container.is_running


def test_a_label_of_the_node_chooses_the_configuration(node: Node) -> None:
    other = "example.com/gpu-share"
    node.start_plugin(configs={"default": {}, "other": {"resource": other}})
    node.wait_allocatable(4)
    container = node.run(pod("trainer"))
    node.label(**{"nvidia.com/device-plugin.config": "other"})
    node.wait_allocatable(3, other)  # the pod has the fourth
    node.wait_allocatable(0)
    others = [node.run(pod(f"other-{number}", resource=other)) for number in range(3)]
    assert_leased_to(node.daemon, container, *others)
    node.delete("trainer")
    node.wait_allocatable(4, other)


def test_the_clients_of_a_deleted_pod_end_before_it_is_killed(jobs: StandIns, node: Node) -> None:
    plugin = node.start_plugin()
    node.wait_allocatable(4)
    client, _ = made = [jobs.attached(node.daemon.pipe_directory) for _ in range(2)]
    containers = []
    for name, one in zip(("deleted", "neighbour"), made):
        containers.append(node.run(pod(name, terminationGracePeriodSeconds=8)))
        node.move(one.pid, containers[-1])
    node.delete("deleted", wait=False)
    assert client.says() == "terminated"
    assert containers[0].is_running, "the grace period has not ended"
    eventually(lambda: "pod default/deleted: terminated PID" in plugin.log, "the message in the log")
    node.wait_gone("deleted")
    assert_leased_to(node.daemon, containers[1])
    assert is_running(made[1].pid)
    assert len(jobs.servers()) == 1


@pytest.mark.gpus({"kind": "v100", "count": 64, "virtual_number": 48})
def test_a_node_can_have_3072_devices(cluster: ControlPlane, daemon: Daemon, image_folder: Path) -> None:
    daemon.configure(cuda_mps_scope="gpu")
    daemon.start().wait_ready()
    with Node(cluster, daemon, make_image(image_folder, daemon.host)) as node:
        node.start_plugin()
        node.wait_allocatable(3072)
        containers = [node.run(pod(f"trainer-{number}")) for number in range(2)]
        daemon.host.gpus[63].lose()
        eventually(lambda: daemon.polls(gpu=63) and node.allocatable() == 3024, "the loss of 48 devices")
        assert_leased_to(daemon, *containers)
