"""Devices on MIG instances, from the configuration to the environment."""

from __future__ import annotations

import time

import pytest
from yunion_mps import reasons
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Device
from yunion_mps.planning.environment import client_environment
from yunion_mps.service.devices import devices_json

from simhost import Description, SimHost
from unit.supervised import Supervise, Supervised, MakeHost

H100 = [{"kind": "h100"}]


def configured(host: SimHost, *entries: str) -> None:
    """Write an entry for each of the first GPUs, with these keys."""
    lines = ["devices:"]
    for gpu, keys in zip(host.gpus, entries):
        lines.append(f"- path: {gpu.uuid}")
        lines += [f"  {key}" for key in keys.split("; ")]
    (host.root / "etc/yunion/host_container_device.yml").write_text("\n".join(lines) + "\n")


def apply_layouts(made: Supervised, leased: set[str] | None = None) -> None:
    """As the monitor does in each poll."""
    made.rescan()
    made.set_modes()
    tasks = made.supervisor.layout_tasks(leased or set())
    if tasks:
        made.supervisor.note_layouts(made.supervisor.apply_layouts(tasks), time.monotonic())
    made.until(lambda: made.supervisor.fleet.started)


MIG = "type: NVIDIA_MPS; mig: all-balanced"


@pytest.fixture
def begun(make_host: MakeHost, supervise: Supervise):  # noqa: ANN201
    def make(*entries: str, description: Description = H100, **keys: str) -> tuple[SimHost, Supervised]:
        host = make_host(description, **keys)
        configured(host, *entries)
        made = supervise(host).start()
        apply_layouts(made)
        return host, made

    return make


def devices(made: Supervised) -> tuple[Device, ...]:
    return made.snapshot.plan.devices


def test_each_instance_is_a_device(begun) -> None:
    host, made = begun(MIG)
    found = devices(made)
    by_id = {one.gpu_instance: one for one in host.gpus[0].mig_devices()}
    assert {one.addr: one.gpu_uuid for one in found} == {
        f"00:06.0-g{number}": one.uuid for number, one in by_id.items()
    }
    assert sorted((one.memory_limit_mib, one.thread_percentage) for one in found) == [
        (9984, 12.1),
        (9984, 12.1),
        (20096, 24.2),
        (40448, 45.4),
    ]
    assert {(one.sharing, one.budget_enforced, one.domain) for one in found} == {("none", True, "")}
    assert {one["state"] for one in devices_json(made.snapshot, Ledger())} == {"free"}
    assert made.snapshot.domains == ()


def test_a_process_sees_only_its_instance(begun) -> None:
    _, made = begun(MIG)
    one = devices(made)[0]
    assert client_environment([one], None) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": one.gpu_uuid,
        "YUNION_MPS_DEVICE": one.addr,
    }


def test_each_instance_with_mps_has_a_control_daemon(begun) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2")
    assert [status.state for status in made.snapshot.domains] == ["ready", "ready"]
    assert [status.plan.gpu_uuids for status in made.snapshot.domains] == [
        (one.uuid,) for one in host.gpus[0].mig_devices()
    ]
    assert [(one.addr, one.memory_limit_mib, one.thread_percentage) for one in devices(made)] == [
        (f"00:06.0-g{one.gpu_instance}-{slot}", 20224, 50.0)
        for one in host.gpus[0].mig_devices()
        for slot in (0, 1)
    ]
    assert host.gpus[0].compute_mode == "default"
    assert made.available == 4
