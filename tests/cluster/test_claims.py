"""Pods with resource claims on a real cluster, by the DRA driver, with and without faults."""

from __future__ import annotations

import os
import signal

import pytest
from yunion_mps.kubernetes.selection import CONFIG_LABEL

from cluster.control_plane import ApiError, Object
from cluster.node import Node
from cluster.objects import named, pod
from containers.containerd import Container
from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of, take
from kubernetes.kubelet import KubeletPlugin
from simhost.host import IN_UNITS

#: The Kubernetes, 1.x, that is known to do what a test needs, unlike 1.34.
LATER = 36

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


@pytest.fixture
def driver(node: Node) -> KubeletPlugin:
    driver = node.start_plugin(dra=True)
    node.wait_published(4)
    return driver


def assert_leased_to(daemon: Daemon, *containers: Container) -> None:
    """These containers run, each has a lease of its own, no device has two, and nothing else is leased."""
    assert all(container.is_running for container in containers)
    leases = {lease["id"] for lease in leases_of(daemon)}
    assert leases == {container.environment["YUNION_MPS_LEASE"] for container in containers}
    devices = [device for lease in leases_of(daemon) for device in lease["devices"]]
    assert len(leases) == len(containers) == len(devices) == len(set(devices))


def test_four_claims_are_prepared_and_a_fifth_follows_the_first(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    containers = [node.run(named(trainer, f"trainer-{number}")) for number in range(4)]
    assert_leased_to(node.daemon, *containers)
    node.create(named(trainer, "trainer-4"))
    node.wait_pending("trainer-4", "cannot allocate all claims")
    node.delete("trainer-0")
    assert_leased_to(node.daemon, *containers[1:], node.wait_running("trainer-4"))
    assert "3 of 4 devices" not in driver.log, "none was unhealthy when its claim ended"


def test_two_containers_share_a_claim_until_their_pod_ends(node: Node, driver: KubeletPlugin) -> None:
    shared = node.create_example("dra-shared-claim")
    node.create(shared)
    containers = node.wait_all_running(shared["metadata"]["name"])
    (lease,) = leases_of(node.daemon)
    assert [one.environment["YUNION_MPS_LEASE"] for one in containers] == [lease["id"]] * 2
    node.delete(shared["metadata"]["name"])
    eventually(lambda: not leases_of(node.daemon), "the end of the lease")


def test_claims_consume_the_memory_of_a_pool(node: Node) -> None:
    node.daemon.host.divide(IN_UNITS)
    assert node.daemon.ask("POST", "/v1/reload")[0] == 200
    node.start_plugin(dra=True)
    node.wait_published(1)
    trainer = node.create_example("dra-memory")
    job = take(node.daemon, "holder.name=job&holder.ttl_s=0&memory_mib=6144")["id"]
    eventually(
        lambda: node.devices()[0]["capacity"]["memory"]["value"] == "10Gi", "the memory that the job leaves"
    )
    containers = [node.run(named(trainer, "first"))]
    node.create(named(trainer, "second"))
    node.wait_pending("second", "cannot allocate all claims")
    node.daemon.ask("DELETE", f"/v1/leases/{job}")
    containers.append(node.wait_running("second"))
    assert [one.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for one in containers] == ["0=6144M"] * 2
    node.create(named(trainer, "third"))  # of 16 GiB
    node.wait_pending("third", "cannot allocate all claims")
    node.delete("first")
    assert_leased_to(node.daemon, containers[1], node.wait_running("third"))


def test_claims_consume_the_threads_of_a_pool(node: Node) -> None:
    node.daemon.host.divide(f"{IN_UNITS}\n  thread_percentage: 25")
    assert node.daemon.ask("POST", "/v1/reload")[0] == 200
    node.start_plugin(dra=True)
    node.wait_published(1)
    by_default = node.create_example("dra-memory")
    named_threads = node.create_example("dra-memory-and-threads")
    job = take(node.daemon, "holder.name=job&holder.ttl_s=0&memory_mib=1024&thread_percentage=30")["id"]
    eventually(
        lambda: node.devices()[0]["capacity"]["smPercentage"]["value"] == "70", "the threads that are left"
    )
    containers = [node.run(named(named_threads, "half"))]
    node.create(named(by_default, "quarter"))
    node.wait_pending("quarter", "cannot allocate all claims")
    node.daemon.ask("DELETE", f"/v1/leases/{job}")
    containers.append(node.wait_running("quarter"))
    percentages = [one.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in containers]
    assert percentages == ["50", "25"]
    assert_leased_to(node.daemon, *containers)


def test_two_shares_are_scheduled_only_where_they_can_be_combined(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-two-shares")
    node.create(named(trainer, "trainer"))
    node.wait_pending("trainer", "cannot allocate all claims")
    node.daemon.configure(cuda_mps_combine=2)
    assert node.daemon.ask("POST", "/v1/reload")[0] == 200
    driver.restart()  # it would notice within a minute
    assert node.wait_running("trainer").environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"


@pytest.mark.gpus(
    {"kind": "v100", "virtual_number": 1}, {"kind": "a100", "virtual_number": 1}, {"kind": "a100"}
)
def test_a_claim_gets_a_large_share_of_a_new_gpu(node: Node) -> None:
    node.start_plugin(dra=True)
    node.wait_published(6)
    trainer = node.create_example("dra-ampere-20gi")
    assert node.run(named(trainer, "trainer")).environment["YUNION_MPS_DEVICE"] == "00:07.0-0"
    node.create(named(trainer, "another"))
    node.wait_pending("another", "cannot allocate all claims")


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_claim_gets_shares_of_two_gpus(node: Node) -> None:
    if node.cluster.minor_version < LATER:
        pytest.skip("the scheduler of Kubernetes 1.34 ignores distinctAttribute")
    node.start_plugin(dra=True)
    node.wait_published(8)
    environment = node.run(named(node.create_example("dra-two-gpus"), "trainer")).environment
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M,1=4096M"
    (lease,) = leases_of(node.daemon)
    assert lease["gpus"] == ["00:06.0", "00:07.0"]


def test_a_pod_with_a_claim_ends_after_its_node_is_turned_off(node: Node) -> None:
    node.label(gpus="on")
    node.start_plugin(dra=True, onlyWithNodeLabel="gpus=on")
    node.wait_published(4)
    trainer = node.create_example("dra-one-device")
    containers = [node.run(named(trainer, name)) for name in ("first", "second")]
    node.label(gpus="off")
    eventually(lambda: not node.devices(), "the end of the devices")
    node.create(named(trainer, "third"))
    node.wait_pending("third", "cannot allocate all claims")
    node.delete("first")
    assert_leased_to(node.daemon, containers[1])
    node.label(gpus="on")
    assert_leased_to(node.daemon, containers[1], node.wait_running("third"))


def test_a_pod_with_a_claim_ends_beside_the_device_plugin(node: Node) -> None:
    node.label(**{CONFIG_LABEL: "claims"})
    node.start_plugin(configs={"claims": {"dra": True}, "plugin": {}})
    node.wait_published(4)
    node.run(named(node.create_example("dra-one-device"), "first"))
    node.label(**{CONFIG_LABEL: "plugin"})
    node.wait_allocatable(3)
    node.run(pod("second"))
    node.delete("first")
    node.wait_allocatable(4)
    assert len(leases_of(node.daemon)) == 1


def test_a_pod_sees_why_its_claim_waits_for_the_daemon(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    driver.end()
    node.create(named(trainer, "trainer"))
    node.wait_pending("trainer", "Failed to prepare dynamic resources")
    assert node.daemon.stop() == 0
    driver.start()
    node.wait_pending("trainer", "start it: systemctl start yunion-mps-daemon")
    eventually(lambda: not node.devices(), "the end of the devices")
    node.daemon.start().wait_ready()
    assert_leased_to(node.daemon, node.wait_running("trainer"))


def test_a_claim_of_a_pod_deleted_by_force_ends_with_the_next_driver(
    node: Node, driver: KubeletPlugin
) -> None:
    trainer = node.create_example("dra-one-device")
    node.run(named(trainer, "deleted"))
    driver.end()
    node.delete("deleted", gracePeriodSeconds=0)
    assert len(leases_of(node.daemon)) == 1
    driver.start()
    eventually(lambda: not leases_of(node.daemon), "the end of the lease")
    assert_leased_to(node.daemon, *(node.run(named(trainer, f"next-{number}")) for number in range(4)))


def test_the_status_of_a_pod_has_the_health_of_its_device(node: Node, driver: KubeletPlugin) -> None:
    if node.cluster.minor_version < LATER:
        pytest.skip("the kubelet of Kubernetes 1.34 watches the health, but does not write it to the status")
    node.run(named(node.create_example("dra-one-device"), "trainer"))

    def health() -> Object:
        (container,) = node.pod("trainer")["status"]["containerStatuses"]
        resources = [
            one for each in container.get("allocatedResourcesStatus", ()) for one in each["resources"]
        ]
        return dict(resources[0]) if resources else {}

    eventually(lambda: health().get("health") == "Healthy", "the health")
    node.daemon.host.gpus[0].lose()
    eventually(lambda: node.daemon.polls() and health()["health"] == "Unhealthy", "the loss")
    assert "lost" in health()["message"]


def test_claims_are_kept_whichever_program_is_killed(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    containers = [node.run(named(trainer, "first"))]
    for number, restart in enumerate((driver.restart, node.kubelet.restart, node.containerd.restart)):
        node.create(named(trainer, f"next-{number}"))
        restart()
        containers.append(node.wait_running(f"next-{number}"))
        assert_leased_to(node.daemon, *containers)
    node.daemon.kill()
    node.wait_published(0)
    node.daemon.start().wait_ready()
    node.wait_published(4)
    os.kill(node.daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: node.daemon.status()["domains"][0]["restarts"] == 1, "the next control daemon")
    assert_leased_to(node.daemon, *containers)


def test_a_claim_is_prepared_when_the_driver_is_back(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    container = node.run(named(trainer, "first"))
    driver.end()
    node.create(named(trainer, "second"))
    node.wait_pending("second", "Failed to prepare dynamic resources")
    node.delete("first", wait=False)
    eventually(lambda: not container.is_running, "the end of the container")
    assert len(leases_of(node.daemon)) == 1, "it is unprepared by the next driver"
    driver.start()
    second = node.wait_running("second")
    node.wait_gone("first")
    assert_leased_to(node.daemon, second)


def test_a_lost_gpu_is_tainted_and_ends_no_pod(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    container = node.run(named(trainer, "first"))
    node.daemon.host.gpus[0].lose()
    eventually(lambda: node.daemon.polls() and node.published() == 0, "the taints")
    node.create(named(trainer, "second"))
    node.wait_pending("second", "cannot allocate all claims")
    assert container.is_running
    node.daemon.host.gpus[0].restore()
    eventually(lambda: node.daemon.polls() and node.published() == 4, "the end of the taints")
    assert_leased_to(node.daemon, container, node.wait_running("second"))


def test_claims_have_their_leases_after_the_node_has_restarted(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    trainer["spec"]["restartPolicy"] = "Always"
    before = node.run(named(trainer, "first"))
    node.cut_power()
    node.boot()
    after = node.wait_restarted("first", before)
    node.wait_published(4)
    assert_leased_to(node.daemon, after, node.run(named(trainer, "second")))


def test_a_pod_can_end_while_the_api_server_is_down(node: Node, driver: KubeletPlugin) -> None:
    trainer = node.create_example("dra-one-device")
    stays, ends = (node.run(named(trainer, name)) for name in ("stays", "ends"))
    node.cluster.api_server.kill()
    try:
        driver.restart()
        os.kill(ends.pid, signal.SIGKILL)
    finally:
        node.cluster.start_api_server()
    eventually(lambda: node.phase("ends") == "Failed", "the end of the pod")
    eventually(lambda: len(leases_of(node.daemon)) == 1, "the end of the lease")
    assert_leased_to(node.daemon, stays, node.run(named(trainer, "next")))


def test_the_driver_can_only_change_the_slices_of_its_node(node: Node, driver: KubeletPlugin) -> None:
    (published, *_) = node.cluster.get("/apis/resource.k8s.io/v1/resourceslices")["items"]
    other = {**published, "metadata": {"name": "other"}, "spec": {**published["spec"], "nodeName": "other"}}
    with pytest.raises(ApiError, match="can only change the ResourceSlices of that node"):
        node.cluster.request("POST", "/apis/resource.k8s.io/v1/resourceslices", other, token=node.token)
