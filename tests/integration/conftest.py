"""Hosts with the daemon on them. See daemon_host.py for what a Daemon can do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from integration.daemon_host import Daemon
from simhost import Description, SimHost

MakeHost = Callable[..., SimHost]
MakeDaemon = Callable[..., Daemon]


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
def host(make_host: MakeHost) -> SimHost:
    """The reference case: one Tesla P40, divided by four."""
    return make_host()


@pytest.fixture
def make_daemon(make_host: MakeHost) -> Iterator[MakeDaemon]:
    """Make a Daemon, not started, on a host (the reference case when none is given)."""
    with ExitStack() as stack:

        def make(host: SimHost | None = None, *, notify: bool = True) -> Daemon:
            return stack.enter_context(Daemon(host or make_host(), notify=notify))

        yield make


@pytest.fixture
def daemon(make_daemon: MakeDaemon, host: SimHost) -> Daemon:
    """A daemon on the reference case, not started yet: `daemon.start().wait_ready()`."""
    return make_daemon(host)


@pytest.fixture
def ready_daemon(daemon: Daemon) -> Daemon:
    """A daemon on the reference case that has said READY."""
    return daemon.start().wait_ready()
