"""A domain's control daemon, adopted or started, and the tasks of its start and of its end; nothing waits."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence

from yunion_mps.errors import ControlError, HostError, ShortageError, YunionError
from yunion_mps.host.processes import Process, describe_exit, wake
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps import startup
from yunion_mps.mps.conversation import (
    ANSWER_TIMEOUT_S,
    HEARD,
    Conversation,
    Probe,
    SilentError,
    occupied,
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

#: How soon a control daemon is asked again that did not hear us, and if it is to quit.
ASK_AGAIN_S = 1.0
_QUIT_AGAIN_S = 0.2
#: Turned away so often, it is by another program's front-end.
_SURELY_ANOTHERS = 2


class ControlDaemon:
    """The process while there is one, what is known of its past, its log, and one task at a time with it."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        tell: Callable[[Event], None],
        *,
        is_recorded: bool,
    ) -> None:
        """`is_recorded`: what its servers have is on record."""
        self.program = program
        #: What its next server is to get, the GPUs in its own order.
        self.target = plan
        #: The order to adopt it, if another program has started it.
        self.order: AdoptionOrder | None = None
        #: Whether it ran before us, and whether it has had limits of ours, which its servers may still have.
        self.was_adopted = self.has_served = False
        #: Whether it replaces one that did not answer, and has not served yet.
        self.is_replacement = False
        self._had_one = False
        self._is_recorded = is_recorded
        self._tell = tell
        self._known_servers: tuple[int, ...] = ()
        self._process: Process | None = None
        self.log = LogReader(plan, tell, self.servers)

    @property
    def runs(self) -> bool:
        """Whether there is a process; also if it has ended and was not reaped yet."""
        return self._process is not None

    @property
    def process(self) -> Process:
        """The process, while it `runs`."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_adopted(self) -> bool:
        """Whether it runs since before us, and so may have jobs."""
        return self.was_adopted and self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and is to be reaped."""
        return self._process is not None and self._process.status() is not None

    @property
    def is_unrecorded(self) -> bool:
        """Whether another program has started it, and what its servers have was never recorded."""
        return self.order is not None and not self._is_recorded

    def servers(self) -> tuple[int, ...]:
        """The PIDs of its servers; those known last if they cannot be read now."""
        known = self._known_servers
        try:
            now = tuple(server_pids(self.pid)) if self.pid else ()
        except ShortageError as error:
            log.debug("%s", error)
            return known
        # One that runs and is no child any more has lost its control daemon, which has not been noticed yet.
        lost = running_servers(pid for pid in known if pid not in now)
        self._known_servers = (*now, *lost)
        return self._known_servers

    def adopt_or_start(
        self, desired: DomainPlan, before: DomainPlan, ours: Sequence[MpsProcess] | None = None
    ) -> str:
        """Adopt one that serves the domain already, or start one; returns which, in words.

        `before` is what is recorded of its clients' plan, `ours` as `find` takes it. Raises HostError if
        neither can be done.
        """
        if self._had_one:
            ours = ()  # no other can run: only the daemon with the lock starts them, and it had this one
        try:
            # First, because one that serves needs nothing of what a new one needs.
            found = startup.find(desired, ours)
            self.target = startup.with_recorded(found.plan, before) if found else desired
            self.log = LogReader(self.target, self._tell, self.servers)
            self.has_served = self.was_adopted = found is not None
            self.order = found.order if found else None
            self._process = found.process if found else startup.start(self.program, desired)
        except HostError:
            self._is_recorded = False
            raise
        self._had_one = True
        if not found:
            return "started"
        record(self.target, found.process.pid)
        if found.plan.pipe_group == desired.pipe_group:
            try:
                startup.set_access(desired)
            except HostError as error:  # jobs go on
                log.error("domain %s: %s. %s", desired.name, error.message, error.hint)
        return f"adopted the running control daemon (PID {self.pid})"

    def note_served(self) -> None:
        """Note that it serves with its limits in effect."""
        self.has_served = self._is_recorded = True
        self.is_replacement = False

    # -- its end

    def reap(self, *, was_replaced: bool) -> tuple[str, tuple[int, ...]]:
        """Forget the process, which has ended; returns how, in words, and the PIDs of its servers."""
        self.log.tell()
        how = "did not serve, and was ended"
        self.is_replacement = was_replaced
        if not was_replaced:
            how = describe_exit(self.process.status() or 0)
        what = f"the control daemon (PID {self.process.pid}) {how}"
        forget(self.target)
        self._release()
        return what, self._take_servers()

    def leave(self) -> None:
        """Forget the process, which goes on."""
        log.warning("domain %s: the control daemon (PID %d) is left running", self.target.name, self.pid)
        self._release()

    def kill(self) -> tuple[int, ...]:
        """Kill it because it has no limits; returns the PIDs of its servers: a job may have come."""
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


class Task:
    """What is under way with a control daemon, with at most one conversation and one probe at a time.

    Subclasses have a `tick` that does what is due, and says when to be called again; nothing waits.
    """

    def __init__(self, control: ControlDaemon) -> None:
        self._control = control
        self._plan = control.target
        self._conversation: Conversation | None = None
        self._probe: Probe | None = None

    def descriptors(self) -> list[int]:
        """What to watch for reading."""
        watched = [self._probe.fileno()] if self._probe and self._probe.watched else []
        return [*watched, self._conversation.fileno()] if self._conversation else watched

    def close(self) -> None:
        for part in (self._probe, self._conversation):
            if part:
                part.close()
        self._probe = self._conversation = None

    def _wake(self) -> None:
        wake([self._control.process.pid, *self._control.servers()])

    def _connect(self, now_s: float, timeout_s: float) -> Probe:
        """Begin a probe; raises SilentError and ShortageError as it does."""
        self._probe = Probe(self._plan.pipe_directory, self._control.process.pid, now_s, timeout_s)
        return self._probe

    def _converse(
        self, commands: Sequence[str], now_s: float, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Conversation:
        """Begin a conversation; raises HostError if the front-end cannot be started."""
        place = self._plan.pipe_directory
        self._conversation = Conversation(self._control.program, place, commands, now_s, timeout_s)
        return self._conversation


class Startup(Task):
    """Waiting for a control daemon's first sign of life, which no descriptor tells of."""

    def __init__(self, control: ControlDaemon, now_s: float) -> None:
        super().__init__(control)
        self._pause_s = _FIRST_POLL_S
        self._deadline_s = now_s + START_TIMEOUT_S

    def tick(self, now_s: float) -> float | None:
        """When to be called again, sooner at first; None once it listens. Raises SilentError in the end."""
        peer = peer_of(self._plan.pipe_directory)
        if peer and peer.pid == self._control.pid:
            return None
        if now_s >= self._deadline_s:
            what = f"the control daemon did not answer within {START_TIMEOUT_S:g} s after its start"
            raise SilentError(what, log_hint(self._plan))
        self._pause_s = min(self._pause_s * 1.5, _MAX_POLL_S)
        return min(now_s + self._pause_s, self._deadline_s)


class Shutdown(Task):
    """The end of a control daemon: `quit -t`, SIGTERM, SIGKILL, each with its time.

    A signal ends the control daemon alone: its servers would go on without it and keep their GPUs (measured).
    So they get the signals as well.
    """

    def __init__(self, control: ControlDaemon, now_s: float, *, timeout_s: int | None) -> None:
        """`timeout_s` is how long clients have before their servers end; None does not ask, but signals."""
        super().__init__(control)
        #: Whether it was asked to quit, and is waiting for its servers, as far as we know.
        self._asked = False
        self._forced = False
        #: How often another front-end was connected instead of ours.
        self._turns_away = 0
        self._again_s = now_s
        self._signal: signal.Signals | None = None
        self._deadline_s = now_s
        #: Whether it is ended because it does not serve.
        self.is_replacement = timeout_s is None
        if timeout_s is not None:
            self._deadline_s = now_s + timeout_s + GRACE_S
            self._wake()  # what was stopped can neither hear nor end
            self._ask(now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due; return when to be called again."""
        self._listen(now_s)
        if now_s < self._deadline_s:
            if self._conversation or self._asked or self._signal:
                return self._deadline_s
            if now_s >= self._again_s:
                self._ask(now_s)
            return min(self._deadline_s, self._again_s)
        servers = running_servers(self._control.servers())
        if self._asked and servers and not self._forced:
            self._forced = True
            self._signal_servers(servers, signal.SIGKILL)  # they were to end, and it waits for them
        else:
            self._signal = signal.SIGKILL if self._signal else signal.SIGTERM
            self._warn(f"control daemon (PID {self._control.process.pid}) gets {self._signal.name}")
            self._control.process.signal(self._signal)
            self._signal_servers(servers, self._signal)
        self._deadline_s = now_s + (UNKILLABLE_S if self._signal == signal.SIGKILL else GRACE_S)
        return self._deadline_s

    def _signal_servers(self, servers: Sequence[int], number: signal.Signals) -> None:
        for pid in servers:
            try:
                if signal_server(pid, number):
                    self._warn(f"MPS server (PID {pid}) gets {number.name}")
            except ShortageError as error:
                self._warn(str(error))

    def _ask(self, now_s: float) -> None:
        """Ask; if only descriptors are short, its clients still get their time, and it is asked again."""
        self._again_s = now_s + _QUIT_AGAIN_S
        left_s = max(0, round(self._deadline_s - GRACE_S - now_s))
        try:
            self._converse([HEARD, f"quit -t {left_s}"], now_s, self._deadline_s - now_s)
        except ShortageError as error:
            log.debug("domain %s: it cannot be asked to quit yet: %s", self._plan.name, error)
        except YunionError as error:
            self._warn(f"it cannot be asked to quit: {error}")
            self._deadline_s = now_s

    def _listen(self, now_s: float) -> None:
        """Note the front-end's end."""
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
            self._warn("it has not ended in time" if self._asked else f"it does not quit: {error}")
            if not self._control.servers():  # otherwise jobs get their time, and it is asked again
                self._deadline_s = now_s
        self._conversation = None

    def _turned_away(self, now_s: float) -> None:
        """Another front-end is connected: its clients get their time all the same, and it is asked again.

        The first time it may be one of ours that was dropped just now, which it has not noticed yet.
        """
        self._turns_away += 1
        if self._turns_away == _SURELY_ANOTHERS:
            self._warn(str(occupied(self._plan.pipe_directory)))
        if self._turns_away >= _SURELY_ANOTHERS and not self._control.servers():
            self._deadline_s = now_s  # there is no job to wait for

    def _warn(self, text: str) -> None:
        log.warning("domain %s: %s", self._plan.name, text)
