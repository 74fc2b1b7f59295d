"""Whether a control daemon serves: the monitor of one that does, and the recovery of one that does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from yunion_mps.errors import ControlError, ShortageError, YunionError
from yunion_mps.mps import limits
from yunion_mps.mps.control_daemon import ASK_AGAIN_S, ControlDaemon, Task
from yunion_mps.mps.conversation import HEARD, Conversation, OccupiedError, SilentError
from yunion_mps.mps.diagnosis import why_silent
from yunion_mps.mps.log_file import bound_logs
from yunion_mps.mps.processes import describe_servers
from yunion_mps.reasons import CONTROL_DAEMON_BUSY, LIMITS_OVERWRITTEN, Reason

log = logging.getLogger(__name__)

#: How often it is asked for a sign of life, and how long that may take: together less than two intervals.
PROBE_S = 10.0
PROBE_TIMEOUT_S = 5.0
#: How often its limits are read back.
VERIFY_S = 60.0
#: How long a wedged control daemon has to answer once it was told to go on, and how often it is probed.
RESUME_TIMEOUT_S = 2.0
_WEDGED_PROBE_S = 0.5
#: How often it is found out why: all processes are searched for that.
_DIAGNOSE_S = 10.0


class LimitsChangedError(ControlError):
    """Another program has changed the limits."""

    code = LIMITS_OVERWRITTEN


class HealthMonitor(Task):
    """Does it answer, are its limits still ours, is its log small? From when it serves until it does not."""

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._probe_at_s = now_s + PROBE_S
        self._verify_at_s = now_s + VERIFY_S
        self._order_at_s = now_s
        #: The orders that it is being told, and those that it was found to have heard in this tick.
        self._telling: Sequence[str] = ()
        self.heard: Sequence[str] = ()
        #: How long it took to answer when it was last asked for a sign of life, None before that.
        self.probe_s: float | None = None
        #: The PIDs of its servers when its limits were last found right.
        self.servers = control.servers()

    def tick(self, now_s: float, orders: Sequence[str]) -> float:
        """Do what is due; return when to be called again. `orders` are commands that answer nothing.

        Raises SilentError when it does not answer, LimitsChangedError when its limits are not ours.
        """
        self.heard = ()
        due_s = self._tick_probe(now_s)
        if self._conversation:
            return min(due_s, self._tick_conversation(self._conversation, now_s))
        talk_s = min(self._verify_at_s, self._order_at_s) if orders else self._verify_at_s
        return min(due_s, self._talk(now_s, orders) if now_s >= talk_s else talk_s)

    def _tick_probe(self, now_s: float) -> float:
        probe = self._probe
        if probe is None:
            if now_s < self._probe_at_s:
                return self._probe_at_s
            self._probe_at_s = now_s + PROBE_S
            self._control.log.tell()  # before what it says may be cut
            bound_logs(self._plan)
            try:
                probe = self._connect(now_s, PROBE_TIMEOUT_S)
            except ShortageError as error:
                log.debug("domain %s: %s", self._plan.name, error)
                return self._probe_at_s
        if not probe.poll(now_s):
            return probe.deadline_s
        self.probe_s = now_s - probe.began_s
        probe.close()
        self._probe = None
        return self._probe_at_s

    def _talk(self, now_s: float, orders: Sequence[str]) -> float:
        """Begin a conversation: a question for its limits, which shows that it hears us, then orders."""
        self._telling = orders
        self._verify_at_s = now_s + VERIFY_S
        try:
            commands = ["get_server_list", *limits.get_commands(self._plan), *self._telling]
            return self._converse(commands, now_s).deadline_s
        except ShortageError as error:
            log.debug("domain %s: %s", self._plan.name, error)
            return self._not_heard(now_s)

    def _tick_conversation(self, conversation: Conversation, now_s: float) -> float:
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            log.info("domain %s: %s", self._plan.name, OccupiedError(self._plan.pipe_directory))
            return self._not_heard(now_s)
        self.heard = self._telling
        servers = limits.servers_in(answer)
        limit = len(servers) + len(limits.get_commands(self._plan)) if self._telling else None
        try:
            limits.check(self._plan, answer[len(servers) : limit])
        except ControlError as error:
            raise LimitsChangedError(error.message, error.hint) from None
        self.servers = tuple(servers)
        return self._verify_at_s

    def _not_heard(self, now_s: float) -> float:
        """Orders are told again soon, and the limits with them; without orders those have time."""
        self._order_at_s = now_s + ASK_AGAIN_S
        return self._order_at_s if self._telling else self._verify_at_s


class Recovery(Task):
    """The way out for a control daemon that runs and does not serve: the safest steps first, jobs above all.

    It and its servers, for which it waits, are told to go on, in case one was only stopped, and it is asked
    again and again. Only if that does not help, and no server of it may have jobs, it is to be replaced. If
    other processes keep it from answering, that is done once: they can keep the next one from it as well.
    """

    def __init__(self, control: ControlDaemon, error: SilentError, now_s: float) -> None:
        super().__init__(control)
        self._error = error
        self._diagnose(now_s)
        self._began_s = now_s
        self._deadline_s = now_s + RESUME_TIMEOUT_S
        self._probe_at_s = now_s
        #: The servers for whose sake it is not replaced.
        self.spared_for: tuple[int, ...] = ()
        #: Whether it is to be replaced.
        self.failed = False
        self._wake()

    @property
    def reason(self) -> Reason:
        """What is wrong, and what it waits for."""
        pid, why = self._control.process.pid, self._why
        what = f"the control daemon (PID {pid}) does not serve: {why}"
        if self.spared_for:
            until = f"it is replaced when {describe_servers(self.spared_for)}, which may have jobs, has ended"
            sooner = f"to end it now, at the risk of its jobs: kill -9 {pid}"
            if self._is_kept_busy:
                sooner = "not to wait: end the processes that keep it busy"
            what = f"{what}; {until} ({sooner})"
        return Reason(what, why.code)

    @property
    def _is_kept_busy(self) -> bool:
        return self._why.code == CONTROL_DAEMON_BUSY

    def _diagnose(self, now_s: float) -> None:
        why = why_silent(self._control.process.pid, self._plan.pipe_directory)
        self._why = why or self._error.reason
        self._diagnose_at_s = now_s + _DIAGNOSE_S

    def tick(self, now_s: float, *, in_use: bool | None, polled_s: float) -> float | None:
        """Do what is due; when to be called again, None once it answers.

        `in_use` tells whether other processes than servers used its GPUs when they were polled at `polled_s`,
        None if that is unknown.
        """
        due_s = self._ask(now_s)
        if due_s is None:
            return None
        if now_s >= self._diagnose_at_s:
            self._diagnose(now_s)
        if now_s >= self._deadline_s:
            servers = self._control.servers()
            # A job may have come since an earlier poll.
            is_idle = in_use is False and polled_s >= self._began_s
            self.spared_for = () if is_idle else tuple(servers)
            self.failed = not self.spared_for and not (self._is_kept_busy and self._control.is_replacement)
            if not self.failed:
                self._wake()
                self._deadline_s = now_s + ASK_AGAIN_S
        return min(due_s, self._deadline_s)

    def _ask(self, now_s: float) -> float | None:
        """None once it has answered a probe, and then NVIDIA's front-end, which may look elsewhere for it."""
        try:
            if self._conversation:
                return self._conversation.deadline_s if self._conversation.poll(now_s) is None else None
            if self._probe is None and now_s >= self._probe_at_s:
                self._probe_at_s = now_s + _WEDGED_PROBE_S
                self._connect(now_s, _WEDGED_PROBE_S)
            if self._probe is None:
                return self._probe_at_s
            if not self._probe.poll(now_s):
                return self._probe.deadline_s
            self.close()
            return self._converse([HEARD], now_s, RESUME_TIMEOUT_S).deadline_s
        except YunionError:
            self.close()
            self._probe_at_s = max(self._probe_at_s, now_s + _WEDGED_PROBE_S)
            return self._probe_at_s
