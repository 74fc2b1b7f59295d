"""scripts/test itself, whose tools are stand-ins here, and tests that are told to end by SIGTERM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.daemon_host import PATIENCE_S, eventually, is_running
from integration.lease_host import needs_root

CHECKOUT = Path(__file__).resolve().parent.parent
TOOLS = tuple(f".venv/bin/{name}" for name in ("ruff", "mypy", "lint-imports", "coverage", "pytest"))
SCRIPTS = ("scripts/setup", "scripts/test-engines", "scripts/test-packages")
#: It fails, or hangs until SIGTERM comes, if these variables name it.
TOOL = """#!/bin/sh
call="${0##*/} $*"
case $call in $HANGS) trap 'echo interrupted >>calls; exit 2' TERM ;; esac
echo "$call" >>calls
case $call in $FAILS) exit 3 ;; esac
case $call in $HANGS) while :; do sleep 0.01; done ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in (".venv/bin", ".cache", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("scripts/lib", "packaging"):
        (tmp_path / folder).symlink_to(CHECKOUT / folder)
    shutil.copy(CHECKOUT / "scripts/test", tmp_path / "scripts/test")
    for name in (*TOOLS, *SCRIPTS):
        (tmp_path / name).write_text(TOOL)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(checkout: Path, *arguments: str, fails: str = "-", hangs: str = "-") -> subprocess.Popen[str]:
    env = {**os.environ, "FAILS": fails, "HANGS": hangs}
    # A shell cannot trap what was ignored when it began, as under nohup(1).
    command = ["env", "--default-signal=HUP,INT,TERM", str(checkout / "scripts/test"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def calls(checkout: Path) -> list[str]:
    """What was called until now, nothing if nothing was."""
    if not (checkout / "calls").exists():
        return []
    return [" ".join(line.split()[:2]) for line in (checkout / "calls").read_text().splitlines()]


WHOLE = [
    "setup --quiet", "ruff check", "ruff format", "mypy", "lint-imports --no-cache", "coverage run",
    "pytest tests/bench", "coverage combine", "coverage report", "test-engines", "test-packages",
]  # fmt: skip


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("-", []),
        ("ruff check*", ["Style"]),
        ("mypy *", ["Types"]),
        ("lint-imports *", ["Layers"]),
        ("coverage run *", ["Tests"]),
        ("pytest *", ["Faults"]),
        ("coverage report*", ["Coverage"]),
        ("test-engines *", ["Engines"]),
        ("test-packages *", ["Packages"]),
    ],
)
def test_all_parts_run_and_the_summary_lists_failures(checkout: Path, fails: str, failed: list[str]) -> None:
    with start(checkout, fails=fails) as running:
        out, err = running.communicate(timeout=PATIENCE_S)
    assert (err, sorted(calls(checkout))) == ("", sorted(WHOLE)), "some at the same time"
    rows = [line.split(None, 1) for line in out.partition("==> Summary\n")[2].splitlines()]
    assert len(rows) == 8
    assert {what for what, _ in rows} <= {"ok", "FAILED"}
    names = [name for what, name in rows if what == "FAILED"]
    assert len(names) == len(failed)
    assert all(name.startswith(start) for name, start in zip(names, failed))
    assert running.returncode == bool(failed)


@pytest.mark.parametrize(("fails", "status"), [("-", 0), ("pytest *", 1)])
def test_quick_runs_the_linters_and_tests_without_processes(checkout: Path, fails: str, status: int) -> None:
    with start(checkout, "--quick", fails=fails) as running:
        running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, calls(checkout)) == (status, [*WHOLE[:5], "pytest -q"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("hangs", ["coverage run *", "test-packages *"])
def test_an_interrupt_ends_all_parts(checkout: Path, hangs: str, number: signal.Signals) -> None:
    call = hangs[:-2]
    with start(checkout, hangs=hangs) as running:
        eventually(lambda: calls(checkout).count(call) == WHOLE.count(call))
        running.send_signal(number)
        out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert calls(checkout).count("interrupted") == WHOLE.count(call)
    assert "Summary" not in out


def test_tests_ignore_no_signal_even_if_they_are_started_by_nohup(checkout: Path) -> None:
    tool = checkout / ".venv/bin/coverage"
    tool.write_text("#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
    command = ["env", "--ignore-signal=HUP,INT,QUIT", str(checkout / "scripts/test")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert re.findall(r"SigIgn:\s*(\S+)", done.stdout)[0] == "0" * 16, done.stderr


def test_the_demo_needs_a_compiler_and_python_and_no_more() -> None:
    setup = (CHECKOUT / "scripts/setup").read_text()
    needs = re.findall(r"^(demo|tests) +(\S+) ", setup, re.MULTILINE)
    assert [package for level, package in needs if level == "demo"] == ["python3", "gcc", "libc6-dev"]
    assert len(needs) > 10
    for name in ("demo", "simhost"):
        assert '/setup" --demo --quiet\n' in (CHECKOUT / f"scripts/{name}").read_text()


PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet")


def run_test_kubernetes(assets: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KUBERNETES_ASSETS": assets}
    command = [CHECKOUT / "scripts/test-kubernetes"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


@needs_root
def test_cluster_tests_are_skipped_without_the_programs_of_a_cluster() -> None:
    done = run_test_kubernetes("")
    assert (done.returncode, done.stderr) == (0, "")
    names = " ".join(PROGRAMS)
    assert done.stdout == f"skipped: KUBERNETES_ASSETS is not set: set it to a folder with {names}\n"


@needs_root
def test_programs_that_cannot_be_run_are_named(tmp_path: Path) -> None:
    for name in PROGRAMS[:3]:
        (tmp_path / name).write_text("#!/bin/sh\n")
    for name in PROGRAMS[:2]:
        (tmp_path / name).chmod(0o755)
    done = run_test_kubernetes(str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"missing or cannot be run: {' '.join(PROGRAMS[2:])}\n")


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
