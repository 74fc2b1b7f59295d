"""Time-sliced GPUs beside GPUs with a control daemon, and a reload that changes how a GPU is shared."""

from __future__ import annotations

import os
import time

import pytest
from yunion_mps.core.enums import FREE, LEASED, MPS, PENDING, TIME_SLICING, UNAVAILABLE
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.reasons import COMPUTE_MODE_CHANGED, LEASES_PENDING, TIME_SLICE_REFUSED
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import LeaseRequest, candidates_of
from yunion_mps.leases.storage import LeaseStorage
from yunion_mps.mps.processes import our_processes
from yunion_mps.views.devices import devices_json, unusable_reasons

from simhost import SimHost
from simhost.host import SHARED
from unit.supervised import (
    AtWork,
    MakeHost,
    MakeStandIns,
    StartSupervised,
    StartWithJob,
    Supervise,
    Supervised,
    attach,
    modes,
)

TWO = [{"kind": "v100"}, {"kind": "v100"}]


def states(made: Supervised, ledger: Ledger | None = None) -> dict[str, str]:
    return {row["addr"]: row["state"] for row in devices_json(made.snapshot, ledger or Ledger())}


def of_second(made: Supervised, ledger: Ledger | None = None) -> list[tuple[str, str]]:
    rows = devices_json(made.snapshot, ledger or Ledger())
    return [(row["sharing"], row["state"]) for row in rows if row["addr"].startswith("00:07.0")]


def lease_of(made: Supervised, address: str = "00:07.0-0") -> Lease:
    device = next(device for device in made.snapshot.plan.devices if device.addr == address)
    return Lease("0" * 36, (device,), Holder("name", 0, name="job"), time.time())


def lease(made: Supervised) -> Ledger:
    """Lease the first device of the second GPU."""
    return made.hold([lease_of(made)])


def test_a_time_sliced_gpu_serves_beside_one_with_a_control_daemon(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, SHARED)
    assert modes(host) == ["exclusive_process", "default"]
    assert [domain.plan.gpu_uuids for domain in made.snapshot.domains] == [(host.gpus[0].uuid,)]
    assert of_second(made) == [(TIME_SLICING, FREE)] * 3
    made.stop()
    assert modes(host) == ["default", "default"]


def test_without_mps_no_control_program_is_needed(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host([{"kind": "v100", "compute_mode": "prohibited"}])
    host.divide(SHARED)
    monkeypatch.setenv("PATH", "/nowhere")
    made = supervise(host).start()
    assert (modes(host), list(states(made).values()), our_processes()) == (["default"], [FREE] * 3, [])
    made.stop()
    assert modes(host) == ["prohibited"]


def test_a_mode_that_another_program_sets_makes_the_devices_unavailable(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, 4, SHARED)
    host.gpus[1].compute_mode = "exclusive_process"
    made.rescan()
    assert of_second(made) == [(TIME_SLICING, UNAVAILABLE)] * 3
    assert unusable_reasons(made.snapshot)[host.gpus[1].uuid].code == COMPUTE_MODE_CHANGED
    made.reconcile()
    assert (modes(host)[1], of_second(made)) == ("default", [(TIME_SLICING, FREE)] * 3)
    made.stop()
    assert modes(host)[1] == "default", "the mode from before the daemon"


def test_an_idle_gpu_changes_its_way_of_sharing_at_once_and_back(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.divide(4, SHARED)
    made.reload()
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.reconcile()
    assert (modes(host), of_second(made)) == (["exclusive_process", "default"], [(TIME_SLICING, FREE)] * 3)
    host.divide(4, 4)
    made.reload()
    made.until(lambda: made.available == 8)
    assert (modes(host)[1], of_second(made)) == ("exclusive_process", [(MPS, FREE)] * 4)


@pytest.mark.parametrize(("before", "after"), [("4", SHARED), (SHARED, "4")])
def test_a_leased_gpu_keeps_its_way_of_sharing_until_the_lease_ends(
    start_supervised: StartSupervised, before: str, after: str
) -> None:
    host, made = start_supervised(TWO, 4, before)
    ledger, mode, way = lease(made), modes(host)[1], made.snapshot.plan.devices[-1].sharing
    count = len(of_second(made))
    host.divide(4, after)
    made.accept()
    made.until(lambda: made.supervisor.fleet.started)
    made.reconcile()
    assert of_second(made, ledger) == [(way, LEASED)] + [(way, PENDING)] * (count - 1)
    assert (modes(host)[1], unusable_reasons(made.snapshot)[host.gpus[1].uuid]) == (mode, "")
    reasons = {row["reason_code"] for row in devices_json(made.snapshot, ledger) if row["state"] == PENDING}
    assert reasons == {LEASES_PENDING}
    candidates = candidates_of(made.snapshot, unusable_reasons(made.snapshot))
    anything = candidates.suitable(LeaseRequest(allow_unlimited=True))
    assert {one.device.gpu_address for one in anything if not one.reason} == {"00:06.0"}
    assert made.supervisor.is_urgent
    ledger.remove("0" * 36)
    made.rescan()
    made.until(lambda: {sharing for sharing, _ in of_second(made)} != {way})
    made.reconcile()
    made.until(lambda: {state for _, state in of_second(made)} == {FREE})
    assert modes(host)[1] != mode
    assert not made.supervisor.is_urgent


def test_a_plan_names_the_lease_that_a_change_waits_for(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "h100"}] * 2, 4, SHARED, cuda_mps_pipe_directory="/run/mps")
    lease(made)
    host.divide(4, 4)
    effects = {(change.kind, change.subject): change.effect for change in made.accept()}
    assert {effect for (_, subject), effect in effects.items() if subject in ("00:07.0", "host")} == {
        "once lease job of root has ended"
    }
    made.reconcile()
    assert modes(host) == ["exclusive_process", "default"]


def test_a_change_to_mps_names_the_server_of_the_other_gpu(start_with_job: StartWithJob) -> None:
    """Its control daemon has to be started again with both GPUs."""
    host, jobs, made, job = start_with_job(TWO, 4, SHARED)
    (server,), ledger = jobs.servers(), lease(made)
    host.divide(4, 4)
    effects = {(change.kind, change.subject): change.effect for change in made.accept()}
    alone, of_first = (f"the MPS server (PID {server}){of}" for of in ("", " of GPU 00:06.0"))
    assert effects["control daemon", "host"] == f"once lease job of root and {alone} have ended"
    assert effects["budget", "00:07.0"] == f"once lease job of root and {of_first} have ended"
    assert effects["compute mode", "00:07.0"] == "once lease job of root has ended"
    waits = {f"the change to mps waits for lease job of root and {of_first} to end"}
    listed = devices_json(made.snapshot, ledger)
    assert {row["reason"] for row in listed if row["state"] == PENDING} == waits
    ledger.remove("0" * 36)
    made.rescan()
    assert made.snapshot.domains[0].waits_for == (server,)
    why = f"the running control daemon does not serve its GPU; the next one waits for {alone} to end"
    listed = devices_json(made.snapshot, ledger)
    assert {row["reason"] for row in listed if row["state"] == UNAVAILABLE} == {why}
    assert {change.effect for change in made.accept()} == {f"once {alone} has ended"}
    job.end()
    made.supervisor.jobs.update({gpu.uuid: {server: 30} for gpu in host.gpus}, time.monotonic())
    made.until(lambda: made.available == 8)


def test_a_drain_for_a_change_to_mps_lasts_until_it_is_in_effect(start_with_job: StartWithJob) -> None:
    host, jobs, made, job = start_with_job(TWO, 4, SHARED)
    ledger = lease(made)
    host.divide(4, 4)
    made.accept()
    made.supervisor.fleet.drain(time.monotonic())
    assert made.available == 0, "also those of the GPU with the server"
    ledger.remove("0" * 36)
    made.rescan()
    assert made.snapshot.domains[0].waits_for == tuple(jobs.servers())
    job.end()  # no poll sees this, so only the drain can end the server
    made.until(lambda: made.available == 8)


def test_a_pending_change_names_a_server_that_started_later(
    make_host: MakeHost, stand_ins: MakeStandIns, supervise: Supervise
) -> None:
    host = make_host(TWO)
    host.divide(4, SHARED)
    jobs = stand_ins(host)
    made = supervise(host).start()
    lease(made)
    host.divide(4, 4)
    made.reload()
    assert made.snapshot.plan.pending[host.gpus[1].uuid].endswith("waits for lease job of root to end")
    job = attach(jobs, host)
    made.rescan()
    assert f"(PID {jobs.servers()[0]}) of GPU 00:06.0" in made.snapshot.plan.pending[host.gpus[1].uuid]
    AtWork(host=host, jobs=jobs, made=made, job=job).end()  # or the stop of the supervisor would wait for it


def test_a_restart_finds_leases_that_no_control_daemon_serves(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO, 4, SHARED)
    store = Store(first.paths)
    LeaseStorage(store).write(lease_of(first))
    store.close()
    first.stop(restore=False)
    host.divide(4, 4)
    made = first.start_next()
    assert (modes(host), of_second(made)) == (["exclusive_process", "default"], [])
    made.hold()
    made.rescan()
    made.until(lambda: made.available == 8)
    made.reconcile()
    assert modes(host) == ["exclusive_process"] * 2


def test_the_control_daemon_of_running_jobs_ends_before_the_mode_changes(
    start_with_job: StartWithJob,
) -> None:
    work = start_with_job([{"kind": "v100"}], 4)
    work.host.divide(SHARED)
    work.made.accept()
    work.made.reconcile()
    assert modes(work.host) == ["exclusive_process"]
    assert set(states(work.made).values()) == {PENDING}
    work.end()
    work.made.until(lambda: not work.made.snapshot.domains)
    work.made.reconcile()
    assert (modes(work.host), set(states(work.made).values())) == (["default"], {FREE})


# -- time slices


def shared(time_slice: str) -> str:
    return f"{SHARED}\n  time_slice: {time_slice}"


def slices(host: SimHost) -> list[str]:
    """As NVIDIA's own program shows them."""
    output = host.run(("nvidia-smi", "compute-policy", "--list"), check=True).stdout
    return [line.split()[3].lower() for line in output.splitlines() if "Timeslice" in line]


def test_a_time_slice_is_set_read_back_and_restored(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, shared("short"), shared("long"))
    assert slices(host) == ["short", "long"]
    events = [event.what for event in made.events if event.kind == "gpu"]
    assert events == ["time slice short", "time slice long"]
    assert made.supervisor.reconciliation.settings_due() is None
    made.stop()
    assert slices(host) == ["default", "default"]


def test_a_reload_changes_and_restores_time_slices_and_names_the_change(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, shared("short"), shared("long"))
    host.divide(SHARED, shared("medium"))
    changes = [(change.before, change.after) for change in made.reload() if change.kind == "time slice"]
    assert changes == [("short", "original"), ("long", "medium")]
    assert slices(host) == ["default", "medium"]


@pytest.mark.parametrize("after", ["4", "4\n  mig: all-balanced"])
def test_a_leased_gpu_keeps_its_time_slice_until_the_lease_ends(
    start_supervised: StartSupervised, after: str
) -> None:
    gpus = [{"kind": "h100"}, {"kind": "h100"}]
    host, made = start_supervised(gpus, 4, shared("long"), cuda_mps_pipe_directory="/run/mps")
    ledger, storage = lease(made), LeaseStorage(made.supervisor.store())
    storage.write(ledger.leases["0" * 36])
    host.divide(4, f"virtual_number: {after}")
    made.reload()
    assert slices(host)[1] == "long"
    made.stop()
    assert slices(host)[1] == "long"
    again = made.start_next()
    assert slices(host)[1] == "long"
    again.hold()
    LeaseStorage(again.supervisor.store()).delete("0" * 36)
    again.rescan()
    again.reconcile()
    assert slices(host)[1] == "default"


def test_a_process_that_is_not_leased_keeps_its_time_slice(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 4, shared("long"))
    host.gpus[1].add_process(os.getpid(), 100)
    host.divide(4)
    made.reload()
    assert slices(host)[1] == "long"
    host.gpus[1].remove_process(os.getpid())
    made.reconcile()
    assert slices(host)[1] == "default"


def test_a_time_slice_that_another_program_changed_is_set_again(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, shared("short"), shared("long"))
    for changed in (False, True, False):
        if changed:
            host.gpus[0].time_slice = "medium"
        made.supervisor.settings.reconciler.compare()
        made.reconcile()
        assert slices(host) == ["short", "long"]
    reported = [(event.subject, event.what) for event in made.events if event.code]
    assert reported == [("00:06.0", "time slice short")]


def test_a_time_slice_that_cannot_be_read_now_is_compared_later(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, shared("short"), SHARED)
    host.fail("nvmlInit*", "driver_not_loaded")
    made.supervisor.settings.reconciler.compare()
    made.reconcile()
    assert not [event for event in made.events if event.code]
    host.clear()
    host.gpus[0].time_slice = "medium"
    made.supervisor.settings.reconciler.compare()
    made.reconcile()
    assert slices(host) == ["short", "default"]


def test_a_time_slice_that_is_already_set_is_recorded_as_the_original(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(TWO, shared("default"), SHARED)
    assert "gpu" not in {event.kind for event in made.events}, "it is not set"
    store = Store(made.paths)
    assert Originals(store).of("time_slice") == {host.gpus[0].uuid: "default"}
    store.close()
    host.gpus[0].time_slice = host.gpus[1].time_slice = "long"
    made.supervisor.settings.reconciler.compare()
    made.reconcile()
    made.stop()
    assert slices(host) == ["default", "long"]


def test_a_stop_does_not_report_an_original_time_slice(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4, shared("default"))
    host.gpus[1].add_process(os.getpid(), 100)
    made.stop()
    host.gpus[1].remove_process(os.getpid())
    assert "time slice" not in caplog.text
    store = Store(made.paths)
    assert Originals(store).of("time_slice") == {}
    store.close()


def test_after_a_daemon_that_was_killed_the_original_is_restored(start_supervised: StartSupervised) -> None:
    host, first = start_supervised(TWO, shared("short"), SHARED)
    first.stop(restore=False)
    made = first.start_next()
    made.stop()
    assert slices(host) == ["default", "default"]


def test_a_refused_time_slice_is_a_warning_and_the_devices_serve(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "tesla-m60"}])
    host.divide(shared("short"))
    made = supervise(host).start()
    assert set(states(made).values()) == {FREE}
    (warning,) = made.warnings
    assert warning.reason.code == TIME_SLICE_REFUSED
    what = "GPU 00:06.0 (Tesla M60): the time slice short cannot be set: nvidia-smi: Not Supported"
    assert warning.text == f"{what}; its devices have the one that it had before"
    assert made.snapshot.plan.time_slices == {}
    assert made.supervisor.reconciliation.settings_due() is None, "it is tried again by a reload only"
    host.divide(SHARED)
    made.reload()
    assert made.warnings == []


def test_a_program_that_is_missing_is_a_warning(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host([{"kind": "v100"}])
    host.divide(shared("short"))
    monkeypatch.setenv("PATH", "/nowhere")
    made = supervise(host).start()
    assert "nvidia-smi is not installed" in made.warnings[0].text
    assert set(states(made).values()) == {FREE}
