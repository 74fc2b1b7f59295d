"""The cycle of what is set on GPUs: neither a shortage nor another program or refusal spoils the rest."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import Gpu, Plan, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DRIVER_HUNG, GPU_LOST, MIG_NO_PERMISSION, SETTING_PENDING
from yunion_mps.gpus import kinds
from yunion_mps.gpus.blockers import Blockers, Needs
from yunion_mps.gpus.kind import Kind, Step
from yunion_mps.gpus.mig_layout import LayoutLook
from yunion_mps.gpus.mig_steps import bring_into_effect
from yunion_mps.inventory.driver import Deadline
from yunion_mps.inventory.mig import Mig, MigMode
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner
from yunion_mps.planning.mig import layout_profiles
from yunion_mps.supervisor.preflight import run_preflight

from simhost import SimHost
from simhost.tree import device_file
from unit.mig_host import MakeMigHost, MigHost
from unit.mps.other_processes import no_descriptor_left
from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervise, configure, modes

pytestmark = pytest.mark.processes

#: How long a driver call may take.
DEADLINE_S = 1.0
MIG = "type: NVIDIA_MPS; mig: all-3g.40gb"
WHOLE = "type: NVIDIA_MPS; mig: all-disabled; virtual_number: 2"


def test_what_cannot_be_read_in_a_shortage_is_due_again(start_supervised: StartSupervised) -> None:
    """The original mode of a GPU that left the configuration is restored once no process of ours uses it."""
    host, made = start_supervised([{"kind": "v100"}, {"kind": "a100"}], 4, 4)
    host.fail("nvmlDeviceSetComputeMode", "unknown", gpu=1)
    host.divide(4)
    made.reload()
    made.rescan()

    async def set_values() -> None:
        with no_descriptor_left():
            assert await made.supervisor.reconciliation.set_values(made.supervisor.nvml) == []

    asyncio.run(set_values())


def test_without_the_driver_no_setting_is_said_to_wait(start_with_job: StartWithJob) -> None:
    """What it waited for may have ended since; the next poll that succeeds tells."""
    host, _, made, job = start_with_job([{"kind": "v100"}], 4)
    configure(host, cuda_mps_compute_mode="keep")
    made.reload()
    made.bring_about()
    assert waiting(made.snapshot) == ["00:06.0"]
    made.supervisor.driver_failed(DriverError("it hangs", code=DRIVER_HUNG), time.monotonic())
    assert waiting(made.snapshot) == []
    job.end()


def waiting(snapshot: Snapshot) -> list[str]:
    """The GPUs with a setting that waits."""
    subjects = []
    for condition in snapshot.conditions:
        if condition.reason.code == SETTING_PENDING:
            subjects.append(condition.subject)
    return subjects


def test_a_start_goes_on_if_only_a_gpu_that_is_not_divided_refuses(
    make_host: MakeHost, supervise: Supervise
) -> None:
    """Otherwise the control daemon of the other one would be left without supervision at each start."""
    host = make_host([{"kind": "v100"}, {"kind": "h100"}])
    host.gpus[1].compute_mode = "prohibited"
    host.divide(4)
    made = supervise(host).start()
    made.supervisor.release()
    layout = device_file([(host.gpus[1].uuid, "type: NVIDIA_MPS; mig: all-3g.40gb")])
    (host.root / "etc/yunion/host_container_device.yml").write_text(layout)
    host.fail("nvmlDeviceSetComputeMode", "no_permission", gpu=1)
    made.next_supervisor().supervisor.start(time.monotonic())


def test_a_mig_call_that_hangs_keeps_no_other_gpu_from_being_restored(
    start_supervised: StartSupervised,
) -> None:
    """While it hangs, all calls through the same NVML are refused."""
    host, made = start_supervised([{"kind": "h100"}, {"kind": "v100"}], f"{MIG}; mig_restore: true", 2)
    made.bring_about()
    assert host.gpus[1].compute_mode == "exclusive_process"
    assert made.supervisor.nvml
    made.supervisor.nvml.deadline = Deadline(DEADLINE_S)
    host.fail("nvmlGpuInstanceDestroy", "success", delay_ms=3_600_000)
    made.stop()
    assert host.gpus[1].compute_mode == "default"
    host.clear()


def test_a_stop_that_cannot_restore_a_layout_records_why(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "h100"}], f"{MIG}; mig_restore: true")
    made.bring_about()
    host.fail("nvmlGpuInstanceDestroy", "no_permission")
    made.stop()
    events = [event for event in made.events if event.kind == "mig"]
    assert (events[-1].what, events[-1].code) == (
        "the original layout was not restored",
        MIG_NO_PERMISSION,
    )
    host.clear()


def gpus_of(host: MigHost) -> list[Gpu]:
    return [gpu for gpu in Scanner(Paths(str(host.sim.root))).scan(host.nvml).gpus if not gpu.parent]


def look_at(host: MigHost, number: int, *profiles: str) -> LayoutLook:
    gpu = gpus_of(host)[number]
    return LayoutLook(MigLayout(str(gpu.uuid), True, layout_profiles(profiles, gpu)), gpu)


class SlowMig(Mig):
    """While it switches a mode, an operator replaces an idle instance of the second GPU by the same."""

    host: MigHost

    def set_mode(self, uuid: str, on: bool) -> MigMode:
        mode = super().set_mode(uuid, on)
        gpu = gpus_of(self.host)[1]
        (ours,) = [instance for instance in gpu.mig_instances if instance.profile == "1g.10gb"]
        (profile,) = [profile for profile in gpu.mig_profiles if profile.name == ours.profile]
        self.destroy(str(gpu.uuid), ours.id)
        number = self.create(str(gpu.uuid), profile, ours.start)
        self.create_compute(str(gpu.uuid), number)
        return mode


def test_an_instance_that_another_program_has_just_created_is_kept(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100"}, {"kind": "h100"}])
    host.result(look_at(host, 1, "3g.40gb", "1g.10gb"))
    looks = [look_at(host, 0, "all-1g.10gb"), look_at(host, 1, "3g.40gb")]
    mig = SlowMig(host.nvml)
    mig.host = host
    result = bring_into_effect(looks, mig, host.originals, Blockers())
    assert sorted(instance.profile for instance in gpus_of(host)[1].mig_instances) == ["1g.10gb", "3g.40gb"]
    assert "have changed meanwhile" in result.reasons[looks[1].uuid]


class FanSpeed(Kind):
    """Set if a test requests it; notes whether the second GPU was in MIG mode then."""

    name = label = "fan speed"
    refused_code = changed_code = "other"

    def __init__(self) -> None:
        self.is_requested = False
        self.host: SimHost | None = None
        self.was_in_mig_mode: list[bool] = []

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        del plan, gpu
        return "full" if self.is_requested else None

    def needs(self, step: Step) -> Needs:
        del step
        return Needs()

    def observe(self, nvml: Nvml, uuid: str) -> str:
        del nvml, uuid
        return "quiet"

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        del nvml, uuid, step
        assert self.host
        self.was_in_mig_mode.append(self.host.gpus[1].mig)

    def command(self, uuid: str, value: str) -> str:
        return f"set-fan {uuid} {value}"


@pytest.fixture
def fan_speed() -> Iterator[FanSpeed]:
    kind = FanSpeed()
    kinds.KINDS.append(kind)
    yield kind
    kinds.KINDS.remove(kind)


def test_what_precedes_no_layout_is_set_after_the_layouts(
    fan_speed: FanSpeed, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised([{"kind": "v100"}, {"kind": "h100"}], 4)
    fan_speed.host = host
    host.divide(4, MIG)
    made.supervisor.accept(run_preflight(made.paths, made.supervisor.nvml))
    fan_speed.is_requested = True
    made.bring_about()
    assert set(fan_speed.was_in_mig_mode) == {True}


def test_a_compute_mode_is_set_after_a_layout_step_that_failed(start_supervised: StartSupervised) -> None:
    """The switch resets it, although the daemon cannot read back that the mode was switched."""
    host, made = start_supervised([{"kind": "h100"}], MIG)
    made.bring_about()
    host.gpus[0].end_instances()
    host.divide(WHOLE)
    made.supervisor.accept(run_preflight(made.paths, made.supervisor.nvml))
    host.fail("nvmlDeviceGetMigMode", "unknown", skip=2, times=1)
    made.bring_about()
    assert (host.gpus[0].mig, modes(host)) == (False, ["exclusive_process"])


def test_a_state_file_that_cannot_be_read_is_logged_once(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    _, made = start_supervised([{"kind": "v100"}], 4)
    made.bring_about()
    file = made.paths.store
    os.rename(file, f"{file}.away")
    with closing(sqlite3.connect(file)) as newer:
        newer.execute("PRAGMA user_version = 99")
    made.bring_about()
    made.bring_about()
    assert caplog.text.count("compute modes and time slices cannot be restored") == 1
    os.rename(f"{file}.away", file)
    made.bring_about()


def test_a_poll_during_steps_tells_only_which_gpus_answer(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host([{"kind": "h100"}, {"kind": "v100"}])
    host.divide("type: NVIDIA_MPS; mig: [3g.40gb]", 4)
    made = supervise(host).start()
    made.bring_about()
    before, events = made.snapshot, len(made.events)
    host.create_mig_devices(0, "1g.10gb")  # as a layout that is brought into effect at the moment
    host.gpus[1].compute_mode = "default"
    assert made.supervisor.nvml
    scan = Scanner(made.paths).scan(made.supervisor.nvml)
    made.supervisor.update_gpus(scan, time.monotonic(), during_steps=True)
    assert made.snapshot.inventory == before.inventory
    assert len(made.events) == events
    host.gpus[1].lose()
    scan = Scanner(made.paths).scan(made.supervisor.nvml)
    made.supervisor.update_gpus(scan, time.monotonic(), during_steps=True)
    first, *instances, second = made.snapshot.inventory.gpus
    assert (first, *instances) == before.inventory.gpus[:-1]
    assert second.reason.code == GPU_LOST
    host.gpus[1].restore()
    made.rescan()
    assert len(made.snapshot.inventory.gpus) == len(before.inventory.gpus) + 1
