"""Looking after a control daemon that serves: does it answer, are its limits still ours, is its log small."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from yunion_mps.errors import ControlError, ShortageError
from yunion_mps.models import DomainPlan
from yunion_mps.mps import limits
from yunion_mps.mps.control import Conversation, OccupiedError
from yunion_mps.mps.log_file import bound_logs
from yunion_mps.mps.probe import Probe
from yunion_mps.mps.succession import FORCE_WITHIN_S, FORCED

log = logging.getLogger(__name__)

#: How often it is asked for a sign of life, and how long that may take: together less than two intervals.
PROBE_S = 10.0
PROBE_TIMEOUT_S = 5.0
#: How often its limits are read back.
VERIFY_S = 60.0
ANSWER_TIMEOUT_S = 5.0
#: How soon orders are told again that were not heard.
LOOK_AGAIN_S = 1.0


class LimitsChangedError(ControlError):
    """Somebody else has changed the limits."""


class Watch:
    """The probes of one control daemon, from when it serves until it does not; nothing here waits."""

    def __init__(
        self,
        program: str,
        plan: DomainPlan,
        pid: int,
        servers: Sequence[int],
        read_log: Callable[[], None],
        now_s: float,
    ) -> None:
        """`plan` has the limits that a next server is to get, `servers` are the PIDs of those that run now.

        `read_log` is called now and then, before what the log says may be cut.
        """
        self._program = program
        self._plan = plan
        self._pid = pid
        self._read_log = read_log
        self._probe: Probe | None = None
        self._conversation: Conversation | None = None
        self._probe_s = now_s + PROBE_S
        self._verify_s = now_s + VERIFY_S
        self._order_s = now_s
        #: What it is to be told and what it is being told, each with when that was first asked for.
        self._orders: dict[str, float] = {}
        self._telling: dict[str, float] = {}
        #: How long it took to answer when it was last asked for a sign of life, None before that.
        self.probe_s: float | None = None
        #: The PIDs of its servers when its limits were last found right.
        self.servers = tuple(servers)

    def descriptors(self) -> list[int]:
        """What to watch for reading."""
        probe = [self._probe.fileno()] if self._probe and self._probe.watched else []
        return [*probe, self._conversation.fileno()] if self._conversation else probe

    def order(self, commands: Iterable[str], now_s: float) -> None:
        """Have it told these commands, which answer nothing; again and again where it does not hear us.

        Those that end jobs (`-f`) are told within a minute, or not at all.
        """
        for command in commands:
            self._orders.setdefault(command, now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due; return when to be called again.

        Raises SilentError when it does not answer, LimitsChangedError when its limits are not ours.
        """
        due_s = self._tick_probe(now_s)
        if self._conversation:
            return min(due_s, self._tick_conversation(self._conversation, now_s))
        talk_s = min(self._verify_s, self._order_s) if self._orders else self._verify_s
        return min(due_s, self._talk(now_s) if now_s >= talk_s else talk_s)

    def close(self) -> None:
        """Give back what is held."""
        if self._probe:
            self._probe.close()
            self._probe = None
        if self._conversation:
            self._conversation.close()
            self._conversation = None

    def _tick_probe(self, now_s: float) -> float:
        if self._probe is None and now_s < self._probe_s:
            return self._probe_s
        if self._probe is None:
            self._probe_s = now_s + PROBE_S
            self._read_log()
            bound_logs(self._plan)
            try:
                self._probe = Probe(self._plan.pipe_directory, self._pid, now_s, PROBE_TIMEOUT_S)
            except ShortageError as error:
                log.debug("domain %s: %s", self._plan.name, error)
                return self._probe_s
        if not self._probe.poll(now_s):
            return self._probe.deadline_s
        self.probe_s = now_s - self._probe.began_s
        self._probe.close()
        self._probe = None
        return self._probe_s

    def _talk(self, now_s: float) -> float:
        """Begin a conversation: a question for its limits, which shows that it hears us, then orders."""
        self._telling, self._orders = self._orders, {}
        self._verify_s = now_s + VERIFY_S
        commands = ["get_server_list", *limits.asking(self._plan), *self._telling]
        place = self._plan.pipe_directory
        try:
            self._conversation = Conversation(self._program, place, commands, now_s, ANSWER_TIMEOUT_S)
        except ShortageError as error:
            log.debug("domain %s: %s", self._plan.name, error)
            return self._not_heard(now_s)
        return self._conversation.deadline_s

    def _tick_conversation(self, conversation: Conversation, now_s: float) -> float:
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            log.info("domain %s: %s", self._plan.name, OccupiedError(self._plan.pipe_directory))
            return self._not_heard(now_s)
        servers = limits.servers_in(answer)
        limit = len(servers) + len(limits.asking(self._plan)) if self._telling else None
        try:
            limits.check(self._plan, answer[len(servers) : limit])
        except ControlError as error:
            raise LimitsChangedError(error.message, error.hint) from None
        self.servers = tuple(servers)
        return self._verify_s

    def _not_heard(self, now_s: float) -> float:
        """Orders are told again soon, and the limits with them; without orders those have time."""
        for command, since_s in self._telling.items():
            if not command.endswith(FORCED) or now_s <= since_s + FORCE_WITHIN_S:
                self._orders[command] = since_s
        self._order_s = now_s + LOOK_AGAIN_S
        return self._order_s if self._orders else self._verify_s
