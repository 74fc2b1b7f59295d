"""Records of MIG layouts that are damaged or lost: a condition, never a reason to give up what is ours."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core import reasons
from yunion_mps.gpus.mig_restore import restore_layouts, withdrawn
from yunion_mps.gpus.mig_steps import observe_layouts
from yunion_mps.host.store import MIG
from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.offline import restore as restore_offline
from yunion_mps.supervisor.event_log import RECORDS_LOST

from simhost import SimHost
from simhost.tree import device_file
from unit.mig_host import MakeMigHost, MigHost
from unit.supervised import Supervised
from unit.supervisor.test_mig_devices import StartWork, apply_layouts, begun

__all__ = ["begun"]

RESTORED = "type: NVIDIA_MPS; mig: 3g.40gb; mig_restore: true"


def damage(host: MigHost) -> None:
    """As a newer version, or a disk, may leave it."""
    row = ('{"created": 1}', str(host.gpu.uuid))
    host.store.write("UPDATE mig SET value = ? WHERE gpu_uuid = ?", [row])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"enabled_before": false, "before": null, "created": [["too", "short"]]}']
)
def test_no_layout_changes_on_a_gpu_whose_record_cannot_be_read(mig_host: MakeMigHost, text: str) -> None:
    host = mig_host()
    host.apply("3g.40gb")
    uuid = str(host.gpu.uuid)
    host.store.write("UPDATE mig SET value = ? WHERE gpu_uuid = ?", [(text, uuid)])
    why = host.apply("all-1g.10gb")
    assert why.code == reasons.MIG_RECORD_DAMAGED
    assert "which MIG instances the daemon created" in why
    assert host.has == "1 x 3g.40gb"
    assert host.store.records(MIG)[uuid] == text


def test_a_layout_is_not_restored_and_says_so_if_its_record_is_damaged(
    mig_host: MakeMigHost, caplog: pytest.LogCaptureFixture
) -> None:
    host = mig_host()
    host.apply("3g.40gb")
    damage(host)
    layout = host.layout("3g.40gb", restore=True)
    result = restore_layouts(
        [layout], [host.gpu], host.nvml, host.originals, left=(), ledger=Ledger(), keeps_requests=True
    )
    assert result.reasons[str(host.gpu.uuid)].code == reasons.MIG_RECORD_DAMAGED
    assert "the MIG layout of GPU 00:06.0 is not restored: the record of which MIG" in caplog.text
    assert host.has == "1 x 3g.40gb"


def test_nothing_is_forecast_or_withdrawn_by_a_damaged_record(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100"}])
    assert host.apply("3g.20gb").code == reasons.MIG_RESET_REQUIRED
    look = host.look("3g.20gb")
    assert withdrawn([], [host.gpu], lambda: host.originals)
    assert observe_layouts([look], host.mig, host.originals).found
    damage(host)
    assert withdrawn([], [host.gpu], lambda: host.originals) == ()
    assert observe_layouts([look], host.mig, host.originals).found == {}


def spoil(made: Supervised, text: str = "{}") -> None:
    """Damage the record in the file, and remove the copy, which would repair it."""
    with closing(sqlite3.connect(made.paths.store)) as connection, connection:
        connection.execute("UPDATE mig SET value = ?", (text,))
    shutil.rmtree(made.paths.run_directory)


def test_a_damaged_record_is_a_warning_and_makes_the_stop_fail(begun: StartWork) -> None:
    host, made = begun(RESTORED)
    made.supervisor.release()
    spoil(made)
    again = made.start_next()
    assert [event.code for event in again.events if event.what == "its MIG record is damaged"] == [
        reasons.MIG_RECORD_DAMAGED
    ]
    assert again.supervisor.layouts.pending[str(host.gpus[0].uuid)].code == reasons.MIG_RECORD_DAMAGED
    again.stop(restore=False)
    assert again.supervisor.close() is False
    assert [one.profile for one in host.gpus[0].mig_devices()] == ["3g.40gb"]
    assert restore_offline(again.paths) == 1


def test_a_damaged_record_of_a_gpu_without_a_layout_is_a_warning(begun: StartWork) -> None:
    host, made = begun(RESTORED)
    made.supervisor.release()
    spoil(made)
    host.divide("type: NVIDIA_MPS; mig: all-disabled")
    (host.root / "etc/yunion/host_container_device.yml").write_text("devices: []\n")
    again = made.start_next()
    assert reasons.MIG_RECORD_DAMAGED in [warning.reason.code for warning in again.warnings]


@pytest.mark.parametrize("way", ["removed", "truncated", "zeroed"])
def test_a_layout_is_restored_although_the_file_was_lost(begun: StartWork, way: str) -> None:
    host, made = begun(RESTORED)
    made.supervisor.release()
    file = Path(made.paths.store)
    size = file.stat().st_size
    file.unlink()
    if way != "removed":
        file.write_bytes(bytes(size if way == "zeroed" else 0))
    again = made.start_next()
    apply_layouts(again)
    assert again.supervisor.layouts.pending == {}
    (event,) = [one for one in again.events if one.code == reasons.STATE_FILE_DAMAGED]
    assert "which MIG instances the daemon created" in event.consequence
    again.stop(restore=False)
    assert again.supervisor.close() is True
    assert not host.gpus[0].mig


def test_records_lost_with_the_file_are_a_warning_and_fail_the_stop(begun: StartWork) -> None:
    """After a boot, there are no copies of what the damaged file had recorded."""
    host, made = begun(RESTORED)
    made.supervisor.release()
    shutil.rmtree(made.paths.run_directory)
    Path(made.paths.store).write_bytes(b"no database" * 1000)
    again = made.start_next()
    (warning,) = [one for one in again.warnings if one.reason.code == reasons.STATE_FILE_DAMAGED]
    assert RECORDS_LOST in warning.text
    assert RECORDS_LOST in [event.consequence for event in again.events]
    again.stop(restore=False)
    assert again.supervisor.close() is False
    assert host.gpus[0].mig


def test_a_stop_fails_if_the_state_file_cannot_be_read(begun: StartWork) -> None:
    _, made = begun(RESTORED)
    made.stop(restore=False)
    shutil.rmtree(made.paths.state_directory)
    Path(made.paths.state_directory).write_text("")
    assert made.supervisor.close() is False


TWO = [{"kind": "h100"}, {"kind": "v100"}]
WITHOUT_LAYOUT = pytest.mark.parametrize("is_divided", [True, False], ids=["divided", "removed"])


def divide_without_layout(host: SimHost, *, is_divided: bool) -> None:
    """Write an entry without a layout for the first GPU, or one for the second GPU only."""
    gpu = host.gpus[0 if is_divided else 1]
    (host.root / "etc/yunion/host_container_device.yml").write_text(device_file([(gpu.uuid, 2)]))


@WITHOUT_LAYOUT
def test_a_stop_restores_a_layout_that_the_entry_has_no_longer(begun: StartWork, is_divided: bool) -> None:
    host, made = begun(RESTORED, description=TWO)
    divide_without_layout(host, is_divided=is_divided)
    made.reload()
    made.stop()
    assert not host.gpus[0].mig
    assert made.supervisor.state_file.originals().changed_layouts() == set()


@WITHOUT_LAYOUT
def test_restore_restores_a_layout_that_the_entry_has_no_longer(begun: StartWork, is_divided: bool) -> None:
    host, made = begun(RESTORED, description=TWO)
    made.supervisor.release()
    divide_without_layout(host, is_divided=is_divided)
    assert restore_offline(made.paths) == 0
    assert not host.gpus[0].mig


def test_an_entry_that_keeps_its_layout_can_give_up_the_restoration(begun: StartWork) -> None:
    host, made = begun(RESTORED)
    host.divide("type: NVIDIA_MPS; mig: 3g.40gb")
    made.reload()
    apply_layouts(made)
    host.divide("type: NVIDIA_MPS; virtual_number: 2")
    made.reload()
    made.stop()
    assert host.gpus[0].mig


def test_a_start_notes_whether_a_layout_of_an_earlier_version_is_restored(begun: StartWork) -> None:
    host, made = begun(RESTORED)
    made.supervisor.release()
    with closing(sqlite3.connect(made.paths.store)) as connection, connection:
        connection.execute("UPDATE mig SET value = json_remove(value, '$.restores')")
    shutil.rmtree(made.paths.run_directory)
    again = made.start_next()
    apply_layouts(again)
    host.divide("type: NVIDIA_MPS; virtual_number: 2")
    again.reload()
    again.stop()
    assert not host.gpus[0].mig
