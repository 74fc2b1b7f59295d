"""From the control daemon's SIGKILL until the limits are in force again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.asking import Http
from bench.floors import control_ms
from bench.running import Daemon, make_host
from bench.values import BenchError, Line, Rounds, Settings
from simhost import SimHost

GROUP = "recovery"
FLOOR = "a bare control daemon"
#: The number of GPUs, and how many rounds in a full and in a quick run.
SIZES = ((1, 15, 4), (8, 10, 2))


def lines(settings: Settings) -> Iterator[Line]:
    """One line for each size."""
    for gpus, full, quick in SIZES:
        with make_host(gpus) as host:
            rounds = Rounds("ms")
            steps = [("floor", partial(control_ms, host)), ("recovery", partial(_recovery_ms, host))]
            rounds.run(settings.rounds(full, quick), steps)
        what = f"recovery from SIGKILL, {gpus} GPU{'s' if gpus > 1 else ''}"
        yield Line(GROUP, what, rounds.of("recovery"), rounds.of("floor"), FLOOR)


def _recovery_ms(host: SimHost) -> float:
    """Each round with a daemon of its own: after a second death soon after the first it would wait."""
    with Daemon(host) as daemon:
        before = _domain(daemon)
        taken_ms = daemon.recovery_ms(before["pid"])
        after = _domain(daemon)
    if after["state"] != "ready" or after["restarts"] != 1 or after["pid"] == before["pid"]:
        raise BenchError(f"the control daemon did not recover: {after}")
    return taken_ms


def _domain(daemon: Daemon) -> dict[str, Any]:
    with Http(daemon.socket) as http:
        body, _ = http.ask("/v1/status")
    domain: dict[str, Any] = json.loads(body)["domains"][0]
    return domain
