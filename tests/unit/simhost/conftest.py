"""Hosts for these tests, and a Python on them that speaks pynvml."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable

import pytest

from integration.conftest import MakeHost, make_host
from simhost import SimHost

__all__ = ["MakeHost", "make_host"]

RunPython = Callable[..., str]


@pytest.fixture
def python() -> RunPython:
    """Run Python on a host in a process of its own, after `import pynvml as n`; return what it prints."""

    def run(host: SimHost, statements: str) -> str:
        program = "import pynvml as n\n" + textwrap.dedent(statements)
        done = host.run([sys.executable, "-I", "-c", program])
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
