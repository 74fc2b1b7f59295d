"""The life of a control daemon: wait until it listens, stop it, and recover it if it is unresponsive.

Nothing blocks.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence

from yunion_mps.core.errors import ControlError, ShortageError, YunionError
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, Reason
from yunion_mps.core.waits import describe_servers, wait_reason
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask
from yunion_mps.mps.conversation import (
    COMMAND_RETRY_S,
    PING,
    UnresponsiveError,
    diagnose,
    occupied_error,
    peer_of,
)
from yunion_mps.mps.log_file import log_hint
from yunion_mps.mps.processes import GRACE_S, UNKILLABLE_S, running_servers, signal_server

log = logging.getLogger(__name__)

#: It listens after about 2 ms (measured).
START_TIMEOUT_S = 10.0
_FIRST_POLL_S = 0.0002
_MAX_POLL_S = 0.05

#: How soon a `quit` is sent again if the control daemon did not receive it.
_QUIT_RETRY_S = 0.2
#: How long an unresponsive one has to answer after SIGCONT, and how often it is probed.
RESUME_TIMEOUT_S = 2.0
_WEDGED_PROBE_S = 0.5
#: How often the cause is diagnosed, which searches all processes.
_DIAGNOSE_S = 10.0
#: After this many rejections, another program's front-end must be connected.
_FOREIGN_REJECTIONS = 2


class Startup(ControlTask):
    """Waits until a new control daemon listens, by polling, because no descriptor signals that.

    now_s: when it was started, by the clock that `tick` is called with.
    """

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._pause_s = _FIRST_POLL_S
        self._deadline_s = now_s + START_TIMEOUT_S

    def tick(self, now_s: float) -> float | None:
        """Return when to call it again; None once it listens. Raises UnresponsiveError at the deadline."""
        peer = peer_of(self._plan.pipe_directory)
        if peer and peer.pid == self._control.pid:
            return None
        if now_s >= self._deadline_s:
            message = f"the control daemon did not answer within {START_TIMEOUT_S:g} s after its start"
            raise UnresponsiveError(message, log_hint(self._plan))
        self._pause_s = min(self._pause_s * 1.5, _MAX_POLL_S)
        return min(now_s + self._pause_s, self._deadline_s)


class Shutdown(ControlTask):
    """Stops a control daemon: `quit -t`, SIGTERM, SIGKILL, each with a timeout.

    A signal ends only the control daemon: its servers would continue without it and keep their GPUs
    (measured). So they get the signals as well.

    Source: nvidia-cuda-mps-control(1), quit.
    """

    def __init__(self, control: ControlDaemon, now_s: float, *, timeout_s: int | None) -> None:
        """Send `quit` at once, unless there is no timeout.

        now_s: the time, by the clock that `tick` is called with.
        timeout_s: how long clients have before their servers end; None sends signals instead of `quit`.
        """
        super().__init__(control)
        #: Whether it has received `quit`, and presumably waits for its servers.
        self._quit_requested = False
        self._forced = False
        #: How often our front-end was rejected because another one was connected.
        self._rejections = 0
        self._retry_at_s = now_s
        self._signal: signal.Signals | None = None
        self._deadline_s = now_s
        #: Whether it is stopped because it does not serve.
        self.is_replacement = timeout_s is None
        if timeout_s is not None:
            self._deadline_s = now_s + timeout_s + GRACE_S
            self._wake()  # a stopped process can neither answer nor exit
            self._request_quit(now_s)

    def tick(self, now_s: float) -> float:
        self._poll_answer(now_s)
        if now_s < self._deadline_s:
            if self._conversation or self._quit_requested or self._signal:
                return self._deadline_s
            if now_s >= self._retry_at_s:
                self._request_quit(now_s)
            return min(self._deadline_s, self._retry_at_s)
        servers = running_servers(self._control.servers())
        if self._quit_requested and servers and not self._forced:
            self._forced = True
            self._signal_servers(servers, signal.SIGKILL)  # it waits for them to end
        else:
            self._signal = signal.SIGKILL if self._signal else signal.SIGTERM
            self._warn(f"sending {self._signal.name} to the control daemon (PID {self._control.process.pid})")
            self._control.process.signal(self._signal)
            self._signal_servers(servers, self._signal)
        grace_s = UNKILLABLE_S if self._signal == signal.SIGKILL else GRACE_S
        self._deadline_s = now_s + grace_s
        return self._deadline_s

    def _signal_servers(self, servers: Sequence[int], number: signal.Signals) -> None:
        for pid in servers:
            try:
                if signal_server(pid, number):
                    self._warn(f"sent {number.name} to MPS server (PID {pid})")
            except ShortageError as error:
                self._warn(str(error))

    def _request_quit(self, now_s: float) -> None:
        """Send `quit`; in a shortage of descriptors it is sent again, and clients still get their time."""
        self._retry_at_s = now_s + _QUIT_RETRY_S
        left_s = max(0, round(self._deadline_s - GRACE_S - now_s))
        try:
            self._converse([PING, f"quit -t {left_s}"], now_s, self._deadline_s - now_s)
        except ShortageError as error:
            log.debug("domain %s: cannot ask its control daemon to quit yet: %s", self._plan.name, error)
        except YunionError as error:
            self._warn(f"cannot ask its control daemon to quit: {error}")
            self._deadline_s = now_s

    def _poll_answer(self, now_s: float) -> None:
        """Handle the answer to `quit`, if the front-end has ended."""
        if self._conversation is None:
            return
        try:
            answer = self._conversation.poll(now_s)
            if answer is None:
                return
            self._quit_requested = bool(answer) or not self._listens()
            if not self._quit_requested:
                self._on_rejected(now_s)
        except ControlError as error:
            if now_s >= self._deadline_s:  # no answer in all that time: it waits for its servers
                self._quit_requested = True
                self._warn("its control daemon did not end in time")
            else:
                self._quit_requested = False
                self._warn(f"its control daemon does not quit: {error}")
            if not self._control.servers():  # otherwise jobs get their time, and `quit` is sent again
                self._deadline_s = now_s
        self._conversation = None

    def _listens(self) -> bool:
        """Whether the control daemon accepts connections, so that no answer means a rejection.

        After a `quit` without clients it closes its sockets, then the front-end's connection, and then exits.
        So the front-end can end first, and in most cases prints nothing (135 of 150, measured).
        """
        try:
            peer = peer_of(self._plan.pipe_directory)
        except ShortageError:
            return True
        return peer is not None and peer.pid == self._control.pid

    def _on_rejected(self, now_s: float) -> None:
        """Note that another front-end is connected: clients still get their time, and `quit` is sent again.

        The first time this may be a front-end of ours whose end the control daemon has not noticed yet.
        """
        self._rejections += 1
        if self._rejections == _FOREIGN_REJECTIONS:
            self._warn(str(occupied_error(self._plan.pipe_directory)))
        if self._rejections >= _FOREIGN_REJECTIONS and not self._control.servers():
            self._deadline_s = now_s  # there is no job to wait for

    def _warn(self, text: str) -> None:
        log.warning("domain %s: %s", self._plan.name, text)


class Recovery(ControlTask):
    """Recovers a control daemon that runs but does not serve, with the safest steps first, to protect jobs.

    It and its servers, which it waits for, get SIGCONT in case one was only stopped, and it is probed
    repeatedly. It is replaced only if that does not help and none of its servers may have jobs. If other
    processes keep it from answering, that happens only once, because they can block its replacement too.

    error: what showed that it does not serve; it is the reason if no cause is found.
    now_s: the time, by the clock that `tick` is called with.
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
        pid = self._control.process.pid
        why = self._why
        text = f"the control daemon (PID {pid}) does not serve: {why}"
        if self.spared_for:
            servers = f"{describe_servers(self.spared_for)}, which may have jobs,"
            until = wait_reason("its replacement", servers, why.code)
            sooner = f"to end it now, at the risk of its jobs: kill -9 {pid}"
            if self._is_busy:
                sooner = "to avoid the wait, end the processes that keep it busy"
            text = f"{text}; {until} ({sooner})"
        return Reason(text, why.code)

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
        """Return None once it has answered a probe and then NVIDIA's front-end, which may use another path.

        Otherwise, return when to call this again.
        """
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
