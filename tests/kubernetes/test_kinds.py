"""A node with MPS beside time-slicing beside MIG: each kind of device is a resource of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import grpc
import pytest
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import ListAndWatchResponse

from integration.daemon_host import Daemon, eventually
from integration.device_nodes import publish_nodes
from integration.lease_host import leases_of, take
from kubernetes.conftest import StartContainer
from kubernetes.kubelet import INSTANCES, MEMORY, RESOURCE, TIME_SLICED, Kubelet, KubeletPlugin, Reconciler
from kubernetes.test_metrics import address, scrape
from simhost.host import EACH_KIND, IN_UNITS, SHARED

__all__ = ["address"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "h100", "count": 3}),
    pytest.mark.divided(*EACH_KIND),
]

NUMBERS = {RESOURCE: 2, TIME_SLICED: 3, INSTANCES: 2}
FILE = "etc/features.d/yunion-mps"
BUDGET = ("YUNION_MPS_MEMORY_MIB", "YUNION_MPS_SM_PERCENT")


@pytest.fixture
def ready_daemon(daemon: Daemon) -> Daemon:
    daemon.configure(cuda_mps_scope="gpu")
    daemon.start().wait_ready()
    publish_nodes(daemon)
    return daemon


@pytest.fixture
def kubelet(ready_daemon: Daemon) -> Iterator[Kubelet]:
    with Kubelet(ready_daemon.host, *NUMBERS, MEMORY) as kubelet:
        yield kubelet


def wait_healthy(kubelet: Kubelet, numbers: dict[str, int]) -> None:
    for resource, number in numbers.items():
        kubelet.request(resource).wait_healthy(number)


def reload_as(daemon: Daemon, *divisions: object) -> None:
    daemon.host.divide(*divisions)
    assert daemon.ask("POST", "/v1/reload")[0] == 200


def test_pods_get_the_kind_of_device_that_they_request(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, start_container: StartContainer
) -> None:
    wait_healthy(kubelet, NUMBERS)
    has_mps, has_budget = {}, {}
    for number, resource in enumerate(NUMBERS):
        pod = kubelet.request(resource).run_pod(f"pod-{number}", 1)
        container = start_container(pod)
        has_mps[resource] = "CUDA_MPS_PIPE_DIRECTORY" in container.environment
        has_budget[resource] = {*BUDGET} & {*container.environment, *pod.answer.envs}
        assert pod.devices[0].startswith(f"00:0{6 + number}.0-")
        (lease,) = [one for one in leases_of(ready_daemon) if one["pid"] == container.pid]
        assert lease["devices"] == [*pod.devices]
    assert has_mps == {RESOURCE: True, TIME_SLICED: False, INSTANCES: False}
    assert {resource: len(names) for resource, names in has_budget.items()} == {
        RESOURCE: 2, TIME_SLICED: 2, INSTANCES: 0
    }  # fmt: skip
    wait_healthy(kubelet, NUMBERS)


def test_a_device_of_another_kind_is_refused(kubelet: Kubelet, plugin: KubeletPlugin) -> None:
    wait_healthy(kubelet, NUMBERS)
    (first, *_) = kubelet.request(TIME_SLICED).healthy
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.request(RESOURCE).admit("trainer", (first,))
    assert f"there are no such devices: {first}" in str(caught.value.details())


def test_each_resource_has_the_health_of_its_own_devices(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    wait_healthy(kubelet, NUMBERS)
    ready_daemon.host.gpus[1].lose()
    eventually(lambda: ready_daemon.polls() and not kubelet.request(TIME_SLICED).healthy, "the loss")
    assert len(kubelet.health) == 3
    (first, _) = kubelet.request(RESOURCE).wait_healthy(2)
    take(ready_daemon, f"devices={first}&holder.name=job&holder.ttl_s=600")
    wait_healthy(kubelet, {RESOURCE: 1, INSTANCES: 2})
    ready_daemon.kill()
    wait_healthy(kubelet, dict.fromkeys(NUMBERS, 0))
    assert [len(kubelet.request(resource).health) for resource in NUMBERS] == [*NUMBERS.values()]


def test_all_resources_are_registered_again_and_end_with_the_plugin(
    kubelet: Kubelet, plugin: KubeletPlugin
) -> None:
    wait_healthy(kubelet, NUMBERS)
    kubelet.registrations.clear()
    kubelet.restart()
    wait_healthy(kubelet, NUMBERS)
    assert {one.resource_name for one in kubelet.registrations} == {*NUMBERS}
    assert len({one.endpoint for one in kubelet.registrations}) == len(NUMBERS)
    assert plugin.end(signal.SIGTERM) == 0
    for resource in NUMBERS:
        eventually(lambda resource=resource: not kubelet.request(resource).lists, "its end")  # type: ignore[misc]


def test_a_resource_begins_with_its_first_device_and_stays(
    kubelet: Kubelet, ready_daemon: Daemon, address: str
) -> None:
    reload_as(ready_daemon, 2, 2)
    with KubeletPlugin(ready_daemon.host):
        kubelet.request(RESOURCE).wait_healthy(4)
        assert [one.resource_name for one in kubelet.registrations] == [RESOURCE]
        reload_as(ready_daemon, SHARED, IN_UNITS)
        wait_healthy(kubelet, {RESOURCE: 0, TIME_SLICED: 3, MEMORY: 79})
        reload_as(ready_daemon, 2, 2, "mig: all-3g.40gb")
        wait_healthy(kubelet, {RESOURCE: 4, TIME_SLICED: 0, MEMORY: 0, INSTANCES: 2})
        assert kubelet.request(TIME_SLICED).lists[-1] == ListAndWatchResponse()
        values = scrape(address)
        healthy = {resource: values["devices", resource, "healthy"] for resource in (*NUMBERS, MEMORY)}
        assert healthy == {RESOURCE: 4, TIME_SLICED: 0, INSTANCES: 2, MEMORY: 0}


def test_a_leased_device_keeps_its_kind_until_its_lease_ends(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, start_container: StartContainer
) -> None:
    wait_healthy(kubelet, NUMBERS)
    pod = kubelet.request(RESOURCE).run_pod("trainer", 1)
    container = start_container(pod)
    ready_daemon.host.divide(SHARED, *EACH_KIND[1:])
    ready_daemon.ask("POST", "/v1/reload")
    kubelet.request(RESOURCE).wait_healthy(1)
    assert kubelet.healthy == [*pod.devices]
    container.close()
    wait_healthy(kubelet, {RESOURCE: 0, TIME_SLICED: 6})


@pytest.mark.divided("mig: [3g.40gb, 1g.10gb]; reserved_for: kubernetes", SHARED)
def test_a_reservation_outlasts_a_layout_that_waits_for_a_pod(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, start_container: StartContainer
) -> None:
    wait_healthy(kubelet, {INSTANCES: 2})
    pod = kubelet.request(INSTANCES).run_pod("trainer", 1)
    start_container(pod)
    reload_as(ready_daemon, "mig: [4g.40gb, 2g.20gb]; reserved_for: kubernetes", SHARED)
    kubelet.request(INSTANCES).wait_healthy(1)
    assert kubelet.healthy == [*pod.devices]
    assert not kubelet.request(TIME_SLICED).lists, "the other GPU is not reserved"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_container_does_not_start_again_on_a_device_of_another_kind(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, restarts: bool
) -> None:
    wait_healthy(kubelet, NUMBERS)
    pod = kubelet.request(RESOURCE).run_pod("trainer", 1)
    (lease,) = leases_of(ready_daemon)
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    if restarts:  # as when the node does
        ready_daemon.stop()
        plugin.restart()
        ready_daemon.host.divide(SHARED, *EACH_KIND[1:])
        kubelet.wait_registered(len(NUMBERS) + 1)
        ready_daemon.start()
    else:
        reload_as(ready_daemon, SHARED, *EACH_KIND[1:])
        wait_healthy(kubelet, {TIME_SLICED: 6})

    def refusal() -> str:
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.request(RESOURCE).start_container(pod)
        is_away = caught.value.code() is grpc.StatusCode.UNAVAILABLE  # the daemon, which takes its time
        return "" if is_away else str(caught.value.details())

    told = f"no longer devices of {RESOURCE}: {pod.devices[0]} (delete the pod)"
    assert eventually(refusal, "a refusal") == told  # the kubelet tries again, too
    assert leases_of(ready_daemon.wait_ready()) == []


def test_leases_of_all_resources_are_compared_with_the_pods(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon
) -> None:
    wait_healthy(kubelet, NUMBERS)
    for resource in NUMBERS:
        kubelet.request(resource).run_pod(resource, 1)
    del kubelet.pods[TIME_SLICED]
    Reconciler(ready_daemon.host).release_missing()
    kept = {device for pod in kubelet.pods.values() for device in pod.devices}
    assert {device for lease in leases_of(ready_daemon) for device in lease["devices"]} == kept


def test_the_labels_tell_the_profiles_from_the_other_gpus(kubelet: Kubelet, ready_daemon: Daemon) -> None:
    root = ready_daemon.host.root
    (root / "etc/yunion/kubelet-plugin.yml").write_text(f"featureFile: /{FILE}\nmigStrategy: mixed\n")
    with KubeletPlugin(ready_daemon.host):
        eventually((root / FILE).exists, "the labels")
        labels = dict(line.split("=") for line in (root / FILE).read_text().splitlines())
    assert labels == {
        "yunion.io/mps.gpus": "4",
        "yunion.io/mps.devices": "7",
        "yunion.io/mps.memory-units": "0",
        "nvidia.com/mps.capable": "true",
        "nvidia.com/mig.strategy": "mixed",
        **{
            f"nvidia.com/mig-{profile}.{suffix}": value
            for profile in ("3g.40gb", "1g.10gb")
            for suffix, value in (("count", "1"), ("replicas", "1"), ("sharing-strategy", "none"))
        },
    }
