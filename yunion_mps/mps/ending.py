"""Ending a control daemon: it is asked to quit, and only when that does not help it is ended by signals.

A signal ends the control daemon alone: its servers would go on without it and keep their GPUs (measured). So
they get the signals as well.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence

from yunion_mps.errors import ControlError, ShortageError, YunionError
from yunion_mps.host.processes import Process, wake
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import HEARD, Conversation, OccupiedError
from yunion_mps.mps.diagnosis import front_end_at
from yunion_mps.mps.servers import still_serving

log = logging.getLogger(__name__)

#: How long a control daemon may take to end on top of the time that its clients have.
GRACE_S = 2.0
#: After this long it is said once more that something does not even end by SIGKILL.
UNKILLABLE_S = 60.0
_ASK_AGAIN_S = 0.2
#: So often turned away, it is by a front-end of somebody else.
_SURELY_ANOTHERS = 2


class Ending:
    """The steps, the safest first: `quit -t`, SIGTERM, SIGKILL. Each has its time; nothing here waits."""

    def __init__(
        self,
        process: Process,
        plan: DomainPlan,
        program: str,
        servers: Callable[[], Sequence[int]],
        now_s: float,
        *,
        timeout_s: int | None,
    ) -> None:
        """`timeout_s` is how long clients have before their servers end; None does not ask, but signals.

        `servers` tells the PIDs of its servers, at any time.
        """
        self._process = process
        self._plan = plan
        self._program = program
        self._servers = servers
        self._conversation: Conversation | None = None
        #: Whether it was asked to quit, and is waiting for its servers, as far as we know.
        self._asked = False
        self._forced = False
        #: How often another front-end had its ear.
        self._turns_away = 0
        self._again_s = now_s
        self._signal: signal.Signals | None = None
        self._deadline_s = now_s
        if timeout_s is not None:
            self._deadline_s = now_s + timeout_s + GRACE_S
            wake([process.pid, *servers()])  # what was stopped can neither hear nor end
            self._ask(now_s)

    def descriptors(self) -> list[int]:
        """What to watch for reading, beyond the process' own end."""
        return [self._conversation.fileno()] if self._conversation else []

    def tick(self, now_s: float) -> float:
        """Do what is due; return when to be called again."""
        self._listen(now_s)
        if now_s < self._deadline_s:
            if self._conversation or self._asked or self._signal:
                return self._deadline_s
            if now_s >= self._again_s:
                self._ask(now_s)
            return min(self._deadline_s, self._again_s)
        servers = still_serving(self._servers())
        if self._asked and servers and not self._forced:
            self._forced = True
            self._signal_servers(servers, signal.SIGKILL)  # they were to end, and it waits for them
        else:
            self._signal = signal.SIGKILL if self._signal else signal.SIGTERM
            self._say("control daemon", self._process.pid, self._signal)
            self._process.signal(self._signal)
            self._signal_servers(servers, self._signal)
        self._deadline_s = now_s + (UNKILLABLE_S if self._signal == signal.SIGKILL else GRACE_S)
        return self._deadline_s

    def close(self) -> None:
        """Give back what is held."""
        if self._conversation:
            self._conversation.close()
            self._conversation = None

    def _signal_servers(self, servers: Sequence[int], number: signal.Signals) -> None:
        for pid in servers:
            try:
                server = Process.adopt(pid)
            except ShortageError as error:
                log.warning("domain %s: %s", self._plan.name, error)
                continue
            if server:
                if still_serving([pid]):
                    self._say("MPS server", pid, number)
                    server.signal(number)
                server.close()

    def _say(self, what: str, pid: int, number: signal.Signals) -> None:
        log.warning("domain %s: %s (PID %d) gets %s", self._plan.name, what, pid, number.name)

    def _ask(self, now_s: float) -> None:
        """Ask; where only descriptors are short, its clients still get their time, and it is asked again."""
        self._again_s = now_s + _ASK_AGAIN_S
        left_s = max(0, round(self._deadline_s - GRACE_S - now_s))
        commands, place = [HEARD, f"quit -t {left_s}"], self._plan.pipe_directory
        try:
            self._conversation = Conversation(self._program, place, commands, now_s, self._deadline_s - now_s)
        except ShortageError as error:
            log.debug("domain %s: it cannot be asked to quit yet: %s", self._plan.name, error)
        except YunionError as error:
            log.warning("domain %s: it cannot be asked to quit: %s", self._plan.name, error)
            self._deadline_s = now_s

    def _listen(self, now_s: float) -> None:
        """Take the front-end's end."""
        if self._conversation is None:
            return
        try:
            answer = self._conversation.poll(now_s)
            if answer is None:
                return
            self._asked = bool(answer)
            if not answer:
                self._turned_away(now_s)
        except ControlError as error:
            self._asked = now_s >= self._deadline_s  # no answer in all that time: it waits for its servers
            what = "it has not ended in time" if self._asked else f"it does not quit: {error}"
            log.warning("domain %s: %s", self._plan.name, what)
            if not self._servers():  # otherwise jobs get their time, and it is asked again
                self._deadline_s = now_s
        self._conversation = None

    def _turned_away(self, now_s: float) -> None:
        """Another front-end has its ear: its clients get their time all the same, and it is asked again.

        The first time it may be one of ours that was left off just now, which it has not noticed yet.
        """
        self._turns_away += 1
        if self._turns_away == _SURELY_ANOTHERS:
            place = self._plan.pipe_directory
            log.warning("domain %s: %s", self._plan.name, OccupiedError(place, front_end_at(place)))
        if self._turns_away >= _SURELY_ANOTHERS and not self._servers():
            self._deadline_s = now_s  # nobody has anything to lose
