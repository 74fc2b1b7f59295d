"""A stop with jobs at work: they have the time that was configured, and then nothing is left."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from yunion_mps.models import DomainPlan
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.states import READY, STOPPED, STOPPING

from .conftest import HoldFrontEnd, RunDomain, connections_to
from .driving import DomainRun, Jobs, full_queue, silent_connection, stop_process, wait_for


@pytest.fixture
def run(jobs: Jobs, run_domain: RunDomain) -> DomainRun:
    return run_domain(its_program=jobs.program).start().until(READY)


def end_of(run: DomainRun, timeout_s: int) -> DomainRun:
    run.domain.stop(run.clock.now_s, timeout_s=timeout_s)
    return run


def test_it_waits_for_jobs_that_end(run: DomainRun, jobs: Jobs) -> None:
    job = jobs.begin()
    run.stop().until_it(lambda: run.tick() is not None)
    assert run.turn(9).state == STOPPING
    jobs.end(job)
    run.until(STOPPED)


def test_jobs_that_do_not_end_lose_their_server_and_nothing_is_left(
    run: DomainRun, jobs: Jobs, plan: DomainPlan
) -> None:
    """The time is measured by the control daemon, with its own clock."""
    job = jobs.begin()
    end_of(run, 1).until(STOPPED)
    assert job.says() == "server gone"
    assert jobs.stand_ins.servers() == []
    assert peer_of(plan.pipe_directory) is None
    assert run.domain.descriptors() == []


def test_a_server_that_does_not_end_is_killed_before_its_control_daemon(
    run: DomainRun, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The control daemon's own clock gives us a second to stop it, before it is told to end."""
    jobs.begin()
    (server,) = run.domain.server_pids()
    end_of(run, 1)
    stop_process(server)
    run.turn(3).until_in_time(STOPPED)
    assert caplog.messages[:2] == [
        "domain host: it has not ended in time",
        f"domain host: MPS server (PID {server}) gets SIGKILL",
    ]
    assert jobs.stand_ins.servers() == []


def test_a_deaf_control_daemon_is_ended_with_its_servers_after_the_time(
    run: DomainRun, jobs: Jobs, plan: DomainPlan
) -> None:
    job = jobs.begin()
    with silent_connection(plan):
        run.stop().turn(11.9)
        assert (run.state, len(jobs.stand_ins.servers())) == (STOPPING, 1)
        run.turn(0.1).turn(2).until(STOPPED)
    assert job.says() == "server gone"
    wait_for(lambda: jobs.stand_ins.servers() == [])


def test_a_full_queue_costs_jobs_none_of_their_time(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    job = jobs.begin()
    with full_queue(plan.pipe_directory):
        run.stop().turn(11.9)
        assert (run.state, len(jobs.stand_ins.servers())) == (STOPPING, 1)
        run.turn(0.1).turn(2).until(STOPPED)
    assert job.says() == "server gone"


def test_a_missing_socket_costs_jobs_none_of_their_time(run: DomainRun, jobs: Jobs, plan: DomainPlan) -> None:
    job = jobs.begin()
    for name in ("control", "control_privileged"):  # root's front-end asks at the second
        os.unlink(f"{plan.pipe_directory}/{name}")
    run.stop()
    for _ in range(55):
        run.turn(0.2).until_said()
    assert (run.state, len(jobs.stand_ins.servers())) == (STOPPING, 1)
    run.turn(1).turn(2).until(STOPPED)
    assert job.says() == "server gone"


def test_an_open_front_end_costs_jobs_none_of_their_time(
    run: DomainRun,
    jobs: Jobs,
    plan: DomainPlan,
    hold_front_end: HoldFrontEnd,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "yunion_mps.mps")
    job = jobs.begin()
    hold_front_end(plan)
    run.stop()
    for _ in range(50):
        run.turn(0.2).until_said()
    assert (run.state, len(jobs.stand_ins.servers())) == (STOPPING, 1)
    (message,) = caplog.messages
    assert "another nvidia-cuda-mps-control is connected to it: PID " in message
    run.turn(2).until(STOPPED)
    assert job.says() == "server gone"
    wait_for(lambda: jobs.stand_ins.servers() == [])


def test_the_quit_is_said_again_until_it_is_heard(
    run: DomainRun, jobs: Jobs, plan: DomainPlan, hold_front_end: HoldFrontEnd
) -> None:
    job = jobs.begin()
    leave = hold_front_end(plan)
    run.stop()
    for _ in range(10):
        run.turn(0.2).until_said()
    leave()
    jobs.end(job)
    run.turn(0.2).until(STOPPED)
    assert jobs.stand_ins.servers() == [], "a quit ends servers too"


def test_an_open_front_end_delays_a_stop_without_jobs_by_one_question(
    run: DomainRun, plan: DomainPlan, hold_front_end: HoldFrontEnd
) -> None:
    hold_front_end(plan)
    run.stop().until_said().turn(0.2).until(STOPPED)


def test_a_front_end_that_leaves_just_then_as_ours_do_costs_no_signal(
    run: DomainRun, plan: DomainPlan, hold_front_end: HoldFrontEnd, caplog: pytest.LogCaptureFixture
) -> None:
    leave = hold_front_end(plan)
    run.stop().until_said()
    leave()
    wait_for(lambda: not connections_to(plan.pipe_directory))  # our own, too, which was turned away
    run.turn(0.2).until(STOPPED)
    assert caplog.messages == []


def test_a_server_orphaned_during_a_stop_has_its_time_too(run: DomainRun, jobs: Jobs) -> None:
    jobs.begin()
    run.turn(1)
    pid = run.pid
    run.stop()
    os.kill(pid, signal.SIGKILL)
    run.until_it(lambda: run.domain.status().pid is None)
    assert (run.turn(9.9).state, len(jobs.stand_ins.servers())) == (STOPPING, 1)
    run.turn(0.1).until(STOPPED)
    assert jobs.stand_ins.servers() == []
