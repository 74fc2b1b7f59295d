"""Pods with devices on a real cluster, by the device plugin."""

from __future__ import annotations

import pytest

from cluster.node import Node, pod
from kubernetes.test_containerd_faults import assert_leased_to

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


def test_four_pods_run_and_a_fifth_follows_the_first(node: Node) -> None:
    node.start_plugin()
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
