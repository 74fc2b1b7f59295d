"""What the doctor finds about MPS servers in their control daemon's logs."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from yunion_mps.core.reasons import SERVER_FAILED, SERVER_START_FAILED
from yunion_mps.doctor.checks import Finding

from unit.doctor.hosts import finding_of, host_of, write

BEGINS, READY, FAILED, KILLED = (
    "Starting new server 7 for user 1234",
    "NEW SERVER 7: Ready",
    "Server 7 exited with status 1",
    "Server 7 exited with status 0",
)
EXCEPTION = "Server encountered a fatal exception. Shutting down"
ORDER = "Cmd:shutdown_server 7"


def stamp(ago_s: float = 1.0) -> str:
    """A moment in the time zone of the host, as its control daemon writes it."""
    here: tzinfo = timezone.utc
    with contextlib.suppress(OSError), open("/etc/localtime", "rb") as file:
        here = ZoneInfo.from_file(file)
    return datetime.fromtimestamp(time.time() - ago_s, here).strftime("%Y-%m-%d %H:%M:%S.000")


def check(root: Path, level: str, *messages: str, ago_s: float = 1.0, server_log: str = "") -> Finding:
    lines = "".join(f"[{stamp(ago_s)} Control  4250] {text}\n" for text in messages)
    write(root / "tmp/nvidia-mps/log/control.log", lines)
    write(root / "tmp/nvidia-mps/log/server.log", server_log)
    return finding_of(host_of(root), "MPS servers", level)


def test_servers_that_do_not_start_are_a_problem_with_the_cause(tmp_path: Path) -> None:
    words = f"[{stamp()} Legacy Server     7] Failed to start : invalid argument\n"
    finding = check(tmp_path, "problem", *[BEGINS, EXCEPTION, FAILED] * 6, server_log=words)
    assert finding.what == (
        "MPS servers of domain host failed 6 times within the last hour; the last one failed to start: "
        "server.log: Failed to start : invalid argument"
    )
    assert finding.code == SERVER_START_FAILED


@pytest.mark.parametrize("last", [FAILED, KILLED])
def test_a_server_that_ended_before_it_was_ready_failed(tmp_path: Path, last: str) -> None:
    assert "failed 1 time " in check(tmp_path, "problem", BEGINS, last).what


def test_a_killed_server_is_a_warning_because_the_next_one_may_start(tmp_path: Path) -> None:
    finding = check(tmp_path, "warning", BEGINS, READY, KILLED)
    assert finding.what.endswith("the last one ended unexpectedly: it crashed or was killed")
    assert finding.code == SERVER_FAILED


def test_servers_that_start_again_leave_a_warning(tmp_path: Path) -> None:
    check(tmp_path, "warning", BEGINS, FAILED, BEGINS, READY)


def test_servers_that_fail_for_one_user_only_are_a_warning(tmp_path: Path) -> None:
    other = ("Starting new server 8 for user 54321", "NEW SERVER 8: Ready")
    finding = check(tmp_path, "warning", BEGINS, FAILED, *other, BEGINS, FAILED)
    assert "failed 2 times within the last hour, and do not start for uid 1234 only; " in finding.what
    assert finding.code == SERVER_START_FAILED
    check(tmp_path, "problem", *other, BEGINS, FAILED)


def test_servers_that_ended_as_ordered_or_long_ago_are_no_finding(tmp_path: Path) -> None:
    assert check(tmp_path, "ok", BEGINS, READY, ORDER, KILLED).what == "none failed within the last hour"
    assert check(tmp_path, "ok", BEGINS, FAILED, ago_s=4000).what == "none failed within the last hour"
