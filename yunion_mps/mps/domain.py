"""One domain as a state machine: it is told the time, does what can be done now, and never waits.

`tick` is called when a descriptor of `descriptors()` is readable or the time that it returned has come. The
state changes in `_change` and nowhere else. Every state that waits for something has a deadline.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from yunion_mps.errors import ControlError, HostError, ShortageError, YunionError
from yunion_mps.models import DomainPlan, DomainStatus
from yunion_mps.mps import launch, limits
from yunion_mps.mps.adoption import find
from yunion_mps.mps.control import Conversation, peer_of
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
from yunion_mps.process import Process, describe_exit

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0
#: How long clients have to end after a `quit`, before the control daemon ends their servers.
QUIT_TIMEOUT_S = 10
#: How long it may take on top of that, before it is ended by signals.
QUIT_GRACE_S = 2.0
QUIT_RETRY_S = 0.2
_FIRST_LOOK_S = 0.0002
_LONGEST_LOOK_S = 0.05
BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
RETRY_FAILED_S = 60.0
#: READY for this long, and earlier deaths count no more.
STABLE_S = 60.0


class Domain:
    """A control daemon, from its start over its limits to its end."""

    def __init__(self, plan: DomainPlan, program: str, on_change: Callable[[], None]) -> None:
        self.plan = plan
        self.state = STOPPED
        self.reason = "not started yet"
        self.error: YunionError | None = None
        self.since_s = 0.0
        self.restarts = 0
        self._wanted = plan
        self._program = program
        self._on_change = on_change
        self._process: Process | None = None
        self._conversation: Conversation | None = None
        self._deadline_s = 0.0
        self._look_s = _FIRST_LOOK_S
        self._deaths = 0
        self._ended_by = 0
        self._asked_to_quit = False
        self._found = False

    def status(self) -> DomainStatus:
        """What the snapshot shows of it."""
        pid = self._process.pid if self._process else None
        return DomainStatus(self.plan, self.state, self.reason, pid, self.since_s, self.restarts)

    def descriptors(self) -> list[int]:
        """What to watch for reading: the control daemon's end, and the answer that is awaited."""
        watched = [self._process.fileno()] if self._process else []
        return [*watched, self._conversation.fileno()] if self._conversation else watched

    def obstacle(self) -> HostError | None:
        """What would keep it from starting: found out before anything is changed on the host."""
        try:
            launch.prepare(self._wanted)
            found = find(self._wanted)
            if found:
                found.process.close()
        except HostError as error:
            return error
        return None

    def start(self, now_s: float) -> None:
        """Begin: directories, then the control daemon; the rest is done by ticks."""
        try:
            launch.prepare(self._wanted)
            found = find(self._wanted)
            self._process = found.process if found else launch.launch(self._program, self._wanted)
        except HostError as error:
            self._fail(now_s, error, FAILED)
            return
        self.plan = found.plan if found else self._wanted
        self._found = found is not None
        what = f"took over the running control daemon (PID {self._process.pid})" if found else "started"
        self._look_s = _FIRST_LOOK_S
        self._deadline_s = now_s + START_TIMEOUT_S
        self._change(STARTING, now_s, f"{what}; it does not answer yet")

    def stop(self, now_s: float, *, spare_found: bool = False) -> None:
        """Begin to stop; idle states end at once, the others by ticks.

        With `spare_found`, a control daemon that was running before us is left as it is, with its clients.
        """
        if self.state == STOPPING:
            return
        self._end_conversation()
        if spare_found and self._process and not self._process.is_child:
            self._release()
        if self._process is None:
            if self.state != STOPPED:
                self._change(STOPPED, now_s, "stopped")
            return
        self._change(STOPPING, now_s, f"waiting up to {QUIT_TIMEOUT_S} s for its clients to end")
        self._deadline_s = now_s + QUIT_TIMEOUT_S + QUIT_GRACE_S
        self._ended_by = 0
        self._asked_to_quit = False
        self._ask_to_quit(now_s)

    def _ask_to_quit(self, now_s: float) -> None:
        """Ask; where only descriptors are short, its clients still get their time, and it is asked again."""
        place, wait_s = self.plan.pipe_directory, QUIT_TIMEOUT_S + QUIT_GRACE_S
        try:
            self._conversation = Conversation(
                self._program, place, [f"quit -t {QUIT_TIMEOUT_S}"], now_s, wait_s
            )
            self._asked_to_quit = True
        except ShortageError as error:
            log.debug("domain %s: it cannot be asked to quit yet: %s", self.plan.name, error)
        except YunionError as error:
            log.warning("domain %s: it cannot be asked to quit: %s", self.plan.name, error)
            self._deadline_s = now_s

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for not before a descriptor."""
        if self._process and self._process.status() is not None:
            self._ended(now_s)
        step = {
            STARTING: self._tick_starting,
            APPLYING: self._tick_applying,
            BACKOFF: self._tick_waiting,
            FAILED: self._tick_waiting,
            STOPPING: self._tick_stopping,
        }.get(self.state)
        return step(now_s) if step else None

    def _tick_starting(self, now_s: float) -> float | None:
        assert self._process is not None
        try:
            peer = peer_of(self.plan.pipe_directory)
            if peer and peer.pid == self._process.pid:
                self._conversation = self._ask(now_s)
                self._change(APPLYING, now_s, "its limits are being set and read back")
                return self.tick(now_s)
        except YunionError as error:
            self._give_up(now_s, error)
            return self._deadline_s
        if now_s >= self._deadline_s:
            what = f"the control daemon did not answer within {START_TIMEOUT_S:g} s after its start"
            self._give_up(now_s, ControlError(what, launch.look_at_log(self.plan)))
            return self._deadline_s
        self._look_s = min(self._look_s * 1.5, _LONGEST_LOOK_S)
        return min(now_s + self._look_s, self._deadline_s)

    def _ask(self, now_s: float) -> Conversation:
        """Set the limits; those of a control daemon that was found are only asked for, with its servers."""
        commands = limits.asking(self.plan)
        commands = ["get_server_list", *commands] if self._found else limits.setting(self.plan) + commands
        return Conversation(self._program, self.plan.pipe_directory, commands, now_s, ANSWER_TIMEOUT_S)

    def _tick_applying(self, now_s: float) -> float | None:
        assert self._conversation is not None
        try:
            answer = self._conversation.poll(now_s)
            if answer is None:
                return self._conversation.deadline_s
            self._conversation = None
            if self._found and not self._in_force(answer):
                self._found = False
                self._conversation = self._ask(now_s)
                return self.tick(now_s)
            if not self._found:
                limits.check_setting(self.plan, answer)
        except YunionError as error:
            self._give_up(now_s, error)
            return self._deadline_s
        self._change(READY, now_s, "")
        return None

    def _in_force(self, answer: list[str]) -> bool:
        """Whether a control daemon that was found has the planned limits.

        Raises ControlError where it has others and a server runs: limits count for the next server only.
        """
        servers = limits.servers_in(answer)
        try:
            limits.check(self.plan, answer[len(servers) :])
        except ControlError:
            if servers:
                pids = ", ".join(str(pid) for pid in servers)
                what = f"its MPS server (PID {pids}) keeps the limits of the configuration before this one"
                raise ControlError(
                    what, "it ends with its last client; the new limits are set then"
                ) from None
            return False
        return True

    def _tick_waiting(self, now_s: float) -> float | None:
        if now_s < self._deadline_s:
            return self._deadline_s
        self.start(now_s)
        return self.tick(now_s) if self.state == STARTING else self._deadline_s

    def _tick_stopping(self, now_s: float) -> float | None:
        """Once the deadline is over: SIGTERM, and a moment later SIGKILL."""
        assert self._process is not None
        if self._conversation:
            try:
                if self._conversation.poll(now_s) is not None:
                    self._conversation = None
            except ControlError as error:
                log.warning("domain %s: it does not quit: %s", self.plan.name, error)
                self._conversation = None
                self._deadline_s = now_s
        if now_s < self._deadline_s and not self._asked_to_quit:
            self._ask_to_quit(now_s)
            return min(self._deadline_s, now_s + QUIT_RETRY_S)
        if now_s < self._deadline_s:
            return self._deadline_s
        number = signal.SIGKILL if self._ended_by else signal.SIGTERM
        log.warning(
            "domain %s: control daemon (PID %d) gets %s", self.plan.name, self._process.pid, number.name
        )
        self._process.signal(number)
        self._ended_by = number
        self._deadline_s = now_s + QUIT_GRACE_S
        return self._deadline_s

    def _ended(self, now_s: float) -> None:
        """The control daemon is gone: as we wished, or on its own."""
        assert self._process is not None
        words = describe_exit(self._process.status() or 0)
        pid = self._process.pid
        self._process.close()
        self._process = None
        self._end_conversation()
        if self.state == STOPPING:
            self._change(STOPPED, now_s, "stopped")
            return
        self._fail(
            now_s,
            ControlError(f"the control daemon (PID {pid}) {words}", launch.look_at_log(self.plan)),
            BACKOFF,
        )

    def _give_up(self, now_s: float, error: YunionError) -> None:
        """End a control daemon that does not do what it should, and try anew later.

        One that was taken over may have clients at work: it is left alone, and looked at again later.
        """
        self._end_conversation()
        if self._process and self._process.is_child:
            self._process.kill()
            self._process = None
        elif self._process:
            self._release()
        self._fail(now_s, error, BACKOFF)

    def _release(self) -> None:
        """Let go of a control daemon that was running before us."""
        assert self._process is not None
        log.warning(
            "domain %s: the control daemon (PID %d) is left running", self.plan.name, self._process.pid
        )
        self._process.close()
        self._process = None

    def _fail(self, now_s: float, error: YunionError, state: str) -> None:
        if self.state == READY and now_s - self.since_s >= STABLE_S:
            self._deaths = 0
        wait_s = RETRY_FAILED_S
        if state == BACKOFF or isinstance(error, ShortageError):
            wait_s = BACKOFF_S[min(self._deaths, len(BACKOFF_S) - 1)]
        self._deaths += 1
        self.restarts += 1
        self.error = error
        self._deadline_s = now_s + wait_s
        log.error("domain %s: %s; next start in %g s. %s", self.plan.name, error.message, wait_s, error.hint)
        self._change(state, now_s, error.message)

    def _change(self, state: str, now_s: float, reason: str) -> None:
        """The one place that changes the state."""
        if state not in LEGAL_CHANGES[self.state]:
            raise AssertionError(f"domain {self.plan.name}: {self.state} cannot become {state}")
        log.info("domain %s: %s -> %s%s", self.plan.name, self.state, state, f" ({reason})" if reason else "")
        self.state, self.since_s, self.reason = state, now_s, reason
        if state == READY:
            self.error = None
        self._on_change()

    def _end_conversation(self) -> None:
        if self._conversation:
            self._conversation.close()
            self._conversation = None
