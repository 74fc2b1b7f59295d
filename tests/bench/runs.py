"""`yunion-mps run -- true`: a device taken and the command begun, against a listing and `true` alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.floors import program, run_ms
from bench.running import running
from bench.values import Aim, BenchError, Line, Rounds, Settings

GROUP = "run"
#: At most so many times a listing: both are one question to the daemon, asked by the same program.
AIM = Aim(1.5)


def lines(settings: Settings) -> Iterator[Line]:
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
            ("list", partial(run_ms, [ours, "list", "--limit", "0"], host.env)),
            ("run", partial(run_ms, [ours, "run", "--", "true"], host.env)),
        ]
        rounds.run(settings.rounds(40, 10), steps)
    yield Line(GROUP, "run -- true", rounds.of("run"), rounds.of("list"), "yunion-mps list, 4 devices", AIM)
    yield Line(GROUP, "run -- true, beside true", rounds.of("run"), rounds.of("true"), "true")
