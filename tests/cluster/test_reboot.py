"""Pods with devices on a node that is really rebooted, by systemd and with its real units."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster.booted import BootedNode
from cluster.control_plane import ControlPlane
from cluster.objects import pod
from packages.machine import Machine
from packages.versions import built

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def node(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedNode]:
    packages = built(tmp_path_factory.mktemp("packages"))
    with BootedNode(cluster, packages, tmp_path_factory.mktemp("image")) as node:
        node.wait_allocatable(4)
        yield node


def boot_id(node: BootedNode) -> str:
    return node.machine.run("cat", "/proc/sys/kernel/random/boot_id").stdout


def assert_leased_to(node: BootedNode, *containers: str) -> None:
    """Each container has a lease, and there are no others."""
    leases = node.leases()
    assert sorted(lease["container_id"] for lease in leases) == sorted(containers)
    devices = [device for lease in leases for device in lease["devices"]]
    assert len(set(devices)) == len(devices)


@pytest.mark.parametrize("end", [Machine.power_off, Machine.cut_power])
def test_pods_run_again_with_their_devices_after_a_reboot(
    node: BootedNode, end: Callable[[Machine], None]
) -> None:
    names = "first", "second"
    before = [node.run(pod(name)) for name in names]
    node.run(pod("deleted"))
    boot, leases = boot_id(node), {lease["id"] for lease in node.leases()}
    end(node.machine)
    node.delete("deleted", gracePeriodSeconds=0)
    node.machine.boot()
    after = [node.wait_restarted(name, container) for name, container in zip(names, before)]
    assert boot_id(node) != boot
    assert_leased_to(node, *after)
    assert not leases & {lease["id"] for lease in node.leases()}
    node.wait_allocatable(4)
    assert_leased_to(node, *after, *(node.run(pod(f"next-{number}")) for number in range(2)))
    for name in node.names():
        node.delete(name)
