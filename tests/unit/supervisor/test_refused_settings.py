"""A setting that the driver refuses to set or to restore: it is said, tried again, and ends by itself."""

from __future__ import annotations

import logging
import os
import sqlite3
import time

import pytest
from yunion_mps.core.enums import (
    ABOUT_COMPUTE_MODE,
    ABOUT_GPU,
    ABOUT_RECORD,
    ABOUT_TIME_SLICE,
    REFUSED,
    TIME_SLICING,
    WARNING,
)
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.reasons import COMPUTE_MODE_REFUSED, SETTING_NOT_RESTORED, TIME_SLICE_REFUSED
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.reload_rows import pending_rows

from simhost.host import SHARED
from unit.supervised import MakeHost, StartSupervised, Supervise, Supervised, modes
from unit.supervisor.test_mig_devices import apply_layouts, configured

TWO = [{"kind": "v100"}, {"kind": "v100"}]
SET = "nvmlDeviceSetComputeMode"
LONG = f"{SHARED}; time_slice: long"


def kinds(made: Supervised) -> list[str]:
    return [condition.kind for condition in made.snapshot.conditions if not condition.follows_from]


def told(made: Supervised, subject: str) -> list[str]:
    """What the events say of a GPU, except modes that were set."""
    return [event.what for event in made.events if event.subject == subject and "->" not in event.what]


# -- desired values


def test_a_mode_that_the_driver_refuses_once_is_set_soon(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=0, times=1)
    host.gpus[0].compute_mode = "default"
    made.poll_later(0.0)
    (refused, *_) = made.snapshot.conditions
    assert (refused.kind, refused.reason.code) == (ABOUT_GPU, COMPUTE_MODE_REFUSED)
    assert refused.reason.endswith("; it is tried again")
    assert refused.hint.startswith("the GPU is used as soon as its mode is set; if it lasts, set it: ")
    assert made.available == 4
    made.poll_later(0.0)
    assert modes(host) == ["default", "exclusive_process"], "it has a pause"
    made.poll_later(1.0)
    assert (modes(host), made.available) == (["exclusive_process"] * 2, 8)
    assert made.snapshot.conditions == ()
    assert told(made, "00:06.0") == ["unavailable", "available"]


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_mode_that_is_refused_at_the_start_is_set_soon(
    make_host: MakeHost, supervise: Supervise, scope: str
) -> None:
    host = make_host(TWO, cuda_mps_scope=scope)
    host.fail(SET, "unknown", gpu=0, times=1)
    made = supervise(host).start()
    assert made.available == 4
    made.poll_later(1.0)
    made.until(lambda: made.available == 8)
    assert modes(host) == ["exclusive_process"] * 2
    assert made.snapshot.conditions == ()


def test_a_refused_mode_that_is_set_by_hand_ends_with_the_next_poll(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "no_permission", gpu=0)
    host.gpus[0].compute_mode = "default"
    made.poll_later(0.0)
    assert made.available == 4
    host.gpus[0].compute_mode = "exclusive_process"
    made.poll_later(0.0)
    assert (made.snapshot.conditions, made.available) == ((), 8)


def test_a_mode_that_is_refused_all_the_time_is_told_once(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=0)
    host.gpus[0].compute_mode = "default"
    for _ in range(5):
        made.poll_later()
    assert told(made, "00:06.0") == ["unavailable"]
    assert caplog.text.count("compute mode cannot be set") == 2, "the error, and that the GPU is unusable"


def test_a_reload_that_keeps_the_modes_ends_a_refusal(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "no_permission", gpu=0)
    host.gpus[0].compute_mode = "default"
    made.poll_later(0.0)
    host.divide("virtual_number: 4; cuda_mps_compute_mode: keep", 4)
    made.reload()
    assert (made.snapshot.conditions, made.available) == ((), 8)


def test_a_layout_waits_no_longer_for_a_mode_that_was_refused_once(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "h100"}])
    configured(host, "type: NVIDIA_MPS; virtual_number: 2")
    made = supervise(host).start()
    host.fail(SET, "unknown", gpu=0, times=1)
    configured(host, "type: NVIDIA_MPS; mig: all-3g.40gb")
    made.accept()
    made.until(lambda: made.supervisor.fleet.settled)
    made.poll_later(0.0)
    assert not host.gpus[0].mig
    made.poll_later(1.0)
    apply_layouts(made)
    made.rescan()
    assert (host.gpus[0].mig, made.snapshot.conditions) == (True, ())


def test_a_time_slice_that_could_not_be_set_once_is_set_soon(
    start_supervised: StartSupervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, made = start_supervised([{"kind": "v100"}], SHARED)
    host.divide(LONG)
    with monkeypatch.context() as without_program:
        without_program.setenv("PATH", "/nowhere")
        made.reload()
    assert kinds(made) == [ABOUT_TIME_SLICE]
    made.poll_later(1.0)
    assert (host.gpus[0].time_slice, made.snapshot.conditions) == ("long", ())
    assert told(made, "00:06.0")[-1].startswith("no longer: the time slice long cannot be set")


def test_a_reload_names_a_mode_that_the_driver_refuses(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4)
    host.fail(SET, "unknown", gpu=1)
    host.divide(4, 4)
    made.reload()
    check_that_it_is_pending(made, COMPUTE_MODE_REFUSED)
    host.clear()


def test_a_reload_names_a_time_slice_that_the_driver_refuses(
    start_supervised: StartSupervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, made = start_supervised([{"kind": "v100"}], SHARED)
    host.divide(LONG)
    with monkeypatch.context() as without_program:
        without_program.setenv("PATH", "/nowhere")
        made.reload()
    check_that_it_is_pending(made, TIME_SLICE_REFUSED)


def check_that_it_is_pending(made: Supervised, code: str) -> None:
    """The answer to a reload has one row of what is pending, about the only condition."""
    (refused,) = [condition for condition in made.snapshot.conditions if not condition.follows_from]
    assert refused.reason.code == code
    (row,) = pending_rows(made.snapshot, made.supervisor.desired.plan, {}, (), lambda _: [])
    assert row["pending"] == f"{refused.text}; {refused.hint}"


# -- original values


def test_a_mode_that_cannot_be_restored_is_a_condition_until_it_is(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=1)
    host.divide(4)
    changes = made.reload()
    assert ("compute mode", "00:07.0") in [(change.kind, change.subject) for change in changes]
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    for _ in range(3):
        made.poll_later()
    (refused,) = made.snapshot.conditions
    assert (refused.kind, refused.subject, refused.status) == (ABOUT_COMPUTE_MODE, "00:07.0", REFUSED)
    assert (refused.reason.code, refused.level) == (SETTING_NOT_RESTORED, WARNING)
    assert refused.reason.startswith("its original compute mode Default cannot be restored: ")
    assert refused.hint.endswith(f"nvidia-smi -i {host.gpus[1].uuid} -c DEFAULT")
    assert made.supervisor.settings.refused()["compute mode"] == {host.gpus[1].uuid}
    assert told(made, "00:07.0") == [refused.reason]
    (row,) = pending_rows(made.snapshot, made.supervisor.desired.plan, {}, (), lambda _: [])
    assert row["pending"] == f"{refused.text}; {refused.hint}"
    host.clear()
    made.poll_later()
    assert (modes(host), made.snapshot.conditions) == (["exclusive_process", "default"], ())
    assert told(made, "00:07.0")[-1] == f"no longer: {refused.reason}"


def test_a_stop_records_which_mode_it_cannot_restore_and_says_what_to_run(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=1)
    made.stop()
    problem = "GPU 00:07.0: compute mode Default cannot be restored: NVML error: Unknown Error"
    hint = f"see why: nvidia-smi -i {host.gpus[1].uuid} -q; then run: yunion-mps-daemon --restore"
    assert f"{problem}; {hint}" in caplog.text
    event = made.events[-1]
    assert (event.severity, event.kind, event.subject) == ("warning", "compute_mode", "00:07.0")
    assert event.what == "the original compute mode Default was not restored"
    assert (event.cause, event.code) == ("NVML error: Unknown Error", SETTING_NOT_RESTORED)
    host.clear()


def test_a_mode_that_is_restored_by_hand_ends_its_refusal(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=1)
    host.divide(4)
    made.reload()
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.poll_later(0.0)
    assert kinds(made) == [ABOUT_COMPUTE_MODE]
    host.gpus[1].compute_mode = "default"
    made.poll_later(0.0)
    assert made.snapshot.conditions == ()


def test_a_stop_tries_a_refused_restoration_at_once(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.fail(SET, "unknown", gpu=1)
    host.divide(4)
    made.reload()
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.poll_later(0.0)
    host.clear()
    made.stop()
    assert modes(host) == ["default", "default"]


# -- when a change takes effect


@pytest.mark.parametrize("by_lease", [True, False])
def test_the_plan_says_what_the_condition_says(start_supervised: StartSupervised, *, by_lease: bool) -> None:
    host, made = start_supervised(TWO, LONG, 4)
    if by_lease:
        device = made.snapshot.plan.devices[0]
        assert device.sharing == TIME_SLICING
        made.hold([Lease("0" * 36, (device,), Holder("name", 0, name="job"), time.time())])
    else:
        host.gpus[0].add_process(os.getpid(), 100)
        made.supervisor.settings.note_processes({host.gpus[0].uuid: [os.getpid()]})
    host.divide(SHARED, 4)
    preflight = run_preflight(made.paths, made.supervisor.nvml, confirms_replacements=True)
    _, foreseen = made.supervisor.plan_for(preflight)
    made.reload()
    (condition,) = made.snapshot.conditions
    (change,) = [change for change in foreseen if change.kind == "time slice"]
    assert (change.after, change.effect) == ("original", condition.waits_for.effect)
    assert made.supervisor.settings.effects() == {("time slice", "00:06.0"): change.effect}
    assert made.snapshot.plan.time_slices == {host.gpus[0].uuid: "long"}, "as the GPU has it"
    assert host.gpus[0].time_slice == "long"
    made.hold()
    if not by_lease:
        host.gpus[0].remove_process(os.getpid())
        made.supervisor.settings.note_processes({})
    made.poll_later(0.0)
    assert (host.gpus[0].time_slice, made.snapshot.conditions) == ("default", ())
    assert made.snapshot.plan.time_slices == {}


# -- records


def test_what_cannot_be_recorded_is_a_condition_and_logged_once(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    host, made = start_supervised(TWO, SHARED, 4)
    refusing = "BEFORE INSERT ON former_time_slice BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    run_sql(made, f"CREATE TRIGGER refusing {refusing}")
    host.divide(LONG, 4)
    made.reload()
    caplog.clear()
    for _ in range(3):
        made.poll_later()
    (condition,) = made.snapshot.conditions
    assert (condition.kind, condition.subject) == (ABOUT_RECORD, "settings of GPUs")
    assert caplog.text == ""
    run_sql(made, "DROP TRIGGER refusing")
    made.poll_later()
    assert (host.gpus[0].time_slice, made.snapshot.conditions) == ("long", ())


def test_a_damaged_mig_record_is_no_condition_after_it_is_gone(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "h100"}])
    configured(host, "type: NVIDIA_MPS; mig: all-3g.40gb")
    first = supervise(host).start()
    apply_layouts(first)
    first.stop(restore=False)
    first.supervisor.release()
    run_sql(first, "UPDATE mig SET value = '{'")
    configured(host, "type: NVIDIA_MPS; virtual_number: 2")
    made = first.start_next()
    assert ABOUT_RECORD in kinds(made)
    run_sql(made, "DELETE FROM mig")
    made.rescan()
    assert ABOUT_RECORD not in kinds(made)


def run_sql(made: Supervised, statement: str) -> None:
    database = sqlite3.connect(made.paths.store)
    database.execute(statement)
    database.commit()
    database.close()
