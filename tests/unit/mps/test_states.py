"""Every legal change of a domain's state, each brought about in the way that it comes about, and no other."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from yunion_mps.models import DomainPlan
from yunion_mps.mps.states import (
    APPLYING,
    BACKOFF,
    FAILED,
    LEGAL_CHANGES,
    READY,
    STARTING,
    STOPPED,
    STOPPING,
    WEDGED,
)

from .conftest import RunDomain, StartControl
from .driving import DomainRun, Jobs, silent_connection, stop_process

Edge = tuple[str, str]


class Stage:
    """What the scenarios act with."""

    def __init__(
        self,
        run_domain: RunDomain,
        plan: DomainPlan,
        program: str,
        write: Callable[[str], str],
        start_control: StartControl,
        jobs: Jobs,
        stack: ExitStack,
    ) -> None:
        self._run_domain = run_domain
        self.start_control = start_control
        self.plan = plan
        self.program = program
        self._write = write
        self._jobs = jobs
        self._stack = stack

    def real(self) -> DomainRun:
        """A domain with NVIDIA's own program."""
        return self._run_domain()

    def script(self, text: str) -> DomainRun:
        """A domain with a script in its place."""
        return self._run_domain(its_program=self._write(text))

    def with_job(self) -> DomainRun:
        """A domain with NVIDIA's own program that serves a job."""
        run = self._run_domain(its_program=self._jobs.program).start().until(READY)
        self._jobs.begin()
        run.turn(1)
        return run

    def hang(self) -> None:
        """Keep the control daemon from all others."""
        self._stack.enter_context(silent_connection(self.plan))

    def exits_at_once(self) -> DomainRun:
        return self.script("exit 3")

    def never_talks(self) -> DomainRun:
        """The control daemon is real, the front-end hangs."""
        return self.script(f'[ "$1" = -f ] && exec {self.program} -f; exec sleep 1000')

    def block_directory(self) -> None:
        """Put a symlink where the log directory goes."""
        if os.path.isdir(self.plan.log_directory):
            os.rename(self.plan.log_directory, self.plan.log_directory + ".old")
        with open(self.plan.log_directory, "w"):
            pass

    def free_directory(self) -> None:
        os.unlink(self.plan.log_directory)


def starts(stage: Stage) -> DomainRun:
    return stage.real().start()


def cannot_start(stage: Stage) -> DomainRun:
    stage.block_directory()
    return stage.real().start()


def serves(stage: Stage) -> DomainRun:
    return stage.real().start().until(READY)


def ends_while_it_starts(stage: Stage) -> DomainRun:
    return stage.exits_at_once().start().until(BACKOFF)


def is_stopped_while_it_starts(stage: Stage) -> DomainRun:
    return stage.script("exec sleep 1000").start().stop()


def gets_no_answer_for_its_limits(stage: Stage) -> DomainRun:
    return stage.never_talks().start().until(APPLYING).turn(5)


def is_stopped_while_its_limits_are_set(stage: Stage) -> DomainRun:
    return stage.never_talks().start().until(APPLYING).stop()


def is_killed_while_it_serves(stage: Stage) -> DomainRun:
    run = serves(stage)
    os.kill(run.pid, signal.SIGKILL)
    run.until_ended().tick()
    return run


def is_stopped_while_it_serves(stage: Stage) -> DomainRun:
    return serves(stage).stop()


def is_started_again(stage: Stage) -> DomainRun:
    return ends_while_it_starts(stage).turn(1)


def cannot_start_again(stage: Stage) -> DomainRun:
    run = ends_while_it_starts(stage)
    stage.block_directory()
    return run.turn(1)


def is_stopped_while_it_waits(stage: Stage) -> DomainRun:
    return ends_while_it_starts(stage).stop()


def starts_after_a_failure(stage: Stage) -> DomainRun:
    run = cannot_start(stage)
    stage.free_directory()
    return run.turn(60)


def fails_again(stage: Stage) -> DomainRun:
    run = cannot_start(stage)
    stage.free_directory()
    os.mkdir(stage.plan.log_directory)
    os.chmod(stage.plan.log_directory, 0o777)
    return run.turn(60)


def is_stopped_after_a_failure(stage: Stage) -> DomainRun:
    return cannot_start(stage).stop()


def survivor(stage: Stage) -> DomainRun:
    """A domain that found its control daemon running."""
    stage.start_control(stage.plan)
    return stage.real()


def serves_again_with_other_limits(stage: Stage) -> DomainRun:
    run = serves(stage)
    run.domain.change(stage.plan._replace(thread_percentage=50.0), run.clock.now_s)
    return run.until(READY)


def hangs_while_it_serves(stage: Stage) -> DomainRun:
    run = serves(stage)
    stage.hang()
    return run.turn(10).turn(5)


def goes_on_after_it_hung(stage: Stage) -> DomainRun:
    run = serves(stage)
    stop_process(run.pid)
    return run.turn(10).turn(5).until(READY)


def is_replaced_after_it_hung(stage: Stage) -> DomainRun:
    return hangs_while_it_serves(stage).turn(2).until(READY)


def cannot_be_replaced_after_it_hung(stage: Stage) -> DomainRun:
    """Deaths before have used up the quick starts."""
    run = hangs_while_it_serves(stage)
    run.domain._failures = 7
    return run.turn(2).until(FAILED)


def is_stopped_while_it_hangs(stage: Stage) -> DomainRun:
    return hangs_while_it_serves(stage).stop()


def is_let_go_while_it_hangs(stage: Stage) -> DomainRun:
    run = survivor(stage).start().until(READY)
    stage.hang()
    run.turn(10).turn(5)
    run.domain.stop(run.clock.now_s, spare_adopted=True)
    return run


def hangs_when_it_is_found(stage: Stage) -> DomainRun:
    """It runs, and its socket is gone."""
    stage.start_control(stage.plan)
    run = stage.real().start()
    os.unlink(f"{stage.plan.pipe_directory}/control")
    return run.turn(10)


def dies_too_often_while_it_starts(stage: Stage) -> DomainRun:
    run = stage.exits_at_once().start()
    while FAILED not in run.states:
        run.until(BACKOFF, FAILED).turn(60)
    return run


def dies_too_often_while_its_limits_are_set(stage: Stage) -> DomainRun:
    run = stage.never_talks().start().until(APPLYING)
    run.domain._failures = 7
    return run.turn(5)


def dies_too_often_while_it_serves(stage: Stage) -> DomainRun:
    run = serves(stage)
    run.domain._failures = 7
    os.kill(run.pid, signal.SIGKILL)
    return run.until(FAILED)


def hangs_while_its_limits_are_read(stage: Stage) -> DomainRun:
    stage.start_control(stage.plan)
    run = stage.real().start()
    stage.hang()
    return run.until(APPLYING).turn(5)


def leaves_a_job_and_is_stopped(stage: Stage) -> DomainRun:
    """Its server has outlived it, and no other can be started."""
    run = stage.with_job()
    stage.block_directory()
    os.kill(run.pid, signal.SIGKILL)
    return run.until(FAILED).stop()


def leaves_a_job_and_is_stopped_before_it_is_started_again(stage: Stage) -> DomainRun:
    run = stage.with_job()
    run.domain._failures = 1
    os.kill(run.pid, signal.SIGKILL)
    return run.until(BACKOFF).stop()


def is_let_go_while_it_starts(stage: Stage) -> DomainRun:
    run = survivor(stage).start()
    run.domain.stop(run.clock.now_s, spare_adopted=True)
    return run


def is_let_go_while_its_limits_are_set(stage: Stage) -> DomainRun:
    stage.start_control(stage.plan)
    run = stage.never_talks().start().until(APPLYING)
    run.domain.stop(run.clock.now_s, spare_adopted=True)
    return run


def is_let_go_while_it_serves(stage: Stage) -> DomainRun:
    run = survivor(stage).start().until(READY)
    run.domain.stop(run.clock.now_s, spare_adopted=True)
    return run


def has_stopped(stage: Stage) -> DomainRun:
    return serves(stage).stop().until(STOPPED)


SCENARIOS: dict[Edge, Callable[[Stage], DomainRun]] = {
    (STOPPED, STARTING): starts,
    (STOPPED, FAILED): cannot_start,
    (STARTING, APPLYING): serves,
    (STARTING, WEDGED): hangs_when_it_is_found,
    (STARTING, BACKOFF): ends_while_it_starts,
    (STARTING, FAILED): dies_too_often_while_it_starts,
    (STARTING, STOPPING): is_stopped_while_it_starts,
    (STARTING, STOPPED): is_let_go_while_it_starts,
    (APPLYING, READY): serves,
    (APPLYING, WEDGED): hangs_while_its_limits_are_read,
    (APPLYING, BACKOFF): gets_no_answer_for_its_limits,
    (APPLYING, FAILED): dies_too_often_while_its_limits_are_set,
    (APPLYING, STOPPING): is_stopped_while_its_limits_are_set,
    (APPLYING, STOPPED): is_let_go_while_its_limits_are_set,
    (READY, APPLYING): serves_again_with_other_limits,
    (READY, WEDGED): hangs_while_it_serves,
    (READY, BACKOFF): is_killed_while_it_serves,
    (READY, FAILED): dies_too_often_while_it_serves,
    (READY, STOPPING): is_stopped_while_it_serves,
    (READY, STOPPED): is_let_go_while_it_serves,
    (WEDGED, APPLYING): goes_on_after_it_hung,
    (WEDGED, BACKOFF): is_replaced_after_it_hung,
    (WEDGED, FAILED): cannot_be_replaced_after_it_hung,
    (WEDGED, STOPPING): is_stopped_while_it_hangs,
    (WEDGED, STOPPED): is_let_go_while_it_hangs,
    (BACKOFF, STARTING): is_started_again,
    (BACKOFF, FAILED): cannot_start_again,
    (BACKOFF, STOPPING): leaves_a_job_and_is_stopped_before_it_is_started_again,
    (BACKOFF, STOPPED): is_stopped_while_it_waits,
    (FAILED, STARTING): starts_after_a_failure,
    (FAILED, FAILED): fails_again,
    (FAILED, STOPPING): leaves_a_job_and_is_stopped,
    (FAILED, STOPPED): is_stopped_after_a_failure,
    (STOPPING, STOPPED): has_stopped,
}

LEGAL = {(before, after) for before, afters in LEGAL_CHANGES.items() for after in afters}
ILLEGAL = sorted(set(itertools.product(LEGAL_CHANGES, repeat=2)) - LEGAL)


@pytest.fixture
def stage(
    jobs: Jobs,
    run_domain: RunDomain,
    plan: DomainPlan,
    program: str,
    write_program: Callable[[str], str],
    start_control: StartControl,
) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(run_domain, plan, program, write_program, start_control, jobs, stack)


def test_there_is_a_scenario_for_each_legal_change() -> None:
    assert set(SCENARIOS) == LEGAL


@pytest.mark.parametrize("edge", SCENARIOS, ids=[f"{before}-{after}" for before, after in SCENARIOS])
def test_each_legal_change_comes_about_and_no_state_waits_for_good(stage: Stage, edge: Edge) -> None:
    run = SCENARIOS[edge](stage)
    assert edge in run.edges
    due_s = run.tick()
    assert run.state == STOPPED or (due_s is not None and due_s <= 60)


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_each_other_change_raises_and_changes_nothing(run_domain: RunDomain, before: str, after: str) -> None:
    run = run_domain()
    run.domain.state = before
    with pytest.raises(AssertionError) as caught:
        run.domain._change(after, 0.0, "")
    assert str(caught.value) == f"domain host: {before} cannot become {after}"
    assert run.state == before
    run.domain.state = STOPPED
