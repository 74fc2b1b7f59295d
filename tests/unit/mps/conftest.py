"""A real control daemon, plans for one, and trees as a hostile user leaves them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.host.processes import Process, spawn
from yunion_mps.models import DomainPlan, PlannedGpu
from yunion_mps.mps.diagnosis import front_end_at
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import client_variables, control_environment
from yunion_mps.paths import ROOT_VARIABLE

from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.mps import StandIns

from .driving import Clock, DomainRun, Jobs, wait_for, wait_until_it_answers

MakePlan = Callable[..., DomainPlan]
StartControl = Callable[..., Process]
RunDomain = Callable[..., DomainRun]
WriteProgram = Callable[[str], str]
HoldFrontEnd = Callable[[DomainPlan], Callable[[], None]]


@pytest.fixture
def program() -> str:
    """NVIDIA's own control program."""
    found = shutil.which(
        "nvidia-cuda-mps-control", path=f"{CHECKOUT}/.nvidia/usr/bin{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        pytest.fail("nvidia-cuda-mps-control is not there: run scripts/setup")
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory, because a socket's path ends at 107 bytes and pytest's own can be longer."""
    path = Path(tempfile.mkdtemp(prefix="mps."))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def root(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no control daemon of another test, or of this machine, be taken for one of ours."""
    monkeypatch.setenv(ROOT_VARIABLE, str(place / "root"))


@pytest.fixture
def make_plan(place: Path) -> MakePlan:
    """Make a domain's plan in `place`: one GPU with 5760 MiB and 25 % unless told otherwise."""

    def make(
        memory_mib: tuple[int, ...] = (5760,), percentage: float = 25.0, name: str = "host"
    ) -> DomainPlan:
        gpus = tuple(
            PlannedGpu(f"GPU-00000000-0000-0000-0000-{index:012d}", mib, 4, percentage)
            for index, mib in enumerate(memory_mib)
        )
        return DomainPlan(name, str(place / "pipe"), str(place / "log"), gpus, percentage)

    return make


@pytest.fixture
def plan(make_plan: MakePlan) -> DomainPlan:
    """The reference case's."""
    return make_plan()


@pytest.fixture
def start_control(program: str) -> Iterator[StartControl]:
    """Start a real control daemon for a plan, with our environment or another, and wait until it answers."""
    started: list[Process] = []

    def start(plan: DomainPlan, environment: dict[str, str] | None = None) -> Process:
        os.makedirs(plan.pipe_directory, exist_ok=True)
        os.makedirs(plan.log_directory, exist_ok=True)
        with open("/dev/null", "wb") as null:
            process = spawn(
                [program, "-f"],
                control_environment(plan) if environment is None else environment,
                stdin=None,
                stdout=null.fileno(),
                stderr=null.fileno(),
            )
        started.append(process)
        wait_until_it_answers(plan, process.pid)
        return process

    yield start
    for process in started:
        with contextlib.suppress(OSError):  # the test has killed it
            process.kill()


@pytest.fixture
def run_domain(program: str, plan: DomainPlan) -> Iterator[RunDomain]:
    """Make a Domain with a clock that the test turns; whatever it started is gone at the end."""
    made: list[DomainRun] = []

    def make(
        its_plan: DomainPlan | None = None,
        its_program: str | None = None,
        remembered: LimitsInEffect | None = None,
    ) -> DomainRun:
        run = DomainRun(its_plan or plan, its_program or program, Clock(), remembered)
        made.append(run)
        return run

    yield make
    for run in made:
        run.end()


@pytest.fixture
def write_program(place: Path) -> WriteProgram:
    """Write a shell script in the place of NVIDIA's program; returns its path."""

    def write(script: str) -> str:
        path = place / "bin/nvidia-cuda-mps-control"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def jobs(plan: DomainPlan) -> Iterator[Jobs]:
    """Stand-ins for jobs and their servers, under a program that has NVIDIA's control daemon find them."""
    with SimHost.create() as host, StandIns(host) as stand_ins:
        yield Jobs(host, stand_ins, plan)


@pytest.fixture
def hold_front_end(program: str) -> Iterator[HoldFrontEnd]:
    """Open NVIDIA's front-end as an operator does who types commands; returns how to leave it.

    It is left once the control daemon has noticed: until then it turns others away.
    """
    held: list[tuple[subprocess.Popen[bytes], Callable[[], set[str]]]] = []

    def leave() -> None:
        for front_end, connections in held:
            front_end.kill()
            front_end.communicate()
            wait_for(lambda connections=connections: not connections())  # type: ignore[misc]
        held.clear()

    def hold(plan: DomainPlan) -> Callable[[], None]:
        place = plan.pipe_directory
        before, its = connections_to(place), set[str]()
        front_end = subprocess.Popen([program], env=client_variables(place), stdin=-1, stdout=-1)
        held.append((front_end, lambda: connections_to(place) & its))
        wait_for(lambda: f"PID {front_end.pid} " in front_end_at(place))
        its.update(connections_to(place) - before)
        assert its
        return leave

    yield hold
    leave()


def connections_to(pipe_directory: str) -> set[str]:
    """The inodes of its control daemon's ends, by the kernel's list: state 3, inode, path."""
    places = (f"{pipe_directory}/control", f"{pipe_directory}/control_privileged")
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {row[6] for row in rows if row[-1] in places and row[5] == "03"}
