"""Tracebacks in the log: once a minute for each cause."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.host.log import TracebackLimit


class Clock:
    """A monotonic clock that the test advances."""

    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(clock: Clock, output: io.StringIO) -> Iterator[logging.Logger]:
    """A logger whose handler has a limit."""
    handler = logging.StreamHandler(output)
    handler.addFilter(TracebackLimit(clock))
    logger = logging.getLogger("limited")
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def fail(log: logging.Logger, name: str, raising: Callable[[], object]) -> None:
    try:
        raising()
    except Exception:
        log.exception("the answer to %s has failed", name)


def divide() -> object:
    return 1 / 0


def look_up() -> object:
    return {"another": 1}["key"]


def test_the_same_cause_is_logged_once_a_minute_and_counted(
    log: logging.Logger, clock: Clock, output: io.StringIO
) -> None:
    for number in range(1000):
        fail(log, f"request {number}", divide)
    clock.now_s += 59
    fail(log, "request 1000", divide)
    assert output.getvalue().count("Traceback") == 1
    assert output.getvalue().startswith("the answer to request 0 has failed\nTraceback")
    clock.now_s += 1
    fail(log, "100 %s", divide)
    assert output.getvalue().count("Traceback") == 2
    assert "the answer to 100 %s has failed (1000 more since the last traceback)\n" in output.getvalue()


def test_another_cause_and_what_has_none_are_logged(log: logging.Logger, output: io.StringIO) -> None:
    for _ in range(2):
        fail(log, "a", divide)
        fail(log, "b", look_up)
        log.error("in one line", exc_info=None)
    assert output.getvalue().count("ZeroDivisionError") == 1
    assert output.getvalue().count("KeyError") == 1
    assert output.getvalue().count("in one line") == 2


@pytest.mark.parametrize(
    "begin",
    [
        "from yunion_mps.host.log import set_up_log; set_up_log('info')",
        "from yunion_mps.cli.gateway import gateway; gateway.main([], standalone_mode=False)",
        "from yunion_mps.cli.gateway import web; web.main([], standalone_mode=False)",
    ],
    ids=["daemon", "gateway", "web"],
)
def test_every_server_logs_a_cause_once(begin: str, tmp_path: Path) -> None:
    """Without a daemon, the gateway ends at once, and `yunion-mps web` raises."""
    repeat = "[loop.call_soon(lambda: 1 / 0) for _ in range(9)]; loop.call_later(0.01, loop.stop)"
    lines = [
        "import asyncio, contextlib",
        "with contextlib.suppress(Exception):",
        f"    {begin}",
        f"loop = asyncio.new_event_loop(); {repeat}; loop.run_forever()",
    ]
    environment = {**os.environ, "YUNION_MPS_ROOT": str(tmp_path)}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr.count("ZeroDivisionError") == 1
