"""MIG layouts on a host: what is applied, what is in the way, and what is restored."""

from __future__ import annotations

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.mig import DISABLED, MigInstance
from yunion_mps.gpus.mig_layout import Losses

from unit.mig_host import MakeMigHost, MigHost

# -- what is applied


def test_a_layout_is_applied_mode_first(mig_host: MakeMigHost) -> None:
    host = mig_host()
    result = host.result(host.look("all-balanced"))
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
        "the switch to MIG mode waits for the process (PID 4321) to end",
        reasons.MIG_IN_USE,
    )
    host.sim.gpus[0].remove_process(4321)
    leased = host.leased(str(host.gpu.uuid))
    assert host.apply("all-1g.10gb", busy=leased).code == reasons.MIG_IN_USE
    assert host.gpu.mig_pending is False
    assert host.apply("all-1g.10gb", busy=leased, force=True) == ""


def test_nothing_is_taken_away_before_the_leases_are_known(mig_host: MakeMigHost) -> None:
    host = mig_host()
    assert host.apply("all-1g.10gb", busy=None).code == reasons.MIG_PENDING
    host.apply("all-2g.20gb")
    assert host.apply("all-3g.40gb", busy=None).code == reasons.MIG_PENDING
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
        assert f"waits for the process (PID 4321) on instance g{number} (3g.40gb) to end" in why
        assert host.has == "2 x 3g.40gb"
    host.sim.gpus[0].remove_process(4321)
    assert host.apply("all-1g.10gb") == ""


def test_a_leased_instance_is_destroyed_only_now(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    leased = host.leased(host.gpu.mig_instances[1].uuid)
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
    busy = host.leased(before[0].uuid)
    look = host.look(*names)
    if has_process:
        host.process(before[1].id)
    losses = host.losses(look, busy)
    assert host.gpu.mig_instances == before
    if has_process:  # what is listed is what goes once it has ended
        host.sim.gpus[0].remove_process(4321)
    assert host.apply(*names, busy=busy, force=True) == ""
    gone = {one.uuid for one in before} - {one.uuid for one in host.gpu.mig_instances}
    assert losses.uuids == gone
    assert {one.uuid for one in losses.others} == gone - ours


def test_a_confirmation_does_not_cover_what_was_not_listed(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("3g.40gb", "1g.10gb")
    first, second = host.gpu.mig_instances
    look = host.look("all-7g.80gb")
    losses = host.losses(look, host.leased(first.uuid))
    assert losses.uuids == {first.uuid, second.uuid}
    late = look._replace(confirmed=Losses(frozenset({first.uuid})))
    assert host.result(late, host.leased(second.uuid)).reasons[str(host.gpu.uuid)].code == reasons.MIG_IN_USE
    host.sim.create_mig_devices(0, "1g.10gb")
    late = look._replace(confirmed=losses)
    assert (
        host.result(late, host.leased(first.uuid)).reasons[str(host.gpu.uuid)].code
        == reasons.MIG_FOREIGN_INSTANCE
    )
    assert {first.uuid, second.uuid} < {one.uuid for one in host.gpu.mig_instances}


#: What each refusal that NVML documents means, its reason code, and a command that its hint names.
REFUSALS = {
    "in_use": ("a process uses it", reasons.MIG_IN_USE, "yunion-mps who"),
    "reset_required": ("the GPU must be reset first", reasons.MIG_RESET_REQUIRED, "nvidia-smi --gpu-reset"),
    "no_permission": ("permission denied", reasons.MIG_NO_PERMISSION, "systemctl status yunion-mps-daemon"),
    "not_supported": ("the driver does not support it here", reasons.MIG_NOT_SUPPORTED, "remove mig"),
    "insufficient_resources": (
        "the GPU has no room for it", reasons.MIG_INSUFFICIENT_RESOURCES, "nvidia-smi mig -i GPU -lgi"
    ),
    "unknown": ("NVML: Unknown Error", reasons.MIG_REFUSED, "dmesg"),
}  # fmt: skip
#: The calls that change something from 3g.40gb alone to all-2g.20gb, and what fails without them.
CHANGES = {
    "nvmlDeviceSetMigMode": "MIG mode cannot be switched on",
    "nvmlDeviceCreateGpuInstance*": "instance 2g.20gb cannot be created at slice 0",
    "nvmlGpuInstanceCreateComputeInstance": "the compute instance of g3 cannot be created",
    "nvmlComputeInstanceDestroy": "instance g1 cannot be destroyed",
    "nvmlGpuInstanceDestroy": "instance g1 cannot be destroyed",
}


@pytest.mark.parametrize("error", REFUSALS)
@pytest.mark.parametrize("call", CHANGES)
def test_a_refusal_says_what_failed_that_jobs_are_safe_and_what_to_do(
    mig_host: MakeMigHost, call: str, error: str
) -> None:
    host = mig_host()
    if call != "nvmlDeviceSetMigMode":
        assert host.apply("3g.40gb") == ""
    host.sim.fail(call, error)
    why = host.apply("all-2g.20gb")
    meaning, code, command = REFUSALS[error]
    told = f"{CHANGES[call]}: {meaning}; no running job is affected"
    assert (why, why.code) == (f"its MIG layout cannot be changed: {told}", code)
    assert command in reasons.hint_of(code)
    host.sim.clear()
    assert host.apply("all-2g.20gb") == "", "the next attempt continues"
    assert host.has == "3 x 2g.20gb"


@pytest.mark.parametrize("error", ["no_permission", "not_supported", "insufficient_resources", "unknown"])
def test_a_mode_that_is_not_activated_is_refused_with_the_reason(mig_host: MakeMigHost, error: str) -> None:
    host = mig_host()
    host.sim.fail("nvmlDeviceSetMigModeActivation", error)
    why = host.apply("all-2g.20gb")
    assert why.code == REFUSALS[error][1]
    assert f"MIG mode cannot be switched on: {REFUSALS[error][0]}; no running job is affected" in why
    assert (host.gpu.mig_enabled, host.gpu.mig_pending) == (False, True)
    host.sim.clear()
    assert host.apply("all-2g.20gb") == ""


def test_instances_are_created_again_after_a_reboot(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-2g.20gb")
    host.sim.reboot()
    assert (host.gpu.mig_enabled, host.has) == (True, "")
    assert host.apply("all-2g.20gb") == ""
    assert host.has == "3 x 2g.20gb"
    assert host.apply("all-1g.10gb") == "", "they are ours again"


def test_a_leftover_of_ours_is_destroyed_once_nothing_uses_it(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-2g.20gb")
    last = max(host.gpu.mig_instances, key=lambda one: one.start)
    leased = host.leased(last.uuid)
    why = host.apply("3g.40gb", busy=leased)
    assert (why, why.code) == (
        "its MIG layout waits for leases and MPS servers on instance g5 (2g.20gb) to end",
        reasons.MIG_IN_USE,
    )
    assert host.has == "1 x 2g.20gb + 1 x 3g.40gb"
    host.process(last.id)
    assert (
        host.apply("3g.40gb", force=True)
        == f"its MIG layout waits for the process (PID 4321) on instance g{last.id} (2g.20gb) to end"
    )
    host.sim.gpus[0].remove_process(4321)
    assert host.apply("3g.40gb", busy=leased, force=True) == ""
    assert host.has == "1 x 3g.40gb"


def test_an_instance_without_compute_instance_is_left_to_its_program(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.run(["nvidia-smi", "mig", "-cgi", "4g.40gb"], check=True)
    (other,) = host.gpu.mig_instances
    why = host.apply("4g.40gb")
    what = f"instance g{other.id} (4g.40gb), which another program left without a compute instance"
    assert (why, why.code) == (f"{what}, is in the way of its MIG layout", reasons.MIG_FOREIGN_INSTANCE)
    assert host.gpu.mig_instances == (other,)
    assert host.apply("3g.40gb") == "", "beside it"
    assert other in host.gpu.mig_instances
    losses = host.losses(host.look("4g.40gb"))
    assert losses.others == (other,)
    assert host.apply("4g.40gb", force=True) == ""
    assert host.has == "1 x 4g.40gb"
    assert all(one.uuid for one in host.gpu.mig_instances)


def without_compute_instance(mig_host: MakeMigHost) -> tuple[MigHost, MigInstance]:
    """A host with an instance of ours whose compute instance another program has destroyed."""
    host = mig_host()
    host.apply("all-7g.80gb")
    (ours,) = host.gpu.mig_instances
    host.sim.run(["nvidia-smi", "mig", "-dci", "-gi", ours.id], check=True)
    return host, ours


def test_an_instance_of_ours_gets_its_compute_instance_again(mig_host: MakeMigHost) -> None:
    host, ours = without_compute_instance(mig_host)
    assert host.apply("all-7g.80gb") == ""
    (now,) = host.gpu.mig_instances
    assert (now.place, now.is_whole, now.uuid != "") == (ours.place, True, True)
    assert host.ours == [ours.id]
    assert host.apply("all-1g.10gb") == "", "it is not another program's"


def test_an_instance_of_ours_without_its_compute_instance_is_replaced(mig_host: MakeMigHost) -> None:
    host, _ = without_compute_instance(mig_host)
    assert host.apply("all-1g.10gb") == ""
    assert host.has == "7 x 1g.10gb"


def test_an_instance_of_ours_that_another_program_divided_is_reported(mig_host: MakeMigHost) -> None:
    host, ours = without_compute_instance(mig_host)
    host.sim.run(["nvidia-smi", "mig", "-cci", "0,0", "-gi", ours.id], check=True)
    for names in (["all-7g.80gb"], ["all-1g.10gb"]):
        why = host.apply(*names)
        what = f"instance g{ours.id} (7g.80gb), which another program divided into compute instances"
        assert (why, why.code) == (f"{what}, is in the way of its MIG layout", reasons.MIG_FOREIGN_INSTANCE)
