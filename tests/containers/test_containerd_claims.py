"""Containers that share a resource claim, on the real containerd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import CDIDevice, ContainerAllocateResponse

from containers.containerd import Container, Containerd
from containers.image import make_image
from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of, restart
from kubernetes.dra_kubelet import DraKubelet, DriverInThread
from kubernetes.kubelet import Pod
from simhost import SimHost
from simhost.mps import StandIns

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"})]


def start_container(containerd: Containerd, pod: str, cdi: str) -> Container:
    """The container of a pod that has this device."""
    answer = ContainerAllocateResponse(cdi_devices=[CDIDevice(name=cdi)])
    return containerd.run(Pod(pod, (), answer))


@pytest.fixture
def jobs(host: SimHost, image_folder: Path) -> Iterator[StandIns]:
    make_image(image_folder, host)  # of the real control program, which the stand-ins wrap
    with StandIns(host) as jobs:
        yield jobs


def test_views_name_the_pods_whose_processes_use_a_claim(
    jobs: StandIns,
    dra_kubelet: DraKubelet,
    driver: DriverInThread,
    ready_daemon: Daemon,
    containerd: Containerd,
) -> None:
    cdi = dra_kubelet.prepared(dra_kubelet.allocate("trainer", ["00-06-0-1"]))
    container = start_container(containerd, "first", cdi)
    name = "pod default/first/main"
    assert f"00:06.0-1: used by container {name} (PID {container.pid}, root)" in output_of(
        ready_daemon, "events"
    )
    ready_daemon.host.env["YUNION_MPS_DEVICE"] = "00:06.0-1"
    client = jobs.attached(ready_daemon.pipe_directory)
    for cgroup in containerd.cgroups_of(container):
        (cgroup / "cgroup.procs").write_text(str(client.pid))
    ready_daemon.host.gpus[0].add_process(client.pid, 512)
    eventually(lambda: ready_daemon.polls() and f"{name}: " in output_of(ready_daemon, "who"), "the pod")
    assert f"{name}: " in output_of(ready_daemon, "top", "--once")


def test_lists_name_the_container_that_started_last_with_a_claim(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, containerd: Containerd
) -> None:
    claim = dra_kubelet.allocate("trainer", ["00-06-0-1"])
    cdi = dra_kubelet.prepared(claim)

    def holders() -> list[str]:
        return [
            output_of(ready_daemon, *words, "--output", "wide") for words in (("list",), ("lease", "list"))
        ]

    assert all("root (claim:default/trainer@" in text for text in holders())
    for pod in ("first", "second"):
        container = start_container(containerd, pod, cdi)
        assert all(f"root (pod default/{pod}/main)" in text for text in holders())
    restart(ready_daemon)
    assert all("root (pod default/second/main)" in text for text in holders())
    (lease,) = leases_of(ready_daemon)
    assert (lease["name"], lease["pid"]) == (f"claim:default/trainer@{claim.uid}", container.pid)
    containerd.stop_container(container)
    assert leases_of(ready_daemon)[0]["pid"] is None, "another process may get the PID"
    restart(ready_daemon)
    assert all("root (claim:default/trainer@" in text for text in holders())


def output_of(daemon: Daemon, *words: str) -> str:
    return daemon.host.run(["yunion-mps", *words]).stdout


def test_containers_with_one_claim_share_its_lease(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, containerd: Containerd
) -> None:
    claim = dra_kubelet.allocate("trainer", ["00-06-0-1"])
    cdi = dra_kubelet.prepared(claim)
    first, second = (start_container(containerd, pod, cdi) for pod in ("first", "second"))
    (lease,) = leases_of(ready_daemon)
    for container in (first, second):
        assert container.environment["YUNION_MPS_LEASE"] == lease["id"]
        assert container.environment["YUNION_MPS_DEVICE"] == "00:06.0-1"
    containerd.stop_container(first)
    restart(ready_daemon)
    again = start_container(containerd, "first", cdi)
    assert (again.is_running, second.is_running) == (True, True)
    assert [one["id"] for one in leases_of(ready_daemon)] == [lease["id"]], "it is the claim's"
    for container in (again, second):
        containerd.stop_container(container)
    assert dra_kubelet.unprepare(claim) == []
    assert leases_of(ready_daemon) == []
