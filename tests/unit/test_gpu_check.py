"""scripts/gpu-check without a GPU: every question is asked, none hinders the next, and nothing is left.

The driver is a stand-in (tests/simhost/libcuda.c, and the servers of simhost.mps), the control daemon
NVIDIA's own. So this shows that the program works, and nothing about MPS.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.daemon_host import control_daemons, eventually
from simhost import SimHost
from simhost.install import libcuda
from simhost.mps import StandIns

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAM = SCRIPTS / "gpu-check"
UUID = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"

#: Words of the answers to each question, by which is seen that it was asked to its end.
ANSWERS = {
    "start": [" in CUDA), under MPS", "3 s after its last client, the server runs"],
    "killed_client": ["client b continued", "a new client ran a kernel"],
    "deaths": [
        "job a continued",
        "the next one was READY",
        "`yunion-mps terminate` of the new job: job a continued",
    ],
    "killed_control": [
        "OUTSIDE MPS, without a limit",
        "5 s after its last client, the old server has exited",
    ],
    "killed_server": ["client a got CUDA_ERROR_MPS_RPC_FAILURE (806)", "a new client ran a kernel"],
    "terminate_client": ["client a got CUDA_ERROR_MPS_CLIENT_TERMINATED (810)", "client b continued"],
    "memory_limit": ["The default limit 5760M for device 0 did NOT hold", "5760M gave 640 MiB more than 5G"],
    "life": [
        "`yunion-mps run true`",
        "The budget of one of 4 devices",
        "SIGTERM with a running job: exit status 0",
    ],
    "thread_limit": ["100 % held: 16 of 16 SMs", "Four at once", "10 % did NOT hold"],
    "fault": ["CUDA_ERROR_ILLEGAL_ADDRESS (700)", "new ones were tried 1 times"],
    "memory_by_uuid": ["for the UUID did NOT hold", "in a client's environment held"],
    "nvml": ["NVIDIA-SMI", "nvmlDeviceGetProcessUtilization"],
    "shutdown_now": ["client a got CUDA_ERROR_MPS_RPC_FAILURE (806)", "The control daemon runs"],
    "quit_timeout": ["client a got CUDA_ERROR_MPS_RPC_FAILURE (806)", "The control daemon has exited"],
    "sixty_clients": ["Of 62 clients started at once, ", "2 s later, "],
    "time_slicing": ["It was READY", "job a continued", "job b continued"],
}

#: Questions of the test's own, which gpu-check asks as it asks its own.
QUESTIONS = """
import subprocess, sys, time
sys.path.insert(0, {scripts!r})
{before}
from gpu_check.bench import question
from gpu_check.cli import main

@question("What of it?", 5, "")
def fine(bench):
    bench.answer("It is fine.")
@question("What of it?", 5, "")
def breaks(bench):
    bench.answer("Half of it.")
    raise ValueError("what a pity")
@question("What of it?", 1, "")
def hangs(bench):
    subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 1000"], start_new_session=True)
    bench.answer("It began to hang.")
    time.sleep(1000)

sys.exit(main(sys.argv[1:], [breaks, hangs, fine]))
"""


@pytest.fixture
def host() -> Iterator[SimHost]:
    """A host with the stand-ins, and the check that nothing of gpu-check is left on it."""
    with SimHost.create([{"kind": "h200", "uuid": UUID}]) as host, StandIns(host) as stand_ins:
        shutil.copy(libcuda(), host.root / "lib/libcuda.so.1")
        temporary = host.root / "t"
        temporary.mkdir()
        host.env["TMPDIR"] = str(temporary)
        yield host
        assert stand_ins.servers() == []
        assert control_daemons(host.root) == []
        assert list(temporary.iterdir()) == []


def run_gpu_check(host: SimHost, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return host.run([PROGRAM, "--output", output, *options], timeout=120)


def page_in(output: Path) -> str:
    (file,) = output.iterdir()
    assert file.name.endswith("-stand-in-gpu-0.md")
    return file.read_text()


def test_gpu_check_without_a_driver_says_what_it_searched(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a driver is here")
    result = subprocess.run([PROGRAM, "--output", tmp_path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gpu-check: missing: libcuda.so.1 (searched: the loader's path, ")
    assert list(tmp_path.iterdir()) == []


def test_gpu_check_without_a_gpu_says_what_cuda_says(host: SimHost, tmp_path: Path) -> None:
    host.env["STANDIN_NO_DEVICE"] = "1"
    result = run_gpu_check(host, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "missing: a GPU that can be used: " in result.stdout
    assert "CUDA_ERROR_NO_DEVICE (100) from cuInit" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ANSWERS)
def test_gpu_check_asks_a_question_to_its_end(host: SimHost, tmp_path: Path, name: str) -> None:
    result = run_gpu_check(host, tmp_path, "--only", name)
    assert result.returncode == 0, result.stderr
    page = page_in(tmp_path)
    assert f" {name}: answered\n" in result.stdout, page
    for words in ANSWERS[name]:
        assert words in page


def test_gpu_check_has_no_other_questions(tmp_path: Path) -> None:
    result = subprocess.run(
        [PROGRAM, "--only", "x"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert result.returncode == 2
    assert f"unknown question: x (choose from: {', '.join(ANSWERS)})" in result.stderr


def test_gpu_check_asks_nothing_about_mps_if_no_client_runs(host: SimHost, tmp_path: Path) -> None:
    (host.root / "usr/bin/behaviour").write_text("failing")
    result = run_gpu_check(host, tmp_path, "--only", "start,killed_client,thread_limit")
    assert result.returncode == 0, result.stderr
    assert "the first client did not run a kernel: CUDA_ERROR_MPS_CONNECTION_FAILED" in page_in(tmp_path)
    assert "killed_client: not asked: start has no good answer" in result.stdout


def questions(tmp_path: Path, before: str = "") -> list[object]:
    program = tmp_path / "questions.py"
    program.write_text(QUESTIONS.format(scripts=str(SCRIPTS), before=before))
    return [sys.executable, program, "--output", tmp_path / "out"]


def test_no_question_of_gpu_check_hinders_the_next(host: SimHost, tmp_path: Path) -> None:
    result = host.run(questions(tmp_path), timeout=120)
    assert result.returncode == 0, result.stderr
    page = page_in(tmp_path / "out")
    assert "Half of it." in page
    assert "ValueError: what a pity" in page
    assert "It began to hang." in page
    assert "*no full answer within 1.0 s, " in page
    assert "It is fine.\n\n*answered, " in page


def test_gpu_check_without_psutil_says_what_that_costs(host: SimHost, tmp_path: Path) -> None:
    before = "sys.modules['psutil'] = None"
    result = host.run([*questions(tmp_path, before), "--only", "fine"], timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gpu-check: missing: the Python module psutil: ")
    assert "It is fine." in page_in(tmp_path / "out")


def test_an_interrupted_gpu_check_keeps_its_answers(host: SimHost, tmp_path: Path) -> None:
    run = host.popen([PROGRAM, "--output", tmp_path, "--only", "killed_client,killed_server"])
    eventually(lambda: any(tmp_path.iterdir()) and "## " in page_in(tmp_path), "a question")
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "interrupted; the answers so far have been written" in output
    assert "## killed_client: What does SIGKILL" in page_in(tmp_path)
