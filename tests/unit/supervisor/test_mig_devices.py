"""Devices on MIG instances, from the configuration to the environment."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from yunion_mps.cli.config import gpu_records
from yunion_mps.core import reasons
from yunion_mps.core.errors import ConfigError
from yunion_mps.core.models import Device
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import ENTRY_REFUSED, NO_REASON, Reason
from yunion_mps.leases.ledger import Ledger
from yunion_mps.planning.environment import client_environment
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.devices import devices_json

from simhost import Description, SimHost
from unit.leases.lease_builders import leases_on
from unit.supervised import MakeHost, Supervise, Supervised

H100 = [{"kind": "h100"}]


def configured(host: SimHost, *entries: str) -> None:
    """Write an entry for each of the first GPUs, with these keys."""
    host.divide(*entries)


def apply_layouts(made: Supervised, leased: set[str] | None = None, *, now: bool | None = None) -> None:
    """As the monitor does in each poll, or with `now` a reload, after it has been accepted.

    `leased` has the GPUs and instances (UUIDs) that are leased; without it, the ledger stays as it is.
    """
    if leased is not None:
        made.hold(leases_on(*leased))
    made.rescan()
    if now is not None:
        made.supervisor.layouts.confirm(made.losses() if now else {})
    made.bring_about()
    made.until(lambda: made.supervisor.fleet.started)


MIG = "type: NVIDIA_MPS; mig: all-balanced"


StartWork = Callable[..., "tuple[SimHost, Supervised]"]


@pytest.fixture
def begun(make_host: MakeHost, supervise: Supervise) -> StartWork:
    """Start a supervisor on a host with these entries, and bring the layouts into effect."""

    def make(*entries: str, description: Description = H100, **keys: str) -> tuple[SimHost, Supervised]:
        host = make_host(description, **keys)
        configured(host, *entries)
        made = supervise(host).start()
        apply_layouts(made)
        return host, made

    return make


def devices(made: Supervised) -> tuple[Device, ...]:
    return made.snapshot.plan.devices


def waits(made: Supervised) -> Reason:
    """Why the layout of the first GPU is pending; empty if it is in effect."""
    return made.snapshot.faults.get("00:06.0", NO_REASON)


def test_each_instance_is_a_device(begun: StartWork) -> None:
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


def test_a_process_sees_only_its_instance(begun: StartWork) -> None:
    _, made = begun(MIG)
    one = devices(made)[0]
    assert client_environment([one], None) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": one.gpu_uuid,
        "YUNION_MPS_DEVICE": one.addr,
    }


def test_each_instance_with_mps_has_a_control_daemon(begun: StartWork) -> None:
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


def test_each_instance_can_be_time_sliced(begun: StartWork) -> None:
    _, made = begun("type: NVIDIA_GPU_SHARE; mig: all-3g.40gb; virtual_number: 3")
    assert len(devices(made)) == 6
    assert {(one.sharing, one.budget_enforced, one.memory_limit_mib) for one in devices(made)} == {
        ("time-slicing", False, 13482)
    }
    assert made.snapshot.domains == ()


def test_the_ways_of_sharing_stand_side_by_side(begun: StartWork) -> None:
    three = ["type: NVIDIA_MPS; virtual_number: 2", "type: NVIDIA_GPU_SHARE; virtual_number: 2"]
    host, made = begun(
        *three,
        "type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2",
        description=[{"kind": "h100", "count": 3}],
        cuda_mps_pipe_directory="/run/mps/pipe",
    )
    assert [gpu.compute_mode for gpu in host.gpus] == ["exclusive_process", "default", "default"]
    assert [status.plan.name for status in made.snapshot.domains] == [
        "host",
        *(f"00:08.0-g{one.gpu_instance}" for one in host.gpus[2].mig_devices()),
    ]
    assert made.available == 8


def test_ids_of_devices_stay_when_instances_are_made_again(begun: StartWork) -> None:
    host, made = begun(MIG)
    before = {one.id: one.gpu_uuid for one in devices(made)}
    host.reboot()
    apply_layouts(made)
    after = {one.id: one.gpu_uuid for one in devices(made)}
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    assert made.available == 4


def test_a_restarted_daemon_creates_what_a_reboot_took(begun: StartWork) -> None:
    host, made = begun(MIG)
    before = {one.id for one in devices(made)}
    made.stop()
    host.reboot()
    again = made.start_next()
    assert {one.id for one in devices(again)} == before
    assert again.available == 4, "at its start, before the first poll"


def test_an_instance_that_is_destroyed_is_reported_and_made_again(begun: StartWork) -> None:
    host, made = begun(MIG)
    gone = host.gpus[0].mig_devices()[0]
    host.gpus[0].end_instances(gone.gpu_instance)
    made.rescan()
    rows = {row["addr"]: row for row in devices_json(made.snapshot, Ledger())}
    row = rows[f"00:06.0-g{gone.gpu_instance}"]
    assert (row["state"], row["reason_code"]) == ("unavailable", reasons.MIG_INSTANCE_GONE)
    assert made.available == 3
    apply_layouts(made)
    assert made.available == 4
    assert (reasons.MIG_CHANGED, "00:06.0") in {(event.code, event.subject) for event in made.events}


def test_an_event_names_the_compute_instance_that_was_destroyed(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-1g.10gb")
    host.run(["nvidia-smi", "mig", "-i", "0", "-dci", "-gi", "7"], check=True)
    apply_layouts(made)
    (event,) = (event for event in made.events if event.code == reasons.MIG_CHANGED)
    assert event.what == "the compute instance of instance g7 (1g.10gb) was destroyed"
    assert made.available == 7
    host.divide("type: NVIDIA_MPS; mig: all-7g.80gb")
    made.reload()
    apply_layouts(made)
    assert (made.available, waits(made)) == (1, NO_REASON), "the instance is still ours"


def test_an_instance_that_was_divided_is_not_said_to_be_gone(begun: StartWork) -> None:
    host, made = begun(MIG)
    number = host.gpus[0].mig_devices()[0].gpu_instance
    host.run(["nvidia-smi", "mig", "-i", "0", "-dci", "-gi", str(number)], check=True)
    host.run(["nvidia-smi", "mig", "-i", "0", "-cci", "0,0", "-gi", str(number)], check=True)
    made.rescan()
    rows = {row["addr"]: row for row in devices_json(made.snapshot, Ledger())}
    row = rows[f"00:06.0-g{number}"]
    assert (row["state"], row["reason_code"]) == ("unavailable", reasons.MIG_FOREIGN_INSTANCE)
    assert row["reason"].endswith("another program divided the MIG instance into compute instances")


def test_a_mode_that_is_switched_off_is_switched_on_again(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2")
    host.gpus[0].mig = False
    made.rescan()
    assert made.available == 0
    assert made.snapshot.inventory.gpus[0].reason == ""
    apply_layouts(made)
    made.until(lambda: made.available == 4)


def test_a_layout_that_waits_says_for_what(begun: StartWork) -> None:
    host, made = begun(MIG, description=[{"kind": "a100"}])
    why = waits(made)
    assert (why, why.code) == (
        "MIG mode will be on after the next reset of the GPU",
        reasons.MIG_RESET_REQUIRED,
    )
    assert made.supervisor.is_urgent
    assert devices(made) == ()
    host.gpus[0].reset()
    apply_layouts(made)
    assert waits(made) == ""
    assert made.available == 4


def test_a_reload_changes_the_layout_of_free_instances_only(begun: StartWork) -> None:
    host, made = begun(MIG)
    leased = devices(made)[0]
    configured(host, "type: NVIDIA_MPS; mig: all-1g.10gb")
    made.accept()
    apply_layouts(made, {leased.gpu_uuid})
    assert waits(made).code == reasons.MIG_IN_USE
    assert leased.gpu_uuid in {one.uuid for one in host.gpus[0].mig_devices()}
    apply_layouts(made, set())
    assert [one.profile for one in host.gpus[0].mig_devices()] == ["1g.10gb"] * 7
    assert made.available == 7


def test_a_mode_that_another_program_switched_off_is_switched_on_again(begun: StartWork) -> None:
    """Although an instance that was destroyed with it is leased: it is created again."""
    host, made = begun(MIG)
    made.hold(leases_on(devices(made)[0].gpu_uuid))
    host.gpus[0].mig = False
    apply_layouts(made)
    assert waits(made) == ""
    assert len(host.gpus[0].mig_devices()) == 4


def test_what_can_be_leased_meanwhile_is_never_destroyed(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-1g.10gb")
    by_start = sorted(made.snapshot.inventory.gpus[0].mig_instances, key=lambda one: one.start)
    configured(host, "type: NVIDIA_MPS; mig: [3g.40gb, 1g.10gb]")
    made.accept()
    (offered,) = devices(made)
    leased = by_start[5].uuid  # a 3g.40gb fits beside it, in the place of what is offered
    made.hold(leases_on(leased))
    made.bring_about()
    assert {offered.gpu_uuid, leased} <= {one.uuid for one in host.gpus[0].mig_devices()}
    apply_layouts(made, {offered.gpu_uuid})
    assert sorted(one.profile for one in host.gpus[0].mig_devices()) == ["1g.10gb", "3g.40gb"]


def test_a_reload_that_does_not_wait_says_nothing_about_the_next(begun: StartWork) -> None:
    """Nor about the layouts of other GPUs, though one waits for its reset for days."""
    host, made = begun(MIG, MIG, description=[{"kind": "a100"}, {"kind": "h100"}])
    made.accept()
    apply_layouts(made, now=True)
    leased = {made.snapshot.inventory.gpus[1].mig_instances[0].uuid}
    for now, profiles in ((False, 4), (True, 7)):
        configured(host, MIG, "type: NVIDIA_MPS; mig: all-1g.10gb")
        made.accept()
        apply_layouts(made, leased, now=now)
        assert len(host.gpus[1].mig_devices()) == profiles
        assert waits(made).code == reasons.MIG_RESET_REQUIRED


def test_a_removed_entry_leaves_the_instances_and_the_plan_says_so(begun: StartWork) -> None:
    host, made = begun(MIG, "type: NVIDIA_MPS; virtual_number: 2", description=[{"kind": "h100", "count": 2}])
    before = host.gpus[0].mig_devices()
    (host.root / "etc/yunion/host_container_device.yml").write_text(
        f"devices:\n- path: {host.gpus[1].uuid}\n  type: NVIDIA_MPS\n  virtual_number: 2\n"
    )
    (change,) = [change for change in made.reload() if change.kind == "MIG layout"]
    assert (change.after, change.effect) == ("as it is", "at once")
    apply_layouts(made)
    assert host.gpus[0].mig_devices() == before


def test_a_gpu_that_is_bound_to_another_driver_gets_no_other_layout(begun: StartWork) -> None:
    host, made = begun(MIG, description=[{"kind": "h100"}])
    host.gpus[0].bind("vfio-pci")
    made.rescan()
    assert [change for change in made.accept() if change.kind == "MIG layout"] == []


def test_an_idle_control_daemon_ends_before_its_instance(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2")
    configured(host, "type: NVIDIA_MPS; mig: all-1g.10gb; virtual_number: 2")
    made.reload()
    apply_layouts(made)
    assert len(made.snapshot.domains) == 7
    assert made.available == 14


def test_mig_is_left_for_mps_on_the_whole_gpu_by_all_disabled(begun: StartWork) -> None:
    host, made = begun(MIG)
    configured(host, "type: NVIDIA_MPS; mig: all-disabled; virtual_number: 2")
    made.reload()
    apply_layouts(made)
    assert (host.gpus[0].mig, host.gpus[0].compute_mode) == (False, "exclusive_process")
    assert made.available == 2


def test_a_gpu_that_mps_serves_is_given_up_before_its_mig_mode_is_on(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; virtual_number: 2")
    configured(host, MIG)
    made.reload()
    apply_layouts(made)
    assert (host.gpus[0].mig, host.gpus[0].compute_mode) == (True, "default")
    assert made.available == 4


@pytest.mark.parametrize(("restores", "after"), [("", True), ("; mig_restore: true", False)])
def test_the_layout_stays_at_a_stop_unless_it_is_to_be_restored(
    begun: StartWork, restores: str, after: bool
) -> None:
    host, made = begun(MIG + restores)
    made.stop()
    assert host.gpus[0].mig is after


def test_instances_of_a_missing_gpu_stay_listed_by_the_next_daemon(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(H100)
    configured(host, "type: NVIDIA_MPS; mig: all-3g.40gb")
    made = supervise(host).start()
    apply_layouts(made)
    assert made.available == 2
    made.end()
    host.gpus[0].remove()
    again = made.start_next()
    again.rescan()
    reasons_of_devices = [device["reason"] for device in devices_json(again.snapshot, Ledger())]
    assert reasons_of_devices == ["the GPU is no longer present"] * 2
    assert [gpu.parent for gpu in again.snapshot.inventory.gpus] == ["", *[host.gpus[0].uuid] * 2]
    assert again.snapshot.plan.missing == ()


def refused_with(made: Supervised) -> str:
    """The reason for which the only GPU is not divided, while the daemon runs."""
    (reason,) = made.start().snapshot.plan.unavailable.values()
    assert reason.code == ENTRY_REFUSED
    return reason


def test_an_impossible_layout_is_refused_before_anything_changes(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(H100)
    configured(host, "type: NVIDIA_MPS; mig: all-1g.5gb")
    reason = refused_with(supervise(host))
    assert re.search(r"host_container_device.yml:4: .* has no MIG profile 1g.5gb", reason)
    assert host.gpus[0].mig is False


@pytest.mark.parametrize("text", ["all-balance", "3", "[]", "[all-balanced]"])
def test_a_value_that_is_no_layout_is_refused_like_any_other(
    make_host: MakeHost, supervise: Supervise, text: str
) -> None:
    host = make_host(H100)
    configured(host, f"type: NVIDIA_MPS; mig: {text}")
    with pytest.raises(ConfigError, match=r"host_container_device.yml:4: mig is .*, not a MIG"):
        supervise(host)


def test_more_devices_than_mps_has_clients_are_refused_for_an_instance_too(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(H100)
    configured(host, "type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 49")
    assert "virtual_number is 49, more than the 48 clients" in refused_with(supervise(host))


def test_a_control_daemon_that_all_find_is_refused_beside_instances(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "h100", "count": 2}], cuda_mps_pipe_directory="/tmp/nvidia-mps")
    configured(host, MIG, "type: NVIDIA_MPS; virtual_number: 2")
    with pytest.raises(ConfigError, match="which is split into MIG instances"):
        supervise(host)


DIVISIONS = [
    (MIG, 4, "mig"),
    ("type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2", 4, "mig"),
    ("type: NVIDIA_GPU_SHARE; mig: [2g.20gb]; virtual_number: 3", 3, "mig"),
    ("type: NVIDIA_MPS; mig: all-disabled; virtual_number: 3", 3, "mps"),
]


@pytest.mark.parametrize(("entry", "number", "sharing"), DIVISIONS)
@pytest.mark.parametrize("mig", [False, True])
def test_a_check_counts_the_devices_that_a_layout_will_give(
    begun: StartWork, make_host: MakeHost, entry: str, number: int, sharing: str, mig: bool
) -> None:
    host = make_host([{"kind": "h100", "mig": mig}])
    configured(host, entry)
    preflight = run_preflight(Paths(str(host.root)))
    try:
        before, waits_for = gpu_records(preflight), preflight.plan.unavailable
    finally:
        preflight.close()
    assert before[0]["devices"] == number
    assert before[0]["reason"] == waits_for.get("0000:00:06.0", "")
    host, made = begun(entry)
    after = gpu_records(made.preflight._replace(inventory=made.snapshot.inventory, plan=made.snapshot.plan))
    assert (after[0]["devices"], after[0]["reason"], after[0]["sharing"]) == (number, "", sharing)
    assert made.available == number


def test_a_layout_does_not_wait_for_a_compute_mode_that_cannot_be_set(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; virtual_number: 2")
    host.fail("nvmlDeviceSetComputeMode", "not_supported")
    configured(host, "type: NVIDIA_MPS; mig: all-3g.40gb")
    made.reload()
    for _ in range(2):
        apply_layouts(made)
    assert waits(made) == NO_REASON
    assert host.gpus[0].mig
    assert made.available == 2
