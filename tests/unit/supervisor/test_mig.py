"""MIG layouts on a host: what is applied, what is in the way, and what is restored."""

from __future__ import annotations

import pytest
from yunion_mps import reasons
from yunion_mps.mig import DISABLED
from yunion_mps.supervisor.mig import LayoutTask, find_losses, restore

from unit.mig_host import NOTHING_BUSY, MakeMigHost

# -- what is applied


def test_a_layout_is_applied_mode_first(mig_host: MakeMigHost) -> None:
    host = mig_host()
    task = LayoutTask(host.layout("all-balanced"), host.gpu, NOTHING_BUSY)
    result = host.result(task)
    assert result.reasons == {host.gpu.uuid: ""}
    assert result.changes[str(host.gpu.uuid)].startswith("switched MIG mode on, created g")
    assert host.has == "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb"
    assert sorted(host.ours) == sorted(one.id for one in host.gpu.mig_instances)


def test_a_layout_in_effect_is_left_alone(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-balanced")
    before = host.gpu.mig_instances
    host.sim.fail("nvmlDeviceCreateGpuInstance*", "unknown")
    host.sim.fail("nvmlGpuInstanceDestroy", "unknown")
    host.sim.fail("nvmlDeviceSetMigMode", "unknown")
    assert host.apply("all-balanced") == ""
    assert host.gpu.mig_instances == before


def test_a_new_layout_keeps_the_instances_that_it_has_too(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("3g.40gb", "2g.20gb")
    kept = {one.uuid for one in host.gpu.mig_instances}
    assert host.apply("3g.40gb", "2g.20gb", "1g.10gb") == ""
    assert kept < {one.uuid for one in host.gpu.mig_instances}


def test_all_disabled_destroys_what_is_ours_and_switches_the_mode_off(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-1g.10gb")
    assert host.apply(DISABLED) == ""
    assert (host.gpu.mig_enabled, host.gpu.mig_instances) == (False, ())


def test_every_layout_agrees_with_nvidia_smi(mig_host: MakeMigHost) -> None:
    host = mig_host()
    for names in (["all-1g.10gb"], ["all-balanced"], ["4g.40gb", "1g.20gb", "1g.10gb"], ["all-7g.80gb"]):
        assert host.apply(*names) == ""
        listed = host.sim.run(["nvidia-smi", "mig", "-lgi"], check=True).stdout
        assert {f"{one.id}" for one in host.gpu.mig_instances} == {
            row.split()[-3] for row in listed.splitlines() if "MIG " in row
        }
        shown = host.sim.run(["nvidia-smi", "-L"], check=True).stdout
        assert all(one.uuid in shown for one in host.gpu.mig_instances)


# -- what it waits for


def test_a_mode_that_needs_a_reset_is_pending(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100"}])
    why = host.apply("all-1g.5gb")
    assert (why, why.code) == (
        "MIG mode will be on after the next reset of the GPU",
        reasons.MIG_RESET_REQUIRED,
    )
    assert host.apply("all-1g.5gb").code == reasons.MIG_RESET_REQUIRED
    host.sim.gpus[0].reset()
    assert host.apply("all-1g.5gb") == ""
    assert host.has == "7 x 1g.5gb"


def test_no_mode_is_switched_on_a_gpu_with_processes_or_leases(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.sim.gpus[0].add_process(4321, 100)
    why = host.apply("all-1g.10gb", force=True)
    assert (why, why.code) == (
        "MIG mode cannot be switched on while processes use the GPU (PID 4321)",
        reasons.MIG_IN_USE,
    )
    host.sim.gpus[0].remove_process(4321)
    leased = frozenset({str(host.gpu.uuid)})
    assert host.apply("all-1g.10gb", busy=leased).code == reasons.MIG_IN_USE
    assert host.gpu.mig_pending is False
    assert host.apply("all-1g.10gb", busy=leased, force=True) == ""


def test_nothing_is_taken_away_before_the_leases_are_known(mig_host: MakeMigHost) -> None:
    host = mig_host()
    assert host.apply("all-1g.10gb", busy=None).code == reasons.MIG_PENDING
    host.apply("all-2g.20gb")
    assert host.apply("all-3g.40gb", busy=None).code == reasons.MIG_IN_USE
    assert host.has == "3 x 2g.20gb"
    host.sim.reboot()
    assert host.apply("all-2g.20gb", busy=None) == "", "what is only created needs no leases"


def test_an_instance_with_a_client_is_not_destroyed_even_now(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    number = host.gpu.mig_instances[0].id
    host.process(number)
    for force in (False, True):
        why = host.apply("all-1g.10gb", force=force)
        assert why.code == reasons.MIG_IN_USE
        assert f"instance g{number} (3g.40gb) is in the way of its MIG layout" in why
        assert "PID 4321" in why
        assert host.has == "2 x 3g.40gb"
    host.sim.gpus[0].remove_process(4321)
    assert host.apply("all-1g.10gb") == ""


def test_a_leased_instance_is_destroyed_only_now(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    leased = frozenset({host.gpu.mig_instances[1].uuid})
    why = host.apply("all-1g.10gb", busy=leased)
    assert (why, why.code) == (
        "its MIG layout waits for leases and MPS servers on instance g2 (3g.40gb) to end",
        reasons.MIG_IN_USE,
    )
    assert host.has == "2 x 3g.40gb"
    assert host.apply("all-1g.10gb", busy=leased, force=True) == ""


def test_an_instance_of_another_program_is_destroyed_only_now(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "3g.40gb")
    why = host.apply("all-7g.80gb")
    assert why.code == reasons.MIG_FOREIGN_INSTANCE
    assert f"instance g{other.gpu_instance} (3g.40gb), which another program created" in why
    assert host.sim.gpus[0].mig_devices() == [other]
    assert host.apply(DISABLED).code == reasons.MIG_FOREIGN_INSTANCE
    assert host.apply("all-7g.80gb", force=True) == ""


def test_an_instance_of_another_program_is_used_if_the_layout_has_it(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "3g.40gb")
    assert host.apply("all-3g.40gb") == ""
    assert other.uuid in {one.uuid for one in host.gpu.mig_instances}
    assert other.gpu_instance not in host.ours
    assert host.apply("all-7g.80gb").code == reasons.MIG_FOREIGN_INSTANCE


def test_an_instance_of_another_program_beside_the_layout_stays_even_now(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "1g.10gb")
    for force in (False, True):
        assert host.apply("2g.20gb", force=force) == ""
        assert other in host.sim.gpus[0].mig_devices()


def test_an_instance_with_a_used_compute_instance_stays_whole(
    mig_host: MakeMigHost,
) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.run(["nvidia-smi", "mig", "-cgi", "4g.40gb"], check=True)
    host.sim.run(["nvidia-smi", "mig", "-cci", "1c.4g.40gb,1c.4g.40gb"], check=True)
    before = host.sim.gpus[0].mig_devices()
    host.sim.gpus[0].add_process(4321, 100, on=(before[0].gpu_instance, 1))
    for names in (["all-7g.80gb"], [DISABLED]):
        why = host.apply(*names, force=True)
        assert (why.code, "PID 4321" in why) == (reasons.MIG_IN_USE, True)
        assert host.sim.gpus[0].mig_devices() == before
    host.sim.gpus[0].remove_process(4321)
    assert host.apply("all-7g.80gb", force=True) == ""


def test_an_instance_made_in_our_place_is_not_ours(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-7g.80gb")
    host.sim.gpus[0].end_instances()
    (other,) = host.sim.create_mig_devices(0, "7g.80gb")
    assert host.apply("all-1g.10gb").code == reasons.MIG_FOREIGN_INSTANCE
    assert host.sim.gpus[0].mig_devices() == [other]


@pytest.mark.parametrize("names", [["all-1g.10gb"], ["4g.40gb", "3g.40gb"], ["3g.40gb"], [DISABLED]])
@pytest.mark.parametrize("has_process", [False, True])
def test_what_now_would_take_away_is_what_it_takes(
    mig_host: MakeMigHost, names: list[str], has_process: bool
) -> None:
    host = mig_host()
    host.apply("3g.40gb", "2g.20gb")
    ours = {one.uuid for one in host.gpu.mig_instances}
    host.sim.create_mig_devices(0, "1g.10gb")
    before = host.gpu.mig_instances
    busy = frozenset({before[0].uuid})
    task = LayoutTask(host.layout(*names), host.gpu, busy)
    if has_process:
        host.process(before[1].id)
    losses = find_losses([task], host.mig, host.store)[str(host.gpu.uuid)]
    assert host.gpu.mig_instances == before
    if has_process:  # what is listed is what goes once it has ended
        host.sim.gpus[0].remove_process(4321)
    assert host.apply(*names, busy=busy, force=True) == ""
    gone = {one.uuid for one in before} - {one.uuid for one in host.gpu.mig_instances}
    assert losses.uuids == gone
    assert {one.uuid for one in losses.others} == gone - ours


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("nvmlDeviceSetMigMode", "no_permission", reasons.MIG_REFUSED),
        ("nvmlDeviceCreateGpuInstance*", "insufficient_resources", reasons.MIG_REFUSED),
        ("nvmlDeviceCreateGpuInstance*", "reset_required", reasons.MIG_RESET_REQUIRED),
        ("nvmlGpuInstanceCreateComputeInstance", "unknown", reasons.MIG_REFUSED),
    ],
)
def test_a_refusal_is_a_reason_and_the_next_attempt_continues(
    mig_host: MakeMigHost, call: str, error: str, code: str
) -> None:
    host = mig_host()
    host.sim.fail(call, error)
    why = host.apply("all-balanced")
    assert (why.code, why.startswith("its MIG layout cannot be changed: ")) == (code, True)
    host.sim.clear()
    assert host.apply("all-balanced") == ""
    assert host.has == "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb"


def test_instances_are_created_again_after_a_reboot(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-2g.20gb")
    host.sim.reboot()
    assert (host.gpu.mig_enabled, host.has) == (True, "")
    assert host.apply("all-2g.20gb") == ""
    assert host.has == "3 x 2g.20gb"
    assert host.apply("all-1g.10gb") == "", "they are ours again"


# -- what is restored


@pytest.mark.parametrize("before", [[], ["1g.10gb", "3g.40gb"]])
def test_the_layout_from_before_is_restored_only_if_so_configured(
    mig_host: MakeMigHost, before: list[str]
) -> None:
    host = mig_host([{"kind": "h100", "mig": bool(before)}])
    if before:
        host.sim.create_mig_devices(0, *before)
    had = (host.gpu.mig_enabled, host.has)
    host.apply("all-2g.20gb", force=True)
    restore([host.layout("all-2g.20gb")], [host.gpu], host.nvml, host.store, ())
    assert host.has.endswith("3 x 2g.20gb")
    restore([host.layout("all-2g.20gb", restore=True)], [host.gpu], host.nvml, host.store, ())
    assert (host.gpu.mig_enabled, host.has) == had
    assert host.ours == []


def test_leased_instances_are_not_taken_away_by_a_restoration(
    mig_host: MakeMigHost, caplog: pytest.LogCaptureFixture
) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    leased = {host.gpu.mig_instances[0].uuid}
    former = [host.layout("all-3g.40gb", restore=True)]
    restore(former, [host.gpu], host.nvml, host.store, leased)
    assert host.has == "2 x 3g.40gb"
    assert "waits for leases and MPS servers on instance g1 (3g.40gb) to end" in caplog.text
    restore(former, [host.gpu], host.nvml, host.store, ())
    assert host.gpu.mig_enabled is False
