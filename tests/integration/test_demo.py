"""`scripts/demo` is what a newcomer runs first, so it is run here as they do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from simhost import SimHost

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SMI = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400, Tesla P40, 00000000:00:06.0, 23040 MiB"


def test_the_demo_shows_the_main_job_in_order_and_puts_everything_back() -> None:
    result = subprocess.run(
        [str(CHECKOUT / "scripts/demo")],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    steps = re.split(r"^==> ", result.stdout, flags=re.MULTILINE)
    assert [step[:2] for step in steps[1:]] == ["1.", "2.", "3.", "4.", "5.", "6.", "7."]
    assert "virtual_number: 4" in steps[1]
    assert "The configuration is right." in steps[1]
    assert f"{SMI}, Exclusive_Process" in steps[3]
    addresses = re.findall(r"\| (00:06\.0-\d) ", steps[4])
    assert addresses == ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]
    assert "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***" in steps[4]
    assert re.findall(r"^[\d.]+G?$", steps[5], re.MULTILINE) == ["5G", "25.0"]
    assert "State:    ready" in steps[6]
    assert "Devices:  4 of 4 available" in steps[6]
    assert f"{SMI}, Default" in steps[7]
    assert steps[7].endswith("The compute modes are what they were.\n")
    assert "is ready: 4 of 4 devices available, 1 of 1 control daemons serving" in result.stderr


def test_the_demo_runs_on_the_gpus_of_a_host_with_a_driver_and_keeps_their_compute_mode() -> None:
    with SimHost.create([{"kind": "h100", "count": 2}]) as host:
        result = host.run([str(CHECKOUT / "scripts/demo")], timeout=120)
        assert result.returncode == 0, result.stderr
        assert "simulated" not in result.stdout
        modes = re.findall(r"MiB, (\w+)$", result.stdout, re.MULTILINE)
        assert modes == ["Default"] * 4  # two GPUs, while it runs and afterwards
        assert "Devices:  8 of 8 available" in result.stdout
        assert result.stdout.endswith("The compute modes are what they were.\n")


def test_the_demo_refuses_an_option_that_it_does_not_know() -> None:
    result = subprocess.run(
        [str(CHECKOUT / "scripts/demo"), "--nonsense"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "scripts/demo [--compute-mode exclusive_process]" in result.stderr
