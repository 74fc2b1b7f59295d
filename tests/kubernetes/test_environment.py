"""Containers of runtimes without CDI: everything is in the answer of Allocate."""

from __future__ import annotations

import asyncio
import subprocess

import grpc
import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.host.systemd import Notifier
from yunion_mps.kubernetes.device_plugin.lease_names import lease_name
from yunion_mps.kubernetes.kubelet.grpc import RpcError
from yunion_mps.kubernetes.node import NodeService
from yunion_mps.kubernetes.options import read_options

from integration.daemon_host import PATIENCE_S, Daemon, eventually
from integration.lease_host import ADDRESSES, leases_of, take
from kubernetes.kubelet import MEMORY, RESOURCE, TIME_SLICED, Kubelet, KubeletPlugin, Reconciler
from simhost.host import IN_UNITS

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


@pytest.fixture
def configured(daemon: Daemon) -> Daemon:
    (daemon.host.root / "etc/yunion/kubelet-plugin.yml").write_text("deviceListStrategy: environment\n")
    return daemon


def test_the_answer_has_all_that_the_container_needs(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(4)
        pod = kubelet.run_pod("trainer", 1)
        (lease,) = leases_of(configured)
        environment = {**lease["environment"]}
        del environment["YUNION_MPS_LEASE"]
        uuid = environment["CUDA_VISIBLE_DEVICES"]
        budget = {"YUNION_MPS_MEMORY_MIB": "4096", "YUNION_MPS_SM_PERCENT": "25"}
        assert pod.answer.envs == {**environment, **budget, "NVIDIA_VISIBLE_DEVICES": uuid}
        assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
        pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert [one.host_path for one in pod.answer.mounts] == [pipes, "/dev/shm"]
        nodes = [(one.container_path, one.host_path, one.permissions) for one in pod.answer.devices]
        names = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
        assert nodes == [(name, name, "rw") for name in names]
        assert not pod.answer.cdi_devices


def test_a_time_sliced_device_needs_nothing_of_mps(configured: Daemon) -> None:
    configured.host.divide("type: NVIDIA_GPU_SHARE\n  virtual_number: 3")
    host = configured.start().wait_ready().host
    with Kubelet(host, TIME_SLICED, RESOURCE) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(3)
        pod = kubelet.run_pod("trainer", 1)
        assert not pod.answer.mounts
        assert not [name for name in pod.answer.envs if name.startswith("CUDA_MPS_")]
        assert pod.answer.envs["YUNION_MPS_MEMORY_MIB"] == "5461"
        assert pod.answer.envs["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.333"


def test_memory_is_allocated_without_a_device_name(configured: Daemon) -> None:
    configured.host.divide(IN_UNITS)
    host = configured.start().wait_ready().host
    with Kubelet(host, MEMORY, RESOURCE) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(16)
        pod = kubelet.run_pod("trainer", 6)
        assert pod.answer.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6144M"
        assert "YUNION_MPS_DEVICE" not in pod.answer.envs


def test_a_lease_without_a_hook_lasts_as_long_as_its_pod(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    with Kubelet(host) as kubelet, KubeletPlugin(host) as plugin:
        kubelet.wait_healthy(4)
        pod = kubelet.run_pod("trainer", 1)
        plugin.restart()
        kubelet.wait_registered(2)
        kubelet.start_container(pod)  # a container that is started again has the same lease
        assert len(leases_of(configured)) == 1
        kubelet.pods.clear()
        Reconciler(host).release_missing()
        assert leases_of(configured) == []


def test_leases_are_compared_with_pods_even_while_nothing_is_offered(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    labels = host.root / "labels"
    labels.write_text("")
    (host.root / "etc/yunion/kubelet-plugin.yml").write_text("onlyWithNodeLabel: mps\n")
    device = ADDRESSES[0]
    take(configured, f"devices={device}&holder.kind=container&holder.name={lease_name(RESOURCE, [device])}")
    paths = Paths(str(host.root))
    options = read_options(paths)
    service = NodeService(options, paths, Notifier(), labels_file=str(labels), reconcile_s=0.01)
    with Kubelet(host) as kubelet:

        async def wait_compared() -> None:
            while kubelet.asked_for_pods < 3:  # noqa: ASYNC110 - another thread counts it
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(first_of(service.run(), wait_compared()), PATIENCE_S))
        assert (kubelet.asked_for_pods >= 3, kubelet.registrations) == (True, [])


def test_a_lease_outlives_lists_of_pods_that_are_not_complete_yet(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    reconciler = Reconciler(host)
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(4)
        kubelet.run_pod("trainer", 1)
        pods = dict(kubelet.pods)
        kubelet.pods.clear()  # as a kubelet that has just started lists them
        reconciler.run()
        reconciler.run(after_s=119.0)
        kubelet.pods.update(pods)
        reconciler.run()
        kubelet.pods.clear()
        reconciler.run(after_s=119.0)
        assert len(leases_of(configured)) == 1, "the pod was listed meanwhile"
        kubelet.stop()
        with pytest.raises(RpcError):
            reconciler.run(after_s=120.0)
        kubelet.start()
        reconciler.run()
        assert len(leases_of(configured)) == 1, "the kubelet was away meanwhile"
        reconciler.run(after_s=120.0)
        assert leases_of(configured) == []


def test_the_lease_of_an_init_container_outlives_the_kubelet_s_lists(configured: Daemon) -> None:
    """The kubelet lists only the pod's other containers, which get the devices of its init containers."""
    configured.configure(cuda_mps_combine=2)
    host = configured.start().wait_ready().host
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(4)
        init = kubelet.admit("init", kubelet.preferred(2))
        main = kubelet.admit("main", init.devices[:1])
        kubelet.start_container(init)
        del kubelet.pods["init"]
        Reconciler(host).release_missing()
        assert [lease["devices"] for lease in leases_of(configured)] == [list(init.devices)]
        kubelet.start_container(main)
        assert [lease["devices"] for lease in leases_of(configured)] == [list(main.devices)]


def test_a_lease_that_a_process_uses_is_not_released(configured: Daemon) -> None:
    """Such as that of an init container in a pod whose other containers have no devices."""
    host = configured.start().wait_ready().host
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        kubelet.wait_healthy(4)
        pod = kubelet.run_pod("init", 1)
        kubelet.pods.clear()
        process = subprocess.Popen(["sleep", "1000"], env=dict(pod.answer.envs))
        try:
            host.gpus[0].add_process(process.pid, 100, "M+C")
            eventually(lambda: configured.polls() and states(configured) == ["in use"], "the process")
            Reconciler(host).release_missing()
            assert states(configured) == ["in use"]
        finally:
            process.kill()
            process.wait()
        host.gpus[0].remove_process(process.pid)
        eventually(lambda: configured.polls() and states(configured) == ["idle"], "its end")
        Reconciler(host).release_missing()
        assert states(configured) == []


def states(daemon: Daemon) -> list[str]:
    return [lease["state"] for lease in leases_of(daemon)]


def test_a_renamed_resource_keeps_the_leases_of_running_pods(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    other = "example.com/large"
    with Kubelet(host, RESOURCE, other) as kubelet, KubeletPlugin(host) as plugin:
        kubelet.wait_healthy(4)
        kubelet.run_pod("trainer", 1)
        plugin.end()
        options = host.root / "etc/yunion/kubelet-plugin.yml"
        options.write_text(f"deviceListStrategy: environment\nresource: {other}\n")
        plugin.start()
        kubelet.wait_registered(2)
        Reconciler(host).release_missing()
        assert len(leases_of(configured)) == 1


def test_without_a_hook_a_device_that_is_not_free_is_refused(configured: Daemon) -> None:
    host = configured.start().wait_ready().host
    with Kubelet(host) as kubelet, KubeletPlugin(host):
        device = kubelet.wait_healthy(4)[0]
        take(configured, f"holder.name=job&holder.ttl_s=600&devices={device}")
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.allocate([device])
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "deviceListStrategy is environment" in str(caught.value.details())
