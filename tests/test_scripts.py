"""The scripts in scripts/ and .ci/. The tools that scripts/test calls are replaced by stand-ins."""

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
#: It fails if $FAILS matches its call, and hangs until SIGTERM if $HANGS does.
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


CHECKS = ["ruff check", "ruff format", "mypy", "lint-imports --no-cache"]
#: What each mode of scripts/test calls, by the first two words.
CALLS = {
    "": ["setup --quiet", "pytest -q", *CHECKS, "coverage run", "coverage combine", "coverage report"],
    "--rest": [
        "setup --quiet",
        "test-packages",
        "test-engines",
        "pytest tests/faults",
        "pytest -n",
        "pytest -n",
    ],
    "--quick": ["setup --quiet", *CHECKS, "pytest -q"],
}


def summary(out: str, heading: str = "==> Summary") -> dict[str, list[str]]:
    """Return the parts that are `ok` and those that `FAILED`, by their first word."""
    rows: dict[str, list[str]] = {"ok": [], "FAILED": []}
    for line in out.rpartition(heading)[2].splitlines()[1:]:
        result, name = line.split()[:2]
        rows[result].append(name.rstrip(":"))
    return rows


@pytest.mark.parametrize(
    ("mode", "fails", "failed"),
    [
        ("", "-", []),
        ("", "ruff check*", ["Style"]),
        ("", "mypy *", ["Types"]),
        ("", "lint-imports *", ["Layers"]),
        ("", "pytest -q --collect-only *", []),
        ("", "coverage run *", ["Tests"]),
        ("", "coverage report*", ["Coverage"]),
        ("--rest", "-", []),
        ("--rest", "pytest tests/faults *", ["Faults"]),
        ("--rest", "*tests/containers", ["Containers"]),
        ("--rest", "*tests/packaging", ["Contents"]),
        ("--rest", "test-engines *", ["Schedulers"]),
        ("--rest", "test-packages *", ["Packages"]),
        ("--quick", "-", []),
        ("--quick", "pytest *", ["Tests"]),
    ],
)
def test_all_parts_run_and_the_summary_lists_failures(
    checkout: Path, mode: str, fails: str, failed: list[str]
) -> None:
    with start(checkout, *mode.split(), fails=fails) as running:
        out, err = running.communicate(timeout=PATIENCE_S)
    # Sorted, because some run at the same time.
    assert (err, sorted(calls(checkout))) == ("", sorted(CALLS[mode]))
    rows = summary(out)
    assert rows["FAILED"] == failed
    assert len(rows["ok"]) == {"": 5, "--rest": 5, "--quick": 4}[mode] - len(failed)
    assert running.returncode == bool(failed)


@pytest.mark.parametrize("fails", ["mypy *", "pytest tests/faults *"])
def test_ci_runs_both_commands_and_fails_if_one_has_failed(checkout: Path, fails: str) -> None:
    (checkout / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci/run", checkout / ".ci/run")
    done = run_ci(checkout, fails)
    assert sorted(calls(checkout)) == sorted(CALLS[""] + CALLS["--rest"])
    rows = summary(done.stdout, "==> Summary of both")
    assert (len(rows["ok"]), len(rows["FAILED"]), done.returncode) == (9, 1, 1)
    assert run_ci(checkout, "-").returncode == 0


def test_an_interrupt_of_the_first_command_ends_ci(checkout: Path) -> None:
    (checkout / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci/run", checkout / ".ci/run")
    env = {**os.environ, "FAILS": "-", "HANGS": "coverage run *"}
    command = ["env", "--default-signal=HUP,INT,TERM", "bash", str(checkout / ".ci/run")]
    with subprocess.Popen(command, env=env, stdout=-1, text=True, start_new_session=True) as running:
        eventually(lambda: "coverage run" in calls(checkout), "the tests")
        os.killpg(running.pid, signal.SIGINT)
        running.communicate(timeout=PATIENCE_S)
    assert running.returncode in (130, -signal.SIGINT)
    assert "test-engines" not in calls(checkout)
    assert "    FAILED  Tests (interrupted)\n" in (checkout / ".cache/summary-tests").read_text()


def run_ci(checkout: Path, fails: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FAILS": fails, "HANGS": "-"}
    return subprocess.run(
        ["bash", str(checkout / ".ci/run")], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tests/unit", "-k", "plan"], "test browser"),
        (["-x", "tests/containers/test_containerd.py"], "test browser containers"),
        (["tests/packaging"], "test browser packages"),
        (["tests/engines", "-x"], "test browser slurm engines containers"),
    ],
)
def test_pytest_gets_other_arguments_and_what_it_needs_is_installed(
    checkout: Path, arguments: list[str], parts: str
) -> None:
    with start(checkout, *arguments) as running:
        running.communicate(timeout=PATIENCE_S)
    words = [f"setup --quiet {parts}", " ".join(["pytest", *arguments])]
    assert (checkout / "calls").read_text().splitlines() == words


def test_repeat_runs_tests_so_often_and_stops_at_a_failure(checkout: Path) -> None:
    with start(checkout, "--repeat", "20", "tests/unit/a.py::test_b", fails="pytest *") as running:
        running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 3, "pytest's exit status"
    call = (checkout / "calls").read_text().splitlines()[-1]
    assert re.fullmatch(r"pytest -n \d+ --dist load -x --count 20 tests/unit/a\.py::test_b", call)


@pytest.mark.parametrize(
    "words",
    [
        "--repeat",
        "--repeat 20",
        "--repeat 0 tests/unit",
        "--repeat many tests/unit",
        "--rest tests",
        "--quick x",
    ],
)
def test_arguments_that_are_missing_or_surplus_are_refused(checkout: Path, words: str) -> None:
    with start(checkout, *words.split()) as running:
        _, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, calls(checkout)) == (2, [])
    assert "\nscripts/test --repeat N TEST... " in err
    assert len(err.splitlines()) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("mode", "hangs"), [("", "coverage run *"), ("--rest", "test-packages *")])
def test_an_interrupt_ends_all_parts(checkout: Path, mode: str, hangs: str, number: signal.Signals) -> None:
    call = hangs[:-2]
    with start(checkout, *mode.split(), hangs=hangs) as running:
        eventually(lambda: call in calls(checkout))
        running.send_signal(number)
        out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert calls(checkout).count("interrupted") == 1
    assert "Summary" not in out


def test_tests_ignore_no_signal_even_if_they_are_started_by_nohup(checkout: Path) -> None:
    tool = checkout / ".venv/bin/coverage"
    tool.write_text("#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
    command = ["env", "--ignore-signal=HUP,INT,QUIT", str(checkout / "scripts/test")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert re.findall(r"SigIgn:\s*(\S+)", done.stdout)[0] == "0" * 16, done.stderr


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("demo", "demo"),
        ("simhost", "demo"),
        ("sessions", "demo"),
        ("screenshot", "demo browser"),
        ("package", "build"),
        ("protos", "test"),
        ("test-packages", "packages"),
        ("test-engines", "slurm engines"),
        ("test-kubernetes", "containers packages"),
    ],
)
def test_each_script_installs_what_it_needs(script: str, parts: str) -> None:
    text = (CHECKOUT / "scripts" / script).read_text()
    assert re.findall(r"/?setup\"? --quiet (.*)\n", text) == [parts]


@pytest.mark.parametrize(
    ("part", "debian", "downloads"),
    [
        ("demo", "python3 gcc libc6-dev", "nvidia venv"),
        ("build", "python3 git apt-utils xz-utils", "packager venv"),
    ],
)
def test_the_demo_and_the_build_need_little(part: str, debian: str, downloads: str) -> None:
    setup = (CHECKOUT / "scripts/setup").read_text()
    packages = re.findall(r"^(\w+) +(\S+) +\S+ +/\S+ ", setup, re.MULTILINE)
    assert len(packages) > 10
    assert [name for of, name in packages if of in ("base", part)] == debian.split()
    components = re.findall(r"^(\w+) +(\w+) +([1-9]\d*)  ", setup, re.MULTILINE)
    needed = [(name, int(size_mb)) for name, of, size_mb in components if of in ("base", part)]
    assert [name for name, _ in needed] == downloads.split()
    assert sum(size_mb for _, size_mb in needed) <= 60


@pytest.mark.parametrize("word", ["nonsense", "--nonsense"])
def test_setup_names_its_parts_if_one_is_misspelt(word: str) -> None:
    done = subprocess.run(
        [CHECKOUT / "scripts/setup", word], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.endswith(f" {word}")
    assert "demo|test|browser|build|containers|packages|slurm|engines" in second


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
        subprocess.run(["sleep", "6"])  # after 5 s, execnet interrupts a worker again
        started.kill()

def test_a_test_waits_for_its_condition(process):
    pathlib.Path("pid").write_text(f"{process.pid}\\n")
    process.wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "number"), [("0", signal.SIGTERM), ("1", signal.SIGTERM), ("1", signal.SIGINT)]
)
def test_tests_that_are_interrupted_end_what_they_started(
    tmp_path: Path, workers: str, number: signal.Signals
) -> None:
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
        os.killpg(tests.pid, number)
        assert tests.wait() != 0
    eventually(lambda: not is_running(int(started)), "the end of the process")
