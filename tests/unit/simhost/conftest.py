"""Hosts for these tests, and a Python on them that speaks pynvml."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from simhost import Description, SimHost

MakeHost = Callable[..., SimHost]
RunPython = Callable[..., str]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    with ExitStack() as stack:

        def make(description: Description | None = None) -> SimHost:
            host = stack.enter_context(SimHost.create(description))
            if not shutil.which("nvidia-smi", path=host.env["PATH"]):
                pytest.fail("nvidia-smi is not there: run scripts/setup")
            return host

        yield make


@pytest.fixture
def python() -> RunPython:
    """Run Python on a host in a process of its own, after `import pynvml as n`; return what it prints."""

    def run(host: SimHost, statements: str) -> str:
        program = "import pynvml as n\n" + textwrap.dedent(statements)
        done = host.run([sys.executable, "-I", "-c", program])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
