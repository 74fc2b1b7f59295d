"""How devices are divided into ResourceSlices, and which of them are written when something changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from yunion_mps.kubernetes.api.credentials import Kubeconfig
from yunion_mps.kubernetes.api.server import ApiServer, Backoff
from yunion_mps.kubernetes.dra.slice_devices import OfferedDevice, offered_devices
from yunion_mps.kubernetes.dra.slices import SLICES as SLICES_RESOURCE
from yunion_mps.kubernetes.dra.slices import (
    ResourceSlice,
    SlicePublisher,
    plan_writes,
    slice_name,
    slices_of,
)
from yunion_mps.kubernetes.metrics import API_SERVER, Counts

from integration.daemon_host import eventually
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import NODE, SLICES, add_node
from kubernetes.grpc_peers import Loop
from kubernetes.offered_devices import facts, pool, shares
from kubernetes.slice_rules import wrong_with

#: The nodes of a cluster: enough that a write too many, or one too few, of each would show.
NODE_COUNT = 16
LOST = {"state": "unavailable", "reason_code": "gpu_lost", "reason": "the GPU is lost"}


def published_slices(offered: list[OfferedDevice], generation: int = 1) -> dict[str, ResourceSlice]:
    """The slices of these devices, as an API server has them."""
    found: dict[str, ResourceSlice] = {}
    for one in (write.build() for write in plan_writes({}, slices_of(offered), NODE, None).stored):
        one["spec"]["pool"] = {**one["spec"]["pool"], "generation": generation}
        one["metadata"]["resourceVersion"], one["metadata"]["uid"] = "7", one["metadata"]["name"]
        for device in one["spec"]["devices"]:
            for taint in device.get("taints", ()):
                taint["timeAdded"] = "2026-11-23T12:00:00Z"
        found[one["metadata"]["name"]] = SLICES_RESOURCE.read(one)
    return found


@pytest.mark.parametrize(
    ("gpus", "each", "sizes"),
    [
        (1, 4, [4]),
        (0, 0, [0]),
        (8, 4, [32]),
        (64, 48, [48] * 64),
        (9, 7, [63]),
        (10, 7, [63, 7]),
        (1, 100, [64, 36]),
    ],
)
def test_a_slice_has_whole_gpus_and_at_most_64_devices(gpus: int, each: int, sizes: list[int]) -> None:
    offered = shares(gpus, each) if gpus else []
    assert [len(one) for one in slices_of(offered)] == sizes


def test_every_slice_obeys_the_api_s_rules() -> None:
    pools = offered_devices(
        facts(
            pools=[
                pool(6, memory_reserve_mib=300),
                pool(7),
                pool(8, memory_unit_mib=16384),
                pool(9, memory_unit_mib=1024, memory_mib=1024, memory_reserve_mib=300),
            ]
        )
    )
    for offered in (shares(64, 48, **LOST), pools):
        writes = plan_writes({}, slices_of(offered), NODE, None)
        wrong = [wrong_with(cast("dict[str, Any]", one.build())) for one in writes.stored]
        assert wrong == [""] * len(writes.stored)


def test_slices_that_are_up_to_date_are_not_written() -> None:
    offered = shares(20, 8, **LOST)
    assert plan_writes(published_slices(offered), slices_of(offered), NODE, None) == ([], [])


def test_a_change_of_one_slice_keeps_the_generation() -> None:
    existing = published_slices(shares(20, 8), generation=5)
    writes = plan_writes(existing, slices_of(shares(20, 8, **LOST)), NODE, None)
    one = writes.stored[0].build()
    assert len(writes.stored) == 1
    assert one["metadata"] == {"name": slice_name(NODE, 0), "resourceVersion": "7"}
    assert one["spec"]["pool"] == {"name": NODE, "generation": 5, "resourceSliceCount": 3}
    assert one["spec"]["devices"][0]["taints"] == [{"key": "mps.yunion.io/gpu_lost", "effect": "NoSchedule"}]


def test_a_change_of_several_slices_is_a_new_generation_of_all() -> None:
    existing = published_slices(shares(20, 8), generation=5)
    for gpus, number, deleted in ((30, 4, 0), (10, 2, 1)):
        writes = plan_writes(existing, slices_of(shares(gpus, 8)), NODE, None)
        assert len(writes.stored) == number
        assert {one.pool["generation"] for one in writes.stored} == {6}
        assert len(writes.deleted) == deleted


def test_a_half_written_generation_is_replaced_by_the_next() -> None:
    offered = shares(20, 8)
    existing = published_slices(offered, generation=5)
    existing[slice_name(NODE, 1)]["spec"]["pool"]["generation"] = 6
    writes = plan_writes(existing, slices_of(offered), NODE, None)
    assert [one.pool["generation"] for one in writes.stored] == [7, 7, 7]


def test_without_taints_unusable_devices_are_left_out() -> None:
    (devices,) = slices_of(shares(1, 4, **LOST), with_taints=False)
    assert len(devices) == 3


def test_the_devices_of_stored_slices_are_not_kept() -> None:
    """Those of a node with 64 GPUs take 30 MiB."""
    few, lost = published_slices(shares(1, 4)), published_slices(shares(1, 4, **LOST))
    name = slice_name(NODE, 0)
    assert few[name]["spec"]["devices"] == []
    assert (few[name]["stored"].have_taints, lost[name]["stored"].have_taints) == (False, True)
    assert few[name]["stored"].digest != lost[name]["stored"].digest


def test_the_name_of_a_long_node_is_shortened() -> None:
    names = [slice_name(node, 12) for node in ("a" * 253, "a" * 252 + "b", "node")]
    assert [len(name) for name in names] == [253, 253, 21]
    assert len(set(names)) == 3


# -- with an API server


class Node:
    """A publisher; its clock is `pause`, which a turn waits for unless a device's health has changed."""

    def __init__(self, loop: Loop, cluster: Cluster, kubeconfig: Path, name: str = NODE) -> None:
        self._loop = loop
        self.waits = 0
        self._turns = loop.run(_semaphore())
        server = ApiServer(Kubeconfig(str(kubeconfig)))
        self.counts = Counts()
        self._publisher = SlicePublisher(server, name, self.counts, 3600.0, Backoff(0.01, 0.02), self._sleep)
        self._cluster, self._name = cluster, name
        loop.call(lambda: asyncio.ensure_future(self._publisher.run()))

    async def _sleep(self, delay_s: float) -> None:
        if delay_s > 1:  # not a backoff
            self.waits += 1
            await self._turns.acquire()

    def offer(self, offered: list[OfferedDevice]) -> None:
        self._loop.call(lambda: self._publisher.offer(offered))

    def pass_interval(self) -> None:
        self._loop.call(self._turns.release)

    def eventually(self, look: Callable[[], bool], what: str) -> None:
        """Let intervals pass until that is true."""

        def passed() -> bool:
            self.pass_interval()
            return look()

        eventually(passed, what)

    @property
    def slices(self) -> list[dict[str, Any]]:
        return [one for one in self._cluster.of(SLICES) if one["spec"]["nodeName"] == self._name]

    def devices(self) -> int:
        return sum(len(one["spec"]["devices"]) for one in self.slices)

    def taints(self) -> int:
        return sum("taints" in device for one in self.slices for device in one["spec"]["devices"])


async def _semaphore() -> asyncio.Semaphore:
    return asyncio.Semaphore(0)


@pytest.fixture
def node(loop: Loop, cluster: Cluster, tmp_path: Path) -> Node:
    add_node(cluster)
    return Node(loop, cluster, cluster.write_kubeconfig(tmp_path / "kubeconfig"))


def test_changes_are_written_together_after_an_interval(cluster: Cluster, node: Node) -> None:
    node.offer(shares(2, 4))
    eventually(lambda: node.devices() == 8 and node.waits, "the first slices, and a turn that waits")
    for each in (5, 6, 7, 8):
        node.offer(shares(2, each))
    assert (node.devices(), cluster.requests["PUT"]) == (8, 0)
    node.pass_interval()
    eventually(lambda: node.devices() == 16, "the change")
    assert cluster.requests["PUT"] == 1


def test_a_change_of_health_is_written_at_once(cluster: Cluster, node: Node) -> None:
    node.offer(shares(2, 4))
    eventually(lambda: node.devices() == 8 and node.waits, "the first slices, and a turn that waits")
    node.offer(shares(2, 4, **LOST))
    eventually(lambda: node.taints() == 1, "the taint")
    node.offer(shares(2, 4))
    eventually(lambda: node.taints() == 0, "its end")


def test_slices_that_are_deleted_or_changed_by_others_are_restored(cluster: Cluster, node: Node) -> None:
    node.offer(shares(2, 4))
    eventually(lambda: node.devices() == 8, "the slices")
    cluster.remove(SLICES, slice_name(NODE, 0))
    node.eventually(lambda: node.devices() == 8, "the slices again")
    (one,) = node.slices
    cluster.replace(SLICES, {**one, "spec": {**one["spec"], "devices": []}})
    node.eventually(lambda: node.devices() == 8, "its devices again")


def test_a_write_that_the_api_server_refuses_is_retried(cluster: Cluster, node: Node) -> None:
    cluster.refusals = {"POST": [500, 403, 429], "PUT": [409, 404, 500]}
    node.offer(shares(2, 4))
    eventually(lambda: node.devices() == 8, "the slices")
    node.offer(shares(2, 4, **LOST))
    eventually(lambda: node.taints() == 1, "the taint")
    assert cluster.refusals == {"POST": [], "PUT": []}


def test_an_outage_of_the_api_server_delays_only_the_slices(cluster: Cluster, node: Node) -> None:
    node.offer(shares(2, 4))
    eventually(lambda: node.devices() == 8, "the slices")
    cluster.stop()
    node.offer(shares(2, 4, **LOST))
    eventually(lambda: node.counts.errors[API_SERVER], "a failure")
    cluster.start()
    eventually(lambda: node.taints() == 1, "the taint")


def test_without_taints_unusable_devices_are_left_out_once(cluster: Cluster, node: Node) -> None:
    """The API server drops members of features that are not enabled."""
    cluster.dropped = {"taints"}
    node.offer(shares(2, 4, **LOST))
    eventually(lambda: node.devices() == 7, "the slices")
    eventually(lambda: node.waits, "a turn that waits")
    writes = cluster.requests["PUT"]
    node.offer(shares(2, 4))
    node.eventually(lambda: node.devices() == 8, "the device")
    assert cluster.requests["PUT"] == writes + 1, "what was dropped is not sent again"


def test_slices_are_published_before_the_node_object_exists(
    loop: Loop, cluster: Cluster, tmp_path: Path
) -> None:
    node = Node(loop, cluster, cluster.write_kubeconfig(tmp_path / "kubeconfig"))
    node.offer(shares(1, 4))
    eventually(lambda: node.devices() == 4, "the slices")
    assert "ownerReferences" not in node.slices[0]["metadata"]


def test_nodes_of_a_cluster_write_each_change_once(loop: Loop, cluster: Cluster, tmp_path: Path) -> None:
    """On all nodes, each with 8 GPUs, a GPU is lost at the same time; then all plugins restart at once."""
    kubeconfig = cluster.write_kubeconfig(tmp_path / "kubeconfig")
    healthy, lost = shares(8, 4), shares(8, 4, **LOST)
    nodes: list[Node] = []
    for number in range(NODE_COUNT):
        add_node(cluster, f"node-{number}")
        nodes.append(Node(loop, cluster, kubeconfig, f"node-{number}"))
        nodes[-1].offer(healthy)
    eventually(
        lambda: len(cluster.of(SLICES)) == NODE_COUNT and all(node.waits for node in nodes), "all slices"
    )
    assert (cluster.requests["POST"], cluster.requests["PUT"]) == (NODE_COUNT, 0)
    for node in nodes:
        node.offer(lost)
    eventually(lambda: cluster.requests["PUT"] == NODE_COUNT, "all taints")
    before = cluster.requests["GET"]
    again = [Node(loop, cluster, kubeconfig, f"node-{number}") for number in range(NODE_COUNT)]
    for node in again:
        node.offer(lost)
    eventually(
        lambda: cluster.requests["GET"] >= before + 2 * NODE_COUNT,
        "a list and a watch of each restarted node",
    )
    assert (cluster.requests["POST"], cluster.requests["PUT"]) == (NODE_COUNT, NODE_COUNT)
