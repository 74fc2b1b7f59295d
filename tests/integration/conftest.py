"""Hosts with the daemon on them. See daemon_host.py for what a Daemon can do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from yunion_mps.mps.conversation import peer_of

from integration.daemon_host import Daemon, eventually
from simhost import Description, SimHost
from simhost.mps import Client, StandIns

MakeHost = Callable[..., SimHost]
MakeDaemon = Callable[..., Daemon]
MakeDivided = Callable[..., Daemon]
StartStranger = Callable[[SimHost], "subprocess.Popen[str]"]
MakeAtWork = Callable[..., "AtWork"]


class AtWork(NamedTuple):
    """A daemon that has said READY, stand-ins for MPS servers and clients, and the first job at work."""

    daemon: Daemon
    jobs: StandIns
    job: Client


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    """Make a simulated host: the reference case, or one of the GPUs described."""
    with ExitStack() as stack:

        def make(description: Description | None = None) -> SimHost:
            host = stack.enter_context(SimHost.create(description))
            for program in ("nvidia-smi", "nvidia-cuda-mps-control"):
                if not shutil.which(program, path=host.env["PATH"]):
                    pytest.fail(f"{program} is not there: run scripts/setup")
            return host

        yield make


@pytest.fixture
def host(make_host: MakeHost, request: pytest.FixtureRequest) -> SimHost:
    """The reference case: one Tesla P40, divided by four; or the GPUs of a test's or module's mark `gpus`,
    divided as its mark `divided` says.

    Tests of leases mark a V100: `run` and the client take nothing of a GPU that enforces no budgets.
    """
    gpus, divided = map(request.node.get_closest_marker, ("gpus", "divided"))
    host = make_host([*gpus.args] if gpus else None)
    if divided:
        host.divide(*divided.args)
    return host


@pytest.fixture
def make_daemon(make_host: MakeHost) -> Iterator[MakeDaemon]:
    """Make a Daemon, not started, on a host (the reference case when none is given)."""
    with ExitStack() as stack:

        def make(host: SimHost | None = None, *, notify: bool = True) -> Daemon:
            return stack.enter_context(Daemon(host or make_host(), notify=notify))

        yield make


@pytest.fixture
def make_divided(make_host: MakeHost, make_daemon: MakeDaemon) -> MakeDivided:
    """Make a Daemon, not started, for GPUs that are divided in this way; the keys go to host.conf."""

    def make(description: Description, *divisions: object, **keys: object) -> Daemon:
        daemon = make_daemon(make_host(description))
        daemon.host.divide(*divisions)
        daemon.configure(**keys)
        return daemon

    return make


@pytest.fixture
def daemon(make_daemon: MakeDaemon, host: SimHost) -> Daemon:
    """A daemon on the reference case, not started yet: `daemon.start().wait_ready()`."""
    return make_daemon(host)


@pytest.fixture
def ready_daemon(daemon: Daemon) -> Daemon:
    return daemon.start().wait_ready()


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[Daemon]:
    """A daemon that serves a V100, divided by four, to all tests of a module that use `shared_daemon`."""
    with SimHost.create([{"kind": "v100"}]) as host, Daemon(host) as daemon:
        yield daemon.start().wait_ready()


@pytest.fixture
def shared_daemon(module_daemon: Daemon) -> Iterator[Daemon]:
    """A ready daemon for a test that changes nothing of it, and ends its jobs and leases.

    Starting one takes four times as long as a command.
    """
    yield module_daemon

    def is_unused() -> bool:
        answer = module_daemon.get("/v1/leases")[1]
        return not answer["leases"] and not answer["waiting"]

    eventually(is_unused, "the end of the test's leases")


@pytest.fixture
def make_at_work(make_host: MakeHost, make_daemon: MakeDaemon) -> Iterator[MakeAtWork]:
    """Make a host of V100s, which enforce budgets, divided by four, with a job; the keys go to host.conf."""
    with ExitStack() as stack:

        def make(gpus: int = 1, **keys: object) -> AtWork:
            host = make_host([{"kind": "v100", "count": gpus}])
            jobs = stack.enter_context(StandIns(host))
            daemon = make_daemon(host)
            daemon.configure(**keys)
            daemon.start().wait_ready()
            return AtWork(daemon, jobs, jobs.attached(daemon.pipe_directory))

        yield make


@pytest.fixture
def at_work(make_at_work: MakeAtWork) -> AtWork:
    return make_at_work()


@pytest.fixture
def start_stranger() -> Iterator[StartStranger]:
    """Start a control daemon that another program runs in the default pipe directory of a host."""
    with ExitStack() as stack:

        def start(host: SimHost) -> subprocess.Popen[str]:
            pipe, log = (str(host.root / "tmp/nvidia-mps" / name) for name in ("pipe", "log"))
            for directory in (pipe, log):
                os.makedirs(directory)
            variables = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
            command = ["nvidia-cuda-mps-control", "-f"]
            started = host.popen(command, env={**host.env, **variables}, stdout=subprocess.DEVNULL)
            stack.enter_context(started)
            stack.callback(started.kill)
            eventually(lambda: peer_of(pipe) is not None, "its answer")
            return started

        yield start


@pytest.fixture
def stranger(host: SimHost, start_stranger: StartStranger) -> subprocess.Popen[str]:
    return start_stranger(host)
