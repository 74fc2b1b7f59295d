"""Limits with a control daemon that was adopted, or that another program talks to as well."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from yunion_mps.core.enums import APPLYING, BACKOFF, READY
from yunion_mps.core.models import DomainPlan
from yunion_mps.mps.health import VERIFY_S
from yunion_mps.mps.limits import LimitsInEffect

from .domain_bench import Bench, DomainRun

PERCENTAGE = "get_default_active_thread_percentage"
MEMORY = "get_default_device_pinned_mem_limit 0"


# -- the daemon dies in between; the control daemon and its server do not


@pytest.mark.parametrize("told", [0, 1, 2], ids=["before", "in the midst of it", "after it was set"])
def test_a_change_that_a_killed_daemon_began_is_finished_by_the_next(
    run: DomainRun, bench: Bench, other: DomainPlan, told: int
) -> None:
    job = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    remembered = LimitsInEffect(bench.plan, (server,) if told else ())
    commands = ["set_default_active_thread_percentage 12.5", "set_default_device_pinned_mem_limit 0 2880M"]
    if told:
        bench.ask(*commands[:told])
    after = bench.serving(other, remembered)
    assert after.pid == run.pid
    assert after.domain.limits_in_effect == LimitsInEffect(bench.plan, (server,))
    assert bench.ask(PERCENTAGE, MEMORY) == ["12.5", "2G"]
    bench.jobs.end(job)
    after.domain.note_use(in_use=False)
    after.advance(10).until_true(lambda: after.domain.limits_in_effect == LimitsInEffect(other))


def test_a_server_with_unknown_limits_delays_a_survivor_until_it_is_idle(
    run: DomainRun, bench: Bench
) -> None:
    bench.ask("set_default_active_thread_percentage 77")
    job = bench.jobs.attach()
    (server,) = run.domain.server_pids()
    after = bench.domain(program=bench.jobs.program).start()
    after.until_true(lambda: after.domain.restarts > 0).until(BACKOFF)
    assert after.domain.reason == (
        f"the MPS server (PID {server}) has limits from neither the current configuration nor the previous "
        "one"
    )
    assert f"echo shutdown_server {server} | CUDA_MPS_PIPE_DIRECTORY=" in after.error.hint
    assert after.pid == run.pid, "its jobs go on"
    assert after.domain.server_pids() == [server]
    bench.jobs.end(job)
    after.domain.note_use(in_use=False)
    after.advance(60).until_true(
        lambda: after.state == READY and after.domain.limits_in_effect == LimitsInEffect(bench.plan)
    )
    assert bench.ask(PERCENTAGE, MEMORY) == ["25.0", "5G"]


def test_a_control_daemon_that_dies_between_checks_is_replaced(run: DomainRun, bench: Bench) -> None:
    bench.ask("set_default_active_thread_percentage 77")
    server = run.begin_job(bench.jobs)
    after = bench.domain(program=bench.jobs.program).start()
    after.until_true(lambda: after.domain.restarts > 1).until(BACKOFF)
    os.kill(run.pid, signal.SIGKILL)
    after.until(READY)
    assert after.awaited_servers == (server,)


def test_a_survivor_without_servers_gets_the_limits_whatever_it_has(bench: Bench) -> None:
    bench.control()
    bench.ask("set_default_active_thread_percentage 77")
    run = bench.domain().start().until(READY)
    assert run.reasons[1] == "its limits are being read"
    assert bench.ask(PERCENTAGE, MEMORY) == ["25.0", "5G"]


def test_a_survivor_with_the_planned_limits_gets_no_commands(run: DomainRun, bench: Bench) -> None:
    bench.jobs.attach()
    log = Path(bench.plan.log_directory, "control.log")
    before = log.read_text().count("Cmd:set_")
    after = bench.serving()
    assert after.domain.limits_in_effect == LimitsInEffect(bench.plan)
    assert log.read_text().count("Cmd:set_") == before


# -- other programs


def test_limits_that_another_program_changed_are_set_again(run: DomainRun, bench: Bench) -> None:
    bench.ask("set_default_device_pinned_mem_limit 0 0G")
    assert run.advance(VERIFY_S - 1).state == READY
    run.advance(1).until_true(lambda: "another program changed its limits" in run.event_texts).until(READY)
    (event,) = [event for event in run.events if event.kind == "limit"]
    assert event.cause.startswith("the memory limit of device 0 is not in effect: it was set to 5760M")
    assert event.consequence == "they are being set again"
    assert run.states[-3:] == [READY, APPLYING, READY]
    assert bench.ask(PERCENTAGE, MEMORY) == ["25.0", "5G"]
    assert run.pending == []


def test_a_server_with_another_programs_limits_is_named_and_awaited(run: DomainRun, bench: Bench) -> None:
    bench.ask("set_default_active_thread_percentage 100")
    bench.jobs.end(bench.jobs.attach())
    (server,) = run.domain.server_pids()
    run.advance(VERIFY_S).until_true(lambda: "another program changed its limits" in run.event_texts).until(
        READY
    )
    (event,) = [event for event in run.events if event.kind == "limit"]
    assert f"the MPS server (PID {server}) may have started with the other limits" in event.consequence
    assert run.awaited_servers == (server,)
    run.domain.note_use(in_use=False)
    run.advance(10).until_true(lambda: run.pending == [])


def test_a_server_from_before_a_new_control_daemons_limits_is_awaited(bench: Bench) -> None:
    """A job that comes in the first millisecond has no limits at all."""
    gate = Path(bench.plan.log_directory, "..", "gate").resolve()
    script = f'[ "$1" = -f ] || while [ ! -e {gate} ]; do sleep 0.01; done; exec {bench.jobs.program} $1'
    run = bench.domain(program=bench.script(script)).start().until(APPLYING)
    job = bench.jobs.attach()
    gate.touch()
    run.until(READY)
    (server,) = run.domain.server_pids()
    assert run.domain.limits_in_effect == LimitsInEffect(bench.plan, (server,))
    bench.jobs.end(job)
    run.domain.note_use(in_use=False)
    run.advance(10).until_true(lambda: run.pending == [])


# -- an operator who types commands has its ear


def test_a_survivor_is_queried_again_while_another_front_end_is_open(bench: Bench) -> None:
    survivor = bench.control()
    leave = bench.hold_front_end()
    run = bench.domain().start().until(APPLYING)
    run.until_true(lambda: "another nvidia-cuda-mps-control is connected to it" in run.domain.reason)
    assert "nvidia-cuda-mps, root)" in run.domain.reason, "it says who that is"
    run.advance_steps(30, 1)
    assert (run.state, run.pid) == (APPLYING, survivor.pid)
    leave()
    run.advance(1).until(READY)


def test_limits_are_not_verified_while_another_front_end_is_open(run: DomainRun, bench: Bench) -> None:
    """An open shell is no fault; a probe is answered all the same."""
    leave = bench.hold_front_end()
    before = list(run.states)
    run.advance_steps(5, VERIFY_S)
    assert run.states == before
    leave()
    run.advance(VERIFY_S).until_answered()
    assert run.states == before
