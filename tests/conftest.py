"""What holds for all tests: the time zone, where hypothesis keeps its files, what `--quick` leaves out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

# One that no host is in: what tells a host's time from its own, or from UTC, only by luck fails everywhere.
os.environ.setdefault("TZ", "HERE-5:45")
time.tzset()

set_hypothesis_home_dir(Path(__file__).resolve().parent.parent / ".cache/hypothesis")

#: What a test does that starts a process or can be reached from another one, as sys.addaudithook names it.
_NOT_QUICK = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "socket.bind", "socket.connect"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and no server")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ValueError):  # in a thread of a worker
        signal.signal(signal.SIGTERM, _interrupt)
        # As a background job this would ignore it, and so would all that the tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "processes: starts processes or opens sockets; not in --quick")
    if config.getoption("quick"):
        sys.addaudithook(_refuse)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _interrupt(number: int, _: object, pid: int = os.getpid()) -> None:
    """End the tests as Ctrl-C does, so that they end what they started; a forked child just ends."""
    if os.getpid() == pid:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _refuse(event: str, _: object) -> None:
    if event in _NOT_QUICK and "PYTEST_CURRENT_TEST" in os.environ:
        raise AssertionError(f"{event} in a test without the mark `processes`")
