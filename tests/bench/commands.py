"""The commands: `list` for few and for many devices, and `run`, which becomes a program with a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from bench.floors import program, python_ms, run_ms
from bench.running import running
from bench.values import Aim, BenchError, Line, Rounds, Settings
from simhost import SimHost

_FLOOR = 'python3 -I -c "import click"'
#: GPUs, devices of each, rounds in a full and in a quick run, and the aim.
_SIZES = ((1, 4, 40, 10, Aim(1.5)), (16, 48, 30, 5, Aim(2.5)), (64, 48, 20, 3, None))


def list_lines(settings: Settings) -> Iterator[Line]:
    for gpus, virtual_number, full, quick, aim in _SIZES:
        devices = gpus * virtual_number
        with running(gpus, virtual_number) as daemon:
            daemon.answered_ms()
            argv = [program(daemon.host, "yunion-mps"), "isolated-device-list", "--limit", "0"]
            _check(daemon.host, argv, devices)
            steps = [
                ("floor", partial(python_ms, daemon.host, "import click", sys.executable)),
                ("list", partial(run_ms, argv, daemon.host.env)),
            ]
            rounds = Rounds("ms")
            rounds.run(settings.rounds(full, quick), steps)
        yield Line(f"list, {devices:,} devices printed", rounds.of("list"), rounds.of("floor"), _FLOOR, aim)


def _check(host: SimHost, argv: list[str], devices: int) -> None:
    """A listing that is quick because it is short would be worth nothing."""
    printed = host.run(argv)
    rows = [line for line in printed.stdout.splitlines() if "NVIDIA_MPS" in line]
    if printed.returncode or len(rows) != devices:
        raise BenchError(f"{' '.join(argv)} shows {len(rows)} of {devices} devices; {printed.stderr}")


#: At most so many times a listing: both are one question to the daemon, asked by the same program.
_RUN_AIM = Aim(1.5)


def run_lines(settings: Settings) -> Iterator[Line]:
    with running(1) as daemon:
        daemon.answered_ms()
        host = daemon.host
        ours = program(host, "yunion-mps")
        command = [ours, "run", "--", "printenv", "YUNION_MPS_DEVICE"]
        if host.run(command).stdout.strip() != "00:06.0-0":
            raise BenchError(f"{' '.join(command)} does not give the first device")
        rounds = Rounds("ms")
        steps = [
            ("true", partial(run_ms, [program(host, "true")], host.env)),
            ("list", partial(run_ms, [ours, "isolated-device-list", "--limit", "0"], host.env)),
            ("run", partial(run_ms, [ours, "run", "--", "true"], host.env)),
        ]
        rounds.run(settings.rounds(40, 10), steps)
    yield Line("run -- true", rounds.of("run"), rounds.of("list"), "yunion-mps list, 4 devices", _RUN_AIM)
    yield Line("run -- true, beside true", rounds.of("run"), rounds.of("true"), "true")
