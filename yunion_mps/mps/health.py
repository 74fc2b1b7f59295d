"""The health of a serving domain: its control daemon answers, its limits are ours, its logs stay small."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from yunion_mps.core import reasons
from yunion_mps.core.errors import ControlError, ShortageError
from yunion_mps.host.process_info import is_stopped
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask
from yunion_mps.mps.conversation import COMMAND_RETRY_S, Conversation, OccupiedError
from yunion_mps.mps.limits import (
    check_limits,
    client_commands,
    get_commands,
    parse_servers,
    servers_without_clients,
)
from yunion_mps.mps.log_file import MAX_BYTES, bound_logs
from yunion_mps.mps.server_starts import START

log = logging.getLogger(__name__)

#: How often it is probed, and how long an answer may take: together less than two intervals.
PROBE_S = 10.0
PROBE_TIMEOUT_S = 5.0
#: How often its limits are read back.
VERIFY_S = 60.0


class LimitsChangedError(ControlError):
    code = reasons.LIMITS_OVERWRITTEN


class HealthMonitor(ControlTask):
    """Checks that a control daemon answers and still has our limits, and bounds its logs.

    now_s: when its limits were last read back, by the clock that `tick` is called with.
    """

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._probe_at_s = now_s + PROBE_S
        self._verify_at_s = now_s + VERIFY_S
        self._send_at_s = now_s
        #: The commands being sent, and the commands delivered in this tick.
        self._sending: Sequence[str] = ()
        self.delivered: Sequence[str] = ()
        #: The servers whose clients are being listed, and whether those of some were listed in this tick.
        self._asking: list[int] = []
        self.has_asked = False
        #: How long the last probe took, None before the first.
        self.probe_s: float | None = None
        #: The PIDs of its servers when its limits were last found right.
        self.servers = control.servers()

    def tick(self, now_s: float, commands: Sequence[str], idle_servers: Sequence[int] = ()) -> float:
        """Do what is due; return when to be called again. `commands` are to be sent; they have no answer.

        Those of `idle_servers` that have no clients are shut down.

        Raises UnresponsiveError if it does not answer, LimitsChangedError if its limits are not ours.
        """
        self.delivered = ()
        self.has_asked = False
        due_s = self._tick_probe(now_s)
        if self._conversation:
            return min(due_s, self._tick_conversation(self._conversation, now_s))
        is_urgent = bool(commands or idle_servers)
        send_at_s = min(self._verify_at_s, self._send_at_s) if is_urgent else self._verify_at_s
        if now_s < send_at_s:
            return min(due_s, send_at_s)
        # A stopped server would block the control daemon, which waits for its answer.
        self._asking = [] if commands else [pid for pid in idle_servers if not is_stopped(pid)]
        return min(due_s, self._start_conversation(now_s, commands))

    @property
    def is_busy(self) -> bool:
        """Whether it is connected to the control daemon, which serves no other connection meanwhile."""
        return bool(self._conversation or self._probe)

    def _tick_probe(self, now_s: float) -> float:
        probe = self._probe
        if probe is None:
            if now_s < self._probe_at_s:
                return self._probe_at_s
            self._probe_at_s = now_s + PROBE_S
            self._control.log.report()  # before it is truncated
            if self._control.log.size > MAX_BYTES:
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
        self._control.log.report()
        bound_logs(self._plan)  # the server's log too, however small the control daemon's is
        try:
            commands = ["get_server_list", *get_commands(self._plan), *self._sending]
            commands += client_commands(self._asking)
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
            # A server that exits may break off the conversation in which it was ordered.
            has_ordered_start = any(command.startswith(START) for command in self._sending)
            if not has_ordered_start:
                log.info("domain %s: %s", self._plan.name, OccupiedError(self._plan.pipe_directory))
            return self._retry_commands(now_s)
        self.delivered = self._sending
        servers = parse_servers(answer)
        end_of_limits = len(servers) + len(get_commands(self._plan))
        limits = answer[len(servers) : end_of_limits]
        if not (self._sending or self._asking):
            limits = answer[len(servers) :]  # nothing else was asked, so surplus lines must fail the check
        try:
            check_limits(self._plan, limits)
        except ControlError as error:
            raise LimitsChangedError(error.message, error.hint) from None
        self.servers = tuple(servers)
        if not self._asking:
            return self._verify_at_s
        self.has_asked = True
        idle = servers_without_clients(self._asking, answer[end_of_limits:])
        self._asking = []
        # At once, before another client can attach, and without -f, in case one has.
        commands = [f"shutdown_server {pid}" for pid in idle]
        return self._start_conversation(now_s, commands) if commands else self._verify_at_s

    def _retry_commands(self, now_s: float) -> float:
        """Retry commands soon; without any, the limits can be read back later."""
        self._send_at_s = now_s + COMMAND_RETRY_S
        return self._send_at_s if self._sending else self._verify_at_s
