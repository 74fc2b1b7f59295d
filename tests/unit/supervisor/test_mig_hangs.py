"""MIG layouts while the driver hangs, or while other programs change what has just been applied."""

from __future__ import annotations

import time

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError
from yunion_mps.core.mig import DISABLED
from yunion_mps.core.reasons import Reason
from yunion_mps.gpus.mig_layout import LayoutLook
from yunion_mps.gpus.mig_steps import carry_out_layouts, decide_layouts, observe_layouts
from yunion_mps.inventory.driver import Deadline
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner

from integration.daemon_host import eventually
from unit.mig_host import NOTHING_BUSY, MakeMigHost, MigHost
from unit.supervisor.test_mig_devices import StartWork, apply_layouts, begun, waits

__all__ = ["begun"]

#: So long that only a call that hangs takes longer.
DEADLINE_S = 2.0


def answers(host: MigHost) -> bool:
    try:
        return bool(host.gpu.uuid)
    except DriverError:
        return False


def hung(host: MigHost, call: str, *names: str) -> tuple[LayoutLook, Reason]:
    """Apply a layout while this call hangs, and let the call go on after it was given up."""
    look = host.look(*names)
    host.mig.deadline = host.nvml.deadline = Deadline(DEADLINE_S)
    host.sim.fail(call, "success", delay_ms=3_600_000)
    why = host.result(look).reasons[look.uuid]
    host.sim.clear()
    eventually(lambda: answers(host), "the driver's answer")
    return look, why


def test_an_instance_is_not_destroyed_after_its_call_was_given_up(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    look, why = hung(host, "nvmlComputeInstanceDestroy", "all-1g.10gb")
    assert why.code == reasons.DRIVER_HUNG
    assert host.has.endswith("3g.40gb"), "the first has lost its compute instance only"
    assert host.gpu.mig_instances[0].compute_instances == 0
    assert len(host.ours) == 2
    assert host.result(look._replace(last=why)).reasons == {host.gpu.uuid: ""}
    assert host.has == "7 x 1g.10gb"


def test_what_a_call_destroys_after_it_was_given_up_is_reported(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    first = host.gpu.mig_instances[0].id
    look, why = hung(host, "nvmlGpuInstanceDestroy", "all-1g.10gb")
    assert host.has == "1 x 3g.40gb"
    result = host.result(look._replace(last=why))
    assert f"destroyed g{first} (3g.40gb) by a call that hung" in result.changes[str(host.gpu.uuid)]
    assert host.has == "7 x 1g.10gb"


def test_an_instance_that_a_call_creates_late_is_ours(mig_host: MakeMigHost) -> None:
    host = mig_host()
    look, why = hung(host, "nvmlDeviceCreateGpuInstanceWithPlacement", "all-7g.80gb")
    assert (why.code, host.has) == (reasons.DRIVER_HUNG, "1 x 7g.80gb")
    assert host.gpu.mig_instances[0].compute_instances == 0
    result = host.result(look._replace(last=why))
    assert result.reasons == {host.gpu.uuid: ""}
    assert "created g0 (7g.80gb) by a step that was interrupted" in result.changes[str(host.gpu.uuid)]
    assert host.ours == [0]
    assert host.apply("all-1g.10gb") == ""


def test_an_instance_created_late_goes_when_mig_mode_is_switched_off(mig_host: MakeMigHost) -> None:
    host = mig_host()
    _, why = hung(host, "nvmlDeviceCreateGpuInstanceWithPlacement", "all-7g.80gb")
    assert why.code == reasons.DRIVER_HUNG
    assert host.apply(DISABLED) == ""
    assert host.gpu.mig_enabled is False
    assert host.ours == []


def test_a_layout_makes_no_step_once_a_stop_has_begun(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("3g.40gb")
    looks = [host.look("all-1g.10gb")]
    steps = decide_layouts(looks, observe_layouts(looks, host.mig, host.originals), NOTHING_BUSY)
    result = carry_out_layouts(steps, {}, host.mig, host.originals, lambda: True)
    assert result.reasons[str(host.gpu.uuid)].code == reasons.BUSY
    assert host.has == "1 x 3g.40gb"


def test_no_layout_is_changed_after_a_stop_has_begun(begun: StartWork) -> None:
    """A poll may be under way on a thread, and come to its end after the original layout was restored."""
    host, made = begun("type: NVIDIA_MPS; mig: 3g.40gb; mig_restore: true")
    host.reboot()
    made.rescan()
    layouts, nvml = made.supervisor.layouts, made.supervisor.nvml
    due = made.supervisor.reconciliation.layouts_due(made.supervisor.nvml)
    assert due
    steps = layouts.decide(due, layouts.observe(due, nvml))
    assert steps.steps[0].create
    made.stop()
    result = layouts.carry_out(steps, nvml)
    assert (result.reasons, result.changes) == ({}, {})
    assert host.gpus[0].mig is False
    assert made.supervisor.state_file.originals().gpus() == set()


def test_a_layout_that_hung_is_noted_although_the_scan_fails_too(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-disabled; virtual_number: 2")
    (host.root / "etc/yunion/host_container_device.yml").write_text(
        f"devices:\n- path: {host.gpus[0].uuid}\n  type: NVIDIA_MPS\n  mig: 3g.40gb\n"
    )
    made.reload()
    made.rescan()
    made.reconcile()
    layouts, nvml = made.supervisor.layouts, made.supervisor.nvml
    due = made.supervisor.reconciliation.layouts_due(made.supervisor.nvml)
    assert due
    assert nvml
    steps = layouts.decide(due, layouts.observe(due, nvml))
    nvml.deadline = Deadline(DEADLINE_S)
    host.fail("nvmlDeviceSetMigMode", "success", delay_ms=3_600_000)
    result = layouts.carry_out(steps, nvml)
    assert result.inventory is None
    layouts.note(due, steps, result, time.monotonic())
    assert waits(made).code == reasons.DRIVER_HUNG
    host.clear()
    eventually(lambda: host.gpus[0].mig, "the call that hung")


@pytest.mark.parametrize("change", ["destroyed", "made again", "created"])
def test_a_change_between_applying_and_the_scan_is_noticed(begun: StartWork, change: str) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: [3g.40gb, 1g.10gb]")
    host.reboot()
    made.rescan()
    layouts, nvml, gpu = made.supervisor.layouts, made.supervisor.nvml, host.gpus[0]
    due = made.supervisor.reconciliation.layouts_due(made.supervisor.nvml)
    assert due
    assert isinstance(nvml, Nvml)
    steps = layouts.decide(due, layouts.observe(due, nvml))
    result = carry_out_layouts(steps.steps, {}, Mig(nvml), made.supervisor.state_file.originals())
    big = next(one for one in gpu.mig_devices() if one.profile == "3g.40gb")
    if change != "created":
        gpu.end_instances(big.gpu_instance)
    if change != "destroyed":
        host.create_mig_devices(0, "3g.40gb" if change == "made again" else "1g.10gb")
    scanned = Scanner(made.paths).scan(nvml)
    layouts.note(due, steps, result._replace(inventory=scanned), time.monotonic())
    assert made.supervisor.reconciliation.layouts_due(made.supervisor.nvml), "it is compared again"
    apply_layouts(made)
    assert sorted(one.profile for one in gpu.mig_devices())[-1] == "3g.40gb"
    assert made.available == 2
    reported = [event.code for event in made.events].count(reasons.MIG_CHANGED)
    assert reported == (1 if change == "created" else 2), (
        "the reboot; what is beside the layout harms nothing"
    )
