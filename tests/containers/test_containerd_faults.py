"""What happens to pods on the real containerd if a part of the node fails, and when it is back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading

import grpc
import pytest
from yunion_mps.kubernetes.kubelet.grpc import RpcError

from containers import cri_pb2
from containers.containerd import Container, Containerd
from integration.daemon_host import Daemon, control_daemons, eventually
from integration.lease_host import ADDRESSES, leases_of, restart
from kubernetes.kubelet import Kubelet, KubeletPlugin, Reconciler

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


def assert_leased_to(daemon: Daemon, *containers: Container) -> None:
    """These containers run, each has one lease, no device has two, and nothing else is leased."""
    leases = leases_of(daemon)
    assert {lease["pid"] for lease in leases} == {container.pid for container in containers}
    devices = [device for lease in leases for device in lease["devices"]]
    assert len(leases) == len(containers) == len(devices) == len(set(devices))
    assert all(container.is_running for container in containers)
    for lease, container in ((lease, one) for lease in leases for one in containers):
        if lease["pid"] == container.pid:
            assert container.environment["YUNION_MPS_LEASE"] == lease["id"]


def refusal(kubelet: Kubelet, devices: tuple[str, ...]) -> str:
    """Why a container with these devices may not start."""
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.permit(devices)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def start_another(kubelet: Kubelet, containerd: Containerd) -> Container:
    """A pod that is admitted and started now."""
    return containerd.run(kubelet.run_pod(f"another-{len(kubelet.pods)}", 1))


@pytest.fixture
def container(kubelet: Kubelet, plugin: KubeletPlugin, containerd: Containerd) -> Container:
    """The running container of a pod."""
    kubelet.wait_healthy(4)
    return containerd.run(kubelet.run_pod("trainer", 1))


def test_a_kubelet_restart_changes_no_container(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    waiting = kubelet.run_pod("waiting", 1)  # its container is not there yet
    kubelet.restart()
    kubelet.wait_registered(2)
    kubelet.wait_healthy(4)
    assert "the previous container still runs" in refusal(kubelet, kubelet.pods["trainer"].devices)
    kubelet.start_container(waiting)
    second = containerd.run(waiting)
    assert_leased_to(ready_daemon, container, second, start_another(kubelet, containerd))


def test_a_container_starts_whenever_the_plugin_is_killed_before(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    registrations = 1

    def kill_plugin() -> None:
        nonlocal registrations
        registrations += 1
        plugin.restart()
        kubelet.wait_registered(registrations)
        kubelet.wait_healthy(4)

    kubelet.wait_healthy(4)
    pod = kubelet.admit("trainer", kubelet.preferred(1))
    kill_plugin()  # between Allocate and PreStartContainer
    kubelet.start_container(pod)
    kill_plugin()  # between PreStartContainer and the container's creation
    kubelet.start_container(pod)  # again, as its answer may have been lost
    created = containerd.create_container(pod)
    kill_plugin()  # between its creation and its start
    container = containerd.start_container(created)
    kill_plugin()
    assert_leased_to(ready_daemon, container)
    plugin.end()
    os.kill(container.pid, signal.SIGKILL)
    eventually(lambda: not leases_of(ready_daemon), "the end of the lease, without the plugin")


@pytest.mark.parametrize("is_allocated", [False, True], ids=["Allocate", "PreStartContainer"])
def test_a_plugin_that_is_killed_within_a_call_leases_nothing_twice(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd, is_allocated: bool
) -> None:
    kubelet.wait_healthy(4)
    devices = kubelet.preferred(1)
    if is_allocated:
        kubelet.admit("trainer", devices)

    def call_plugin() -> None:
        with pytest.raises(grpc.RpcError):
            kubelet.permit(devices) if is_allocated else kubelet.admit("x", devices)

    ready_daemon.signal(signal.SIGSTOP)
    call = plugin.wait_asking(call_plugin)
    plugin.end()
    call.join()
    ready_daemon.signal(signal.SIGCONT)
    if is_allocated:
        eventually(lambda: leases_of(ready_daemon), "the lease that the plugin has requested")
    plugin.start()
    kubelet.wait_registered(2)
    kubelet.wait_healthy(4)
    pod = kubelet.admit("trainer", devices)
    kubelet.start_container(pod)
    assert_leased_to(ready_daemon, containerd.run(pod))


def test_killing_the_daemon_does_not_affect_containers(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    next_pod = kubelet.run_pod("next", 1)
    created = containerd.create_container(next_pod)
    ready_daemon.kill()
    ready_daemon.start()  # and while it starts, a container does, whose hook waits for it
    second = containerd.start_container(created)
    ready_daemon.wait_ready()
    assert_leased_to(ready_daemon, container, second)
    kubelet.wait_healthy(4)
    assert_leased_to(ready_daemon, container, second, start_another(kubelet, containerd))


def test_reexecuting_the_daemon_does_not_affect_containers(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    pod = kubelet.admit("next", kubelet.preferred(1))
    ready_daemon.reexec()
    kubelet.start_container(pod)
    ready_daemon.reexec()
    assert_leased_to(ready_daemon, container, containerd.run(pod))


def test_no_container_starts_while_the_daemon_is_stopped(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    pod = kubelet.run_pod("next", 1)
    created = containerd.create_container(pod)
    assert ready_daemon.stop() == 0
    kubelet.wait_healthy(0)
    with pytest.raises(RpcError) as caught:
        containerd.start_container(created)
    assert re.search("error running .*hook.*yunion-mps: the daemon is not running", caught.value.message)
    assert container.is_running
    ready_daemon.start().wait_ready()
    kubelet.wait_healthy(4)
    kubelet.start_container(pod)
    assert_leased_to(ready_daemon, container, containerd.run(pod))


def test_killing_the_control_daemon_ends_no_container(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    os.kill(ready_daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: is_recovered(ready_daemon), "the next control daemon")
    kubelet.wait_healthy(4)
    assert_leased_to(ready_daemon, container, start_another(kubelet, containerd))


def is_recovered(daemon: Daemon) -> bool:
    (domain,) = daemon.status()["domains"]
    return bool(domain["state"] == "ready" and domain["restarts"] == 1)


def test_a_lost_gpu_ends_no_container_and_refuses_new_ones(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    pod = kubelet.admit("next", kubelet.preferred(1))
    starting = kubelet.run_pod("starting", 1)
    created = containerd.create_container(starting)
    ready_daemon.host.gpus[0].lose()
    eventually(lambda: ready_daemon.polls() and not kubelet.healthy, "the loss of the devices")
    assert "1 unavailable" in refusal(kubelet, pod.devices)
    with pytest.raises(RpcError) as caught:
        containerd.start_container(created)
    assert f"device {starting.devices[0]} is unavailable" in caught.value.message
    ready_daemon.host.gpus[0].restore()
    eventually(lambda: ready_daemon.polls() and len(kubelet.healthy) == 4, "the devices")
    for one in (pod, starting):
        kubelet.start_container(one)
    assert_leased_to(ready_daemon, container, containerd.run(pod), containerd.run(starting))


def test_killing_containerd_ends_no_container(
    kubelet: Kubelet, container: Container, ready_daemon: Daemon, containerd: Containerd
) -> None:
    next_pod = kubelet.run_pod("next", 1)
    created = containerd.create_container(next_pod)
    containerd.restart()
    second = containerd.start_container(created)
    assert_leased_to(ready_daemon, container, second)
    assert containerd.state(container) == cri_pb2.RUNNING
    containerd.remove_pod(kubelet.pods["trainer"])
    eventually(lambda: len(leases_of(ready_daemon)) == 1, "the end of the lease")
    assert_leased_to(ready_daemon, second)


def test_of_containers_that_race_for_a_device_one_starts(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    others = [containerd.run(kubelet.run_pod(f"other-{number}", 1)) for number in range(3)]
    last = kubelet.preferred(1)
    pods = [kubelet.admit(name, last) for name in ("first", "second")]
    created = []
    for pod in pods:
        kubelet.start_container(pod)
        created.append(containerd.create_container(pod))
    started: list[Container] = []
    refused: list[str] = []

    def start(container: str) -> None:
        try:
            started.append(containerd.start_container(container))
        except RpcError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=start, args=(container,)) for container in created]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [("already belongs to a container" in message) for message in refused] == [True]
    assert_leased_to(ready_daemon, *others, *started)


def test_pods_deleted_while_the_plugin_is_down_leave_no_lease(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    running, starting = kubelet.run_pod("running", 1), kubelet.run_pod("starting", 1)
    stays = containerd.run(kubelet.run_pod("stays", 1))
    container = containerd.run(running)
    containerd.create_container(starting)
    plugin.end()
    for pod in (running, starting):
        containerd.remove_pod(pod)
        del kubelet.pods[pod.name]
    eventually(lambda: len(leases_of(ready_daemon)) == 2, "the end of the running container's lease")
    assert not container.is_running
    restart(ready_daemon)
    plugin.start()
    Reconciler(ready_daemon.host).release_missing()
    assert_leased_to(ready_daemon, stays)
    kubelet.wait_registered(2)
    kubelet.wait_healthy(4)
    assert kubelet.preferred(3) == tuple(sorted(set(ADDRESSES) - {*kubelet.pods["stays"].devices}))


def test_removed_sockets_are_created_again_and_end_no_container(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    ready_daemon.kill()
    ready_daemon.start(WATCHDOG_USEC="400000").wait_ready()  # it looks at its socket often
    kubelet.wait_healthy(4)
    container = containerd.run(kubelet.run_pod("trainer", 1))
    plugin.socket.unlink()
    kubelet.wait_registered(2)
    kubelet.wait_healthy(4)
    ready_daemon.socket_path.unlink()
    eventually(ready_daemon.socket_path.exists, "the daemon's socket")
    kubelet.wait_healthy(4)
    assert_leased_to(ready_daemon, container, start_another(kubelet, containerd))


def test_containers_lease_again_after_a_power_cut(
    kubelet: Kubelet, plugin: KubeletPlugin, ready_daemon: Daemon, containerd: Containerd
) -> None:
    kubelet.wait_healthy(4)
    pods = [kubelet.run_pod("trainer", 1), kubelet.run_pod("starting", 1)]
    containerd.run(pods[0])
    ready_daemon.kill()
    plugin.end()
    containerd.cut_power()
    for pid in control_daemons(ready_daemon.host.root):
        os.kill(pid, signal.SIGKILL)
    for path in (ready_daemon.host.root / "run").iterdir():  # which is in memory
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    ready_daemon.start().wait_ready()
    containerd.start()
    kubelet.restart()  # it remembers what it has allocated
    plugin.start()
    kubelet.wait_registered(2)
    kubelet.wait_healthy(4)
    for pod in pods:
        kubelet.start_container(pod)
    assert_leased_to(ready_daemon, *(containerd.run(pod) for pod in pods), start_another(kubelet, containerd))
