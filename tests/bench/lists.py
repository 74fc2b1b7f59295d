"""`yunion-mps list` for few and for many devices, all of them printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from bench.floors import program, python_ms, run_ms
from bench.running import running
from bench.values import Aim, BenchError, Line, Rounds, Settings
from simhost import SimHost

GROUP = "list"
FLOOR = 'python3 -I -c "import click"'
#: GPUs, devices of each, rounds in a full and in a quick run, and the aim.
SIZES = ((1, 4, 40, 10, Aim(1.5)), (16, 48, 30, 5, Aim(2.5)), (64, 48, 20, 3, None))


def lines(settings: Settings) -> Iterator[Line]:
    for gpus, virtual_number, full, quick, aim in SIZES:
        devices = gpus * virtual_number
        with running(gpus, virtual_number) as daemon:
            daemon.answered_ms()
            argv = [program(daemon.host, "yunion-mps"), "list", "--limit", "0"]
            _check(daemon.host, argv, devices)
            steps = [
                ("floor", partial(python_ms, daemon.host, "import click", sys.executable)),
                ("list", partial(run_ms, argv, daemon.host.env)),
            ]
            rounds = Rounds("ms")
            rounds.run(settings.rounds(full, quick), steps)
        yield Line(
            GROUP, f"list, {devices:,} devices printed", rounds.of("list"), rounds.of("floor"), FLOOR, aim
        )


def _check(host: SimHost, argv: list[str], devices: int) -> None:
    """A listing that is quick because it is short would be worth nothing."""
    printed = host.run(argv)
    rows = [line for line in printed.stdout.splitlines() if "NVIDIA_MPS" in line]
    if printed.returncode or len(rows) != devices:
        raise BenchError(f"{' '.join(argv)} shows {len(rows)} of {devices} devices; {printed.stderr}")
