"""Pods on a node with a GPU of each kind: shared through MPS, time-sliced, and in MIG mode."""

from __future__ import annotations

import pytest

from cluster.node import Node
from cluster.objects import named, pod
from containers.containerd import Container
from containers.test_containerd_faults import assert_leased_to
from integration.daemon_host import eventually
from integration.device_nodes import nodes_in, nodes_of, nodes_of_instance, ready_daemon
from integration.lease_host import leases_of
from kubernetes.kubelet import INSTANCES, RESOURCE, TIME_SLICED
from simhost.gpu import MigDevice
from simhost.host import SHARED

__all__ = ["ready_daemon"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "h100", "count": 3}),
    pytest.mark.divided(2, SHARED, "mig: [3g.40gb, 1g.10gb, 1g.10gb]"),
]

SMALL = "yunion.io/mig-1g.10gb"
#: The pods of the examples, one of each kind.
CLAIMS = ("dra-one-device", "dra-time-sliced", "dra-mig-instance")


def assert_has_its_device_alone(node: Node, mps: Container, sliced: Container, instance: Container) -> None:
    """Each container has the device of its kind, and nothing of the others."""
    host = node.daemon.host
    assert mps.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].startswith("0=")
    assert "CUDA_MPS_PIPE_DIRECTORY" in mps.environment
    assert nodes_in(mps.root) == nodes_of(host.gpus[0])
    for one in (sliced, instance):
        assert not [name for name in one.environment if name.startswith("CUDA_MPS_")]
    assert sliced.environment["CUDA_VISIBLE_DEVICES"] == host.gpus[1].uuid
    assert sliced.environment["YUNION_MPS_MEMORY_MIB"] == str(host.gpus[1].description.memory_mib // 3)
    assert nodes_in(sliced.root) == nodes_of(host.gpus[1])
    used = instance_of(node, instance)
    assert instance.environment["YUNION_MPS_DEVICE"] == f"00:08.0-g{used.gpu_instance}"
    assert nodes_in(instance.root) == nodes_of_instance(host, host.gpus[2], used)


def instance_of(node: Node, container: Container) -> MigDevice:
    """The instance that CUDA would use in the container."""
    instances = {one.uuid: one for one in node.daemon.host.gpus[2].mig_devices()}
    return instances[container.environment["CUDA_VISIBLE_DEVICES"]]


def output_of(node: Node, *words: str) -> str:
    return node.daemon.host.run(["yunion-mps", *words], check=True).stdout


def assert_all_views_name(node: Node, *pods: str) -> None:
    for words in (["list"], ["who"]):
        shown = node.daemon.host.run(["yunion-mps", *words], check=True).stdout
        assert all(f"pod default/{pod}/main" in shown for pod in pods), shown


@pytest.mark.parametrize(("strategy", "instances", "number"), [("single", INSTANCES, 3), ("mixed", SMALL, 2)])
def test_pods_of_each_kind_have_their_device_until_they_end(
    node: Node, strategy: str, instances: str, number: int
) -> None:
    plugin = node.start_plugin(migStrategy=strategy)
    numbers = {RESOURCE: 2, TIME_SLICED: 3, instances: number}
    wait_allocatable(node, numbers)
    pods = {f"pod-{place}": resource for place, resource in enumerate(numbers)}
    containers = [node.run(pod(name, resource=resource)) for name, resource in pods.items()]
    assert_has_its_device_alone(node, *containers)
    assert_all_views_name(node, *pods)
    leases = leases_of(node.daemon)
    plugin.restart()
    wait_allocatable(node, numbers)
    assert_has_its_device_alone(node, *containers)
    assert_leased_to(node.daemon, *containers)
    assert leases_of(node.daemon) == leases
    for name in pods:
        node.delete(name)
    eventually(lambda: not leases_of(node.daemon), "the end of the leases")
    wait_allocatable(node, numbers)


def test_pods_of_each_kind_have_their_device_after_a_reboot(node: Node) -> None:
    node.start_plugin(migStrategy="mixed")
    numbers = {RESOURCE: 2, TIME_SLICED: 3, SMALL: 2}
    wait_allocatable(node, numbers)
    pods = {f"pod-{place}": resource for place, resource in enumerate(numbers)}
    before = [
        node.run(pod(name, resource=resource, restartPolicy="Always")) for name, resource in pods.items()
    ]
    old = instance_of(node, before[2])
    node.cut_power()
    node.boot()
    after = [node.wait_restarted(*each) for each in zip(pods, before)]
    new = instance_of(node, after[2])
    assert (new.profile, new.uuid != old.uuid) == (old.profile, True), "the reboot has ended the old one"
    assert_leased_to(node.daemon, *after)


def wait_allocatable(node: Node, numbers: dict[str, int]) -> None:
    for resource, number in numbers.items():
        node.wait_allocatable(number, resource)


def test_claims_of_each_kind_have_their_device_until_their_pods_end(node: Node) -> None:
    plugin = node.start_plugin(dra=True)
    node.wait_published(8)
    mps, sliced, instance = (node.run(node.create_example(name)) for name in CLAIMS)
    assert_has_its_device_alone(node, mps, sliced, instance)
    assert instance_of(node, instance).profile == "1g.10gb"
    assert_all_views_name(node, *CLAIMS)
    leases = leases_of(node.daemon)
    plugin.restart()
    node.wait_published(8)
    assert_has_its_device_alone(node, mps, sliced, instance)
    assert leases_of(node.daemon) == leases
    for name in CLAIMS:
        node.delete(name)
    eventually(lambda: not leases_of(node.daemon), "the end of the leases")
    assert "7 of 8" not in plugin.log, "none was unhealthy when its claim ended"


def test_claims_get_instances_by_profile_and_others_once_these_are_used(node: Node) -> None:
    node.start_plugin(dra=True)
    node.wait_published(8)
    small = node.create_example("dra-mig-instance")
    containers = [node.run(named(small, f"small-{number}")) for number in range(2)]
    assert {instance_of(node, one).profile for one in containers} == {"1g.10gb"}
    node.create(named(small, "small-2"))
    node.wait_pending("small-2", "cannot allocate all claims")
    either = node.create_example("dra-mig-or-share")
    assert instance_of(node, node.run(named(either, "instance"))).profile == "3g.40gb"
    assert "CUDA_MPS_PIPE_DIRECTORY" in node.run(named(either, "share")).environment
    used = instance_of(node, containers[0])
    node.delete("small-0")
    assert instance_of(node, node.wait_running("small-2")) == used


def test_a_pod_sees_why_its_claim_cannot_mix_mps_and_another_kind(node: Node) -> None:
    node.start_plugin(dra=True)
    node.wait_published(8)
    node.create(node.create_claim("trainer", "mps.yunion.io", "mig.yunion.io"))
    node.wait_pending("trainer", "a process uses MPS on all of its GPUs or on none")
    assert not leases_of(node.daemon)


def test_claims_of_each_kind_have_their_device_after_a_reboot(node: Node) -> None:
    node.start_plugin(dra=True)
    node.wait_published(8)
    pods = [node.create_example(name) for name in CLAIMS]
    for one in pods:
        one["spec"]["restartPolicy"] = "Always"
    before = [node.run(one) for one in pods]
    old = instance_of(node, before[2])
    node.cut_power()
    node.boot()
    _, sliced, instance = (node.wait_restarted(*each) for each in zip(CLAIMS, before))
    new = instance_of(node, instance)
    assert (new.profile, new.uuid != old.uuid) == (old.profile, True), "the reboot has ended the old one"
    assert sliced.environment["CUDA_VISIBLE_DEVICES"] == node.daemon.host.gpus[1].uuid
    assert_all_views_name(node, *CLAIMS)
