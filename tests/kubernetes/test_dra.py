"""The DRA driver between a kubelet, an API server and the real daemon on a simulated host."""

from __future__ import annotations

import json
import signal

import pytest
from yunion_mps.kubernetes.kubelet import dra_api as api
from yunion_mps.kubernetes.kubelet.protos.dra_health_pb2 import HEALTHY, UNHEALTHY

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leases_of, take
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import CLAIMS, NAMESPACE, SLICES, DraKubelet, DraPlugin, DriverInThread

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]
NAMES = [f"00-06-0-{slot}" for slot in range(4)]


def cdi_environment(daemon: Daemon, cdi: str) -> dict[str, str]:
    """What a container with this CDI device gets."""
    found = [
        device["containerEdits"]["env"]
        for file in (daemon.host.root / "run/cdi").iterdir()
        for device in json.loads(file.read_text())["devices"]
        if f"yunion.io/mps={device['name']}" == cdi
    ]
    assert len(found) == 1
    return dict(entry.partition("=")[::2] for entry in found[0])


def test_the_driver_registers_with_both_versions_and_publishes_devices(
    dra_kubelet: DraKubelet, driver_process: DraPlugin
) -> None:
    info = dra_kubelet.register()
    assert (info.type, info.name) == ("DRAPlugin", "mps.yunion.io")
    assert {"v1.DRAPlugin", "v1beta1.DRAPlugin"} <= set(info.supported_versions)
    devices = dra_kubelet.wait_published(4)
    assert [device["name"] for device in devices] == NAMES
    attributes, capacity = devices[1]["attributes"], devices[1]["capacity"]
    assert attributes["address"] == {"string": ADDRESSES[1]}
    assert attributes["architecture"] == {"string": "Volta"}
    assert attributes["cudaComputeCapability"] == {"version": "7.0.0"}
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0000:00:06.0"}
    assert attributes["mpsDomain"] == {"string": "host"}
    assert capacity == {"memory": {"value": "4Gi"}, "smPercentage": {"value": "25"}}
    (stored,) = dra_kubelet.cluster.of(SLICES)
    assert stored["metadata"]["ownerReferences"][0]["name"] == "node-1"


@pytest.mark.gpus({"kind": "v100", "count": 6, "virtual_number": 48})
def test_devices_that_are_read_in_pages_are_all_published(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    names = {device["name"] for device in dra_kubelet.wait_published(288)}
    assert names == {f"00-{gpu:02x}-0-{slot}" for gpu in range(6, 12) for slot in range(48)}
    take(ready_daemon, "devices=00:0b.0-47&holder.name=job&holder.ttl_s=600")
    assert names - {device["name"] for device in dra_kubelet.wait_published(287)} == {"00-0b-0-47"}


def test_a_claim_is_one_lease_from_prepare_to_unprepare(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[1]])
    cdi = dra_kubelet.prepared(claim)
    (lease,) = leases_of(ready_daemon)
    assert (lease["devices"], lease["expires"]) == ([ADDRESSES[1]], None)
    assert (lease["name"], lease["cdi"]) == (f"claim:default/trainer@{claim.uid}", cdi)
    environment = cdi_environment(ready_daemon, cdi)
    assert environment["YUNION_MPS_DEVICE"] == ADDRESSES[1]
    assert (environment["YUNION_MPS_MEMORY_MIB"], environment["YUNION_MPS_SM_PERCENT"]) == ("4096", "25")
    assert dra_kubelet.prepared(claim) == cdi, "prepared twice"
    assert [device["name"] for device in dra_kubelet.wait_published(4)] == NAMES, "ours has no taint"
    for _ in range(2):
        assert dra_kubelet.unprepare(claim) == []
        assert leases_of(ready_daemon) == []


def test_the_older_version_of_the_api_is_served(ready_daemon: Daemon, cluster: Cluster) -> None:
    host = ready_daemon.host
    with DraKubelet(host, cluster, "v1beta1") as kubelet, DriverInThread(host, cluster):
        kubelet.register()
        claim = kubelet.allocate("trainer", [NAMES[0]])
        assert kubelet.prepared(claim)
        assert kubelet.unprepare(claim) == []


def test_claims_are_prepared_and_refused_one_by_one(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    take(ready_daemon, f"holder.name=job&holder.ttl_s=600&devices={ADDRESSES[0]}")
    claims = [dra_kubelet.allocate(name, [device]) for name, device in (("a", NAMES[0]), ("b", NAMES[2]))]
    answers = dra_kubelet.prepare(*claims)
    assert "1 of 1 leased" in answers["a"].error
    assert answers["a"].error.endswith("[nothing_free]")
    assert answers["b"].error == ""
    assert dra_kubelet.unprepare(*claims) == []
    assert [lease["name"] for lease in leases_of(ready_daemon)] == ["job"]


def test_a_malformed_claim_does_not_hinder_the_others(
    dra_kubelet: DraKubelet, driver: DriverInThread, cluster: Cluster
) -> None:
    good, wrong = dra_kubelet.allocate("good", [NAMES[0]]), dra_kubelet.allocate("wrong", [NAMES[1]])
    stored = cluster.get(CLAIMS, "wrong", NAMESPACE)
    stored["status"]["allocation"]["devices"]["results"] = [{"driver": "mps.yunion.io"}]
    cluster.replace(CLAIMS, stored)
    answers = dra_kubelet.prepare(good, wrong)
    assert answers["good"].error == ""
    assert "results[0].device is missing" in answers["wrong"].error


def test_the_text_of_a_claim_has_no_control_characters(
    dra_kubelet: DraKubelet, driver: DriverInThread, cluster: Cluster
) -> None:
    """Who may write the claim's status chooses the name of the device, and an administrator reads it."""
    wrong = dra_kubelet.allocate("wrong", ["a\x1b[2J\n\u202e"])
    assert "there is no device a\\x1b[2J\\n\\u202e in the pool" in dra_kubelet.refused(wrong)


def test_parameters_for_the_driver_are_refused_rather_than_ignored(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    stored = cluster.get(CLAIMS, "trainer", NAMESPACE)
    opaque = {"driver": "mps.yunion.io", "parameters": {"memory": "1Mi"}}
    stored["status"]["allocation"]["devices"]["config"] = [{"source": "FromClaim", "opaque": opaque}]
    stored = cluster.replace(CLAIMS, stored)
    assert "parameters for mps.yunion.io, which takes none" in dra_kubelet.refused(claim)
    assert leases_of(ready_daemon) == []
    opaque = {**opaque, "driver": "gpu.example.com"}
    stored["status"]["allocation"]["devices"]["config"] = [{"source": "FromClaim", "opaque": opaque}]
    cluster.replace(CLAIMS, stored)
    assert dra_kubelet.prepared(claim), "they are for another driver"


def test_a_claim_that_cannot_be_prepared_is_refused(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    claim = dra_kubelet.allocate("trainer", [NAMES[0]])
    assert "replaced by another" in dra_kubelet.refused(claim._replace(uid="another"))
    assert "not found" in dra_kubelet.refused(claim._replace(name="missing"))
    unknown = dra_kubelet.allocate("unknown", ["00-99-0-0"])
    assert "there is no device 00-99-0-0" in dra_kubelet.refused(unknown)
    cluster.replace(CLAIMS, {"metadata": {"name": "trainer", "namespace": NAMESPACE}, "status": {}})
    assert "no devices are allocated" in dra_kubelet.refused(claim)
    assert leases_of(ready_daemon) == []


def test_lost_gpus_and_devices_that_others_lease_get_a_taint(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    take(ready_daemon, f"holder.name=job&holder.ttl_s=600&devices={ADDRESSES[3]}")
    dra_kubelet.wait_published(3)

    def taints() -> dict[str, str]:
        return {one["name"]: one["taints"][0]["key"] for one in dra_kubelet.devices() if "taints" in one}

    assert taints() == {NAMES[3]: "mps.yunion.io/leased"}
    health = dra_kubelet.watch_health(api.WATCH_HEALTH)
    eventually(lambda: health.health == dict.fromkeys(NAMES, HEALTHY), "the health")
    ready_daemon.host.gpus[0].lose()
    eventually(lambda: ready_daemon.polls() and len(taints()) == 4, "the taints")
    assert set(taints().values()) == {"mps.yunion.io/gpu_lost"}
    eventually(lambda: health.health == dict.fromkeys(NAMES, UNHEALTHY), "the health")
    ready_daemon.host.gpus[0].restore()
    eventually(lambda: ready_daemon.polls() and len(taints()) == 1, "the end of the taints")


@pytest.mark.gpus({"kind": "v100", "virtual_number": 48, "count": 3})
def test_devices_of_several_slices_are_one_generation(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, cluster: Cluster
) -> None:
    dra_kubelet.wait_published(144)
    assert len(cluster.of(SLICES)) == cluster.requests["POST"] == 3
    ready_daemon.host.gpus[0].lose()
    untainted = "devices without a taint"
    eventually(lambda: ready_daemon.polls() and len(dra_kubelet.untainted()) == 96, untainted)
    assert cluster.requests["PUT"] == 1, "the lost GPU is in one slice"
    health = dra_kubelet.watch_health(api.WATCH_HEALTH_ALPHA)
    eventually(lambda: len(health.health) == 144, "the health, in the older version")
    name = dra_kubelet.devices()[-1]["name"]
    assert dra_kubelet.prepared(dra_kubelet.allocate("trainer", [name]))


def test_the_slices_remain_when_the_driver_stops(dra_kubelet: DraKubelet, driver_process: DraPlugin) -> None:
    before = dra_kubelet.cluster.of(SLICES)
    assert driver_process.end(signal.SIGTERM) == 0
    driver_process.start()
    dra_kubelet.register()
    assert dra_kubelet.cluster.of(SLICES) == before
