"""A domain whose MPS servers fail to start, with NVIDIA's control daemon: noticed, retried, recovered."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from yunion_mps.core.enums import APPLYING, DEGRADED, READY, STOPPED
from yunion_mps.core.reasons import SERVER_START_FAILED
from yunion_mps.mps.health import PROBE_S
from yunion_mps.mps.log_file import LOG_NAME, SERVER_LOG
from yunion_mps.mps.server_starts import PAUSES_S, READ_S

from integration.daemon_host import eventually

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import as_root

FIRST_PAUSE_S = PAUSES_S[0]


def log_of(run: DomainRun) -> str:
    return Path(run.domain.in_effect.log_directory, LOG_NAME).read_text()


def wait_for_log(run: DomainRun, text: str) -> None:
    eventually(lambda: text in log_of(run))


def fail_to_start(run: DomainRun, jobs: Jobs, uid: int | None = None) -> None:
    """Have a job find that no server starts, and the domain notice it."""
    jobs.stand_ins.behave("failing")
    before = log_of(run).count("exited with status 1")
    assert jobs.start_waiting(uid).says() == "refused"
    eventually(lambda: log_of(run).count("exited with status 1") >= before + 6)
    run.advance(PROBE_S).until_true(lambda: run.advance(0.01).state == DEGRADED).until_answered()


def fail_for(uid: int, run: DomainRun, jobs: Jobs) -> None:
    """Have a job of this user find that none of his servers starts, and the domain notice it."""
    jobs.stand_ins.behave(f"refusing:{uid}")
    assert jobs.start_waiting(uid).says() == "refused"
    eventually(lambda: log_of(run).count("exited with status 1") >= 6)
    run.advance(PROBE_S).until_true(
        lambda: uid in run.advance(0.01).domain.status().failing_users
    ).until_answered()


def attempts(run: DomainRun) -> int:
    return log_of(run).count("Cmd:start_server")


def test_a_domain_whose_servers_fail_is_degraded_with_the_cause(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    status = run.domain.status()
    assert status.reason.code == SERVER_START_FAILED
    assert status.reason.endswith("server.log does not say why"), "the cause"
    assert [event.code for event in run.events].count(SERVER_START_FAILED) == 2
    client, domain = run.events[-2:]
    assert (client.kind, client.code, client.severity) == ("client", SERVER_START_FAILED, "error")
    assert (domain.kind, domain.code, domain.severity) == ("domain", SERVER_START_FAILED, "error")


def test_one_failed_start_degrades_nothing(run: DomainRun, jobs: Jobs, bench: Bench) -> None:
    jobs.stand_ins.behave("failing")
    bench.ask("start_server -uid 0")
    wait_for_log(run, "exited with status 1")
    run.advance(PROBE_S).until_answered()
    assert run.state == READY
    assert run.events[-1].what.endswith("failed to start")


def test_lines_that_a_user_writes_into_the_log_degrade_nothing(run: DomainRun, jobs: Jobs) -> None:
    """The control daemon repeats the newlines of a command, so these lines look like its own."""
    written = "".join(
        f"[{time.strftime('%Y-%m-%d %H:%M:%S')}.123 Control {run.pid:5}] {what}\n"
        for pid in (91, 92, 93)
        for what in (f"Starting new server {pid} for user 0", f"Server {pid} exited with status 1")
    )
    with open(Path(run.domain.in_effect.log_directory, LOG_NAME), "a") as log:
        log.write(written)
    run.advance(PROBE_S).until_true(lambda: attempts(run.advance(0.01)) == 1)
    run.until_true(lambda: run.advance(0.01).domain.server_pids() == [])
    run.advance_steps(5, 10.0)
    assert (run.state, DEGRADED in run.states, attempts(run)) == (READY, False, 1)
    assert not run.domain.status().failing_users


def test_it_serves_again_once_an_ordered_server_starts(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    assert attempts(run) == 1, "to find out whether they start"
    jobs.stand_ins.behave()
    run.advance(FIRST_PAUSE_S - 1).until_answered()
    assert attempts(run) == 1
    run.advance(1).until_true(lambda: run.advance(0.01).state == READY)
    run.until_true(lambda: run.advance(0.01).domain.server_pids() == [])
    assert attempts(run) == 2
    assert "Cmd:shutdown_server" in log_of(run)


def test_an_ordered_server_that_fails_is_no_event_and_ordered_again(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    before = len(run.events)
    run.until_true(lambda: attempts(run.advance(0.01)) == 3)
    assert run.state == DEGRADED
    assert run.events[before:] == []


def test_an_order_that_breaks_off_blames_no_other_front_end(
    run: DomainRun, jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that exits may break the connection of the front-end; this one's answers are lost then."""
    fail_to_start(run, jobs)
    breaking = tmp_path / "front-end"
    breaking.write_text(
        f"""#!/bin/sh
commands=$(cat)
case $commands in *start_server*) echo "$commands" | {jobs.program} >/dev/null; exit 1 ;; esac
echo "$commands" | {jobs.program}
"""
    )
    breaking.chmod(0o755)
    run.domain.configure(str(breaking), 10)
    caplog.set_level("INFO")
    run.until_true(lambda: attempts(run.advance(0.01)) == 3)
    assert "is connected to it" not in caplog.text


def test_a_job_whose_server_starts_recovers_the_domain(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    jobs.stand_ins.behave()
    job = jobs.attach()
    wait_for_log(run, "Ready")
    run.advance(READ_S).until_answered()
    assert run.state == READY
    run.advance_steps(10, 10.0)
    assert attempts(run) == 1
    assert run.server in jobs.servers()
    jobs.end(job)


def test_a_job_that_gets_the_ordered_server_keeps_it(run: DomainRun, jobs: Jobs, bench: Bench) -> None:
    """The log shows the job before the daemon reads that the server is ready."""
    fail_to_start(run, jobs)
    jobs.stand_ins.behave()
    run.advance(FIRST_PAUSE_S)
    wait_for_log(run, "Ready")
    jobs.attach()
    run.until_true(lambda: run.advance(0.01).state == READY)
    run.advance_steps(10, 1.0)
    assert run.server in jobs.servers()
    assert "Cmd:shutdown_server" not in log_of(run)


@as_root
def test_servers_that_fail_for_one_user_leave_the_domain_ready(run: DomainRun, jobs: Jobs) -> None:
    fail_for(1234, run, jobs)
    run.until_true(lambda: "Cmd:shutdown_server" in log_of(run.advance(0.01)))
    assert "Cmd:start_server -uid 0" in log_of(run)
    assert DEGRADED not in run.states
    (reason,) = run.domain.status().failing_users.values()
    assert reason.code == SERVER_START_FAILED
    assert reason.startswith("MPS servers of uid 1234 fail to start: the server exited with status 1")
    (event,) = [event for event in run.events if event.what == "unavailable for uid 1234"]
    assert (event.severity, event.cause, event.code) == ("error", reason, SERVER_START_FAILED)


@as_root
def test_a_user_s_servers_are_ordered_until_one_starts(run: DomainRun, jobs: Jobs) -> None:
    fail_for(1234, run, jobs)
    run.until_true(lambda: log_of(run.advance(0.01)).count("Cmd:start_server -uid 1234") == 2)
    jobs.stand_ins.behave()
    run.until_true(lambda: not run.advance(0.01).domain.status().failing_users)
    assert run.event_texts[-1] == "MPS servers of uid 1234 start again"
    assert DEGRADED not in run.states


@as_root
def test_servers_that_fail_for_another_user_and_root_fail_for_all(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs, uid=1234)
    assert "Cmd:start_server -uid 0" in log_of(run)
    assert not run.domain.status().failing_users


@as_root
def test_a_job_of_another_user_does_not_wait_for_the_ordered_server(run: DomainRun, jobs: Jobs) -> None:
    fail_for(1234, run, jobs)
    jobs.attach(uid=4321)


@as_root
def test_no_server_is_ordered_while_a_job_of_another_user_runs(run: DomainRun, jobs: Jobs) -> None:
    """It would count as a waiting client, so the other user's next jobs would hang."""
    fail_for(1234, run, jobs)
    jobs.attach()
    before = attempts(run)
    run.advance(FIRST_PAUSE_S)
    run.advance_steps(5, 5.0)
    assert attempts(run) == before
    jobs.attach()


@as_root
def test_an_idle_server_of_another_user_does_not_delay_the_order(run: DomainRun, jobs: Jobs) -> None:
    """A server remains after its last client; while it has one, it is left alone."""
    fail_for(1234, run, jobs)
    run.until_true(lambda: "Cmd:shutdown_server" in log_of(run.advance(0.01))).until_answered()
    job = jobs.attach()
    before = attempts(run)
    run.domain.note_use(in_use=True)
    run.advance_steps(5, 5.0)
    run.domain.note_use(in_use=False)  # NVML does not list it yet
    run.advance_steps(5, 5.0)
    assert attempts(run) == before
    jobs.end(job)
    run.until_true(lambda: attempts(run.advance(0.01)) > before)
    assert log_of(run).count("Cmd:start_server -uid 1234") >= 1


def test_the_cause_is_told_again_if_it_changes(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    server_log = Path(run.domain.in_effect.log_directory, SERVER_LOG)
    server_log.write_text("ERROR: init 250 result=11")
    os.utime(server_log, (4e9, 4e9))  # as if the server that is ordered next wrote it
    run.until_true(lambda: "result=11" in run.advance(0.01).domain.reason)
    assert run.events[-1].what == "still degraded"


def test_a_change_of_limits_leaves_it_degraded(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    run.domain.change(run.domain.in_effect._replace(thread_percentage=50.0), run.now_s)
    run.until(DEGRADED)
    assert run.edges[-2:] == [(DEGRADED, APPLYING), (APPLYING, DEGRADED)]
    assert run.domain.in_effect.thread_percentage == 50.0


def test_a_new_control_daemon_is_degraded_until_a_server_starts(run: DomainRun, jobs: Jobs) -> None:
    fail_to_start(run, jobs)
    run.kill().until(DEGRADED)
    jobs.stand_ins.behave()
    run.advance(60).until_true(lambda: run.advance(0.01).state == READY)


def test_a_new_daemon_knows_that_servers_just_failed(run: DomainRun, jobs: Jobs, bench: Bench) -> None:
    fail_to_start(run, jobs)
    bench.kill_at_the_end(run.pid)
    run.domain.control.detach()
    new = bench.domain(program=jobs.program).start().until(DEGRADED)
    jobs.stand_ins.behave()
    new.advance(FIRST_PAUSE_S).until_true(lambda: new.advance(0.01).state == READY)
    assert new.domain.control.was_adopted


@pytest.mark.parametrize("ending", ["retire", "await_restoration"])
def test_no_server_is_ordered_on_a_domain_that_is_to_end(run: DomainRun, jobs: Jobs, ending: str) -> None:
    fail_to_start(run, jobs)
    before = attempts(run)
    if ending == "retire":
        run.domain.retire()
        run.until_in_time(STOPPED)
    else:
        run.domain.await_restoration(is_awaited=True)
        run.advance_steps(10, 5.0)
    assert attempts(run) == before


def test_a_server_that_is_killed_degrades_nothing(run: DomainRun, jobs: Jobs) -> None:
    for _ in range(3):
        jobs.attach()
        (server,) = run.domain.server_pids()
        os.kill(server, 9)
        wait_for_log(run, f"Server {server} exited")
    run.advance(PROBE_S).until_answered()
    assert run.state == READY
