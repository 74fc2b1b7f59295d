"""The DRA driver on a host with a GPU of each kind: shared through MPS, time-sliced, and in MIG mode."""

from __future__ import annotations

from typing import Any

import pytest

from integration.daemon_host import Daemon
from integration.lease_host import leases_of
from kubernetes.dra_kubelet import DraKubelet, DriverInThread
from kubernetes.test_dra import cdi_environment
from simhost.host import EACH_KIND

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "h100", "count": 3}),
    pytest.mark.divided(*EACH_KIND),
]


def attribute(device: dict[str, Any], name: str) -> str:
    return str(device["attributes"].get(name, {}).get("string", ""))


def test_each_device_tells_its_kind_and_an_instance_its_profile(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon
) -> None:
    devices = dra_kubelet.wait_published(7)
    kinds = [tuple(attribute(one, name) for name in ("type", "sharing", "profile")) for one in devices]
    assert sorted(kinds) == [
        ("mig", "none", "1g.10gb"),
        ("mig", "none", "3g.40gb"),
        *[("share", "mps", "")] * 2,
        *[("share", "time-slicing", "")] * 3,
    ]
    gpu = ready_daemon.host.gpus[2]
    instances = [one for one in devices if attribute(one, "type") == "mig"]
    assert {attribute(one, "uuid") for one in instances} == {one.uuid for one in gpu.mig_devices()}
    assert {attribute(one, "parentUUID") for one in instances} == {gpu.uuid}
    assert {attribute(one, "productName") for one in devices} == {"NVIDIA H100 80GB HBM3"}
    assert {attribute(one, "mpsDomain") for one in devices} == {"host", ""}


def name_of(devices: list[dict[str, Any]], sharing: str) -> str:
    """The name of the first device that is shared in this way."""
    return str(next(one["name"] for one in devices if attribute(one, "sharing") == sharing))


@pytest.mark.parametrize("sharing", ["time-slicing", "none"])
def test_a_claim_without_mps_has_none_of_its_variables(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, sharing: str
) -> None:
    devices = dra_kubelet.wait_published(7)
    name = name_of(devices, sharing)
    claim = dra_kubelet.allocate("trainer", [name])
    environment = cdi_environment(ready_daemon, dra_kubelet.prepared(claim))
    assert not [variable for variable in environment if variable.startswith("CUDA_MPS_")]
    (uuid,) = (attribute(one, "uuid") for one in devices if one["name"] == name)
    assert environment["CUDA_VISIBLE_DEVICES"] == uuid
    assert len(dra_kubelet.wait_published(7)) == 7, "ours has no taint"
    assert dra_kubelet.unprepare(claim) == []
    assert leases_of(ready_daemon) == []


@pytest.mark.parametrize("other", ["time-slicing", "none"])
def test_a_claim_of_mps_and_another_kind_is_refused_with_the_reason(
    dra_kubelet: DraKubelet, driver: DriverInThread, ready_daemon: Daemon, other: str
) -> None:
    devices = dra_kubelet.wait_published(7)
    claim = dra_kubelet.allocate("trainer", [name_of(devices, "mps"), name_of(devices, other)])
    assert "a process uses MPS on all of its GPUs or on none" in dra_kubelet.refused(claim)
    assert leases_of(ready_daemon) == []
