"""Containers that share a resource claim, on the real containerd."""

from __future__ import annotations

import pytest
from yunion_mps.kubernetes import kubelet_api as api

from integration.daemon_host import Daemon
from integration.lease_host import leases_of, restart
from kubernetes.containerd import Container, Containerd
from kubernetes.dra_kubelet import DraKubelet
from kubernetes.kubelet import Pod

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "v100"}), pytest.mark.usefixtures("driver")]


def start(containerd: Containerd, pod: str, cdi: str) -> Container:
    """The container of a pod that has this device."""
    answer = api.ContainerAllocateResponse(cdi_devices=(api.CdiDevice(cdi),))
    return containerd.run(Pod(pod, (), answer))


def test_containers_with_one_claim_share_its_lease(
    dra_kubelet: DraKubelet, ready_daemon: Daemon, containerd: Containerd
) -> None:
    claim = dra_kubelet.allocate("trainer", ["00-06-0-1"])
    cdi = dra_kubelet.prepared(claim)
    first, second = (start(containerd, pod, cdi) for pod in ("first", "second"))
    (lease,) = leases_of(ready_daemon)
    for container in (first, second):
        assert container.environment["YUNION_MPS_LEASE"] == lease["id"]
        assert container.environment["YUNION_MPS_DEVICE"] == "00:06.0-1"
    containerd.stop_container(first)
    restart(ready_daemon)
    again = start(containerd, "first", cdi)
    assert (again.is_running, second.is_running) == (True, True)
    assert [one["id"] for one in leases_of(ready_daemon)] == [lease["id"]], "it is the claim's"
    for container in (again, second):
        containerd.stop_container(container)
    assert dra_kubelet.unprepare(claim) == []
    assert leases_of(ready_daemon) == []
