"""What holds for all tests: the time zone, where hypothesis keeps its files, what `--quick` leaves out."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

# One that no host is in: what tells a host's time from its own, or from UTC, only by luck fails everywhere.
os.environ.setdefault("TZ", "HERE-5:45")
time.tzset()

set_hypothesis_home_dir(Path(__file__).resolve().parent.parent / ".cache/hypothesis")

#: What a test does that starts a process or can be reached from another one, as sys.addaudithook names it.
_NOT_QUICK = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "socket.bind", "socket.connect"}


#: Tests whose processes are measured, too, which costs 0.1 s for each process. What the processes of other
#: tests run is covered by these, or by a test that runs it in its own process.
_MEASURED = (
    "tests/integration/test_adopt_and_restore.py",
    "tests/integration/test_cli_host.py",
    "tests/integration/test_daemon_",
    "tests/integration/test_leases.py",
    "tests/integration/test_leases_edges.py",
    "tests/integration/test_leases_owners.py",
    "tests/integration/test_metrics.py",
    "tests/integration/test_screens.py",
    "tests/integration/test_web.py",
    "tests/kubernetes/test_plugin.py",
    "tests/packaging/test_purge.py",
    "tests/unit/cli/test_common.py",
    "tests/unit/cli/test_events.py",
    "tests/unit/cli/test_golden.py",
    "tests/unit/cli/test_run.py",
    "tests/unit/cli/test_usage.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and no server")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ValueError):  # in a thread of a worker
        signal.signal(signal.SIGTERM, _interrupt)
        # As a background job this would ignore it, and so would all that the tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "processes: starts processes or opens sockets; not in --quick")
    config.addinivalue_line("markers", "gpus(description, ...): the host's GPUs, if not the default ones")
    config.addinivalue_line("markers", "divided(how, ...): how the host's GPUs are divided, in order")
    if config.getoption("quick"):
        sys.addaudithook(_refuse)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session", autouse=True)
def coverage_variables() -> dict[str, str]:
    """Remove the variables that make each process of this Python measure its coverage; return them."""
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("COVERAGE_")}


@pytest.fixture(scope="module", autouse=True)
def _measured(request: pytest.FixtureRequest, coverage_variables: dict[str, str]) -> Iterator[None]:
    if request.node.nodeid.startswith(_MEASURED):
        os.environ.update(coverage_variables)
    yield
    for name in coverage_variables:
        os.environ.pop(name, None)


def _interrupt(number: int, _: object, pid: int = os.getpid()) -> None:
    """End the tests as Ctrl-C does, so that they end what they started; a forked child just ends."""
    if os.getpid() == pid:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _refuse(event: str, _: object) -> None:
    if event in _NOT_QUICK and "PYTEST_CURRENT_TEST" in os.environ:
        raise AssertionError(f"{event} in a test without the mark `processes`")
