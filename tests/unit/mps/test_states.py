"""Every legal change of a domain's state, each brought about in the way that it comes about, and no other."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.core.enums import (
    APPLYING,
    BACKOFF,
    DEGRADED,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    STOPPING,
    WEDGED,
)
from yunion_mps.mps.log_file import LOG_NAME
from yunion_mps.mps.states import LEGAL_CHANGES, StateMachine

from integration.daemon_host import eventually

from .domain_bench import Bench, DomainRun
from .other_processes import silent_connection, stop_process


def cannot_start(bench: Bench) -> DomainRun:
    bench.block_log_directory()
    return bench.domain().start()


def serving_domain(bench: Bench) -> DomainRun:
    return bench.domain().start().until(READY)


def has_no_server(bench: Bench, run: DomainRun) -> DomainRun:
    """No MPS server starts for its job, which it notices."""
    bench.jobs.stand_ins.behave("failing")
    assert bench.jobs.start_waiting().says() == "refused"
    log = Path(run.domain.in_effect.log_directory, LOG_NAME)
    # The last lines may be written a moment after the job was refused.
    eventually(lambda: log.read_text().count("exited with status 1") >= 6)
    return run.advance(10).until(DEGRADED).until_answered()


def is_degraded(bench: Bench) -> DomainRun:
    return has_no_server(bench, bench.serving())


def has_servers_again(bench: Bench) -> DomainRun:
    run = is_degraded(bench)
    bench.jobs.stand_ins.behave()
    return run.advance(5).until_in_time(READY)


def is_degraded_after_many_failures(bench: Bench) -> DomainRun:
    run = has_used_up_its_quick_starts(bench)
    bench.script(f"exec {bench.jobs.program} $1")
    return has_no_server(bench, run.advance(60).until(READY))


def is_degraded_when_adopted(bench: Bench) -> DomainRun:
    """As by a daemon that is started while no server starts."""
    earlier = is_degraded(bench)
    bench.kill_at_the_end(earlier.pid)
    earlier.domain.control.detach()
    return bench.domain(program=bench.jobs.program).start().until(DEGRADED)


def silent_front_end(bench: Bench) -> str:
    """The control daemon is real, the front-end hangs."""
    return bench.script(f'[ "$1" = -f ] && exec {bench.program} -f; exec sleep 1000')


def gets_no_answer(bench: Bench) -> DomainRun:
    return bench.domain(program=silent_front_end(bench)).start().until(APPLYING)


def gets_other_limits(bench: Bench) -> str:
    """The control daemon is real, and what its front-end says of the limits is wrong."""
    return bench.script(f'[ "$1" = -f ] && exec {bench.program} -f; {bench.program} | sed s/5G/4G/')


def exits_at_once(bench: Bench) -> DomainRun:
    return bench.domain(program=bench.script("exit 3")).start().until(BACKOFF)


def has_used_up_its_quick_starts(bench: Bench) -> DomainRun:
    run = exits_at_once(bench)
    while run.domain.restarts < 7:
        run.advance(60).until(BACKOFF)
    return run


def serves_after_many_failures(bench: Bench) -> DomainRun:
    run = has_used_up_its_quick_starts(bench)
    bench.script(f"exec {bench.program} $1")
    return run.advance(60).until(READY)


def hanging_domain(bench: Bench, run: DomainRun) -> DomainRun:
    bench.stack.enter_context(silent_connection(bench.plan))
    return run.advance(10).advance(5)


def is_let_go(run: DomainRun) -> DomainRun:
    run.domain.stop(run.now_s, spare_adopted=True)
    return run


def adopting_domain(bench: Bench, program: str | None = None) -> DomainRun:
    bench.control()
    return bench.domain(program=program).start()


def begins_a_job(bench: Bench, run: DomainRun) -> DomainRun:
    bench.jobs.attach()
    return run.advance(1)


def starts_after_a_failure(bench: Bench) -> DomainRun:
    run = cannot_start(bench)
    os.unlink(bench.plan.log_directory)
    return run.advance(60)


def fails_again(bench: Bench) -> DomainRun:
    run = cannot_start(bench)
    os.unlink(bench.plan.log_directory)
    os.mkdir(bench.plan.log_directory)
    os.chmod(bench.plan.log_directory, 0o777)
    return run.advance(60)


def cannot_start_again(bench: Bench) -> DomainRun:
    run = exits_at_once(bench)
    bench.block_log_directory()
    return run.advance(1)


def serves_again_with_other_limits(bench: Bench) -> DomainRun:
    return serving_domain(bench).change(bench.plan._replace(thread_percentage=50.0))


def goes_on_after_it_hung(bench: Bench) -> DomainRun:
    run = serving_domain(bench)
    stop_process(run.pid)
    return run.advance(10).advance(5).until(READY)


def is_found_without_its_socket(bench: Bench) -> DomainRun:
    run = adopting_domain(bench)
    os.unlink(f"{bench.plan.pipe_directory}/control")
    return run.advance(10)


def hangs_while_its_limits_are_read(bench: Bench) -> DomainRun:
    run = adopting_domain(bench)
    bench.stack.enter_context(silent_connection(bench.plan))
    return run.until(APPLYING).advance(5)


def gets_other_limits_after_many_failures(bench: Bench) -> DomainRun:
    run = has_used_up_its_quick_starts(bench)
    gets_other_limits(bench)
    return run.advance(60).until(FAILED)


def leaves_a_job_and_is_stopped(bench: Bench) -> DomainRun:
    """Its server has outlived it, and no other can be started."""
    run = begins_a_job(bench, bench.serving())
    bench.block_log_directory()
    os.kill(run.pid, signal.SIGKILL)
    return run.until(FAILED).stop()


def leaves_a_job_and_is_stopped_before_it_is_started_again(bench: Bench) -> DomainRun:
    """It is not its first death, so the next start has to wait."""
    run = begins_a_job(bench, bench.serving().kill().until(READY))
    os.kill(run.pid, signal.SIGKILL)
    return run.until(BACKOFF).stop()


SCENARIOS: dict[tuple[str, str], Callable[[Bench], DomainRun]] = {
    (STOPPED, STARTING): lambda bench: bench.domain().start(),
    (STOPPED, FAILED): cannot_start,
    (STARTING, APPLYING): serving_domain,
    (STARTING, WEDGED): is_found_without_its_socket,
    (STARTING, BACKOFF): exits_at_once,
    (STARTING, FAILED): lambda bench: has_used_up_its_quick_starts(bench).advance(60).until(FAILED),
    (STARTING, STOPPING): lambda bench: bench.domain(program=bench.script("exec sleep 9")).start().stop(),
    (STARTING, STOPPED): lambda bench: is_let_go(adopting_domain(bench)),
    (APPLYING, READY): serving_domain,
    (APPLYING, DEGRADED): lambda bench: is_degraded(bench).change(
        bench.plan._replace(thread_percentage=50.0), DEGRADED
    ),
    (APPLYING, WEDGED): hangs_while_its_limits_are_read,
    (APPLYING, BACKOFF): lambda bench: bench.domain(program=gets_other_limits(bench)).start().until(BACKOFF),
    (APPLYING, FAILED): gets_other_limits_after_many_failures,
    (APPLYING, STOPPING): lambda bench: gets_no_answer(bench).stop(),
    (APPLYING, STOPPED): lambda bench: is_let_go(
        adopting_domain(bench, silent_front_end(bench)).until(APPLYING)
    ),
    (READY, APPLYING): serves_again_with_other_limits,
    (READY, DEGRADED): is_degraded,
    (READY, WEDGED): lambda bench: hanging_domain(bench, serving_domain(bench)),
    (READY, BACKOFF): lambda bench: serving_domain(bench).kill(),
    (READY, FAILED): lambda bench: serves_after_many_failures(bench).kill(),
    (READY, STOPPING): lambda bench: serving_domain(bench).stop(),
    (READY, STOPPED): lambda bench: is_let_go(adopting_domain(bench).until(READY)),
    (DEGRADED, APPLYING): lambda bench: is_degraded(bench).change(
        bench.plan._replace(thread_percentage=50.0), DEGRADED
    ),
    (DEGRADED, READY): has_servers_again,
    (DEGRADED, WEDGED): lambda bench: hanging_domain(bench, is_degraded(bench)),
    (DEGRADED, BACKOFF): lambda bench: is_degraded(bench).kill(),
    (DEGRADED, FAILED): lambda bench: is_degraded_after_many_failures(bench).kill(),
    (DEGRADED, STOPPING): lambda bench: is_degraded(bench).stop(),
    (DEGRADED, STOPPED): lambda bench: is_let_go(is_degraded_when_adopted(bench)),
    (WEDGED, APPLYING): goes_on_after_it_hung,
    (WEDGED, BACKOFF): lambda bench: hanging_domain(bench, serving_domain(bench)).advance(2).until(READY),
    (WEDGED, FAILED): lambda bench: (
        hanging_domain(bench, serves_after_many_failures(bench)).advance(2).until(FAILED)
    ),
    (WEDGED, STOPPING): lambda bench: hanging_domain(bench, serving_domain(bench)).stop(),
    (WEDGED, STOPPED): lambda bench: is_let_go(hanging_domain(bench, adopting_domain(bench).until(READY))),
    (BACKOFF, STARTING): lambda bench: exits_at_once(bench).advance(1),
    (BACKOFF, FAILED): cannot_start_again,
    (BACKOFF, STOPPING): leaves_a_job_and_is_stopped_before_it_is_started_again,
    (BACKOFF, STOPPED): lambda bench: exits_at_once(bench).stop(),
    (FAILED, STARTING): starts_after_a_failure,
    (FAILED, FAILED): fails_again,
    (FAILED, STOPPING): leaves_a_job_and_is_stopped,
    (FAILED, STOPPED): lambda bench: cannot_start(bench).stop(),
    (STOPPING, STOPPED): lambda bench: serving_domain(bench).stop().until(STOPPED),
}

LEGAL = {(before, after) for before, afters in LEGAL_CHANGES.items() for after in afters}
ILLEGAL = sorted(set(itertools.product(LEGAL_CHANGES, repeat=2)) - LEGAL)


def test_there_is_a_scenario_for_each_legal_change() -> None:
    assert set(SCENARIOS) == LEGAL


@pytest.mark.parametrize("edge", SCENARIOS, ids=[f"{before}-{after}" for before, after in SCENARIOS])
def test_each_legal_change_comes_about_and_no_state_waits_for_good(
    bench: Bench, edge: tuple[str, str]
) -> None:
    run = SCENARIOS[edge](bench)
    assert edge in run.edges
    due_s = run.tick()
    assert run.state == STOPPED or (due_s is not None and due_s <= 60)


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_each_other_change_raises_and_changes_nothing(before: str, after: str) -> None:
    machine = StateMachine("host", lambda _: None, lambda: None)
    machine.state = before
    with pytest.raises(AssertionError) as caught:
        machine.change_state(after, 0.0, "")
    assert str(caught.value) == f"domain host: {before} cannot become {after}"
    assert machine.state == before
