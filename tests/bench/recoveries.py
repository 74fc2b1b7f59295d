"""From the SIGKILL of control daemons, one or eight together, until the limits are in effect again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.asking import Http
from bench.floors import control_ms
from bench.running import Daemon, make_host
from bench.values import Aim, BenchError, Line, Rounds, Settings
from simhost import SimHost

GROUP = "recovery"
FLOOR = "a bare control daemon"
AIM = Aim(20)
#: The number of GPUs, what has a control daemon, and how many rounds in a full and in a quick run.
SIZES = ((1, "host", 15, 4), (8, "host", 10, 2), (8, "gpu", 10, 2))


def lines(settings: Settings) -> Iterator[Line]:
    for gpus, scope, full, quick in SIZES:
        with make_host(gpus, scope=scope) as host:
            rounds = Rounds("ms")
            steps = [("floor", partial(control_ms, host)), ("recovery", partial(_recovery_ms, host))]
            rounds.run(settings.rounds(full, quick), steps)
        count = gpus if scope == "gpu" else 1
        what = f"recovery of {_some(count, 'control daemon')}, {_some(gpus, 'GPU')}"
        yield Line(GROUP, what, rounds.of("recovery"), rounds.of("floor"), FLOOR, AIM)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _recovery_ms(host: SimHost) -> float:
    """Each round with a daemon of its own: after a second death soon after the first it would wait."""
    with Daemon(host) as daemon:
        before = _domains(daemon)
        taken_ms = daemon.recovery_ms([domain["pid"] for domain in before])
        after = _domains(daemon)
    for old, new in zip(before, after):
        if new["state"] != "ready" or new["restarts"] != 1 or new["pid"] == old["pid"]:
            raise BenchError(f"the control daemon did not recover: {new}")
    return taken_ms


def _domains(daemon: Daemon) -> list[dict[str, Any]]:
    with Http(daemon.socket) as http:
        body, _ = http.ask("/v1/status")
    domains: list[dict[str, Any]] = json.loads(body)["domains"]
    return domains
