"""A Domain driven by hand: the clock stands still until the test turns it, and real events are waited for."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pytest
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import is_stopped
from yunion_mps.host.processes import Process, spawn
from yunion_mps.models import DomainPlan, Event, PlannedGpu
from yunion_mps.mps.conversation import Conversation, peer_of
from yunion_mps.mps.diagnosis import front_end_at
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import client_variables, control_environment, our_processes
from yunion_mps.mps.states import READY

from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.mps import CONTROL, Client, StandIns

PATIENCE_S = 60.0
#: nobody: a user who is neither root nor us.
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, and mount")


class Jobs:
    """Jobs on a domain's GPU, as its control daemon sees them."""

    def __init__(self, host: SimHost, stand_ins: StandIns, plan: DomainPlan) -> None:
        self.program = str(stand_ins.folder / CONTROL)
        self.stand_ins = stand_ins
        self.servers = stand_ins.servers
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
        self, plan: DomainPlan, program: str, recorded: LimitsInEffect | None = None, now_s: float = 1000.0
    ) -> None:
        self.now_s = now_s
        self.events: list[Event] = []
        self.domain = Domain(plan, program, self._tell, lambda: None, recorded)
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

    @property
    def server(self) -> int:
        """The PID of its only server."""
        (server,) = self.domain.server_pids()
        return server

    @property
    def error(self) -> YunionError:
        assert self.domain.error is not None
        return self.domain.error

    def start(self) -> DomainRun:
        self.domain.start(self.now_s)
        return self

    def stop(self) -> DomainRun:
        self.domain.stop(self.now_s)
        return self

    def change(self, plan: DomainPlan) -> DomainRun:
        """Aim at other limits, and wait until they are set."""
        self.domain.change(plan, self.now_s)
        return self.until(READY)

    def kill(self) -> DomainRun:
        """Kill its control daemon, and have it noticed."""
        os.kill(self.pid, signal.SIGKILL)
        self.until_ended().tick()
        return self

    def tick(self) -> float | None:
        """Tick now; returns in how many seconds it wants to be called again."""
        due_s = self.domain.tick(self.now_s)
        return None if due_s is None else due_s - self.now_s

    def turn(self, seconds: float) -> DomainRun:
        """Let so much time pass, and tick."""
        self.now_s += seconds
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

    def until_in_time(self, *states: str, step_s: float = 0.01) -> DomainRun:
        """As `until`, with the clock going by `step_s` each millisecond."""
        return self.until_it(lambda: self.turn(step_s).state in states)

    def until_said(self) -> DomainRun:
        """Tick until no answer is awaited any more, with the clock standing still."""
        return self.until_it(lambda: self.tick() is not None and len(self.domain.descriptors()) <= 1)

    def turns(self, count: int, seconds: float) -> DomainRun:
        """Let time pass in so many steps, and after each wait for what the control daemon says."""
        for _ in range(count):
            self.turn(seconds).until_said()
        return self

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
            self.domain.stop(self.now_s, timeout_s=0)
        end_s = time.monotonic() + PATIENCE_S
        while self.state != "stopped" and time.monotonic() < end_s:
            self.turn(0.5)  # fifty times as fast as a real clock: no test waits for the patience of a stop
            time.sleep(0.01)
        assert self.state == "stopped", self.domain.reason


class Bench:
    """What tests of a domain act with; whatever is begun here is gone at the end."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        #: A short directory, because a socket's path ends at 107 bytes and pytest's own can be longer.
        self.place = place
        self.stack = stack
        #: The reference case's.
        self.plan = self.planned()

    def planned(self, memory_mib: tuple[int, ...] = (5760,), percentage: float = 25.0) -> DomainPlan:
        """A domain's plan in `place`: one GPU with 5760 MiB and 25 % unless told otherwise."""
        gpus = tuple(
            PlannedGpu(f"GPU-00000000-0000-0000-0000-{index:012d}", mib, 4, percentage)
            for index, mib in enumerate(memory_mib)
        )
        return DomainPlan("host", str(self.place / "pipe"), str(self.place / "log"), gpus, percentage)

    @cached_property
    def program(self) -> str:
        """NVIDIA's own control program."""
        path = f"{CHECKOUT}/.nvidia/usr/bin{os.pathsep}{os.environ['PATH']}"
        found = shutil.which(CONTROL, path=path)
        assert found, "nvidia-cuda-mps-control is not there: run scripts/setup"
        return found

    @cached_property
    def jobs(self) -> Jobs:
        """Stand-ins for jobs and their servers, and a program that has the control daemon find them."""
        host = self.stack.enter_context(SimHost.create())
        return Jobs(host, self.stack.enter_context(StandIns(host)), self.plan)

    def domain(
        self,
        plan: DomainPlan | None = None,
        program: str | None = None,
        recorded: LimitsInEffect | None = None,
    ) -> DomainRun:
        """A domain with a clock that the test turns."""
        run = DomainRun(plan or self.plan, program or self.program, recorded)
        self.stack.callback(run.end)
        return run

    def serving(self, plan: DomainPlan | None = None, recorded: LimitsInEffect | None = None) -> DomainRun:
        """A domain that is ready for jobs."""
        return self.domain(plan, self.jobs.program, recorded).start().until(READY)

    def control(self, plan: DomainPlan | None = None, environment: dict[str, str] | None = None) -> Process:
        """A real control daemon that answers, with our environment or another."""
        plan = plan or self.plan
        os.makedirs(plan.pipe_directory, exist_ok=True)
        os.makedirs(plan.log_directory, exist_ok=True)
        variables = control_environment(plan) if environment is None else environment
        with open("/dev/null", "wb") as null:
            output = null.fileno()
            process = spawn([self.program, "-f"], variables, stdin=None, stdout=output, stderr=output)
        self.stack.callback(_kill, process)
        wait_until_it_answers(plan, process.pid)
        return process

    def script(self, text: str) -> str:
        """The path of a shell script in the place of NVIDIA's program."""
        path = self.place / "bin" / CONTROL
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def block_log_directory(self) -> None:
        """Put a file where the log directory goes, so that no control daemon can be started."""
        if os.path.isdir(self.plan.log_directory):
            os.rename(self.plan.log_directory, f"{self.plan.log_directory}.old")
        Path(self.plan.log_directory).touch()

    def ask(self, *commands: str) -> list[str]:
        """What the control daemon answers to the commands."""
        return converse(self.program, self.plan, *commands)

    def hold_front_end(self) -> Callable[[], None]:
        """Open NVIDIA's front-end as an operator does who types commands; returns how to leave it.

        It is left once the control daemon has noticed: until then it turns others away.
        """
        place = self.plan.pipe_directory
        before = connections_to(place)
        front_end = subprocess.Popen([self.program], env=client_variables(place), stdin=-1, stdout=-1)
        wait_for(lambda: f"PID {front_end.pid} " in front_end_at(place))
        its = connections_to(place) - before
        assert its

        def leave() -> None:
            front_end.kill()
            front_end.communicate()
            wait_for(lambda: not connections_to(place) & its)

        once = self.stack.enter_context(ExitStack())
        once.callback(leave)
        return once.close


def _kill(process: Process) -> None:
    with contextlib.suppress(OSError):  # the test has killed it
        process.kill()


def connections_to(pipe_directory: str) -> set[str]:
    """The inodes of its control daemon's ends, by the kernel's list: state 3, inode, path."""
    places = (f"{pipe_directory}/control", f"{pipe_directory}/control_privileged")
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {row[6] for row in rows if row[-1] in places and row[5] == "03"}


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


_SAY_NOTHING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.recv(64)
print(flush=True)
sys.stdin.read()
"""
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


def silent_process(pipe_directory: str, first: str = "") -> contextlib.AbstractContextManager[int]:
    """Have a process connect that says nothing, which keeps the control daemon from all others; its PID.

    It executes the code `first` before.
    """
    return _connected(f"{first}\n{_SAY_NOTHING}", pipe_directory)


def full_queue(pipe_directory: str, uid: int | None = None) -> contextlib.AbstractContextManager[int]:
    """Have a process hold so many silent connections that no other can be made, as any user may; its PID."""
    return _connected(_FILL, pipe_directory, uid)


@contextlib.contextmanager
def _connected(script: str, pipe_directory: str, uid: int | None = None) -> Iterator[int]:
    # Another user may not reach the virtual environment.
    python = sys.executable if uid is None else os.path.realpath(sys.executable)
    command = [python, "-IS", "-c", script, f"{pipe_directory}/control"]
    with subprocess.Popen(command, user=uid, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As if this process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
