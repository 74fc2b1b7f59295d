"""MIG layouts from before the first change: what is restored, and what is not."""

from __future__ import annotations

import json
import os

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.mig import DISABLED, MigInstance
from yunion_mps.core.models import Holder, Lease
from yunion_mps.gpus.mig_restore import how_to_restore, restore_layouts, withdrawn
from yunion_mps.host.proc import started_ticks
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.storage import LeaseStorage, recorded_ledger

from unit import builders
from unit.leases import lease_builders
from unit.mig_host import MakeMigHost, MigHost


def restored(host: MigHost, *names: str, keeps_requests: bool = True, used: tuple[str, ...] = ()) -> str:
    """Restore, as a stop or `--restore` does, what was before this layout; return why it is not restored."""
    layout, ledger = host.layout(*names, restore=True), recorded_ledger(host.store)
    result = restore_layouts(
        [layout],
        [host.gpu],
        host.nvml,
        host.originals,
        left=used,
        ledger=ledger,
        keeps_requests=keeps_requests,
    )
    return result.reasons.get(str(host.gpu.uuid), "")


def places(host: MigHost) -> list[tuple[str, int, int]]:
    """The profile, first memory slice and number of compute instances of each instance."""
    return sorted((one.profile, one.start, one.compute_instances) for one in host.gpu.mig_instances)


@pytest.mark.parametrize("before", [[], ["1g.10gb", "3g.40gb"]])
def test_the_layout_from_before_is_restored_only_if_so_configured(
    mig_host: MakeMigHost, before: list[str]
) -> None:
    host = mig_host([{"kind": "h100", "mig": bool(before)}])
    if before:
        host.sim.create_mig_devices(0, *before)
    had = (host.gpu.mig_enabled, places(host))
    host.apply("all-2g.20gb", force=True)
    stays = host.layout("all-2g.20gb")
    restore_layouts(
        [stays], [host.gpu], host.nvml, host.originals, left=(), ledger=Ledger(), keeps_requests=True
    )
    assert host.has.endswith("3 x 2g.20gb")
    assert restored(host, "all-2g.20gb") == ""
    assert (host.gpu.mig_enabled, places(host)) == had


def test_what_a_restoration_creates_is_ours(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.create_mig_devices(0, "3g.40gb", "1g.10gb")
    host.apply("all-1g.10gb", force=True)
    for _ in range(2):
        assert restored(host, "all-1g.10gb") == ""
        assert host.has == "1 x 1g.10gb + 1 x 3g.40gb"
        assert host.apply("all-1g.10gb") == "", "no reload --now after each restart"
        assert host.has == "7 x 1g.10gb"


def test_instances_are_restored_at_their_places_without_their_divisions(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.run(["nvidia-smi", "mig", "-cgi", "9:4,14:0,19:2"], check=True)
    by_start = {one.start: one.id for one in host.gpu.mig_instances}
    host.sim.run(["nvidia-smi", "mig", "-cci", "0,0", "-gi", by_start[4]], check=True)
    host.sim.run(["nvidia-smi", "mig", "-cci", "-gi", by_start[2]], check=True)
    assert places(host) == [("1g.10gb", 2, 1), ("2g.20gb", 0, 0), ("3g.40gb", 4, 2)]
    host.apply("all-1g.10gb", force=True)
    assert restored(host, "all-1g.10gb") == ""
    assert places(host) == [("1g.10gb", 2, 1), ("2g.20gb", 0, 0), ("3g.40gb", 4, 0)]


def test_an_instance_that_had_no_compute_instance_gets_none_of_ours(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.run(["nvidia-smi", "mig", "-cgi", "1g.10gb"], check=True)
    before = places(host)
    host.apply("all-1g.10gb", force=True)
    assert host.has == "7 x 1g.10gb"
    assert restored(host, "all-1g.10gb") == ""
    assert places(host) == before
    host.sim.run(["nvidia-smi", "mig", "-cci", "-gi", host.gpu.mig_instances[0].id], check=True)
    (others,) = host.gpu.mig_instances
    host.apply("1g.10gb", "2g.20gb")
    assert restored(host, "1g.10gb", "2g.20gb") == ""
    assert others in host.gpu.mig_instances, "another program has created its compute instance"


@pytest.mark.parametrize(("was", "names"), [(False, ["all-1g.5gb"]), (True, [DISABLED])])
def test_a_stop_leaves_a_mode_alone_that_a_reset_brings(
    mig_host: MakeMigHost, caplog: pytest.LogCaptureFixture, was: bool, names: list[str]
) -> None:
    host = mig_host([{"kind": "a100", "mig": was}])
    caplog.set_level("INFO")
    assert host.apply(*names).code == reasons.MIG_RESET_REQUIRED
    assert restored(host, *names) == ""
    assert (host.gpu.mig_enabled, host.gpu.mig_pending) == (was, not was)
    assert caplog.text.count("after its next reset, as configured") == 1
    assert restored(host, *names, keeps_requests=False) == ""
    assert (host.gpu.mig_enabled, host.gpu.mig_pending) == (was, was)


def test_after_the_reset_the_layout_is_applied_and_restored(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100"}])
    host.apply("all-1g.5gb")
    restored(host, "all-1g.5gb")
    host.sim.gpus[0].reset()
    assert host.apply("all-1g.5gb") == ""
    assert restored(host, "all-1g.5gb") == "MIG mode will be off after the next reset of the GPU"
    assert (host.gpu.mig_pending, host.has) == (False, "")
    assert host.apply("all-1g.5gb") == "", "a start without a reset between"


def lease(host: MigHost, name: str, instance: MigInstance, binding: str = "name") -> None:
    device = lease_builders.device(0, 0)._replace(addr=f"00:06.0-g{instance.id}", gpu_uuid=instance.uuid)
    holder = Holder(binding, 0, os.getpid(), started_ticks(os.getpid()), name=name)
    LeaseStorage(host.store).write(Lease("f4e5", (device,), holder, 0.0))


@pytest.mark.parametrize(("binding", "shown"), [("name", "job"), ("process", "f4e5")])
@pytest.mark.parametrize("was", [False, True])
def test_what_is_not_restored_because_of_a_lease_names_it(
    mig_host: MakeMigHost, caplog: pytest.LogCaptureFixture, was: bool, binding: str, shown: str
) -> None:
    host = mig_host([{"kind": "h100", "mig": was}])
    host.apply("all-3g.40gb")
    one = max(host.gpu.mig_instances, key=lambda one: one.start)
    lease(host, "job", one, binding)
    why = restored(host, "all-3g.40gb")
    assert host.has == "2 x 3g.40gb"
    device = f"00:06.0-g{one.id}"
    assert why == f"that would end lease {shown} (device {device}) on instance g{one.id} (3g.40gb)"
    assert f"lease release {shown}; systemctl stop yunion-mps-daemon" in caplog.text
    host.store.write("DELETE FROM lease WHERE id = ?", [("f4e5",)])
    assert restored(host, "all-3g.40gb") == ""
    assert (host.gpu.mig_enabled, host.has) == (was, "")


def test_nothing_is_recorded_of_a_mode_that_is_off_again_already(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-2g.20gb")
    host.sim.gpus[0].mig = False
    assert restored(host, "all-2g.20gb") == ""
    assert host.originals.gpus() == set()


def test_no_mode_change_of_a_lost_gpu_is_cancelled(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100"}])
    host.apply("all-1g.5gb")
    (task,) = withdrawn([], [host.gpu], lambda: host.originals)
    assert (task.layout.enabled, task.withdrawn) == (False, True)
    lost = host.gpu._replace(reason=reasons.Reason("it is lost", reasons.GPU_LOST))
    assert withdrawn([], [lost], lambda: host.originals) == ()


def test_a_mode_from_before_the_first_change_is_not_cancelled(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100", "mig": True}])
    host.apply("all-1g.5gb")
    host.sim.run(["nvidia-smi", "-i", "0", "-mig", "0"], check=True)
    host.sim.gpus[0].reset()
    host.sim.run(["nvidia-smi", "-i", "0", "-mig", "1"], check=True)
    assert (host.gpu.mig_enabled, host.gpu.mig_pending) == (False, True)
    assert withdrawn([], [host.gpu], lambda: host.originals) == ()
    assert restored(host, "all-1g.5gb") == "MIG mode will be on after the next reset of the GPU"


def test_an_instance_whose_profile_no_longer_exists_is_not_restored(mig_host: MakeMigHost) -> None:
    """As after an update of the driver."""
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.create_mig_devices(0, "3g.40gb", "1g.10gb+me")
    host.apply("all-7g.80gb", force=True)
    profiles = tuple(one for one in host.gpu.mig_profiles if one.name != "1g.10gb+me")
    gpu, layout = host.gpu._replace(mig_profiles=profiles), host.layout("all-7g.80gb", restore=True)
    assert not any(
        restore_layouts(
            [layout], [gpu], host.nvml, host.originals, left=(), ledger=Ledger(), keeps_requests=True
        ).reasons.values()
    )
    assert host.has == "1 x 3g.40gb"


@pytest.mark.parametrize(
    ("code", "first"),
    [
        (reasons.MIG_IN_USE, "once nothing uses it: "),
        (reasons.MIG_RESET_REQUIRED, "reset it: nvidia-smi --gpu-reset -i GPU-1; then: "),
        (reasons.GPU_LOST, "reset it, or reboot the host; then: "),
        (
            reasons.MIG_FOREIGN_INSTANCE,
            "destroy it: nvidia-smi mig -i GPU-1 -dci -gi ID, then -dgi -gi ID; then: ",
        ),
        (reasons.MIG_REFUSED, "once the cause is removed: "),
    ],
)
def test_how_to_restore_begins_with_what_the_cause_requires(code: str, first: str) -> None:
    steps = how_to_restore(reasons.Reason("why", code), builders.gpu(1, uuid="GPU-1"))
    assert steps == f"{first}yunion-mps-daemon --restore"


def test_a_damaged_record_of_a_lease_holds_nothing(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    damaged = ["{", "[]", '{"id": "a", "holder": {}}']
    host.store.write("INSERT INTO lease VALUES (?, ?)", [(str(n), text) for n, text in enumerate(damaged)])
    assert restored(host, "all-3g.40gb") == ""
    assert host.gpu.mig_enabled is False


def test_a_lease_of_a_newer_version_holds_the_instances_it_names(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    text = json.dumps({"shares": [{"gpu": host.gpu.mig_instances[0].uuid}]})
    host.store.write("INSERT INTO lease VALUES (?, ?)", [("f4e5", text)])
    assert restored(host, "all-3g.40gb").startswith("that would end lease f4e5")
    assert host.has == "2 x 3g.40gb"


def test_a_driver_that_does_not_answer_is_the_reason(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    layout, gpu = host.layout("all-3g.40gb", restore=True), host.gpu
    host.sim.fail("nvmlDeviceGetMigMode", "unknown")
    result = restore_layouts(
        [layout], [gpu], host.nvml, host.originals, left=(), ledger=Ledger(), keeps_requests=True
    )
    assert result.reasons[str(gpu.uuid)].code == reasons.MIG_REFUSED


def test_an_instance_that_a_server_left_running_uses_is_not_restored(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    used = (host.gpu.mig_instances[0].uuid,)
    assert restored(host, "all-3g.40gb", used=used)
    assert host.has == "2 x 3g.40gb"
    assert restored(host, "all-3g.40gb") == ""
    assert host.gpu.mig_enabled is False
