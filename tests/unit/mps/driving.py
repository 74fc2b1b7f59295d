"""A Domain driven by hand: the clock stands still until the test turns it, and real events are waited for."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import Conversation, peer_of
from yunion_mps.mps.domain import Domain

PATIENCE_S = 60.0


class Clock:
    """A monotonic clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0


class DomainRun:
    """A Domain, its clock and the states that it went through."""

    def __init__(self, plan: DomainPlan, program: str, clock: Clock) -> None:
        self.clock = clock
        self.domain = Domain(plan, program, self._note)
        self.states = [self.domain.state]
        self.reasons: list[str] = []

    def _note(self) -> None:
        self.states.append(self.domain.state)
        self.reasons.append(self.domain.reason)

    @property
    def state(self) -> str:
        return self.domain.state

    @property
    def edges(self) -> list[tuple[str, str]]:
        return list(zip(self.states, self.states[1:]))

    @property
    def pid(self) -> int:
        pid = self.domain.status().pid
        assert pid is not None
        return pid

    def start(self) -> DomainRun:
        self.domain.start(self.clock.now_s)
        return self

    def stop(self) -> DomainRun:
        self.domain.stop(self.clock.now_s)
        return self

    def tick(self) -> float | None:
        """Tick now; returns in how many seconds it wants to be called again."""
        due_s = self.domain.tick(self.clock.now_s)
        return None if due_s is None else due_s - self.clock.now_s

    def turn(self, seconds: float) -> DomainRun:
        """Let so much time pass, and tick."""
        self.clock.now_s += seconds
        self.tick()
        return self

    def until(self, *states: str) -> DomainRun:
        """Tick on real events, with the clock standing still, until it is in one of the states."""
        end_s = time.monotonic() + PATIENCE_S
        while self.state not in states:
            assert time.monotonic() < end_s, f"{self.states}, never {states}: {self.domain.reason}"
            self.tick()
            if self.state in states:
                break
            poll = select.poll()
            for descriptor in self.domain.descriptors():
                poll.register(descriptor, select.POLLIN)
            # While it starts, there is no descriptor that tells of the control daemon's first answer.
            poll.poll(2)
        return self

    def until_ended(self) -> DomainRun:
        """Wait until the control daemon's end can be seen, without a tick."""
        poll = select.poll()
        poll.register(self.domain.descriptors()[0], select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the control daemon did not end"
        return self

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.state not in ("stopped", "stopping"):
            self.stop()
        for _ in range(3):
            if self.state == "stopping":
                self.turn(100)
        if self.state == "stopping":
            self.until("stopped")


def wait_until_it_answers(plan: DomainPlan, pid: int) -> None:
    """Wait until this control daemon listens in the plan's directory."""
    wait_for(lambda: (peer := peer_of(plan.pipe_directory)) is not None and peer.pid == pid)


def wait_for(look: Callable[[], bool]) -> None:
    """Wait until `look` says true."""
    end_s = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.002)


def converse(program: str, plan: DomainPlan, *commands: str) -> list[str]:
    """What the control daemon answers to the commands."""
    conversation = Conversation(program, plan.pipe_directory, commands, 0.0, 5.0)
    poll = select.poll()
    poll.register(conversation.fileno(), select.POLLIN)
    while (answer := conversation.poll(0.0)) is None:
        assert poll.poll(PATIENCE_S * 1000), "no answer"
    return answer
