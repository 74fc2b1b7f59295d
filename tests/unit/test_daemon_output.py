"""What yunion-mps-daemon writes to standard error, by where that goes; on a host without a configuration."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from unit.http.server_host import short_root

PROGRAM = str(Path(sys.executable).with_name("yunion-mps-daemon"))
CHOICES = "use one of debug, info, warning, error"
OURS = "yunion-mps-daemon: "


@pytest.fixture
def error(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "stderr").open("w+") as file:
        yield file


def run_check(error: IO[str] | int, *arguments: str, **environment: str) -> int:
    """Run `--check`, which finds no configuration; returns the exit status."""
    with short_root() as paths:
        os.mkdir(f"{paths.root}/etc")
        Path(f"{paths.root}/etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        env = {"PATH": os.environ["PATH"], "YUNION_MPS_ROOT": paths.root, **environment}
        command = [PROGRAM, *(arguments or ("--check",))]
        return subprocess.run(command, stderr=error, env=env, timeout=60, check=False).returncode


def lines_of(error: IO[str]) -> list[str]:
    error.seek(0)
    return error.read().splitlines()


@pytest.mark.parametrize("arguments", [["--check"], []], ids=["--check", "none"])
def test_an_unknown_log_level_in_the_environment_is_wrong_usage(error: IO[str], arguments: list[str]) -> None:
    env = {"PATH": os.environ["PATH"], "YUNION_MPS_LOG_LEVEL": "verbose"}
    command = [PROGRAM, *arguments]
    assert subprocess.run(command, stderr=error, env=env, timeout=60, check=False).returncode == 2
    assert lines_of(error) == [
        f"{OURS}YUNION_MPS_LOG_LEVEL is 'verbose': {CHOICES}",
        f"{OURS}see: yunion-mps-daemon --help",
    ]


def test_the_option_overrides_the_environment(error: IO[str]) -> None:
    assert run_check(error, "--check", "--log-level", "info", YUNION_MPS_LOG_LEVEL="verbose") == 6
    assert run_check(error, YUNION_MPS_LOG_LEVEL="") == 6


def test_lines_have_levels_if_standard_error_is_the_journal_s(error: IO[str]) -> None:
    status = os.fstat(error.fileno())
    assert run_check(error, JOURNAL_STREAM=f"{status.st_dev}:{status.st_ino}") == 6
    assert lines_of(error)
    assert [line for line in lines_of(error) if not line.startswith("<3>")] == []


def test_errors_begin_with_the_program_s_name_outside_the_journal(error: IO[str]) -> None:
    assert run_check(error, JOURNAL_STREAM="8:12345") == 6
    assert lines_of(error)
    assert [line for line in lines_of(error) if not line.startswith(OURS)] == []


@pytest.mark.parametrize("terminal", [True, False])
def test_under_another_manager_lines_have_levels_but_not_on_a_terminal(
    error: IO[str], *, terminal: bool
) -> None:
    if not terminal:
        assert run_check(error, NOTIFY_SOCKET="/nonexistent/notify") == 6
        assert lines_of(error)[0].startswith("<3>")
        return
    ours, theirs = pty.openpty()
    try:
        assert run_check(theirs, NOTIFY_SOCKET="/nonexistent/notify") == 6
        assert os.read(ours, 65536).decode().startswith(OURS)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_full_disk_under_standard_error_does_not_change_the_exit_status() -> None:
    with open("/dev/full", "w") as full:
        assert run_check(full) == 6
