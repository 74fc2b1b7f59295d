"""Another configuration: what differs is touched and nothing else, and pending while jobs run."""

from __future__ import annotations

import time

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import Holder, Lease
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import our_processes
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.devices import devices_json

from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervise, budgets, configure, modes, pid

TWO = [{"kind": "v100"}, {"kind": "a100"}]
A100_MIB = 40960


def test_files_that_did_not_change_change_nothing(start_supervised: StartSupervised) -> None:
    _, made = start_supervised(TWO)
    before, count = pid(made), len(made.events)
    assert made.reload() == []
    assert (pid(made), len(made.events)) == (before, count)


def test_other_numbers_of_devices_take_effect_at_once_without_jobs(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2, 4)
    before = pid(made)
    host.divide(4, 4)
    (change,) = made.reload()
    assert change == ("budget", "00:06.0", "2 x 8192 MiB, 50 %", "4 x 4096 MiB, 25 %", "at once")
    assert pid(made) == before, "the control daemon goes on"
    assert [mib for _, mib in budgets(made)] == [4096] * 4 + [A100_MIB // 4] * 4
    assert made.available == 8
    assert made.snapshot.domains[0].plan.memory_limits_mib == (4096, A100_MIB // 4)
    told = [event for event in made.events if event.kind == "configuration"]
    assert [(event.subject, event.what, event.consequence) for event in told] == [
        ("budget 00:06.0", "2 x 8192 MiB, 50 % -> 4 x 4096 MiB, 25 %", "it takes effect at once")
    ]


def test_a_reload_retries_failed_domains_at_once(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(TWO, cuda_mps_scope="gpu")
    log = host.root / "tmp/nvidia-mps/log" / host.gpus[1].uuid
    log.parent.mkdir(parents=True)
    log.write_text("")
    made = supervise(host).start()
    assert [domain.state for domain in made.snapshot.domains] == ["ready", "failed"]
    log.unlink()
    made.accept()
    made.until(lambda: made.available == 8)


def test_an_added_gpu_is_served_and_its_mode_set(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2, cuda_mps_scope="gpu")
    before = pid(made)
    host.divide(2, 2)
    changes = made.reload()
    assert [(change.kind, change.effect) for change in changes] == [
        ("control daemon", "at once"),
        ("budget", "at once"),
        ("compute mode", "at once"),
    ]
    assert modes(host) == ["exclusive_process"] * 2
    assert made.available == 4
    assert pid(made) == before, "that of the other GPU goes on"


def test_a_removed_gpu_is_released_and_its_mode_restored(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2, 2, cuda_mps_scope="gpu")
    before = pid(made)
    host.divide(2)
    made.reload()
    made.until(lambda: len(made.snapshot.domains) == 1)
    made.reconcile()
    assert modes(host) == ["exclusive_process", "default"]
    assert (pid(made), made.available) == (before, 2)
    assert [one.pid for one in our_processes()] == [before]


def test_mps_can_be_turned_off_and_on_again(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    configure(host, enable_cuda_mps="false")
    made.reload()
    made.until(lambda: not made.snapshot.domains)
    made.reconcile()
    assert modes(host) == ["default"] * 2
    assert devices_json(made.snapshot, Ledger()) == []
    assert made.snapshot.notice.startswith("MPS is disabled: enable_cuda_mps is false")
    assert "either" not in made.snapshot.notice
    for entry in ("type: NVIDIA_GPU_SHARE; virtual_number: 2", "type: NVIDIA_MPS; mig: all-balanced"):
        host.divide(entry)
        made.reload()
        assert made.snapshot.notice.endswith("; time-sliced GPUs and MIG instances are not served either")
    host.divide(4, 4)
    configure(host)
    made.reload()
    assert (modes(host), made.available) == (["exclusive_process"] * 2, 8)


def test_a_daemon_that_began_without_mps_serves_it_after_a_reload(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, enable_cuda_mps="false")
    assert made.snapshot.domains == ()
    configure(host)
    made.reload()
    assert (modes(host), made.available) == (["exclusive_process"] * 2, 8)


def test_another_directory_moves_the_control_daemon(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100"}])
    before = pid(made)
    configure(host, cuda_mps_pipe_directory="/run/mps/pipe")
    made.reload()
    made.until(lambda: pid(made) not in (None, before) and made.available == 4)
    assert made.snapshot.domains[0].plan.pipe_directory == str(host.root / "run/mps/pipe")


def test_keep_restores_the_modes_and_exclusive_sets_them_again(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    control = made.snapshot.domains[0].pid
    configure(host, cuda_mps_compute_mode="keep")
    gone = [("00:06.0", "Exclusive_Process", "original"), ("00:07.0", "Exclusive_Process", "original")]
    assert [change[1:4] for change in made.reload()] == gone
    assert modes(host) == ["default"] * 2
    configure(host, cuda_mps_compute_mode="exclusive_process")
    assert [change.effect for change in made.reload()] == ["at once"] * 2
    assert modes(host) == ["exclusive_process"] * 2
    assert made.snapshot.domains[0].pid == control


def test_an_occupied_pipe_directory_is_refused_before_any_change(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    before = pid(made)
    (host.root / "run/taken").write_text("")
    configure(host, cuda_mps_pipe_directory="/run/taken/pipe", cuda_mps_thread_percentage="none")
    with pytest.raises(HostError):
        made.reload()
    assert (pid(made), made.available) == (before, 8)
    assert made.snapshot.domains[0].pending == ""


def test_a_gpu_that_is_lost_meanwhile_keeps_its_place(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2, 2)
    before = pid(made)
    host.gpus[1].lose()
    made.rescan()
    host.divide(4, 2)
    made.reload()
    assert (pid(made), made.available) == (before, 4)
    assert len(devices_json(made.snapshot, Ledger())) == 6
    host.gpus[1].restore()
    made.rescan()
    assert (pid(made), made.available) == (before, 6)


def test_a_plan_shows_changes_without_applying_them(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100"}], 2)
    before = made.snapshot
    host.divide(4)
    configure(host, cuda_mps_stop_timeout_s="60")
    preflight = run_preflight(made.paths, made.supervisor.nvml)
    _, changes = made.supervisor.desired.plan_for(preflight)
    assert [change[:4] for change in changes] == [
        ("setting", "cuda_mps_stop_timeout_s", "10", "60"),
        ("budget", "00:06.0", "2 x 8192 MiB, 50 %", "4 x 4096 MiB, 25 %"),
    ]
    assert made.snapshot is before
    made.reload()
    assert made.supervisor.domains[0].stop_timeout_s == 60


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        (
            {"cuda_mps_combine": "2"},
            [("budget", "00:06.0", "2 x 8192 MiB, 50 %", "2 x 8192 MiB, 50 %, up to 2 combined")],
        ),
        (
            {"max_leases_per_user": "2", "metrics_allow_public": "true"},
            [
                ("setting", "max_leases_per_user", "", "2"),
                ("setting", "metrics_allow_public", "false", "true"),
            ],
        ),
    ],
)
def test_other_keys_are_shown_as_written(
    start_supervised: StartSupervised, keys: dict[str, str], changes: list[tuple[str, ...]]
) -> None:
    host, made = start_supervised([{"kind": "v100"}], 2)
    configure(host, **keys)
    assert [change[:4] for change in made.reload()] == changes
    assert made.reload() == []


def test_another_memory_unit_is_shown_as_written(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100"}], 2)
    devices = host.root / "etc/yunion/host_container_device.yml"
    devices.write_text(f"gpu_memory_unit: 128MiB\n{devices.read_text()}")
    assert [change[:4] for change in made.reload()] == [("setting", "gpu_memory_unit", "1GiB", "128MiB")]
    assert made.reload() == []


def test_multiuser_is_omitted_if_the_program_does_not_support_it(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100"}], cuda_mps_multiuser="true")
    (warning,) = made.warnings
    assert warning.text.startswith("cuda_mps_multiuser is true, but ")
    assert warning.text.endswith(" does not support it: only one user's jobs run at a time")
    assert made.available == 4
    assert not made.snapshot.domains[0].plan.multiuser
    configure(host)
    made.reload()
    assert made.warnings == []


V100 = [{"kind": "v100"}]


def test_a_budget_that_also_waits_for_leases_says_so(start_with_job: StartWithJob) -> None:
    host, jobs, made, _ = start_with_job(V100, 2)
    (server,) = jobs.servers()
    device = made.snapshot.plan.devices[0]
    made.hold([Lease("a", (device,), Holder("name", 0, name="old"), 0.0)])
    host.divide(4)
    (change,) = made.reload()
    ended = f"once the MPS server (PID {server}) has ended"
    assert change.effect == f"{ended}; 2 of 4 devices once lease old of root has ended"


def test_a_pending_budget_is_still_pending_for_the_next_daemon(start_with_job: StartWithJob) -> None:
    host, jobs, first, client = start_with_job(V100, 2)
    host.divide(4)
    first.reload()
    again = first.start_next()
    assert pid(again) == pid(first)
    assert again.snapshot.domains[0].state == "ready"
    assert again.snapshot.domains[0].pending
    assert [mib for _, mib in budgets(again)] == [8192] * 2
    client.end()
    for server in jobs.servers():
        again.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    again.until(lambda: not again.snapshot.domains[0].pending)
    assert [mib for _, mib in budgets(again)] == [4096] * 4


def test_gpus_are_polled_more_often_while_a_change_waits_for_servers(start_with_job: StartWithJob) -> None:
    """A poll finds that a server has no job anymore; then it is ended, and the change takes effect."""
    host, jobs, made, client = start_with_job(V100, 2)
    assert not made.supervisor.is_urgent
    host.divide(4)
    made.reload()
    assert made.supervisor.is_urgent
    client.end()
    for server in jobs.servers():
        made.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    made.until(lambda: not made.snapshot.domains[0].pending)
    assert not made.supervisor.is_urgent


def test_a_configuration_that_changed_while_no_daemon_ran_is_pending_too(
    start_with_job: StartWithJob,
) -> None:
    host, _, first, _ = start_with_job(V100, 2)
    host.divide(4)
    again = first.start_next()
    assert again.snapshot.domains[0].state == "ready"
    assert again.snapshot.domains[0].pending
    assert [mib for _, mib in budgets(again)] == [8192] * 2
    assert pid(again) == pid(first)


def test_a_reverted_change_is_no_longer_pending(start_with_job: StartWithJob) -> None:
    host, _, made, _ = start_with_job(V100, 2)
    host.divide(4)
    made.reload()
    assert made.snapshot.domains[0].pending
    told = len(made.events)
    made.reload()
    assert len([event for event in made.events[told:] if event.kind == "configuration"]) == 0
    host.divide(2)
    made.reload()
    assert made.snapshot.domains[0].pending == ""
    assert [mib for _, mib in budgets(made)] == [8192] * 2
    assert "the pending change was withdrawn" in [event.what for event in made.events]


def test_a_change_reverted_while_no_daemon_runs_is_not_a_change(start_with_job: StartWithJob) -> None:
    host, _, first, _ = start_with_job(V100, 2)
    host.divide(4)
    first.reload()
    host.divide(2)
    again = first.start_next()
    assert (again.snapshot.domains[0].state, again.snapshot.domains[0].pending) == ("ready", "")
    assert [mib for _, mib in budgets(again)] == [8192] * 2


def test_other_control_daemons_wait_for_the_jobs_on_those_that_run(start_with_job: StartWithJob) -> None:
    host, jobs, made, client = start_with_job(TWO)
    before, (server,) = pid(made), jobs.servers()
    configure(host, cuda_mps_scope="gpu")
    changes = made.accept()
    assert [change.kind for change in changes] == ["control daemon"] * 3
    assert changes[0].effect.startswith("once the MPS server")
    first, *others = made.snapshot.domains
    assert (first.pid, first.state, made.available) == (before, "ready", 8)
    assert (
        first.pending
        == f"the configuration has changed: the control daemon waits for the MPS server (PID {server}) to end"
    )
    why = "its control daemon waits for the one that now serves its GPUs to end"
    assert [(other.plan.name, other.reason) for other in others] == [("00:06.0", why), ("00:07.0", why)]
    client.end()
    uuids = [gpu.uuid for gpu in host.gpus]
    made.supervisor.jobs.update({uuid: dict.fromkeys(jobs.servers(), 30) for uuid in uuids}, time.monotonic())
    made.until(lambda: len(made.snapshot.domains) == 2 and made.supervisor.fleet.started)
    assert [domain.plan.gpu_uuids for domain in made.snapshot.domains] == [(uuid,) for uuid in uuids]
    assert made.available == 8


def test_a_server_without_jobs_does_not_hold_a_mode_forever(start_with_job: StartWithJob) -> None:
    host, jobs, made, client = start_with_job(V100, 4)
    (server,) = jobs.servers()
    configure(host, cuda_mps_compute_mode="keep")
    (change,) = made.reload()
    assert change.effect == f"once the MPS server (PID {server}) has ended"
    made.reconcile()
    assert modes(host) == ["exclusive_process"], "jobs may be at work under it"
    (domain,) = made.snapshot.domains
    what = f"the restoration of the compute modes waits for the MPS server (PID {server}) to end"
    assert domain.pending == what
    assert domain.waits_for == (server,)
    client.end()
    made.supervisor.jobs.update({host.gpus[0].uuid: {server: 30}}, time.monotonic())
    made.until(lambda: not jobs.servers() and not made.supervisor.domains[0].server_pids())
    made.reconcile()
    assert modes(host) == ["default"]
    assert made.snapshot.domains[0].pending == ""


def test_a_pending_mode_is_set_at_once_if_the_servers_must_end_now(start_with_job: StartWithJob) -> None:
    host, jobs, made, _ = start_with_job(V100, 4)
    configure(host, cuda_mps_compute_mode="keep")
    made.reload()
    made.reconcile()
    for domain in made.supervisor.domains:
        domain.end_servers(time.monotonic(), lambda _: True, domain.server_pids())
    made.until(lambda: not jobs.servers() and not made.supervisor.domains[0].server_pids())
    made.reconcile()
    assert modes(host) == ["default"]
