"""Tests that are told to end by SIGTERM, as by timeout(1), end what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.daemon_host import eventually, is_running

_TESTS = Path(__file__).resolve().parent
_TEST = """
import subprocess, pathlib, pytest

@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as started:
        yield started
        started.kill()

def test_a_test_waits_for_its_condition(process):
    pathlib.Path("pid").write_text(f"{process.pid}\\n")
    process.wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["0", "1"])
def test_tests_that_get_sigterm_end_what_they_started(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(_TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-n",
        workers,
    ]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(_TESTS)}
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, start_new_session=True
    ) as tests:
        pid = tmp_path / "pid"
        started = eventually(lambda: pid.exists() and pid.read_text(), "the test")
        os.killpg(tests.pid, signal.SIGTERM)
        assert tests.wait() != 0
    eventually(lambda: not is_running(int(started)), "the end of the process")
