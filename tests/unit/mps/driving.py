"""A Domain driven by hand: the clock stands still until the test turns it, and real events are waited for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from yunion_mps.host.proc import is_stopped
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps.conversation import Conversation, peer_of
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import our_processes

from simhost import SimHost
from simhost.mps import CONTROL, Client, StandIns

PATIENCE_S = 60.0


class Clock:
    """A monotonic clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0


class Jobs:
    """Jobs on a domain's GPU, as its control daemon sees them."""

    def __init__(self, host: SimHost, stand_ins: StandIns, plan: DomainPlan) -> None:
        self.program = str(stand_ins.folder / CONTROL)
        self.stand_ins = stand_ins
        self._host = host
        self._plan = plan

    def begin(self, uid: int | None = None) -> Client:
        """A job that has its server."""
        client = self.wait(uid)
        assert client.says() == "attached"
        return client

    def wait(self, uid: int | None = None) -> Client:
        """A job that has asked for a server."""
        client = self.stand_ins.client(Path(self._plan.pipe_directory), uid)
        assert client.says() == "asking"
        return client

    def end(self, *clients: Client) -> None:
        """Have jobs end, and their server notice."""
        for client in clients:
            client.end()


class DomainRun:
    """A Domain, its clock and the states that it went through."""

    def __init__(
        self, plan: DomainPlan, program: str, clock: Clock, remembered: LimitsInEffect | None = None
    ) -> None:
        self.clock = clock
        self.events: list[Event] = []
        self.domain = Domain(plan, program, self._tell, lambda: None, remembered)
        self.states = [self.domain.state]
        self.reasons: list[str] = []

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "domain":
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

    def until_it(self, done: Callable[[], bool]) -> DomainRun:
        """Tick on real events, with the clock standing still, until it has come about."""
        end_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end_s, f"{self.states}: {self.domain.reason}; {self.told}"
            self.tick()
            time.sleep(0.001)
        return self

    def until_in_time(self, *states: str) -> DomainRun:
        """As `until`, with the clock going ten times as fast as a real one."""
        return self.until_it(lambda: self.turn(0.01).state in states)

    def until_said(self) -> DomainRun:
        """Tick until no answer is awaited any more, with the clock standing still."""
        return self.until_it(lambda: self.tick() is not None and len(self.domain.descriptors()) <= 1)

    @property
    def told(self) -> list[str]:
        """What its events other than changes of the state say."""
        return [event.what for event in self.events if event.kind != "domain"]

    @property
    def pending(self) -> str:
        return self.domain.status().pending

    def until_ended(self) -> DomainRun:
        """Wait until the control daemon's end can be seen, without a tick."""
        poll = select.poll()
        poll.register(self.domain.descriptors()[0], select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the control daemon did not end"
        return self

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in, and be quick."""
        if self.state not in ("stopped", "stopping"):
            self.domain.stop(self.clock.now_s, timeout_s=0)
        end_s = time.monotonic() + PATIENCE_S
        while self.state != "stopped" and time.monotonic() < end_s:
            self.turn(0.5)  # fifty times as fast as a real clock: no test waits for the patience of a stop
            time.sleep(0.01)
        assert self.state == "stopped", self.domain.reason


def running_here(plan: DomainPlan) -> list[tuple[int, tuple[str, ...]]]:
    """The PID and GPUs of every control daemon of ours on the plan's directory."""
    ours = [one for one in our_processes() if one.pipe_directory == plan.pipe_directory]
    return [(one.pid, one.gpu_uuids) for one in ours if not one.is_server]


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


def stop_process(pid: int) -> None:
    """Stop it by SIGSTOP, and wait until it has."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid))


def silent_connection(plan: DomainPlan) -> socket.socket:
    """A connection to its control daemon that says nothing, which keeps it from all others (measured)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(f"{plan.pipe_directory}/control")
        connection.recv(64)  # its greeting, so that it is at this connection now
    except BaseException:
        connection.close()
        raise
    return connection


_FILL = """
import socket, sys
held = []
while True:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].setblocking(False)
    try:
        held[-1].connect(sys.argv[1])
    except BlockingIOError:
        break
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def full_queue(pipe_directory: str, uid: int | None = None) -> Iterator[int]:
    """Have a process hold so many silent connections that no other can be made, as any user may; its PID."""
    command = [os.path.realpath(sys.executable), "-IS", "-c", _FILL, f"{pipe_directory}/control"]
    with subprocess.Popen(command, user=uid, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()
