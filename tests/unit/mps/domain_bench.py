"""A Domain driven by hand: the clock stands still until the test turns it, and real events are waited for."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from subprocess import PIPE

import pytest
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_DOMAIN, PENDING, READY
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import DomainPlan, Driver, Event, Inventory, Plan, PlannedGpu
from yunion_mps.core.paths import ROOT_VARIABLE
from yunion_mps.host.processes import Process, readable, spawn
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.log_file import LOG_NAME
from yunion_mps.mps.processes import client_variables, control_environment
from yunion_mps.supervisor.host_conditions import ConditionFacts, conditions_of

from integration.daemon_host import eventually
from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.mps import CONTROL, Client, StandIns

from .other_processes import PATIENCE_S, converse, wait_until_it_answers

#: PIDs above Linux's limit of 4194304, so of no server.
_UNUSED_PIDS = itertools.count(5_000_000)


class Jobs:
    """Jobs on a domain's GPU, as its control daemon sees them."""

    def __init__(self, host: SimHost, stand_ins: StandIns, plan: DomainPlan) -> None:
        self.program = str(stand_ins.folder / CONTROL)
        self.stand_ins = stand_ins
        self.servers = stand_ins.servers
        self._host = host
        self._plan = plan

    def attach(self, uid: int | None = None) -> Client:
        """Start a job of this user, or of ours, whose server accepts it."""
        client = self.start_waiting(uid)
        assert client.says() == "attached"
        return client

    def start_waiting(self, uid: int | None = None) -> Client:
        """Start a job that has asked for a server, without an answer yet."""
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

    def change(self, plan: DomainPlan, state: str = READY) -> DomainRun:
        self.domain.change(plan, self.now_s)
        return self.until(state)

    def begin_job(self, jobs: Jobs) -> int:
        jobs.attach()
        self.advance(1)
        return self.server

    def kill(self) -> DomainRun:
        os.kill(self.pid, signal.SIGKILL)
        self.until_ended().tick()
        return self

    def tick(self) -> float | None:
        """Tick now; returns in how many seconds it wants to be called again."""
        due_s = self.domain.tick(self.now_s)
        return None if due_s is None else due_s - self.now_s

    def advance(self, seconds: float) -> DomainRun:
        """Let so much time pass, and tick if that is due, as the daemon does."""
        self.now_s += seconds
        if self.domain.is_due(self.now_s, [one for one in self.domain.watched() if readable(one.fileno())]):
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
            for descriptor in self.domain.watched():
                poll.register(descriptor, select.POLLIN)
            # While it starts, there is no descriptor that tells of the control daemon's first answer.
            poll.poll(2)
        return self

    def until_true(self, done: Callable[[], bool]) -> DomainRun:
        """Tick on real events, with the clock standing still, until it has come about."""
        end_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end_s, f"{self.states}: {self.domain.reason}; {self.event_texts}"
            self.tick()
            time.sleep(0.001)
        return self

    def until_in_time(self, *states: str, step_s: float = 0.01) -> DomainRun:
        """As `until`, with the clock going by `step_s` each millisecond."""
        return self.until_true(lambda: self.advance(step_s).state in states)

    def until_answered(self) -> DomainRun:
        """Tick until no answer is awaited any more, with the clock standing still."""
        return self.until_true(lambda: self.tick() is not None and len(self.domain.watched()) <= 1)

    def advance_steps(self, count: int, seconds: float) -> DomainRun:
        """Let time pass in so many steps, and after each wait for what the control daemon says."""
        for _ in range(count):
            self.advance(seconds).until_answered()
        return self

    @property
    def event_texts(self) -> list[str]:
        """What its events other than changes of the state say."""
        changes = re.compile(r"\w+ -> \w+|still \w+")
        return [event.what for event in self.events if not changes.fullmatch(event.what)]

    @property
    def pending(self) -> list[Condition]:
        """The conditions of a host with this domain alone that are pending."""
        status = self.domain.status()
        facts = ConditionFacts(Plan("", domains=(status.plan,)), Inventory(Driver("", None), ()), (status,))
        return [condition for condition in conditions_of(facts) if condition.status == PENDING]

    @property
    def awaited_servers(self) -> tuple[int, ...]:
        """The MPS servers (PIDs) that the domain's only pending condition waits for."""
        (condition,) = self.pending
        assert (condition.kind, condition.subject) == (ABOUT_DOMAIN, self.domain.desired.name)
        (servers,) = condition.waits_for.servers
        return servers.pids

    def end_all_servers(self) -> None:
        """Order the end of all servers, whatever clients they have."""
        self.domain.end_servers(self.now_s, lambda _: False, self.domain.server_pids())

    def until_ended(self) -> DomainRun:
        """Wait until the control daemon's end can be seen, without a tick."""
        poll = select.poll()
        poll.register(self.domain.watched()[0], select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the control daemon did not end"
        return self

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in, and be quick."""
        if self.state not in ("stopped", "stopping"):
            self.domain.stop(self.now_s, timeout_s=0)
        end_s = time.monotonic() + PATIENCE_S
        while self.state != "stopped" and time.monotonic() < end_s:
            self.advance(0.5)  # fifty times as fast as a real clock: no test waits for the patience of a stop
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
        run = DomainRun(plan or self.plan, program or self.program, recorded)
        self.stack.callback(run.end)
        return run

    def serving(self, plan: DomainPlan | None = None, recorded: LimitsInEffect | None = None) -> DomainRun:
        return self.domain(plan, self.jobs.program, recorded).start().until(READY)

    def control(self, plan: DomainPlan | None = None, environment: dict[str, str] | None = None) -> Process:
        """A real control daemon that answers, with our environment or another."""
        plan = plan or self.plan
        os.makedirs(plan.pipe_directory, exist_ok=True)
        os.makedirs(plan.log_directory, exist_ok=True)
        variables = control_environment(plan) if environment is None else environment
        with open(Path(plan.log_directory, LOG_NAME), "ab") as log:
            output = log.fileno()
            process = spawn([self.program, "-f"], variables, stdin=None, stdout=output, stderr=output)
        self.stack.callback(_kill, process)
        wait_until_it_answers(plan, process.pid)
        return process

    def kill_at_the_end(self, pid: int) -> None:
        """Leave no control daemon behind that a domain lets go."""
        process = Process.adopt(pid)
        assert process
        self.stack.callback(_kill, process)

    def script(self, text: str) -> str:
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
        return converse(self.program, self.plan, *commands)

    def hold_front_end(self) -> Callable[[], None]:
        """Open NVIDIA's front-end as an operator does who types commands; returns how to leave it.

        It is connected once the log has its first command, which has a number of its own, and has left once
        the log has the end of every front-end. Until then the control daemon turns others away; it may log
        late.
        """
        command = f"get_device_client_list {next(_UNUSED_PIDS)}\n"
        front_end = eventually(lambda: self._connected_front_end(command))
        assert front_end

        def leave() -> None:
            front_end.kill()
            front_end.communicate()
            eventually(lambda: self._are_all_closed() or not self._has_peer())

        once = self.stack.enter_context(ExitStack())
        once.callback(leave)
        return once.close

    def _connected_front_end(self, command: str) -> subprocess.Popen[bytes] | None:
        """NVIDIA's front-end after this command; None if it was rejected for an earlier one of ours."""
        environment = client_variables(self.plan.pipe_directory)
        front_end = subprocess.Popen([self.program], env=environment, stdin=PIPE, stdout=PIPE, bufsize=0)
        assert front_end.stdin
        with contextlib.suppress(BrokenPipeError):
            front_end.stdin.write(command.encode())
        eventually(lambda: self._log_after(command) or front_end.poll() is not None)
        if front_end.poll() is None:
            return front_end
        front_end.communicate()
        return None

    def _are_all_closed(self) -> bool:
        """Whether the log has the end of each front-end: the end of an earlier one may come late."""
        log = Path(self.plan.log_directory, LOG_NAME).read_bytes()
        return log.count(b"] NEW UI\n") == log.count(b"] UI closed\n")

    def _log_after(self, command: str) -> bytes:
        """What the control daemon's log has from this command on; empty if it does not have it yet."""
        log = Path(self.plan.log_directory, LOG_NAME).read_bytes()
        return b"".join(log.partition(f"] Cmd:{command}".encode())[1:])

    def _has_peer(self) -> bool:
        return peer_of(self.plan.pipe_directory) is not None


@contextlib.contextmanager
def private_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on which no control daemon of another test, or of this machine, is taken for one of ours."""
    with tempfile.TemporaryDirectory(prefix="mps.") as place, ExitStack() as stack:
        Path(place).chmod(0o755)
        monkeypatch.setenv(ROOT_VARIABLE, f"{place}/root")
        yield Bench(Path(place), stack)


def _kill(process: Process) -> None:
    with contextlib.suppress(OSError):  # the test has killed it
        process.kill()
