"""What an earlier daemon left behind when it was killed, and a configuration that has changed since."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from contextlib import closing

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import PROGRAM, our_processes
from yunion_mps.supervisor.event_log import EventTable
from yunion_mps.views.devices import devices_json

from integration.daemon_host import eventually
from simhost import SimHost
from unit.mps.other_processes import full_queue
from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervise, Supervised, configure, modes

TWO = [{"kind": "v100"}, {"kind": "a100"}]


def killed(made: Supervised) -> int:
    """Let go of everything as SIGKILL does; the PID of the control daemon that lives on."""
    pid = made.snapshot.domains[0].pid
    assert pid is not None
    return pid


def forget(made: Supervised) -> None:
    """Remove all that is written down of its control daemon."""
    made.supervisor.store().record_limits(made.snapshot.domains[0].plan.pipe_directory, {})
    shutil.rmtree(made.paths.control_daemons)


def end(host: SimHost) -> None:
    """What the hint tells the operator to type."""
    pipe = host.root / "tmp/nvidia-mps/pipe"
    host.run([PROGRAM], input="quit\n", env={**host.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)})
    eventually(lambda: our_processes() == [])


@pytest.mark.parametrize("is_lost", [False, True])
def test_modes_are_restored_if_mps_was_disabled_or_the_state_file_lost(
    start_supervised: StartSupervised, is_lost: bool
) -> None:
    host, made = start_supervised(TWO)
    made.stop(restore=False)
    assert modes(host) == ["exclusive_process"] * 2
    if is_lost:
        shutil.rmtree(made.paths.state_directory)
    configure(host, enable_cuda_mps="false")
    made.start_next()
    assert modes(host) == ["default"] * 2


def test_disabling_mps_keeps_a_control_daemon_with_jobs(start_with_job: StartWithJob) -> None:
    at_work = start_with_job(TWO)
    host, pid = at_work.host, killed(at_work.made)
    configure(host, enable_cuda_mps="false")
    made = at_work.made.start_next()
    (domain,) = made.snapshot.domains
    assert (domain.pid, domain.state) == (pid, "ready")
    assert domain.pending.startswith(
        "the configuration has changed: the control daemon waits for the MPS server (PID "
    )
    made.reconcile()
    assert modes(host) == ["exclusive_process"] * 2
    at_work.end()
    made.supervisor.fleet.take_poll_request()
    made.until(lambda: not made.snapshot.domains)
    assert made.supervisor.fleet.take_poll_request(), "its modes go back at once"
    made.reconcile()
    assert modes(host) == ["default"] * 2


@pytest.mark.parametrize(
    "change", [{"enable_cuda_mps": "false"}, {"cuda_mps_pipe_directory": "/tmp/elsewhere/pipe"}]
)
def test_a_hidden_control_daemon_is_found_by_every_later_configuration(
    start_with_job: StartWithJob, change: dict[str, str]
) -> None:
    """Any user can fill its queue: it keeps its GPUs and their modes, and no second one serves them."""
    at_work = start_with_job(TWO)
    host, pid = at_work.host, killed(at_work.made)
    pipe = at_work.made.snapshot.domains[0].plan.pipe_directory
    configure(host, **change)
    with full_queue(pipe):
        made = at_work.made.start_next()
        assert made.snapshot.domains[0].pid == pid
        assert [one.pid for one in our_processes() if not one.is_server] == [pid]
        made.reconcile()
        assert modes(host) == ["exclusive_process"] * 2
    at_work.end()


@pytest.mark.parametrize(
    "change",
    [
        {"enable_cuda_mps": "false"},
        {"cuda_mps_pipe_directory": "/tmp/elsewhere/pipe"},
        {"cuda_mps_scope": "gpu"},
    ],
)
def test_a_control_daemon_that_never_served_does_not_block_the_next(
    make_host: MakeHost, supervise: Supervise, change: dict[str, str]
) -> None:
    host = make_host(TWO)
    first = supervise(host)
    first.supervisor.start(time.monotonic())  # and no tick, as if it were killed then
    pid = killed(first)
    configure(host, **change)
    made = first.start_next()
    made.until(lambda: pid not in [one.pid for one in our_processes()])
    made.stop()
    assert our_processes() == []
    assert modes(host) == ["default"] * 2


def test_modes_stay_while_a_server_without_its_control_daemon_runs(start_with_job: StartWithJob) -> None:
    at_work = start_with_job(TWO)
    host, pid = at_work.host, killed(at_work.made)
    at_work.made.supervisor.release()
    os.kill(pid, signal.SIGKILL)
    configure(host, enable_cuda_mps="false")
    made = at_work.made.start_next()
    made.reconcile()
    assert modes(host) == ["exclusive_process"] * 2
    at_work.end()
    made.until(lambda: our_processes() == [])

    def are_restored() -> bool:
        made.reconcile()  # as at every poll
        return modes(host) == ["default"] * 2

    made.until(are_restored)


def test_an_unrecorded_control_daemon_is_reported(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host, first = start_supervised(TWO)
    pid = killed(first)
    forget(first)
    configure(host, enable_cuda_mps="false")
    made = first.start_next()
    pipe = host.root / "tmp/nvidia-mps/pipe"
    what = f"a control daemon (PID {pid}) from an earlier run still serves {pipe}"
    assert what in made.snapshot.notice
    assert f"echo quit | CUDA_MPS_PIPE_DIRECTORY={pipe} {PROGRAM}" in caplog.text
    made.stop()
    assert modes(host) == ["exclusive_process"] * 2
    end(host)
    first.start_next()
    assert modes(host) == ["default"] * 2


def test_modes_are_restored_at_the_stop_if_the_control_daemon_has_ended(
    start_supervised: StartSupervised,
) -> None:
    host, first = start_supervised(TWO)
    configure(host, enable_cuda_mps="false")
    made = first.start_next()
    end(host)
    made.stop()
    assert modes(host) == ["default"] * 2


def test_with_scope_gpu_a_lost_gpus_control_daemon_ends_after_its_jobs(
    start_supervised: StartSupervised,
) -> None:
    host, first = start_supervised(TWO, cuda_mps_scope="gpu")
    pids = [domain.pid for domain in first.snapshot.domains]
    host.gpus[0].lose()
    made = first.start_next()
    assert pids[1] in [domain.pid for domain in made.snapshot.domains]
    assert made.available == 4
    made.until(lambda: [domain.pid for domain in made.snapshot.domains] == pids[1:])


def test_a_gpu_that_returns_is_served_once_the_survivor_has_no_jobs(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    host.gpus[0].lose()
    first = supervise(host).start()
    pid = killed(first)
    host.gpus[0].restore()
    made = first.start_next()
    assert made.snapshot.domains[0].pid == pid
    devices = devices_json(made.snapshot, Ledger())
    why = "the running control daemon does not serve its GPU; the next one waits for the running one to end"
    assert [device["reason"] for device in devices] == [why] * 4 + [""] * 4
    made.until(lambda: made.available == 8)
    assert made.snapshot.domains[0].pid != pid


def test_a_gpu_whose_control_daemon_has_jobs_gets_no_second_one(start_with_job: StartWithJob) -> None:
    """As after a reload that waits for the jobs: nothing needs a human, and no client loses its device."""
    at_work = start_with_job(TWO)
    host, pid = at_work.host, killed(at_work.made)
    configure(host, cuda_mps_scope="gpu")
    made = at_work.made.start_next()
    assert [domain.pid for domain in made.snapshot.domains] == [pid, None, None]
    assert made.available == 8
    at_work.end()
    made.until(lambda: len(made.snapshot.domains) == 2 and made.available == 8)
    made.stop()
    assert modes(host) == ["default"] * 2


def test_an_unrecorded_control_daemon_in_our_directory_stops_the_start(
    start_supervised: StartSupervised, supervise: Supervise
) -> None:
    host, first = start_supervised(TWO)
    pid = killed(first)
    forget(first)
    configure(host, cuda_mps_scope="gpu")
    made = supervise(host)
    with pytest.raises(HostError) as caught:
        made.supervisor.start(time.monotonic())
    pipe = host.root / "tmp/nvidia-mps/pipe"
    assert caught.value.message == f"a control daemon (PID {pid}) from an earlier run still serves {pipe}"
    command = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={pipe} {PROGRAM}"
    then = "the next start of yunion-mps-daemon then restores its GPUs' compute modes"
    assert caught.value.hint == f"once its jobs have ended: {command}; {then}"
    made.stop()
    assert modes(host) == ["exclusive_process"] * 2, "its jobs are still at work"


def test_a_stranger_on_the_directory_is_reported_before_any_change(
    start_supervised: StartSupervised, supervise: Supervise
) -> None:
    host, first = start_supervised(TWO)
    pipe = first.snapshot.domains[0].plan.pipe_directory
    first.stop()
    stranger = host.popen([PROGRAM, "-f"], env={**host.env, "CUDA_MPS_PIPE_DIRECTORY": pipe})
    try:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        made = supervise(host)
        host.fail("nvmlDeviceSetComputeMode", "unknown")
        with pytest.raises(HostError, match=f"PID {stranger.pid}, uid 0.* not started by yunion-mps"):
            made.supervisor.start(time.monotonic())
        made.stop()
    finally:
        stranger.kill()
        stranger.communicate()
    assert modes(host) == ["default"] * 2


def test_a_lost_gpu_that_returns_after_a_restart_leaves_nothing_pending(start_with_job: StartWithJob) -> None:
    at_work = start_with_job(TWO)
    host, pid = at_work.host, killed(at_work.made)
    host.gpus[1].lose()
    made = at_work.made.start_next()
    assert (made.snapshot.domains[0].pid, made.available) == (pid, 4)
    host.gpus[1].restore()
    made.rescan()
    made.until(lambda: made.available == 8)
    assert (made.snapshot.domains[0].pid, made.snapshot.domains[0].pending) == (pid, "")


def test_a_gpu_removed_from_the_file_is_dropped_after_a_restart_too(start_with_job: StartWithJob) -> None:
    at_work = start_with_job(TWO, 4, 4)
    host, pid = at_work.host, killed(at_work.made)
    host.divide(4)
    made = at_work.made.start_next()
    made.until(lambda: bool(made.snapshot.domains[0].pending))
    assert (made.snapshot.domains[0].pid, made.available) == (pid, 4), "the other is not leased again"
    at_work.end()
    made.until(lambda: made.available == 4 and made.snapshot.domains[0].pid not in (None, pid))
    assert made.snapshot.domains[0].plan.gpu_uuids == (host.gpus[0].uuid,)
    made.reconcile()
    assert modes(host) == ["exclusive_process", "default"]


def test_restored_modes_are_logged_at_the_stop(start_supervised: StartSupervised) -> None:
    _, made = start_supervised(TWO)
    made.stop()
    with closing(Store(made.paths)) as store:
        told = [one.event for one in EventTable(store).after(0, 100, "compute_mode")]
    assert [(event.subject, event.what) for event in told][2:] == [
        ("00:06.0", "Exclusive_Process -> Default"),
        ("00:07.0", "Exclusive_Process -> Default"),
    ]
