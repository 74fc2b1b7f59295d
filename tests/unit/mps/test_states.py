"""Every legal change of a domain's state, each brought about in the way that it comes about, and no other."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

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
)

from .conftest import RunDomain, StartControl
from .driving import DomainRun

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
    ) -> None:
        self._run_domain = run_domain
        self.start_control = start_control
        self.plan = plan
        self.program = program
        self._write = write

    def real(self) -> DomainRun:
        """A domain with NVIDIA's own program."""
        return self._run_domain()

    def script(self, text: str) -> DomainRun:
        """A domain with a script in its place."""
        return self._run_domain(its_program=self._write(text))

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
    return cannot_start(stage).turn(60)


def is_stopped_after_a_failure(stage: Stage) -> DomainRun:
    return cannot_start(stage).stop()


def survivor(stage: Stage) -> DomainRun:
    """A domain that found its control daemon running."""
    stage.start_control(stage.plan)
    return stage.real()


def is_let_go_while_it_starts(stage: Stage) -> DomainRun:
    run = survivor(stage).start()
    run.domain.stop(run.clock.now_s, spare_found=True)
    return run


def is_let_go_while_its_limits_are_set(stage: Stage) -> DomainRun:
    stage.start_control(stage.plan)
    run = stage.never_talks().start().until(APPLYING)
    run.domain.stop(run.clock.now_s, spare_found=True)
    return run


def is_let_go_while_it_serves(stage: Stage) -> DomainRun:
    run = survivor(stage).start().until(READY)
    run.domain.stop(run.clock.now_s, spare_found=True)
    return run


def has_stopped(stage: Stage) -> DomainRun:
    return serves(stage).stop().until(STOPPED)


SCENARIOS: dict[Edge, Callable[[Stage], DomainRun]] = {
    (STOPPED, STARTING): starts,
    (STOPPED, FAILED): cannot_start,
    (STARTING, APPLYING): serves,
    (STARTING, BACKOFF): ends_while_it_starts,
    (STARTING, STOPPING): is_stopped_while_it_starts,
    (STARTING, STOPPED): is_let_go_while_it_starts,
    (APPLYING, READY): serves,
    (APPLYING, BACKOFF): gets_no_answer_for_its_limits,
    (APPLYING, STOPPING): is_stopped_while_its_limits_are_set,
    (APPLYING, STOPPED): is_let_go_while_its_limits_are_set,
    (READY, BACKOFF): is_killed_while_it_serves,
    (READY, STOPPING): is_stopped_while_it_serves,
    (READY, STOPPED): is_let_go_while_it_serves,
    (BACKOFF, STARTING): is_started_again,
    (BACKOFF, FAILED): cannot_start_again,
    (BACKOFF, STOPPED): is_stopped_while_it_waits,
    (FAILED, STARTING): starts_after_a_failure,
    (FAILED, FAILED): fails_again,
    (FAILED, STOPPED): is_stopped_after_a_failure,
    (STOPPING, STOPPED): has_stopped,
}

LEGAL = {(before, after) for before, afters in LEGAL_CHANGES.items() for after in afters}
ILLEGAL = sorted(set(itertools.product(LEGAL_CHANGES, repeat=2)) - LEGAL)


@pytest.fixture
def stage(
    run_domain: RunDomain,
    plan: DomainPlan,
    program: str,
    write_program: Callable[[str], str],
    start_control: StartControl,
) -> Stage:
    return Stage(run_domain, plan, program, write_program, start_control)


def test_there_is_a_scenario_for_each_legal_change() -> None:
    assert set(SCENARIOS) == LEGAL


@pytest.mark.parametrize("edge", SCENARIOS, ids=[f"{before}-{after}" for before, after in SCENARIOS])
def test_each_legal_change_comes_about(stage: Stage, edge: Edge) -> None:
    assert edge in SCENARIOS[edge](stage).edges


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_each_other_change_raises_and_changes_nothing(run_domain: RunDomain, before: str, after: str) -> None:
    run = run_domain()
    run.domain.state = before
    with pytest.raises(AssertionError) as caught:
        run.domain._change(after, 0.0, "")
    assert str(caught.value) == f"domain host: {before} cannot become {after}"
    assert run.state == before
    run.domain.state = STOPPED


@pytest.mark.parametrize(
    "scenario",
    [
        starts,
        cannot_start,
        ends_while_it_starts,
        gets_no_answer_for_its_limits,
        is_stopped_while_its_limits_are_set,
        is_stopped_while_it_serves,
    ],
)
def test_a_state_that_waits_has_a_deadline(stage: Stage, scenario: Callable[[Stage], DomainRun]) -> None:
    """So that nothing can hang for good, whatever the control daemon does."""
    run = scenario(stage)
    due_s = run.domain.tick(run.clock.now_s)
    assert run.state in (READY, STOPPED) or due_s is not None
