"""The program yunion-mps as users run it, against a server over a snapshot made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from yunion_mps.models import Snapshot

from unit.http import snapshots
from unit.http.server_host import PATIENCE_S, ServerHost, short_root

PROGRAM = str(Path(sys.executable).with_name("yunion-mps"))

Serve = Callable[[Snapshot], "Cli"]


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Cli:
    """Runs yunion-mps on a host with this root, and perhaps a server."""

    def __init__(self, root: str, host: ServerHost | None = None) -> None:
        self.root = root
        self._host = host
        self.env = {**os.environ, "YUNION_MPS_ROOT": root, "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
        self.env.pop("YUNION_MPS_DEVICE", None)

    @property
    def host(self) -> ServerHost:
        """The server that it asks."""
        assert self._host
        return self._host

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": self.env}
        return subprocess.Popen([PROGRAM, *arguments], text=True, encoding="utf-8", **{**settings, **options})

    def __call__(self, *arguments: str, **options: Any) -> Done:
        with self.start(*arguments, **options) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in (err or "")
        return Done(process.returncode, out or "", err or "")

    def good(self, *arguments: str) -> str:
        """What a command prints that succeeds and has nothing to say beside it."""
        done = self(*arguments)
        assert (done.code, done.err) == (0, "")
        return done.out


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Make a Cli for a host in the state of a snapshot."""
    with ExitStack() as stack:

        def make(snapshot: Snapshot) -> Cli:
            host = stack.enter_context(ServerHost(snapshot))
            return Cli(host.paths.root, host)

        yield make


@pytest.fixture(scope="module")
def cli(serve: Serve) -> Cli:
    """The reference case."""
    return serve(snapshots.reference())


@pytest.fixture(scope="module")
def troubled(serve: Serve) -> Cli:
    """GPUs of every sort, and a control daemon that does not start."""
    return serve(snapshots.troubled())


@pytest.fixture
def own() -> Iterator[Cli]:
    """The reference case, for a test that changes something."""
    with ServerHost(snapshots.reference()) as host:
        yield Cli(host.paths.root, host)


@pytest.fixture
def alone() -> Iterator[Cli]:
    """A host on which no daemon runs."""
    with short_root() as paths:
        yield Cli(paths.root)
