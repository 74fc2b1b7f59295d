"""`scripts/demo` is what a newcomer runs first, so it is run here as they do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from simhost import SimHost
from simhost.mps import StandIns

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SMI = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400, Tesla P40, 00000000:00:06.0, 23040 MiB"


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CHECKOUT / "scripts/demo"), *options],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_the_demo_and_the_readme_print_what_was_recorded() -> None:
    command = [str(CHECKOUT / "scripts/sessions"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_record_has_the_reference_case_and_an_enforcing_gpu() -> None:
    text = (CHECKOUT / "docs/demo.txt").read_text()
    steps = re.split(r"^==> ", text, flags=re.MULTILINE)
    assert [step.partition(".")[0] for step in steps[1:]] == [str(number) for number in range(1, 14)]
    assert "virtual_number: 4" in steps[1]
    assert f"{SMI}, Exclusive_Process" in steps[3]
    addresses = re.findall(r"\b00:06\.0-\d\b", steps[4])
    assert addresses == ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]
    assert "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***" in steps[4]
    assert re.findall(r"^[\d.]+G?$", steps[5], re.MULTILINE) == ["5G", "25.0"]
    assert "--allow-unlimited" in steps[7]
    assert f"{SMI}, Default" in steps[8]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20389M" in steps[10]
    assert re.search("00:06.0-0 .*python3 demo_job.py", steps[11])
    assert steps[13].endswith("The compute modes are as they were before.\n")
    for line in text.splitlines():
        assert len(line) <= 100 or line.startswith(("yunion-mps:", "GPU-")), line


def test_the_demo_says_that_the_simulated_host_uses_no_compute_mode() -> None:
    result = demo("--compute-mode", "keep")
    assert result.returncode == 0, result.stderr
    assert "\n(--compute-mode keep is ignored: it applies to real GPUs only.)\n" in result.stdout
    assert f"{SMI}, Exclusive_Process" in result.stdout


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([], "Default"),
        (["--compute-mode", "keep"], "Default"),
        (["--compute-mode", "exclusive_process"], "Exclusive_Process"),
    ],
)
def test_with_a_driver_the_demo_keeps_the_compute_mode_unless_told(options: list[str], mode: str) -> None:
    with SimHost.create([{"kind": "h100", "count": 2}]) as host, StandIns(host) as stand_ins:
        stand_ins.install_libcuda()
        result = host.run([str(CHECKOUT / "scripts/demo"), *options], timeout=120)
        assert result.returncode == 0, result.stderr
        assert "simulated hosts" not in result.stdout
        assert "is ignored here" not in result.stdout
        modes = re.findall(r"MiB, (\w+)$", result.stdout, re.MULTILINE)
        assert modes == [mode, mode, *["Default"] * 4]  # two GPUs, while it runs and after each part
        assert "Devices:  8 of 8 available" in result.stdout
        assert result.stdout.endswith("The compute modes are as they were before.\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--nonsense"],
        ["--compute-mode"],
        ["--compute-mode", ""],
        ["--compute-mode", "bogus"],
        ["--compute-mode", "keep", "more"],
        [""],
    ],
)
def test_the_demo_refuses_invalid_arguments(options: list[str]) -> None:
    result = demo(*options)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"demo: invalid arguments: {' '.join(options)}\n")
    assert "\n  scripts/demo [--compute-mode keep|exclusive_process]\n" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
@pytest.mark.parametrize("script", ["demo", "test"])
def test_a_script_that_needs_root_says_so_at_once_and_what_to_do(script: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(CHECKOUT / "scripts", f"{place}/scripts")  # the checkout may let nobody in
        Path(place).chmod(0o755)
        result = subprocess.run(
            [f"scripts/{script}"],
            cwd=place,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        f"scripts/{script}: root is required to change compute modes and to run jobs as other users",
        f"scripts/{script}: run it as root: sudo scripts/{script}",
    ]
