"""Settings of all tests: time zone, Hypothesis' folder, `--quick`, whose processes are measured, SIGTERM."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from simhost.install import built_library

# A time zone that no machine uses, so that code that confuses a host's time with another one always fails.
os.environ.setdefault("TZ", "HERE-5:45")
time.tzset()

_CHECKOUT = Path(__file__).resolve().parent.parent

set_hypothesis_home_dir(_CHECKOUT / ".cache/hypothesis")

#: Where `--quick` looks for tests that start no process: files, or folders with all that is below them.
_QUICK_PATHS = (
    "tests/test_documents.py",
    "tests/test_words.py",
    "tests/unit/cli/test_config.py",
    "tests/unit/config/",
    "tests/unit/containers/",
    "tests/unit/doctor/",
    "tests/unit/leases/",
    "tests/unit/metrics/",
    "tests/unit/overview/",
    "tests/unit/planning/",
    "tests/unit/service/",
    "tests/unit/slurm/",
    "tests/unit/supervisor/test_event_",
    "tests/unit/test_addresses.py",
    "tests/unit/test_errors.py",
    "tests/unit/test_models.py",
    "tests/unit/test_paths.py",
)
#: What a test does that starts a process or can be reached from another one, as sys.addaudithook names it.
_NOT_QUICK = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "socket.bind", "socket.connect"}


#: Test files whose child processes are measured as well, which costs 0.1 s a process. Code that other tests
#: run in child processes is covered by these files, or by tests that call it directly.
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
    "tests/unit/cli/test_common.py",
    "tests/unit/cli/test_events.py",
    "tests/unit/cli/test_golden.py",
    "tests/unit/cli/test_run.py",
    "tests/unit/cli/test_usage.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and no server")


def pytest_configure(config: pytest.Config) -> None:
    _running.is_worker = hasattr(config, "workerinput")
    with contextlib.suppress(ValueError):  # in a thread of a worker
        signal.signal(signal.SIGTERM, _interrupt)
        # As a background job this would ignore it, and so would all that the tests start.
        signal.signal(signal.SIGINT, _interrupt if _running.is_worker else signal.default_int_handler)
    config.addinivalue_line("markers", "processes: starts processes or opens sockets; not in --quick")
    config.addinivalue_line("markers", "gpus(description, ...): the host's GPUs, if not the default ones")
    config.addinivalue_line("markers", "divided(how, ...): how the host's GPUs are divided, in order")
    # Not while coverage is measured: in Python 3.11, a thread fails that starts while another installs its
    # trace function, and an audit hook lets threads take turns there.
    if config.getoption("quick") or sys.gettrace() is None:
        sys.addaudithook(_refuse)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the simulated driver before the first test, because those of `--quick` start no compiler."""
    if not hasattr(session.config, "workerinput"):
        built_library()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, collect only the files of _QUICK_PATHS."""
    if not config.getoption("quick") or collection_path.is_dir():
        return None
    path = str(collection_path.relative_to(_CHECKOUT))
    return None if path.startswith(_QUICK_PATHS) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if _is_quick(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold each test that `--quick` runs to its promise to start no process, also in other runs."""
    _running.is_quick = _is_quick(item)
    try:
        return (yield)
    finally:
        _running.is_quick = False


def _is_quick(item: pytest.Item) -> bool:
    return item.nodeid.startswith(_QUICK_PATHS) and item.get_closest_marker("processes") is None


def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning the collected tests and modules again and again."""
    gc.collect()
    gc.freeze()


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
    """End the tests as Ctrl-C does, so that they end what they started; a forked child just ends.

    A worker is told twice: by a signal, and 5 s later by execnet. The second one would interrupt the ends of
    fixtures, and leave behind what they have started.
    """
    if os.getpid() != pid:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif not (_running.is_worker and _running.is_interrupted):
        _running.is_interrupted = True
        raise KeyboardInterrupt


class _Running:
    """What is so at the moment."""

    is_worker = False
    is_interrupted = False
    #: Whether the test that is running now is one that `--quick` runs.
    is_quick = False


_running = _Running()


def _refuse(event: str, _: object) -> None:
    if _running.is_quick and event in _NOT_QUICK:
        raise AssertionError(f"{event} in a test without the mark `processes`")
