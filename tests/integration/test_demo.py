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
    "options", [["--nonsense"], ["--compute-mode", "bogus"], ["--compute-mode", "keep", "more"]]
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
        shutil.copytree(CHECKOUT / "scripts", f"{place}/scripts")  # the checkout may be closed to others
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
