"""A stop with jobs at work: they have the time that was configured, and then nothing is left."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from yunion_mps.core.enums import READY, STOPPED, STOPPING
from yunion_mps.core.models import DomainPlan
from yunion_mps.mps.conversation import peer_of

from integration.daemon_host import eventually

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import full_queue, silent_connection, stop_process


def stop_within(run: DomainRun, timeout_s: int) -> DomainRun:
    run.domain.stop(run.now_s, timeout_s=timeout_s)
    return run


def test_it_waits_for_jobs_that_end(run: DomainRun, jobs: Jobs) -> None:
    job = jobs.attach()
    run.stop().until_true(lambda: run.tick() is not None)
    assert run.advance(9).state == STOPPING
    jobs.end(job)
    run.until(STOPPED)


def test_jobs_that_do_not_end_lose_their_server_and_nothing_is_left(run: DomainRun, bench: Bench) -> None:
    """The time is measured by the control daemon, with its own clock."""
    job = bench.jobs.attach()
    stop_within(run, 1).until(STOPPED)
    assert job.says() == "server gone"
    assert bench.jobs.servers() == []
    assert peer_of(bench.plan.pipe_directory) is None
    assert run.domain.watched() == []


def test_a_server_that_does_not_end_is_killed_before_its_control_daemon(
    run: DomainRun, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The control daemon's own clock gives us a second to stop it, before it is told to end."""
    server = run.begin_job(bench.jobs)
    stop_within(run, 1)
    stop_process(server)
    run.advance(3).until_in_time(STOPPED)
    assert caplog.messages[:2] == [
        "domain host: its control daemon did not end in time",
        f"domain host: sent SIGKILL to MPS server (PID {server})",
    ]
    assert bench.jobs.servers() == []


@pytest.mark.parametrize("is_full", [False, True])
def test_an_unresponsive_control_daemon_is_killed_at_the_deadline(
    run: DomainRun, jobs: Jobs, plan: DomainPlan, is_full: bool
) -> None:
    """A connection that says nothing, or a full queue, costs jobs none of their time."""
    job = jobs.attach()
    with full_queue(plan.pipe_directory) if is_full else silent_connection(plan):
        run.stop().advance(11.9)
        assert (run.state, len(jobs.servers())) == (STOPPING, 1)
        run.advance(0.1).advance(2).until(STOPPED)
    assert job.says() == "server gone"
    eventually(lambda: jobs.servers() == [])


def test_a_missing_socket_costs_jobs_none_of_their_time(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    job = jobs.attach()
    for name in ("control", "control_privileged"):  # root's front-end asks at the second
        os.unlink(f"{plan.pipe_directory}/{name}")
    run.stop()
    run.advance_steps(55, 0.2)
    assert (run.state, len(jobs.servers())) == (STOPPING, 1)
    run.advance(1).advance(2).until(STOPPED)
    assert job.says() == "server gone"


def test_an_open_front_end_costs_jobs_none_of_their_time(
    run: DomainRun, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "yunion_mps.mps")
    job = bench.jobs.attach()
    bench.hold_front_end()
    run.stop()
    run.advance_steps(50, 0.2)
    assert (run.state, len(bench.jobs.servers())) == (STOPPING, 1)
    (message,) = caplog.messages
    assert "another nvidia-cuda-mps-control is connected to it: PID " in message
    run.advance(2).until(STOPPED)
    assert job.says() == "server gone"
    eventually(lambda: bench.jobs.servers() == [])


def test_quit_is_repeated_until_delivered(run: DomainRun, bench: Bench) -> None:
    job = bench.jobs.attach()
    leave = bench.hold_front_end()
    run.stop()
    run.advance_steps(10, 0.2)
    leave()
    bench.jobs.end(job)
    run.advance(0.2).until(STOPPED)
    assert bench.jobs.servers() == [], "a quit ends servers too"


def test_an_open_front_end_delays_a_stop_without_jobs_by_one_question(run: DomainRun, bench: Bench) -> None:
    bench.hold_front_end()
    run.stop().until_answered().advance(0.2).until(STOPPED)


def test_a_front_end_that_leaves_just_then_as_ours_do_costs_no_signal(
    run: DomainRun, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    leave = bench.hold_front_end()
    run.stop().until_answered()
    leave()
    run.advance(0.2).until(STOPPED)
    assert caplog.messages == []


#: As a control daemon that quits: it closes its socket, then the front-end's connection, and exits later.
QUITS_SLOWLY = """\
case "$1" in -f) exec {program} -f ;; esac
commands=$(cat)
case "$commands" in *quit*) rm -f {socket}; exit 0 ;; esac
echo "$commands" | {program}
"""


def test_a_control_daemon_that_has_quit_but_not_exited_gets_no_signal(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its front-end may end first, without an answer, as if it was rejected."""
    caplog.set_level(logging.WARNING, "yunion_mps.mps")
    socket = f"{bench.plan.pipe_directory}/control"
    program = bench.script(QUITS_SLOWLY.format(program=bench.program, socket=socket))
    run = bench.domain(program=program).start().until(READY)
    run.stop()
    run.advance_steps(10, 0.2)
    assert (run.state, caplog.messages) == (STOPPING, [])


def test_a_server_orphaned_during_a_stop_has_its_time_too(run: DomainRun, jobs: Jobs) -> None:
    run.begin_job(jobs)
    pid = run.pid
    run.stop()
    os.kill(pid, signal.SIGKILL)
    run.until_true(lambda: run.domain.status().pid is None)
    assert (run.advance(9.9).state, len(jobs.servers())) == (STOPPING, 1)
    run.advance(0.1).until(STOPPED)
    assert jobs.servers() == []
