"""Limits that change: for the next server only, and pending until then, also when the daemon dies."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

import pytest
from yunion_mps.models import DomainPlan
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.rollover import Rollover
from yunion_mps.mps.states import APPLYING, READY, STOPPED

from .conftest import HoldFrontEnd, RunDomain
from .driving import DomainRun, Jobs, converse

PERCENTAGE = "get_default_active_thread_percentage"
MEMORY = "get_default_device_pinned_mem_limit 0"


@pytest.fixture
def run(jobs: Jobs, run_domain: RunDomain) -> DomainRun:
    return run_domain(its_program=jobs.program).start().until(READY)


@pytest.fixture
def other(plan: DomainPlan) -> DomainPlan:
    return plan._replace(gpus=(plan.gpus[0]._replace(memory_limit_mib=2880),), thread_percentage=12.5)


def change(run: DomainRun, plan: DomainPlan) -> DomainRun:
    run.domain.change(plan, run.clock.now_s)
    return run.until(READY)


def test_without_servers_they_are_in_effect_at_once(run: DomainRun, other: DomainPlan, program: str) -> None:
    pid = run.pid
    change(run, other)
    assert run.domain.in_effect == LimitsInEffect(other)
    assert (run.pid, run.pending) == (pid, "")
    assert converse(program, other, PERCENTAGE, MEMORY) == ["12.5", "2G"]


def test_a_shortage_delays_them_and_ends_no_control_daemon(run: DomainRun, other: DomainPlan) -> None:
    pid, (soft, hard) = run.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        run.domain.change(other, run.clock.now_s)
        assert run.turn(1).state == APPLYING
        assert run.domain.reason.startswith("the control daemon cannot be talked to: Too many open files; ")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run.turn(1).until(READY)
    assert (run.domain.in_effect, run.pid) == (LimitsInEffect(other), pid)


def test_limits_are_pending_while_a_server_runs_and_then_in_effect(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, program: str, jobs: Jobs
) -> None:
    job = jobs.begin()
    (server,) = run.domain.server_pids()
    change(run, other)
    assert run.domain.in_effect == LimitsInEffect(plan, (server,))
    assert run.pending == f"other limits take effect when its MPS server (PID {server}) has ended"
    assert run.domain.desired == other
    assert converse(program, other, PERCENTAGE, MEMORY) == ["12.5", "2G"], "for the next server"
    assert converse(program, other, f"get_active_thread_percentage {server}") == ["25.0"]
    jobs.end(job)
    assert run.turn(30).domain.in_effect.old_servers == (server,), "a server stays when its last job is gone"
    run.domain.note_use(in_use=False)
    run.until_it(lambda: run.domain.in_effect == LimitsInEffect(other))
    assert (run.told[-1], run.pending) == ("the new limits are in effect", "")
    assert jobs.stand_ins.servers() == []


def test_a_change_that_is_taken_back_is_pending_no_more(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, jobs: Jobs
) -> None:
    jobs.begin()
    change(run, other)
    assert run.pending
    change(run, plan)
    assert (run.domain.in_effect, run.pending) == (LimitsInEffect(plan), "")
    assert "the change that was pending is taken back" in run.told


def test_the_next_server_has_the_new_limits(
    run: DomainRun, other: DomainPlan, program: str, jobs: Jobs
) -> None:
    jobs.end(jobs.begin())
    change(run, other)
    run.domain.drain(run.clock.now_s, force=False)
    run.until_it(lambda: run.domain.in_effect == LimitsInEffect(other))
    jobs.begin()
    (server,) = run.domain.server_pids()
    assert converse(program, other, f"get_active_thread_percentage {server}") == ["12.5"]


def test_to_drain_waits_for_the_jobs_and_force_does_not(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, jobs: Jobs
) -> None:
    job = jobs.begin()
    (server,) = run.domain.server_pids()
    change(run, other)
    run.domain.drain(run.clock.now_s, force=False)
    run.until_said()
    assert run.turn(1).domain.in_effect == LimitsInEffect(plan, (server,))
    run.domain.drain(run.clock.now_s, force=True)
    run.until_it(lambda: run.domain.in_effect == LimitsInEffect(other))
    assert job.says() == "server gone"


def test_a_server_asked_to_end_while_it_had_jobs_ends_without_them(
    run: DomainRun, other: DomainPlan, jobs: Jobs
) -> None:
    """535 ends it with its last job; 550 asks it again later and later, and at once when we do."""
    job = jobs.begin()
    change(run, other)
    for _ in range(12):
        run.domain.drain(run.clock.now_s, force=False)
        run.until_said()
    jobs.end(job)
    run.domain.note_use(in_use=False)
    run.turn(10).until_it(lambda: run.domain.in_effect == LimitsInEffect(other))
    assert jobs.stand_ins.servers() == []


def test_a_request_outlives_the_hearing_of_an_earlier_one(plan: DomainPlan) -> None:
    rollover = Rollover(LimitsInEffect(plan, (5,)), lambda: (5,), lambda _: None, lambda: None)
    rollover.request_end(0.0, force=False)
    orders = rollover.orders(0.0, every=False, in_use=None)
    assert orders == ["shutdown_server 5"]
    rollover.request_end(0.0, force=True)
    rollover.orders_heard(orders, 0.0)
    forced = rollover.orders(0.0, every=False, in_use=None)
    assert forced == ["shutdown_server 5 -f"]
    rollover.orders_heard(forced, 0.0)
    assert rollover.orders(0.0, every=False, in_use=None) == []


def test_nothing_is_asked_to_end_if_nothing_is_pending(run: DomainRun, jobs: Jobs) -> None:
    jobs.begin()
    run.domain.drain(run.clock.now_s, force=True)
    run.domain.note_use(in_use=False)
    run.turn(60).turn(60)
    assert len(jobs.stand_ins.servers()) == 1


@pytest.mark.parametrize("when", ["before the change", "after it"])
@pytest.mark.parametrize(("force", "for_s"), [(True, 50), (False, 200)])
def test_an_order_that_was_not_heard_is_given_again(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, jobs: Jobs, hold_front_end: HoldFrontEnd,
    when: str, force: bool, for_s: int,
) -> None:  # fmt: skip
    """Also a drain of long ago, which costs no job anything."""
    job = jobs.begin()
    if not force:
        jobs.end(job)
    leave = held(run, plan, other, hold_front_end, when)
    run.domain.drain(run.clock.now_s, force=force)
    wait_held(run, for_s)
    assert len(jobs.stand_ins.servers()) == 1
    leave()
    run.turn(1).until_it(lambda: run.domain.in_effect == LimitsInEffect(other))
    assert not force or job.says() == "server gone"


@pytest.mark.parametrize("when", ["before the change", "after it"])
def test_an_order_that_ends_jobs_is_given_up_after_a_minute(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, jobs: Jobs, hold_front_end: HoldFrontEnd, when: str
) -> None:
    """Later, it would come as a surprise; what waits for the jobs goes on waiting."""
    jobs.begin()
    (server,) = run.domain.server_pids()
    leave = held(run, plan, other, hold_front_end, when)
    run.domain.drain(run.clock.now_s, force=True)
    wait_held(run, 90)
    leave()
    run.turn(1).until(READY).until_said()
    for _ in range(3):
        run.turn(10).until_said()
    assert (run.domain.in_effect, jobs.stand_ins.servers()) == (LimitsInEffect(plan, (server,)), [server])
    assert run.pending


def held(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, hold_front_end: HoldFrontEnd, when: str
) -> Callable[[], None]:
    """Change the limits while, or before, another front-end is open; returns how to leave it."""
    if when == "after it":
        change(run, other)
        return hold_front_end(plan)
    leave = hold_front_end(plan)
    run.domain.change(other, run.clock.now_s)
    run.until_it(lambda: run.domain.is_occupied)
    return leave


def wait_held(run: DomainRun, seconds: int) -> None:
    for _ in range(seconds // 10):
        run.turn(10).until_said()


def test_a_retiring_domain_ends_when_its_servers_have_ended(run: DomainRun, jobs: Jobs) -> None:
    jobs.end(jobs.begin())
    run.domain.retire()
    assert run.turn(10).state == READY
    assert run.pending == "it ends when its MPS servers have ended, because the configuration has changed"
    run.domain.note_use(in_use=False)
    run.turn(1).until(STOPPED)
    assert jobs.stand_ins.servers() == []


def test_a_retiring_domain_without_servers_ends_at_once(run: DomainRun) -> None:
    run.domain.retire()
    run.until(STOPPED)


def test_a_change_takes_a_retirement_back(run: DomainRun, plan: DomainPlan, jobs: Jobs) -> None:
    jobs.begin()
    run.domain.retire()
    run.tick()
    change(run, plan)
    assert (run.domain.retiring, run.pending) == (False, "")


def test_a_control_daemons_death_during_a_change_loses_nothing(
    run: DomainRun, other: DomainPlan, program: str
) -> None:
    run.domain.change(other, run.clock.now_s)
    os.kill(run.pid, signal.SIGKILL)
    run.until_it(lambda: run.domain.restarts == 1).until(READY)
    assert run.domain.in_effect == LimitsInEffect(other)
    assert converse(program, other, PERCENTAGE, MEMORY) == ["12.5", "2G"]
