"""MIG through NVML: profiles, instances, and the GPUs that they become."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.mig import MigInstance, MigProfile
from yunion_mps.core.models import Gpu
from yunion_mps.inventory.mig import Mig, MigMode

from unit.inventory.conftest import OpenedHost, OpenHost


def in_mig_mode(open_host: OpenHost) -> tuple[OpenedHost, Mig, Gpu]:
    host = open_host([{"kind": "h100", "mig": True}, {"kind": "t4"}])
    return host, Mig(host.nvml), host.gpus()[0]


def create_instance(mig: Mig, gpu: Gpu, profile: str, start: int) -> int:
    number = mig.create(str(gpu.uuid), profile_named(gpu, profile), start)
    mig.create_compute(str(gpu.uuid), number)
    return number


def profile_named(gpu: Gpu, profile: str) -> MigProfile:
    return next(one for one in gpu.mig_profiles if one.name == profile)


def test_a_mig_device_is_a_gpu_after_its_parent(open_host: OpenHost) -> None:
    host, mig, gpu = in_mig_mode(open_host)
    big, small = create_instance(mig, gpu, "3g.40gb", 4), create_instance(mig, gpu, "1g.10gb", 0)
    parent, *instances, other = host.gpus()
    assert [one.address for one in instances] == [f"00:06.0-g{number}" for number in sorted((big, small))]
    assert other.address == "00:07.0"
    first = instances[0]
    assert first.uuid is not None
    assert first.uuid.startswith("MIG-")
    assert (first.parent, first.memory_mib) == (parent.uuid, 40448)
    assert first.name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert (first.mig_enabled, first.render_node) == (None, parent.render_node)
    assert first.compute_mode == parent.compute_mode == "Default"


def test_an_instance_is_known_by_its_place_when_it_is_made_again(open_host: OpenHost) -> None:
    host, mig, gpu = in_mig_mode(open_host)
    number = create_instance(mig, gpu, "2g.20gb", 2)
    before = host.gpus()[1]
    mig.destroy(str(gpu.uuid), number)
    create_instance(mig, gpu, "2g.20gb", 2)
    after = host.gpus()[1]
    assert before.uuid != after.uuid
    assert before.identity == after.identity == f"{gpu.uuid}/2g.20gb@2"


def test_an_instance_without_a_compute_instance_is_no_device(open_host: OpenHost) -> None:
    host, mig, gpu = in_mig_mode(open_host)
    number = mig.create(str(gpu.uuid), profile_named(gpu, "1g.10gb"), 6)
    parent, other = host.gpus()
    assert parent.mig_instances == (MigInstance(number, "1g.10gb", 6, 1, "", 0),)
    assert other.address == "00:07.0"
    mig.create_compute(str(gpu.uuid), number)
    assert [one.address for one in host.gpus()] == ["00:06.0", f"00:06.0-g{number}", "00:07.0"]


def test_processes_and_memory_of_an_instance_are_its_own(open_host: OpenHost) -> None:
    host, mig, gpu = in_mig_mode(open_host)
    number = create_instance(mig, gpu, "1g.10gb", 0)
    host.sim.gpus[0].add_process(4321, 100, on=(number, 0))
    device = str(host.gpus()[1].uuid)
    assert host.nvml.processes() == {device: {4321: 100}, str(host.gpus()[2].uuid): {}}
    assert mig.processes(device) == mig.processes(str(gpu.uuid), number) == {4321}
    assert host.nvml.load([], 0.0).gpus[device].memory_used_mib == 100


def test_an_instance_without_reported_memory_has_that_of_its_profile(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "mig": True}])
    host.sim.create_mig_devices(0, "1g.10gb")
    before = host.gpus()
    host.sim.fail("nvmlDeviceGetMemoryInfo", "not_supported")
    assert host.gpus() == (before[0]._replace(memory_mib=None), before[1])


def test_an_instance_with_a_process_is_not_destroyed(open_host: OpenHost) -> None:
    host, mig, gpu = in_mig_mode(open_host)
    number = create_instance(mig, gpu, "1g.10gb", 0)
    host.sim.gpus[0].add_process(4321, 100, on=(number, 0))
    with pytest.raises(DriverError, match="cannot be destroyed: a process uses it"):
        mig.destroy(str(gpu.uuid), number)
    assert [one.address for one in host.gpus()] == ["00:06.0", f"00:06.0-g{number}", "00:07.0"]


@pytest.mark.parametrize(
    ("kind", "after"),
    [("h100", MigMode(enabled=True, pending=True)), ("a100", MigMode(enabled=False, pending=True))],
)
def test_the_mode_is_in_effect_at_once_or_after_a_reset(
    open_host: OpenHost, kind: str, after: MigMode
) -> None:
    host = open_host([{"kind": kind}])
    mig, uuid = Mig(host.nvml), host.sim.gpus[0].uuid
    assert mig.set_mode(uuid, True) == mig.mode(uuid) == after
    found = host.gpus()[0]
    assert (found.mig_enabled, found.mig_pending) == (after.enabled, after.pending)


def test_the_mode_of_a_gpu_in_use_stays_as_it_is(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100"}])
    host.sim.gpus[0].add_process(4321, 100)
    uuid = host.sim.gpus[0].uuid
    assert Mig(host.nvml).set_mode(uuid, True) == MigMode(enabled=False, pending=True, in_use=True)
