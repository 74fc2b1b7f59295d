"""scripts/gpu-check without a GPU: that it says so, that no step hinders the next, and that every step runs.

The driver is a stand-in (tests/simhost/libcuda.c, and the servers of simhost.mps), the control daemon
NVIDIA's own. So this shows that the program works, and nothing about MPS.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.daemon_host import eventually
from simhost import SimHost
from simhost.install import libcuda
from simhost.mps import StandIns

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = CHECKOUT / "scripts"
PROGRAM = SCRIPTS / "gpu-check"
UUID = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
STEM = "*-stand-in-gpu-0"

#: Steps of the test's own, run as `gpu-check` runs its steps.
STEPS = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {scripts!r})
from gpu_check.cli import main
from gpu_check.values import Step, StepError, StepSkipped

def fine(context, report):
    report.answer("q", "It is fine.")
    report.raw("environment", context.host.environment["GPU_CHECK_RUN"])
def raises(context, report):
    report.answer("q", "Half of it.")
    raise ValueError("what a pity")
def troubled(context, report):
    raise StepError("no server")
def skips(context, report):
    raise StepSkipped("not here")
def dies(context, report):
    os._exit(7)
def hangs(context, report):
    report.answer("q", "It began to hang.")
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
    report.raw("child", child.pid)
    time.sleep(1000)
def leaves(context, report):
    report.raw("child", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)

steps = [Step(f.__name__, f"The step that is called {{f.__name__}}", f, 3.0, [("q", "What of it?")])
         for f in (fine, raises, troubled, skips, dies, hangs, leaves)]
sys.exit(main(sys.argv[1:], [*steps, steps[0]._replace(name="again")]))
"""


@pytest.fixture
def host() -> Iterator[SimHost]:
    with SimHost.create([{"kind": "h200", "uuid": UUID}]) as host, StandIns(host) as stand_ins:
        shutil.copy(libcuda(), host.root / "lib/libcuda.so.1")
        yield host
        assert stand_ins.servers() == []


def check(host: SimHost, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return host.run([PROGRAM, "--output", output, *options], timeout=120)


def written(output: Path) -> tuple[dict[str, Any], str]:
    (file,) = output.glob(f"{STEM}.json")
    result: dict[str, Any] = json.loads(file.read_text())
    return result, file.with_suffix(".md").read_text()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_without_a_driver_gpu_check_says_what_it_searched_and_exits_0(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a driver is here")
    result = subprocess.run([PROGRAM, "--output", tmp_path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gpu-check: skipped: libcuda.so.1 was not found (searched ")
    assert "/usr/local/nvidia/lib64" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_with_a_driver_but_no_gpu_gpu_check_says_so_and_exits_0(host: SimHost, tmp_path: Path) -> None:
    host.env["STANDIN_NO_DEVICE"] = "1"
    result = check(host, tmp_path)
    assert result.returncode == 0
    assert "skipped: libcuda.so.1 was found, but no GPU can be used with it" in result.stdout
    assert "CUDA_ERROR_NO_DEVICE (100) from cuInit" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_steps_run_to_their_end_and_leave_nothing_behind(host: SimHost, tmp_path: Path) -> None:
    steps = "memory_default,memory_client,end_shutdown_f,users_multi,recovery,outside"
    result = check(host, tmp_path, "--only", steps)
    assert result.returncode == 0, result.stderr
    found, page = written(tmp_path)
    by_name = {step["name"]: step for step in found["steps"]}
    assert list(by_name) == steps.split(",")
    assert by_name.pop("users_multi")["status"] in ("done", "skipped")  # by the release; or it needs root
    assert {name: (step["status"], step["reason"]) for name, step in by_name.items()} == dict.fromkeys(
        by_name, ("done", "")
    )
    for entry in found["catalogue"]:
        for name, question in entry["questions"]:
            assert f"- **{question}** " in page
            if entry["name"] in by_name:
                assert by_name[entry["name"]]["answers"][name] in page
    assert [step["left_behind"] for step in found["steps"]] == [[]] * 6
    # The stand-in keeps the limits of a client's own environment, and knows of no others.
    answers = by_name["memory_client"]["answers"]
    assert answers["odd"] == "5760M is enforced as 5760M: 640 MiB more could be allocated than with 5G."
    assert "NOT enforced" in by_name["memory_default"]["answers"]["number"]
    assert "CUDA_ERROR_MPS_RPC_FAILURE (806)" in by_name["end_shutdown_f"]["answers"]["clients"]


def test_no_step_affects_the_next_or_leaves_a_process(host: SimHost, tmp_path: Path) -> None:
    program = tmp_path / "steps.py"
    program.write_text(STEPS.format(scripts=str(SCRIPTS)))
    result = host.run([sys.executable, program, "--output", tmp_path / "out"], timeout=120)
    assert result.returncode == 0, result.stderr
    found, page = written(tmp_path / "out")
    steps = {step["name"]: step for step in found["steps"]}
    assert {name: step["status"] for name, step in steps.items()} == {
        "fine": "done",
        "raises": "failed",
        "troubled": "failed",
        "skips": "skipped",
        "dies": "failed",
        "hangs": "timed out",
        "leaves": "done",
        "again": "done",
    }
    assert steps["raises"]["reason"] == "ValueError: what a pity"
    assert "what a pity" in steps["raises"]["raw"]["traceback"]
    assert steps["raises"]["answers"] == {"q": "Half of it."}
    assert steps["dies"]["reason"] == "its process exited with status 7 and no message"
    assert steps["hangs"]["answers"] == {"q": "It began to hang."}
    assert steps["leaves"]["left_behind"] == [
        f"sleep (PID {steps['leaves']['raw']['child']}) was still running and was ended"
    ]
    assert is_gone(steps["hangs"]["raw"]["child"])
    assert is_gone(steps["leaves"]["raw"]["child"])
    assert not Path(steps["fine"]["raw"]["environment"]).exists()
    assert "**Timed out: it did not finish within " in page
    assert "**Skipped: not here.**" in page


def test_an_interrupted_run_keeps_its_results_and_leaves_no_process(host: SimHost, tmp_path: Path) -> None:
    run = host.popen([PROGRAM, "--output", tmp_path, "--only", "outside,end_sigstop,recovery"])
    # end_sigstop takes at least ten seconds, so the signal comes in its midst.
    eventually(
        lambda: b'"status": "done"' in b"".join(f.read_bytes() for f in tmp_path.glob("*.json")), "a result"
    )
    first, _ = written(tmp_path)
    eventually(lambda: bool(_of_runs(host)), "a control daemon")
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "interrupted; the results so far have been written" in errors
    assert _of_runs(host) == []
    second, page = written(tmp_path)
    assert second["steps"][0] == first["steps"][0]
    assert [step["status"] for step in second["steps"]] == ["done", "failed"]
    assert "**Not measured.**" in page


def _of_runs(host: SimHost) -> list[int]:
    """The control daemons that this host's gpu-check has started."""
    root = f"YUNION_MPS_ROOT={host.root}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes() + b"\0"
        except OSError:
            continue
        if root in environment and b"GPU_CHECK_RUN=" in environment and b"CUDA_MPS_LOG_" in environment:
            found.append(int(entry))
    return found


def test_another_control_daemon_is_not_touched(host: SimHost, tmp_path: Path) -> None:
    pipe = host.root / "tmp/other"
    pipe.mkdir(parents=True)
    variables = {**host.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    control = shutil.which("nvidia-cuda-mps-control", path=host.env["PATH"])
    assert control
    other = subprocess.Popen(
        [control, "-f"], env=variables, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        eventually(lambda: (pipe / "control").exists(), "a control daemon")
        host.env["CUDA_MPS_PIPE_DIRECTORY"] = str(pipe)
        assert check(host, tmp_path, "--only", "outside,end_shutdown_f").returncode == 0
        found, page = written(tmp_path)
        assert [step["status"] for step in found["steps"]] == ["done", "done"]
        assert f"{pipe} has the socket of another control daemon, which was not touched." in page
        assert other.poll() is None
        listed = subprocess.run(
            [control], input="get_server_list\n", env=variables, capture_output=True, text=True, timeout=60
        )
        assert (listed.returncode, listed.stdout) == (0, "")
    finally:
        other.kill()
        other.wait()


def test_a_prohibited_compute_mode_is_not_changed(host: SimHost, tmp_path: Path) -> None:
    host.gpus[0].compute_mode = "prohibited"
    assert check(host, tmp_path).returncode == 0
    found, page = written(tmp_path)
    assert {step["status"] for step in found["steps"]} == {"skipped"}
    assert "The GPU's compute mode is Prohibited; it was not changed." in page
    assert host.gpus[0].compute_mode == "prohibited"


def test_a_second_run_on_the_same_day_has_its_own_files(host: SimHost, tmp_path: Path) -> None:
    host.gpus[0].compute_mode = "prohibited"  # so that all steps are skipped
    for _ in range(2):
        assert check(host, tmp_path, "--only", "outside").returncode == 0
    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.md"))) == 2
