"""Health: monitor a serving control daemon, and recover an unresponsive one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from yunion_mps.errors import ControlError, ShortageError, YunionError
from yunion_mps.mps import limits
from yunion_mps.mps.control_daemon import COMMAND_RETRY_S, ControlDaemon, ControlTask
from yunion_mps.mps.conversation import PING, Conversation, OccupiedError, UnresponsiveError
from yunion_mps.mps.diagnosis import diagnose
from yunion_mps.mps.log_file import bound_logs
from yunion_mps.mps.processes import describe_servers
from yunion_mps.reasons import CONTROL_DAEMON_BUSY, LIMITS_OVERWRITTEN, Reason

log = logging.getLogger(__name__)

#: How often it is probed, and how long an answer may take: together less than two intervals.
PROBE_S = 10.0
PROBE_TIMEOUT_S = 5.0
#: How often its limits are read back.
VERIFY_S = 60.0
#: How long a wedged control daemon has to answer after SIGCONT, and how often it is probed.
RESUME_TIMEOUT_S = 2.0
_WEDGED_PROBE_S = 0.5
#: How often the cause is diagnosed, which searches all processes.
_DIAGNOSE_S = 10.0


class LimitsChangedError(ControlError):
    """Another program has changed the limits."""

    code = LIMITS_OVERWRITTEN


class HealthMonitor(ControlTask):
    """Checks, while it serves, that it answers, that its limits are still ours, and the size of its log."""

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._probe_at_s = now_s + PROBE_S
        self._verify_at_s = now_s + VERIFY_S
        self._send_at_s = now_s
        #: The commands being sent, and the commands delivered in this tick.
        self._sending: Sequence[str] = ()
        self.delivered: Sequence[str] = ()
        #: How long the last probe took, None before the first.
        self.probe_s: float | None = None
        #: The PIDs of its servers when its limits were last found right.
        self.servers = control.servers()

    def tick(self, now_s: float, commands: Sequence[str]) -> float:
        """Do what is due; return when to be called again. `commands` are to be sent; they have no answer.

        Raises UnresponsiveError if it does not answer, LimitsChangedError if its limits are not ours.
        """
        self.delivered = ()
        due_s = self._tick_probe(now_s)
        if self._conversation:
            return min(due_s, self._tick_conversation(self._conversation, now_s))
        send_at_s = min(self._verify_at_s, self._send_at_s) if commands else self._verify_at_s
        return min(due_s, self._start_conversation(now_s, commands) if now_s >= send_at_s else send_at_s)

    def _tick_probe(self, now_s: float) -> float:
        probe = self._probe
        if probe is None:
            if now_s < self._probe_at_s:
                return self._probe_at_s
            self._probe_at_s = now_s + PROBE_S
            self._control.log.report()  # before it is truncated
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

    def _start_conversation(self, now_s: float, orders: Sequence[str]) -> float:
        """Read back its limits, whose answer shows that it receives our commands, then send the orders."""
        self._sending = orders
        self._verify_at_s = now_s + VERIFY_S
        try:
            commands = ["get_server_list", *limits.get_commands(self._plan), *self._sending]
            return self._converse(commands, now_s).deadline_s
        except ShortageError as error:
            log.debug("domain %s: %s", self._plan.name, error)
            return self._retry_commands(now_s)

    def _tick_conversation(self, conversation: Conversation, now_s: float) -> float:
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            log.info("domain %s: %s", self._plan.name, OccupiedError(self._plan.pipe_directory))
            return self._retry_commands(now_s)
        self.delivered = self._sending
        servers = limits.parse_servers(answer)
        limit = len(servers) + len(limits.get_commands(self._plan)) if self._sending else None
        try:
            limits.check(self._plan, answer[len(servers) : limit])
        except ControlError as error:
            raise LimitsChangedError(error.message, error.hint) from None
        self.servers = tuple(servers)
        return self._verify_at_s

    def _retry_commands(self, now_s: float) -> float:
        """Retry commands soon; without any, the limits can be read back later."""
        self._send_at_s = now_s + COMMAND_RETRY_S
        return self._send_at_s if self._sending else self._verify_at_s


class Recovery(ControlTask):
    """Recovers a control daemon that runs but does not serve, with the safest steps first, to protect jobs.

    It and its servers, which it waits for, get SIGCONT in case one was only stopped, and it is probed
    repeatedly. It is replaced only if that does not help and none of its servers may have jobs. If other
    processes keep it from answering, that happens only once, because they can block its replacement too.
    """

    def __init__(self, control: ControlDaemon, error: UnresponsiveError, now_s: float) -> None:
        super().__init__(control)
        self._error = error
        self._diagnose(now_s)
        self._began_s = now_s
        self._deadline_s = now_s + RESUME_TIMEOUT_S
        self._probe_at_s = now_s
        #: The servers because of which it is not replaced.
        self.spared_for: tuple[int, ...] = ()
        self.failed = False
        self._wake()

    @property
    def reason(self) -> Reason:
        """What is wrong, and what it waits for."""
        pid, why = self._control.process.pid, self._why
        what = f"the control daemon (PID {pid}) does not serve: {why}"
        if self.spared_for:
            until = (
                f"it will be replaced once {describe_servers(self.spared_for)}, which may have jobs, has "
                "ended"
            )
            sooner = f"to end it now, at the risk of its jobs: kill -9 {pid}"
            if self._is_busy:
                sooner = "to avoid the wait, end the processes that keep it busy"
            what = f"{what}; {until} ({sooner})"
        return Reason(what, why.code)

    @property
    def _is_busy(self) -> bool:
        return self._why.code == CONTROL_DAEMON_BUSY

    def _diagnose(self, now_s: float) -> None:
        why = diagnose(self._control.process.pid, self._plan.pipe_directory)
        self._why = why or self._error.reason
        self._diagnose_at_s = now_s + _DIAGNOSE_S

    def tick(self, now_s: float, *, in_use: bool | None, polled_s: float) -> float | None:
        """Do what is due; return when to be called again, None once it answers.

        `in_use`: whether processes other than servers used its GPUs when they were polled at `polled_s`, None
        if unknown.
        """
        due_s = self._poll(now_s)
        if due_s is None:
            return None
        if now_s >= self._diagnose_at_s:
            self._diagnose(now_s)
        if now_s >= self._deadline_s:
            servers = self._control.servers()
            # A job may have started since an earlier poll.
            is_idle = in_use is False and polled_s >= self._began_s
            self.spared_for = () if is_idle else tuple(servers)
            self.failed = not self.spared_for and not (self._is_busy and self._control.is_replacement)
            if not self.failed:
                self._wake()
                self._deadline_s = now_s + COMMAND_RETRY_S
        return min(due_s, self._deadline_s)

    def _poll(self, now_s: float) -> float | None:
        """None once it has answered a probe and then NVIDIA's front-end, which may use another path."""
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
            return self._converse([PING], now_s, RESUME_TIMEOUT_S).deadline_s
        except YunionError:
            self.close()
            self._probe_at_s = max(self._probe_at_s, now_s + _WEDGED_PROBE_S)
            return self._probe_at_s
