"""A control daemon that runs and does not serve: found, named, let go on, or replaced without loss."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from yunion_mps.core.enums import APPLYING, BACKOFF, FAILED, READY, STARTING, WEDGED
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT
from yunion_mps.mps.health import PROBE_S, PROBE_TIMEOUT_S
from yunion_mps.mps.processes import PROGRAM

from integration.daemon_host import eventually

from .domain_bench import Bench, DomainRun
from .other_processes import (
    STRANGER,
    as_root,
    full_queue,
    silent_connection,
    stop_process,
    wait_until_it_answers,
)


def find_out(run: DomainRun) -> DomainRun:
    """Let the time pass in which a probe finds that there is no answer."""
    return run.advance(PROBE_S).advance(PROBE_TIMEOUT_S)


def test_a_repeatedly_stopped_control_daemon_is_replaced(run: DomainRun) -> None:
    pid = run.pid
    stop_process(pid)
    run.advance(PROBE_S)
    run.now_s += PROBE_TIMEOUT_S
    while run.state != BACKOFF and BACKOFF not in run.states:
        run.tick()
        if run.domain.status().pid == pid:
            os.kill(pid, signal.SIGSTOP)
        run.now_s += 0.25
    assert run.until(READY).pid != pid
    assert f"the control daemon (PID {pid}) was ended because it was not serving" in run.reasons


def test_it_serves_again_once_the_silent_connection_is_closed(run: DomainRun, plan: DomainPlan) -> None:
    pid = run.pid
    with silent_connection(plan) as connection:
        assert find_out(run).state == WEDGED
        connection.close()
        run.until_in_time(READY)
    assert run.pid == pid


def test_a_silent_control_daemon_without_jobs_is_replaced(run: DomainRun, plan: DomainPlan) -> None:
    pid = run.pid
    with silent_connection(plan):
        find_out(run)
        assert run.advance(1.9).state == WEDGED
        run.advance(0.1).until(READY)
    assert run.pid != pid
    assert run.states[-5:] == [WEDGED, BACKOFF, STARTING, APPLYING, READY]


@pytest.mark.parametrize(("in_use", "polled_s"), [(None, None), (True, None), (False, 0.0)])
def test_a_silent_control_daemon_with_jobs_is_replaced_after_them(
    run: DomainRun, bench: Bench, in_use: bool | None, polled_s: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A poll from before it hung does not tell: a job may have come since."""
    caplog.set_level(logging.INFO)
    job = bench.jobs.attach()
    run.tick()
    run.domain.note_use(in_use=in_use, polled_s=polled_s)
    pid, (server,) = run.pid, run.domain.server_pids()
    with silent_connection(bench.plan):
        find_out(run)
        for _ in range(20):
            run.advance(2)
        assert (run.state, run.pid, bench.jobs.servers()) == (WEDGED, pid, [server])
        assert run.domain.reason.endswith(
            f"; its replacement waits for the MPS server (PID {server}), which may have jobs, to end (to end "
            f"it now, at the risk of its jobs: kill -9 {pid})"
        )
        assert sum("which may have jobs" in message for message in caplog.messages) == 1, "it is said once"
        bench.jobs.end(job)
        os.kill(server, signal.SIGKILL)
        eventually(lambda: run.domain.server_pids() == [])
        run.advance(2).until(READY)
    assert run.pid != pid


def test_a_silent_control_daemon_with_idle_servers_is_replaced(run: DomainRun, bench: Bench) -> None:
    bench.jobs.end(bench.jobs.attach())
    run.tick()
    run.domain.note_use(in_use=False)
    pid = run.pid
    with silent_connection(bench.plan):
        find_out(run).advance(2).until_true(lambda: run.state == READY and run.pid != pid)
    eventually(lambda: bench.jobs.servers() == [])
    assert run.advance(2).pending == []


@as_root
def test_with_jobs_the_hint_is_to_end_the_processes_that_fill_its_queue(run: DomainRun, bench: Bench) -> None:
    run.begin_job(bench.jobs)
    with full_queue(bench.plan.pipe_directory, STRANGER) as user_s:
        find_out(run).advance(2)
        assert f"PID {user_s} (" in run.domain.reason
        assert run.domain.reason.endswith("(to avoid the wait, end the processes that keep it busy)")
        assert run.domain.reason.code == CONTROL_DAEMON_BUSY


@as_root
def test_a_start_waits_while_another_user_fills_the_queue(bench: Bench, plan: DomainPlan) -> None:
    """A first replacement gets rid of one who does not come back; from then on it waits."""
    waits = bench.place / "waits"
    waits.touch()
    program = f'[ "$1" = -f ] && while [ -e {waits} ]; do sleep 0.01; done; exec {bench.program} $1'
    run = bench.domain(program=bench.script(program)).start()
    for is_replacement in (False, True):
        pid = run.pid
        waits.unlink()
        wait_until_it_answers(plan, pid)
        with full_queue(plan.pipe_directory, STRANGER) as user_s:
            waits.touch()
            run.until(APPLYING).advance(5)
            assert (run.state, run.pid) == (WEDGED, pid)
            assert f"PID {user_s} (" in run.domain.reason
            assert ", nobody) has 1" in run.domain.reason
            if not is_replacement:
                run.advance(2).until_ended().tick()
                continue
            for _ in range(20):
                run.advance(2)
            assert (run.state, run.pid) == (WEDGED, pid)
    run.until_in_time(READY)
    assert run.pid == pid
    assert bench.ask("get_default_device_pinned_mem_limit 0") == ["5G"]


def test_a_new_one_waits_for_another_front_end_without_end(bench: Bench, plan: DomainPlan) -> None:
    run = bench.domain().start()
    wait_until_it_answers(plan, run.pid)
    leave = bench.hold_front_end()
    run.until_true(lambda: run.domain.is_occupied)
    run.advance_steps(20, 1)
    assert (run.state, run.domain.reason.code) == (APPLYING, CONTROL_DAEMON_BUSY)
    leave()
    run.until_in_time(READY)


@as_root
def test_the_cause_is_diagnosed_again(run: DomainRun, bench: Bench) -> None:
    run.begin_job(bench.jobs)
    with silent_connection(bench.plan):
        with full_queue(bench.plan.pipe_directory, STRANGER):
            find_out(run)
            assert run.domain.reason.code == CONTROL_DAEMON_BUSY
        run.advance(10)
        assert run.domain.reason.code == CONTROL_DAEMON_SILENT


def test_a_stopped_server_is_reported_and_continued(run: DomainRun, bench: Bench) -> None:
    server = run.begin_job(bench.jobs)
    stop_process(server)
    env = {"CUDA_MPS_PIPE_DIRECTORY": bench.plan.pipe_directory}
    with subprocess.Popen([bench.program], env=env, stdin=-1, stdout=-1) as asking:
        assert asking.stdin is not None
        asking.stdin.write(b"ps\n")
        asking.stdin.close()
        log = Path(bench.plan.log_directory, "control.log")
        eventually(lambda: "Cmd:ps" in log.read_text())
        pid = run.pid
        find_out(run).until_in_time(READY)
        assert asking.stdout is not None
        assert asking.stdout.read()
    assert f"the MPS server (PID {server}) was stopped by a signal (SIGSTOP) or a debugger" in run.reasons[-3]
    assert run.pid == pid


def test_another_process_at_its_socket_is_reported_and_left_alone(run: DomainRun, plan: DomainPlan) -> None:
    pid = run.pid
    os.unlink(f"{plan.pipe_directory}/control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(f"{plan.pipe_directory}/control")
        other.listen()
        run.advance(PROBE_S).advance(2).until(FAILED)
        who = f"(PID {os.getpid()})"
        assert f"its socket in {plan.pipe_directory} belongs to another process {who}" in run.reasons[3]
        assert not Path(f"/proc/{pid}").exists()
        assert f"(PID {os.getpid()}, uid {os.getuid()}) not started by yunion-mps" in run.error.message
        assert PROGRAM in run.error.hint
    assert run.advance(60).until(READY).domain.error is None


def test_it_is_known_how_long_the_last_probe_took(run: DomainRun) -> None:
    assert run.domain.probe_s is None
    os.kill(run.pid, signal.SIGSTOP)
    run.advance(PROBE_S)
    run.now_s += 0.25
    os.kill(run.pid, signal.SIGCONT)
    assert run.until_answered().domain.probe_s == 0.25


def test_probes_leave_little_in_the_log(run: DomainRun, plan: DomainPlan) -> None:
    log = Path(plan.log_directory, "control.log")
    before = len(log.read_text().splitlines())
    for _ in range(10):
        run.advance(PROBE_S).until_true(lambda: (run.tick() or 0) > PROBE_TIMEOUT_S)
    assert len(log.read_text().splitlines()) - before <= 10 * 3 + 3 * 12
