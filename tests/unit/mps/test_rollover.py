"""Limits that change: for the next server only, and pending until then, also when the daemon dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from yunion_mps.core.enums import APPLYING, READY, STOPPED
from yunion_mps.core.models import DomainPlan
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.rollover import Rollover

from .domain_bench import Bench, DomainRun, Jobs
from .other_processes import no_descriptor_left

PERCENTAGE = "get_default_active_thread_percentage"
MEMORY = "get_default_device_pinned_mem_limit 0"


def test_a_shortage_delays_them_and_ends_no_control_daemon(run: DomainRun, other: DomainPlan) -> None:
    pid = run.pid
    with no_descriptor_left():
        run.domain.change(other, run.now_s)
        assert run.advance(1).state == APPLYING
        assert run.domain.reason.startswith(
            "cannot communicate with the control daemon: Too many open files; "
        )
    run.advance(1).until(READY)
    assert (run.domain.limits_in_effect, run.pid) == (LimitsInEffect(other), pid)


def test_limits_are_pending_while_a_server_runs_and_then_in_effect(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    job = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    run.change(other)
    assert run.domain.limits_in_effect == LimitsInEffect(bench.plan, (server,))
    assert run.awaited_servers == (server,)
    assert run.domain.desired == other
    assert bench.ask(PERCENTAGE, MEMORY) == ["12.5", "2G"], "for the next server"
    assert bench.ask(f"get_active_thread_percentage {server}") == ["25.0"]
    bench.jobs.end(job)
    assert run.advance(30).domain.limits_in_effect.old_servers == (server,), (
        "a server stays when its last job is gone"
    )
    run.domain.note_use(in_use=False)
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert (run.event_texts[-1], run.pending) == ("the new limits are in effect", [])
    assert bench.jobs.servers() == []


def test_a_job_that_nvml_does_not_list_yet_keeps_its_server(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """A server that was told to shut down would keep all new jobs waiting until its last one has ended."""
    bench.jobs.attach()
    (server,) = run.domain.server_pids()
    run.change(other)
    run.domain.note_use(in_use=False)
    run.advance(30).until_answered()
    run.advance_steps(5, 1.0)
    bench.jobs.attach()
    assert bench.jobs.servers() == [server]


def test_the_next_server_has_the_new_limits(run: DomainRun, bench: Bench, other: DomainPlan) -> None:
    bench.jobs.end(bench.jobs.attach())
    run.change(other)
    run.domain.drain(run.now_s)
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    server = run.begin_job(bench.jobs)
    assert bench.ask(f"get_active_thread_percentage {server}") == ["12.5"]


def test_drain_waits_for_jobs_and_force_does_not(run: DomainRun, bench: Bench, other: DomainPlan) -> None:
    job = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    run.change(other)
    run.domain.drain(run.now_s)
    run.until_answered()
    assert run.advance(1).domain.limits_in_effect == LimitsInEffect(bench.plan, (server,))
    run.end_all_servers()
    run.until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert job.says() == "server gone"


def test_a_server_drained_while_it_has_jobs_ends_after_them(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    """535 ends it with its last job; 550 asks it again later and later, and at once when we do."""
    job = bench.jobs.attach()
    run.change(other)
    for _ in range(12):
        run.domain.drain(run.now_s)
        run.until_answered()
    bench.jobs.end(job)
    run.domain.note_use(in_use=False)
    run.advance(10).until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert bench.jobs.servers() == []


def test_only_the_servers_that_were_confirmed_end_with_all_clients(plan: DomainPlan) -> None:
    """Another one may have started since they were listed."""
    rollover = Rollover(LimitsInEffect(plan, (5, 6)), lambda: (5, 6), lambda _: None, lambda: None)
    rollover.end_at_once(0.0, [5])
    assert rollover.commands(0.0, every=False) == ["shutdown_server 5 -f"]


def test_a_new_shutdown_request_survives_delivery_of_an_earlier_one(plan: DomainPlan) -> None:
    rollover = Rollover(LimitsInEffect(plan, (5,)), lambda: (5,), lambda _: None, lambda: None)
    rollover.drain(0.0)
    orders = rollover.commands(0.0, every=False)
    assert orders == ["shutdown_server 5"]
    rollover.end_at_once(0.0, [5])
    rollover.commands_delivered(orders)
    forced = rollover.commands(0.0, every=False)
    assert forced == ["shutdown_server 5 -f"]
    rollover.commands_delivered(forced)
    assert rollover.commands(0.0, every=False) == []


def test_several_servers_are_named_in_the_plural(plan: DomainPlan) -> None:
    rollover = Rollover(LimitsInEffect(plan, (5, 6)), lambda: (5, 6), lambda _: None, lambda: None)
    pending = "the change of limits waits for the MPS servers (PIDs 5, 6) to end"
    assert rollover.pending(retiring=False, awaits_restoration=False) == pending


def test_no_server_is_told_to_end_if_nothing_is_pending(run: DomainRun, jobs: Jobs) -> None:
    jobs.attach()
    run.end_all_servers()
    run.domain.note_use(in_use=False)
    run.advance(60).advance(60)
    assert len(jobs.servers()) == 1


@pytest.mark.parametrize("when", ["before the change", "after it"])
@pytest.mark.parametrize(("force", "steps", "step_s"), [(True, 4, 1), (False, 20, 10)])
def test_an_undelivered_command_is_sent_again(
    run: DomainRun, bench: Bench, other: DomainPlan, when: str, force: bool, steps: int, step_s: int
) -> None:
    """Also a drain of long ago, which costs no job anything."""
    job = bench.jobs.attach()
    if not force:
        bench.jobs.end(job)
    leave = change_behind_front_end(run, bench, other, when)
    if force:
        run.end_all_servers()
    else:
        run.domain.drain(run.now_s)
    run.advance_steps(steps, step_s)
    assert len(bench.jobs.servers()) == 1
    leave()
    run.advance(1).until_true(lambda: run.domain.limits_in_effect == LimitsInEffect(other))
    assert not force or job.says() == "server gone"


@pytest.mark.parametrize("when", ["before the change", "after it"])
def test_an_order_that_ends_jobs_is_given_up_after_some_seconds(
    run: DomainRun, bench: Bench, other: DomainPlan, when: str
) -> None:
    """New jobs may have begun until then; what waits for the jobs goes on waiting."""
    server = run.begin_job(bench.jobs)
    leave = change_behind_front_end(run, bench, other, when)
    run.end_all_servers()
    run.advance_steps(9, 10)
    leave()
    run.advance(1).until(READY).until_answered()
    run.advance_steps(3, 10)
    assert (run.domain.limits_in_effect, bench.jobs.servers()) == (
        LimitsInEffect(bench.plan, (server,)),
        [server],
    )
    assert run.pending


def change_behind_front_end(run: DomainRun, bench: Bench, other: DomainPlan, when: str) -> Callable[[], None]:
    """Change the limits while, or before, another front-end is open; returns how to leave it."""
    if when == "after it":
        run.change(other)
        return bench.hold_front_end()
    leave = bench.hold_front_end()
    run.domain.change(other, run.now_s)
    run.until_true(lambda: run.domain.is_occupied)
    return leave


def test_a_retiring_domain_ends_when_its_servers_have_ended(run: DomainRun, jobs: Jobs) -> None:
    jobs.end(jobs.attach())
    (server,) = run.domain.server_pids()
    run.domain.retire()
    assert run.advance(10).state == READY
    (condition,) = run.pending
    waits = f"the control daemon waits for the MPS server (PID {server}) to end"
    assert condition.reason == f"the configuration has changed: {waits}"
    assert run.awaited_servers == (server,)
    run.domain.note_use(in_use=False)
    run.advance(1).until(STOPPED)
    assert jobs.servers() == []


def test_a_retiring_domain_without_servers_ends_at_once(run: DomainRun) -> None:
    run.domain.retire()
    run.until(STOPPED)


@pytest.mark.parametrize(
    ("waits", "drains"), [((True, True), True), ((True, False), False), ((False, True), False)]
)
def test_a_drain_lasts_as_long_as_leases_block_its_change(
    run: DomainRun, plan: DomainPlan, jobs: Jobs, waits: tuple[bool, bool], drains: bool
) -> None:
    """Before the drain, and at a later reload, which may have withdrawn the change."""
    jobs.attach()
    run.domain.change(plan, run.now_s, waits_for_leases=waits[0])
    run.domain.drain(run.now_s)
    run.domain.change(plan, run.now_s, waits_for_leases=waits[1])
    run.domain.retire()
    assert run.domain.is_draining == drains


def test_a_change_cancels_a_retirement(run: DomainRun, plan: DomainPlan, jobs: Jobs) -> None:
    jobs.attach()
    run.domain.retire()
    run.tick()
    run.change(plan)
    assert run.pending == []


def test_a_control_daemons_death_during_a_change_loses_nothing(
    run: DomainRun, bench: Bench, other: DomainPlan
) -> None:
    run.domain.change(other, run.now_s)
    os.kill(run.pid, signal.SIGKILL)
    run.until_true(lambda: run.domain.restarts == 1).until(READY)
    assert run.domain.limits_in_effect == LimitsInEffect(other)
    assert bench.ask(PERCENTAGE, MEMORY) == ["12.5", "2G"]
