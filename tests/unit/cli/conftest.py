"""The program yunion-mps as users run it, against a server over a snapshot made by hand."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

import pytest
import yaml
from yunion_mps.cli.output import is_utf8
from yunion_mps.cli.root import run_cli
from yunion_mps.core.models import Snapshot

from unit.http import snapshots
from unit.http.server_host import PATIENCE_S, ServerHost, short_root
from waiting import readable

PROGRAM = str(Path(sys.executable).with_name("yunion-mps"))

Serve = Callable[[Snapshot], "Cli"]

# The tests may have been started with another locale, and the result is cached.
with mock.patch("yunion_mps.host.proc.environment_of", return_value={"LC_ALL": "C.UTF-8"}):
    assert is_utf8()


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Cli:
    #: What is run as a process.
    program: Sequence[str] = (PROGRAM,)

    def __init__(self, root: str, host: ServerHost | None = None) -> None:
        self.root = root
        self._host = host
        self.env = {**os.environ, "YUNION_MPS_ROOT": root, "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
        self.env.pop("YUNION_MPS_DEVICE", None)

    @property
    def host(self) -> ServerHost:
        assert self._host
        return self._host

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": self.env}
        return subprocess.Popen(
            [*self.program, *arguments], text=True, encoding="utf-8", **{**settings, **options}
        )

    def __call__(self, *arguments: str) -> Done:
        """How a command ends.

        It runs in this process, with an environment, arguments and streams of its own: starting another one
        takes many times as long.
        """
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with open(os.devnull) as nothing:
            code, err = self._run(arguments, environment=self.env, stdin=nothing, stdout=out)
        return Done(code, out.buffer.getvalue().decode(), err)

    def _run(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], stdin: TextIO, stdout: TextIO
    ) -> tuple[int, str]:
        """Return a command's exit status and what it prints on standard error."""
        with ExitStack() as stack:
            err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
            stack.enter_context(contextlib.redirect_stdout(stdout))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
            # A command that executes another program needs `process`: here that would end the tests.
            stack.enter_context(mock.patch.multiple(os, execve=None, execvpe=None))
            stack.enter_context(mock.patch.object(sys, "argv", ["yunion-mps", *arguments]))
            stack.enter_context(mock.patch.object(sys, "stdin", stdin))
            code = run_cli()
            return code, err.buffer.getvalue().decode()

    def process(self, *arguments: str, **options: Any) -> Done:
        with self.start(*arguments, **options) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in (err or "")
        return Done(process.returncode, out or "", err or "")

    def good(self, *arguments: str) -> str:
        """What a command prints that succeeds and has nothing to say beside it."""
        done = self(*arguments)
        assert (done.code, done.err) == (0, "")
        return done.out

    def read(self, *arguments: str) -> tuple[Any, list[list[str]]]:
        """What programs read: the answer, which is the same as JSON and as YAML, and the rows as CSV."""
        answer = json.loads(self.good(*arguments, "-o", "json"))
        assert yaml.safe_load(self.good(*arguments, "-o", "yaml")) == answer
        return answer, list(csv.reader(io.StringIO(self.good(*arguments, "-o", "csv"))))

    def on_terminal(self, columns: int, *arguments: str) -> list[str]:
        """The lines that a command prints that succeeds, on a terminal of so many columns."""
        return _good_lines(self.done_on_terminal(columns, *arguments))

    def process_lines(self, columns: int, *arguments: str) -> list[str]:
        """The lines that a process prints that succeeds, on a terminal of so many columns."""
        return _good_lines(self.process_on_terminal(columns, *arguments))

    def done_on_terminal(self, columns: int, *arguments: str) -> Done:
        """How a command ends that prints on a terminal of so many columns; it runs in this process."""
        ours, theirs = open_terminal(columns)
        with ThreadPoolExecutor(max_workers=1) as threads:
            reader = threads.submit(_rest, ours)
            with open(theirs, "w", encoding="utf-8") as stdout, open(os.dup(theirs)) as stdin:
                code, err = self._run(
                    arguments, environment=self._without_columns(), stdin=stdin, stdout=stdout
                )
            return Done(code, _shown(reader.result()), err)

    def process_on_terminal(self, columns: int, *arguments: str) -> Done:
        """How a process ends that prints on a terminal of so many columns."""
        ours, theirs = open_terminal(columns)
        with self.start(*arguments, stdout=theirs, stdin=theirs, env=self._without_columns()) as process:
            os.close(theirs)
            printed = _rest(ours)
            assert process.stderr is not None
            code = process.wait(PATIENCE_S)
            return Done(code, _shown(printed), process.stderr.read())

    def _without_columns(self) -> dict[str, str]:
        """Return an environment in which the width is that of the terminal."""
        return {name: value for name, value in self.env.items() if name != "COLUMNS"}

    def answered(self, answer: bytes, *arguments: str, columns: int = 0) -> tuple[int, str]:
        """How a command ends and what it prints on a terminal, on which its question, if any, is answered."""
        ours, theirs = open_terminal(columns)
        with self.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            printed = b""
            with contextlib.suppress(OSError):  # EIO: it has ended without a question
                while b"[y/N]: " not in printed:
                    assert readable(ours, PATIENCE_S), printed
                    printed += os.read(ours, 65536)
                os.write(ours, answer)
            printed += _rest(ours)
            return process.wait(PATIENCE_S), printed.decode().replace("\r\n", "\n")


def open_terminal(columns: int) -> tuple[int, int]:
    """Our side of a new terminal of so many columns, and that of its programs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    return ours, theirs


def _rest(terminal: int) -> bytes:
    """What is still printed on a terminal, until no process has it open; closes our side."""
    printed = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(terminal, 65536):
            printed += piece
    os.close(terminal)
    return printed


def _good_lines(done: Done) -> list[str]:
    assert (done.code, done.err) == (0, "")
    return done.out.splitlines()


def _shown(printed: bytes) -> str:
    """What a terminal showed of a command that neither colours its text nor moves the cursor."""
    assert b"\x1b" not in printed
    return printed.decode().replace("\r\n", "\n")


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
    return serve(snapshots.reference())


@pytest.fixture(scope="module")
def troubled_cli(serve: Serve) -> Cli:
    """GPUs of every sort, and a control daemon that does not start."""
    return serve(snapshots.troubled())


@pytest.fixture
def own_cli() -> Iterator[Cli]:
    """The reference case, for a test that changes something."""
    with ServerHost(snapshots.reference()) as host:
        yield Cli(host.paths.root, host)


@pytest.fixture
def without_daemon() -> Iterator[Cli]:
    """A host on which no daemon runs."""
    with short_root() as paths:
        yield Cli(paths.root)
