"""Limits that change: for the next server only, and pending until then, also when the daemon dies."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.models import DomainPlan
from yunion_mps.mps.health import VERIFY_S
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.rollover import Rollover
from yunion_mps.mps.states import APPLYING, BACKOFF, READY, STOPPED

from .conftest import HoldFrontEnd, RunDomain, StartControl, WriteProgram
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
    run.until_it(lambda: run.domain.control.is_occupied)
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


# -- the daemon dies in between; the control daemon and its server do not


@pytest.mark.parametrize("told", [0, 1, 2], ids=["before", "in the midst of it", "after it was set"])
def test_a_change_that_a_dead_daemon_had_begun_is_ended_by_the_next(
    run: DomainRun,
    plan: DomainPlan,
    other: DomainPlan,
    program: str,
    jobs: Jobs,
    run_domain: RunDomain,
    told: int,
) -> None:
    job = jobs.begin()
    (server,) = run.domain.server_pids()
    remembered = LimitsInEffect(plan, (server,) if told else ())
    commands = ["set_default_active_thread_percentage 12.5", "set_default_device_pinned_mem_limit 0 2880M"]
    if told:
        converse(program, plan, *commands[:told])
    after = run_domain(other, jobs.program, remembered).start().until(READY)
    assert after.pid == run.pid
    assert after.domain.in_effect == LimitsInEffect(plan, (server,))
    assert converse(program, other, PERCENTAGE, MEMORY) == ["12.5", "2G"]
    jobs.end(job)
    after.domain.note_use(in_use=False)
    after.turn(10).until_it(lambda: after.domain.in_effect == LimitsInEffect(other))


def test_a_server_with_unknown_limits_delays_a_survivor_until_it_is_idle(
    run: DomainRun, plan: DomainPlan, program: str, jobs: Jobs, run_domain: RunDomain
) -> None:
    converse(program, plan, "set_default_active_thread_percentage 77")
    job = jobs.begin()
    (server,) = run.domain.server_pids()
    after = run_domain(its_program=jobs.program).start()
    after.until_it(lambda: after.domain.restarts > 0).until(BACKOFF)
    assert after.domain.reason == (
        f"its MPS server (PID {server}) keeps limits that neither this configuration nor the last one has"
    )
    assert after.domain.error is not None
    assert f"echo shutdown_server {server} | CUDA_MPS_PIPE_DIRECTORY=" in after.domain.error.hint
    assert after.pid == run.pid, "its jobs go on"
    assert after.domain.server_pids() == [server]
    jobs.end(job)
    after.domain.note_use(in_use=False)
    after.turn(60).until_it(lambda: after.state == READY and after.domain.in_effect == LimitsInEffect(plan))
    assert converse(program, plan, PERCENTAGE, MEMORY) == ["25.0", "5G"]


def test_one_that_dies_before_it_is_asked_again_is_replaced_at_once(
    run: DomainRun, plan: DomainPlan, program: str, jobs: Jobs, run_domain: RunDomain
) -> None:
    converse(program, plan, "set_default_active_thread_percentage 77")
    jobs.begin()
    after = run_domain(its_program=jobs.program).start()
    after.until_it(lambda: after.domain.restarts > 1).until(BACKOFF)
    os.kill(run.pid, signal.SIGKILL)
    after.until(READY)
    assert after.pending.endswith(
        "of an earlier control daemon goes on with its jobs; new ones may have to wait"
    )


def test_a_survivor_without_servers_gets_the_limits_whatever_it_has(
    plan: DomainPlan, run_domain: RunDomain, start_control: StartControl, program: str
) -> None:
    start_control(plan)
    converse(program, plan, "set_default_active_thread_percentage 77")
    run = run_domain().start().until(READY)
    assert run.reasons[1] == "its limits are being read"
    assert converse(program, plan, PERCENTAGE, MEMORY) == ["25.0", "5G"]


def test_a_survivor_with_the_planned_limits_is_told_nothing(
    run: DomainRun, plan: DomainPlan, run_domain: RunDomain, jobs: Jobs
) -> None:
    jobs.begin()
    log = Path(plan.log_directory, "control.log")
    before = log.read_text().count("Cmd:set_")
    after = run_domain(its_program=jobs.program).start().until(READY)
    assert after.domain.in_effect == LimitsInEffect(plan)
    assert log.read_text().count("Cmd:set_") == before


def test_what_a_survivors_server_waits_for_is_remembered(
    run: DomainRun, plan: DomainPlan, other: DomainPlan, jobs: Jobs, run_domain: RunDomain
) -> None:
    jobs.begin()
    change(run, other)
    after = run_domain(other, jobs.program, run.domain.in_effect).start().until(READY)
    assert after.domain.in_effect == run.domain.in_effect
    assert after.pending == run.pending


# -- other programs


def test_limits_that_another_program_changed_are_set_again(
    run: DomainRun, plan: DomainPlan, program: str
) -> None:
    converse(program, plan, "set_default_device_pinned_mem_limit 0 0G")
    assert run.turn(VERIFY_S - 1).state == READY
    run.turn(1).until_it(lambda: "another program has changed its limits" in run.told).until(READY)
    (event,) = [event for event in run.events if event.kind == "limit"]
    assert event.cause.startswith("the memory limit of device 0 is not in effect: it was set to 5760M")
    assert event.consequence == "they are set again"
    assert run.states[-3:] == [READY, APPLYING, READY]
    assert converse(program, plan, PERCENTAGE, MEMORY) == ["25.0", "5G"]
    assert run.pending == ""


def test_a_server_with_another_programs_limits_is_named_and_awaited(
    run: DomainRun, plan: DomainPlan, program: str, jobs: Jobs
) -> None:
    converse(program, plan, "set_default_active_thread_percentage 100")
    jobs.end(jobs.begin())
    (server,) = run.domain.server_pids()
    run.turn(VERIFY_S).until_it(lambda: "another program has changed its limits" in run.told).until(READY)
    (event,) = [event for event in run.events if event.kind == "limit"]
    assert f"its MPS server (PID {server}) may have the others" in event.consequence
    assert f"its MPS server (PID {server})" in run.pending
    run.domain.note_use(in_use=False)
    run.turn(10).until_it(lambda: run.pending == "")


def test_a_server_from_before_a_new_control_daemons_limits_is_awaited(
    jobs: Jobs, run_domain: RunDomain, write_program: WriteProgram, plan: DomainPlan
) -> None:
    """A job that comes in the first millisecond has no limits at all."""
    gate = Path(plan.log_directory, "..", "gate").resolve()
    script = f'[ "$1" = -f ] || while [ ! -e {gate} ]; do sleep 0.01; done; exec {jobs.program} $1'
    run = run_domain(its_program=write_program(script)).start().until(APPLYING)
    job = jobs.begin()
    gate.touch()
    run.until(READY)
    (server,) = run.domain.server_pids()
    assert run.domain.in_effect == LimitsInEffect(plan, (server,))
    jobs.end(job)
    run.domain.note_use(in_use=False)
    run.turn(10).until_it(lambda: run.pending == "")


# -- an operator who types commands has its ear


def test_a_survivor_is_asked_again_while_another_front_end_is_open(
    run_domain: RunDomain, plan: DomainPlan, start_control: StartControl, hold_front_end: HoldFrontEnd
) -> None:
    survivor = start_control(plan)
    leave = hold_front_end(plan)
    run = run_domain().start().until(APPLYING)
    run.until_it(lambda: "another nvidia-cuda-mps-control is connected to it" in run.domain.reason)
    assert "nvidia-cuda-mps, root)" in run.domain.reason, "it says who that is"
    for _ in range(30):
        run.turn(1).until_said()
    assert (run.state, run.pid) == (APPLYING, survivor.pid)
    leave()
    run.turn(1).until(READY)


def test_limits_are_not_verified_while_another_front_end_is_open(
    run: DomainRun, plan: DomainPlan, hold_front_end: HoldFrontEnd
) -> None:
    """An open shell is no fault; a probe is answered all the same."""
    leave = hold_front_end(plan)
    before = list(run.states)
    for _ in range(5):
        run.turn(VERIFY_S).until_said()
    assert run.states == before
    leave()
    run.turn(VERIFY_S).until_said()
    assert run.states == before


def test_a_control_daemons_death_during_a_change_loses_nothing(
    run: DomainRun, other: DomainPlan, program: str
) -> None:
    run.domain.change(other, run.clock.now_s)
    os.kill(run.pid, signal.SIGKILL)
    run.until_it(lambda: run.domain.restarts == 1).until(READY)
    assert run.domain.in_effect == LimitsInEffect(other)
    assert converse(program, other, PERCENTAGE, MEMORY) == ["12.5", "2G"]
