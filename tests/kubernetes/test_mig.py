"""MIG instances as extended resources: by profile, like other devices, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from yunion_mps.core.addresses import physical_gpu

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of
from kubernetes.kubelet import INSTANCES, RESOURCE, TIME_SLICED, Kubelet, KubeletPlugin

BIG, SMALL = "yunion.io/mig-3g.40gb", "yunion.io/mig-1g.10gb"
SHARED = "mig: [3g.40gb, 1g.10gb]\n  virtual_number: 2"
SLICED = f"type: NVIDIA_GPU_SHARE\n  {SHARED}"

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 2})]


@pytest.fixture
def daemon_with_mig(daemon: Daemon) -> Daemon:
    return restart_divided(daemon, "mig: [3g.40gb, 1g.10gb, 1g.10gb]", 2)


def restart_divided(daemon: Daemon, *divisions: object) -> Daemon:
    daemon.host.divide(*divisions)
    daemon.configure(cuda_mps_scope="gpu")
    return daemon.start().wait_ready()


def write_options(daemon: Daemon, text: str) -> None:
    (daemon.host.root / "etc/yunion/kubelet-plugin.yml").write_text(f"{text}\n")


def test_with_mixed_each_profile_is_a_resource(daemon_with_mig: Daemon) -> None:
    write_options(daemon_with_mig, "migStrategy: mixed")
    host = daemon_with_mig.host
    with Kubelet(host, RESOURCE, BIG, SMALL) as kubelet, KubeletPlugin(host):
        for resource, number in ((RESOURCE, 2), (SMALL, 2), (BIG, 1)):
            kubelet.request(resource).wait_healthy(number)
        pod = kubelet.run_pod("trainer", 1)
        (lease,) = leases_of(daemon_with_mig)
        assert lease["devices"] == [*pod.devices]
        (big,) = [one for one in host.gpus[0].mig_devices() if one.profile == "3g.40gb"]
        assert pod.devices == (f"00:06.0-g{big.gpu_instance}",)
        assert lease["environment"]["CUDA_VISIBLE_DEVICES"] == big.uuid


def test_with_mixed_shared_instances_are_counted_by_profile_and_way(daemon: Daemon) -> None:
    write_options(daemon, "migStrategy: mixed")
    host = restart_divided(daemon, SHARED, SLICED).host
    names = [f"{profile}.{way}" for profile in (BIG, SMALL) for way in ("mps", "shared")]
    with Kubelet(host, RESOURCE, *names) as kubelet, KubeletPlugin(host):
        for name in names:
            gpu = "00:06.0" if name.endswith(".mps") else "00:07.0"
            devices = kubelet.request(name).wait_healthy(2)
            assert {device.rpartition("-g")[0] for device in devices} == {gpu}
            pod = kubelet.run_pod(name, 1)
            assert [lease["devices"] for lease in leases_of(daemon) if lease["devices"] == [*pod.devices]]
        assert kubelet.request(RESOURCE).health == {}


def test_with_none_instances_are_not_offered(daemon_with_mig: Daemon) -> None:
    write_options(daemon_with_mig, "migStrategy: none")
    with Kubelet(daemon_with_mig.host) as kubelet, KubeletPlugin(daemon_with_mig.host):
        assert [one[:7] for one in kubelet.wait_healthy(2)] == ["00:07.0"] * 2
        assert [one.resource_name for one in kubelet.registrations] == [RESOURCE]


def test_a_layout_that_changes_adds_a_resource_and_empties_another(daemon_with_mig: Daemon) -> None:
    write_options(daemon_with_mig, "migStrategy: mixed")
    host, more = daemon_with_mig.host, "yunion.io/mig-2g.20gb"
    with Kubelet(host, RESOURCE, BIG, SMALL, more) as kubelet, KubeletPlugin(host):
        kubelet.request(BIG).wait_healthy(1)
        host.divide("mig: all-2g.20gb", 2)
        assert daemon_with_mig.ask("POST", "/v1/reload")[0] == 200
        kubelet.request(more).wait_healthy(3)
        kubelet.request(BIG).wait_healthy(0)
        assert kubelet.health == {}, "it stays, without devices"
        kubelet.registrations.clear()
        kubelet.restart()
        kubelet.wait_registered(4)
        assert kubelet.request(BIG).wait_healthy(0) == []


def test_spread_counts_instances_by_their_gpu(daemon: Daemon) -> None:
    write_options(daemon, "preferred: spread")
    host = restart_divided(daemon, "mig: all-1g.10gb", "mig: all-1g.10gb").host
    with Kubelet(host, RESOURCE, INSTANCES) as kubelet, KubeletPlugin(host):
        kubelet.request(INSTANCES).wait_healthy(14)
        devices = [kubelet.run_pod(f"pod-{number}", 1).devices[0] for number in range(4)]
        assert [physical_gpu(one) for one in devices] == ["00:06.0", "00:07.0"] * 2


def test_a_container_gets_no_instance_beside_a_whole_gpu(daemon: Daemon) -> None:
    sliced = "type: NVIDIA_GPU_SHARE\n  virtual_number: 1"
    host = restart_divided(daemon, sliced, f"{sliced}\n  mig: [3g.40gb, 3g.40gb]").host
    with Kubelet(host, RESOURCE, TIME_SLICED) as kubelet, KubeletPlugin(host):
        whole, instance, other = sorted(kubelet.request(TIME_SLICED).wait_healthy(3))
        assert kubelet.preferred(2) == (instance, other)
        mixed = (instance, whole)
        for ask in (
            lambda: kubelet.admit("trainer", mixed),
            lambda: kubelet.permit(mixed),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            told = f"a process can use whole GPUs or MIG instances, but not both: {whole}, {instance}"
            assert told in str(caught.value.details())
        assert leases_of(daemon) == []
        kubelet.run_pod("trainer", 2)


@pytest.fixture
def without_cdi(daemon: Daemon) -> Iterator[Kubelet]:
    write_options(daemon, "deviceListStrategy: environment")
    host = restart_divided(daemon, "mig: [3g.40gb, 1g.10gb]").host
    with Kubelet(host, RESOURCE, INSTANCES) as kubelet, KubeletPlugin(host):
        kubelet.request(INSTANCES).wait_healthy(2)
        yield kubelet


def test_without_cdi_a_container_gets_the_capabilities_of_its_instance(
    without_cdi: Kubelet, daemon: Daemon
) -> None:
    pod = without_cdi.run_pod("trainer", 1)
    number = int(pod.devices[0].rpartition("-g")[2])
    (uuid,) = [one.uuid for one in daemon.host.gpus[0].mig_devices() if one.gpu_instance == number]
    table = (daemon.host.root / "proc/driver/nvidia-caps/mig-minors").read_text()
    minor = dict(line.split() for line in table.splitlines())
    caps = [f"gpu0/gi{number}/access", f"gpu0/gi{number}/ci0/access"]
    assert [one.host_path for one in pod.answer.devices] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        *(f"/dev/nvidia-caps/nvidia-cap{minor[name]}" for name in caps),
    ]
    assert pod.answer.envs["NVIDIA_VISIBLE_DEVICES"] == uuid


def test_without_cdi_a_next_pod_gets_the_uuid_of_an_instance_created_again(
    without_cdi: Kubelet, daemon: Daemon
) -> None:
    pod = without_cdi.run_pod("trainer", 1)
    old = pod.answer.envs["CUDA_VISIBLE_DEVICES"]
    gpu = daemon.host.gpus[0]
    gpu.end_instances(int(pod.devices[0].rpartition("-g")[2]))

    def is_created_again() -> bool:
        (lease,) = leases_of(daemon)
        return daemon.polls() and lease["environment"]["CUDA_VISIBLE_DEVICES"] != old

    eventually(is_created_again, "the new UUID")
    (new,) = {one.uuid for one in gpu.mig_devices() if one.profile == "3g.40gb"}
    without_cdi.wait_healthy(2)
    following = without_cdi.admit("next", pod.devices)
    without_cdi.start_container(following)
    assert following.answer.envs["CUDA_VISIBLE_DEVICES"] == new
    (lease,) = leases_of(daemon)
    assert (lease["devices"], lease["environment"]["CUDA_VISIBLE_DEVICES"]) == ([*pod.devices], new)


def test_without_cdi_an_instance_without_capabilities_is_refused(
    without_cdi: Kubelet, daemon: Daemon
) -> None:
    (device, _) = without_cdi.healthy
    driver = daemon.host.root / "proc/driver/nvidia/capabilities"
    driver.rename(driver.with_name("hidden"))
    with pytest.raises(grpc.RpcError) as caught:
        without_cdi.allocate([device])
    driver.with_name("hidden").rename(driver)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    told = f"the capabilities of MIG instance 0000:{device} are missing from"
    assert told in str(caught.value.details())
    eventually(lambda: without_cdi.admit("trainer", (device,)), "a later attempt")
