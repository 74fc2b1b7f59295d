"""Pods with devices on a node that is really rebooted, by systemd and with its real units."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster.booted import PLUGIN, BootedNode
from cluster.control_plane import ControlPlane
from cluster.objects import named, pod
from integration.daemon_host import PATIENCE_S, eventually
from packages.machine import Machine
from packages.versions import built

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def node(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedNode]:
    """A node whose plugin is a device plugin until a test makes it a DRA driver."""
    packages = built(tmp_path_factory.mktemp("packages"))
    with BootedNode(cluster, packages, tmp_path_factory.mktemp("image")) as node:
        node.wait_allocatable(4)
        yield node


def assert_leased_to(node: BootedNode, *containers: str) -> None:
    """Each container has a lease, no device has two, and nothing else is leased."""
    leases = node.leases()
    devices = [device for each in leases.values() for device in each]
    assert {node.lease_of(container) for container in containers} == leases.keys()
    assert len(containers) == len(leases) == len(devices) == len(set(devices))


@pytest.mark.parametrize("end", [Machine.power_off, Machine.cut_power])
def test_pods_run_again_with_devices_after_a_reboot(node: BootedNode, end: Callable[[Machine], None]) -> None:
    names = "first", "second"
    before = [node.run(pod(name)) for name in names]
    node.run(pod("deleted"))
    boot_id, leases = node.boot_id, node.leases()
    end(node.machine)
    node.delete("deleted", gracePeriodSeconds=0)
    node.machine.boot()
    after = [node.wait_restarted(name, container) for name, container in zip(names, before)]
    assert node.boot_id != boot_id
    assert_leased_to(node, *after)
    assert not node.leases().keys() & leases.keys()
    node.wait_allocatable(4)
    assert_leased_to(node, *after, *(node.run(pod(f"next-{number}")) for number in range(2)))
    for name in node.names():
        node.delete(name)


def test_pods_with_claims_run_again_after_a_reboot(node: BootedNode) -> None:
    """The lease of a claim is kept, unless the kubelet finds that its pod is gone."""
    node.configure_plugin(dra=True)
    node.machine.run("systemctl", "restart", PLUGIN)
    node.wait_published(4)
    trainer = node.create_example("dra-one-device")
    trainer["spec"]["restartPolicy"] = "Always"
    before, _ = (node.run(named(trainer, name)) for name in ("first", "deleted"))
    lease = node.lease_of(before)
    node.machine.cut_power()
    node.delete("deleted", gracePeriodSeconds=0)
    node.machine.boot()
    after = node.wait_restarted("first", before)
    assert node.lease_of(after) == lease
    eventually(lambda: len(node.leases()) == 1, "the end of the other lease", 3 * PATIENCE_S)
    assert_leased_to(node, after, node.run(named(trainer, "next")))
