"""A domain's control daemon, adopted or started, and the tasks that start and stop it; nothing blocks."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence

from yunion_mps.errors import ControlError, HostError, ShortageError, YunionError
from yunion_mps.host.processes import Process, Watchable, describe_exit, wake
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps import startup
from yunion_mps.mps.conversation import (
    ANSWER_TIMEOUT_S,
    PING,
    Conversation,
    Probe,
    UnresponsiveError,
    occupied_error,
    peer_of,
)
from yunion_mps.mps.log_file import LogReader, log_hint
from yunion_mps.mps.processes import (
    GRACE_S,
    UNKILLABLE_S,
    AdoptionOrder,
    MpsProcess,
    forget,
    record,
    running_servers,
    server_pids,
    signal_server,
)

log = logging.getLogger(__name__)

#: It listens after about 2 ms.
START_TIMEOUT_S = 10.0
_FIRST_POLL_S = 0.0002
_MAX_POLL_S = 0.05

#: How soon a command, or a `quit`, is sent again if the control daemon did not receive it.
COMMAND_RETRY_S = 1.0
_QUIT_RETRY_S = 0.2
#: After this many rejections, another program's front-end must be connected.
_FOREIGN_REJECTIONS = 2


class ControlDaemon:
    """A domain's control daemon: its process, if any, its history and its log."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        emit: Callable[[Event], None],
        *,
        is_recorded: bool,
    ) -> None:
        """`is_recorded`: the limits of its servers are recorded."""
        self.program = program
        #: The plan for its next server, with the GPUs in its own order.
        self.target = plan
        #: The order to adopt it, if another program has started it.
        self.order: AdoptionOrder | None = None
        #: Whether it ran before this daemon, and whether its servers may have limits that we set.
        self.was_adopted = self.has_served = False
        #: Whether it replaces an unresponsive control daemon, and has not served yet.
        self.is_replacement = False
        self._had_process = False
        self._is_recorded = is_recorded
        self._emit = emit
        self._known_servers: tuple[int, ...] = ()
        self._process: Process | None = None
        self.log = LogReader(plan, emit, self.servers)

    @property
    def has_process(self) -> bool:
        """Whether there is a process, even if it has ended and was not reaped yet."""
        return self._process is not None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.status() is not None

    @property
    def is_unrecorded(self) -> bool:
        """Whether another program started it, and the limits of its servers were never recorded."""
        return self.order is not None and not self._is_recorded

    def servers(self) -> tuple[int, ...]:
        """The PIDs of its servers; the last known ones if they cannot be read now."""
        known = self._known_servers
        try:
            now = tuple(server_pids(self.pid)) if self.pid else ()
        except ShortageError as error:
            log.debug("%s", error)
            return known
        # A server that runs and is no longer its child is orphaned, which has not been noticed yet.
        lost = running_servers(pid for pid in known if pid not in now)
        self._known_servers = (*now, *lost)
        return self._known_servers

    def adopt_or_start(
        self, desired: DomainPlan, before: DomainPlan, ours: Sequence[MpsProcess] | None = None
    ) -> str:
        """Adopt the control daemon that serves the domain, or start one; returns which, as text.

        `before` is the recorded plan of its clients, `ours` as in `find`. Raises HostError if neither is
        possible.
        """
        if self._had_process:
            ours = ()  # no other can run: only the daemon with the lock starts them, and it had this one
        try:
            # First, because a running one does not need what a new one needs.
            running = startup.find(desired, ours)
            self.target = startup.with_recorded_limits(running.plan, before) if running else desired
            self.log = LogReader(self.target, self._emit, self.servers)
            self.has_served = self.was_adopted = running is not None
            self.order = running.order if running else None
            self._process = running.process if running else startup.start(self.program, desired)
        except HostError:
            self._is_recorded = False
            raise
        self._had_process = True
        if not running:
            return "started"
        record(self.target, running.process.pid)
        if running.plan.pipe_group == desired.pipe_group:
            try:
                startup.set_access(desired)
            except HostError as error:  # jobs continue
                log.error("domain %s: %s. %s", desired.name, error.message, error.hint)
        return f"adopted the running control daemon (PID {self.pid})"

    def note_served(self) -> None:
        """Note that it serves, with its limits in effect."""
        self.has_served = self._is_recorded = True
        self.is_replacement = False

    # -- its end

    def reap(self, *, was_replaced: bool) -> tuple[str, tuple[int, ...]]:
        """Forget the process, which has ended; returns how, as text, and the PIDs of its servers."""
        self.log.report()
        how = "was not serving and was ended"
        self.is_replacement = was_replaced
        if not was_replaced:
            how = describe_exit(self.process.status() or 0)
        what = f"the control daemon (PID {self.process.pid}) {how}"
        forget(self.target)
        self._release()
        return what, self._take_servers()

    def detach(self) -> None:
        """Forget the process, and leave it running."""
        log.warning("domain %s: leaving the control daemon (PID %d) running", self.target.name, self.pid)
        self._release()

    def kill(self) -> tuple[int, ...]:
        """Kill it because it has no limits; returns the PIDs of its servers, which may have jobs."""
        self.process.kill()
        forget(self.target)
        self._process = None
        return self._take_servers()

    def _take_servers(self) -> tuple[int, ...]:
        servers, self._known_servers = self._known_servers, ()
        return servers

    def _release(self) -> None:
        self.process.close()
        self._process = self.order = None


class ControlTask:
    """An operation on a control daemon, with at most one conversation and one probe at a time.

    Subclasses have a `tick` that does what is due and returns when to call it again; nothing blocks.
    """

    def __init__(self, control: ControlDaemon) -> None:
        self._control = control
        self._plan = control.target
        self._conversation: Conversation | None = None
        self._probe: Probe | None = None

    def watched(self) -> list[Watchable]:
        watched: list[Watchable] = [self._probe] if self._probe and self._probe.is_connected else []
        return [*watched, self._conversation] if self._conversation else watched

    def close(self) -> None:
        for part in (self._probe, self._conversation):
            if part:
                part.close()
        self._probe = self._conversation = None

    def _wake(self) -> None:
        wake([self._control.process.pid, *self._control.servers()])

    def _connect(self, now_s: float, timeout_s: float) -> Probe:
        """Begin a probe; raises UnresponsiveError and ShortageError."""
        self._probe = Probe(self._plan.pipe_directory, self._control.process.pid, now_s, timeout_s)
        return self._probe

    def _converse(
        self, commands: Sequence[str], now_s: float, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Conversation:
        """Begin a conversation; raises HostError if the front-end cannot be started."""
        place = self._plan.pipe_directory
        self._conversation = Conversation(self._control.program, place, commands, now_s, timeout_s)
        return self._conversation


class Startup(ControlTask):
    """Waits until a new control daemon listens, by polling, because no descriptor signals that."""

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._pause_s = _FIRST_POLL_S
        self._deadline_s = now_s + START_TIMEOUT_S

    def tick(self, now_s: float) -> float | None:
        """When to call it again; None once it listens. Raises UnresponsiveError at the deadline."""
        peer = peer_of(self._plan.pipe_directory)
        if peer and peer.pid == self._control.pid:
            return None
        if now_s >= self._deadline_s:
            what = f"the control daemon did not answer within {START_TIMEOUT_S:g} s after its start"
            raise UnresponsiveError(what, log_hint(self._plan))
        self._pause_s = min(self._pause_s * 1.5, _MAX_POLL_S)
        return min(now_s + self._pause_s, self._deadline_s)


class Shutdown(ControlTask):
    """Stops a control daemon: `quit -t`, SIGTERM, SIGKILL, each with a timeout.

    A signal ends only the control daemon: its servers would continue without it and keep their GPUs
    (measured). So they get the signals as well.
    """

    def __init__(self, control: ControlDaemon, now_s: float, *, timeout_s: int | None) -> None:
        """`timeout_s` is how long clients have before their servers end; None sends signals at once."""
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
        self._deadline_s = now_s + (UNKILLABLE_S if self._signal == signal.SIGKILL else GRACE_S)
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
            self._quit_requested = bool(answer)
            if not answer:
                self._on_rejected(now_s)
        except ControlError as error:
            self._quit_requested = (
                now_s >= self._deadline_s
            )  # no answer in all that time: it waits for its servers
            self._warn(
                "its control daemon did not end in time"
                if self._quit_requested
                else f"its control daemon does not quit: {error}"
            )
            if not self._control.servers():  # otherwise jobs get their time, and `quit` is sent again
                self._deadline_s = now_s
        self._conversation = None

    def _on_rejected(self, now_s: float) -> None:
        """Another front-end is connected: clients still get their time, and `quit` is sent again.

        The first time this may be a front-end of ours whose end the control daemon has not noticed yet.
        """
        self._rejections += 1
        if self._rejections == _FOREIGN_REJECTIONS:
            self._warn(str(occupied_error(self._plan.pipe_directory)))
        if self._rejections >= _FOREIGN_REJECTIONS and not self._control.servers():
            self._deadline_s = now_s  # there is no job to wait for

    def _warn(self, text: str) -> None:
        log.warning("domain %s: %s", self._plan.name, text)
