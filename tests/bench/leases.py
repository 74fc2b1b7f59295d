"""Leases: how long one takes to be taken and given back, and how many of them that are in a second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.asking import Http
from bench.running import running
from bench.values import Line, Rounds, Samples, Settings

GROUP = "lease"
FLOOR = "/v1/devices twice, on such connections"
_WITHIN = "one client, one lease after another"


def lines(settings: Settings) -> Iterator[Line]:
    """Two lines each for a kept connection and for new ones."""
    with running(1) as daemon, Http(daemon.socket) as kept:
        rounds = Rounds("us")
        steps: list[tuple[str, Callable[[], float]]] = [
            ("kept", partial(_lease_us, lambda target, method: kept.ask(target, method)[0])),
            ("kept floor", partial(_floor_us, lambda target, method: kept.ask(target, method)[0])),
            ("new", partial(_lease_us, partial(_ask_newly, daemon.socket))),
            ("new floor", partial(_floor_us, partial(_ask_newly, daemon.socket))),
        ]
        rounds.run(settings.rounds(1000, 200), steps)
    for name, where in (("kept", "on a kept connection"), ("new", "on new connections")):
        measured = rounds.of(name)
        yield Line(GROUP, f"a lease taken and released {where}", measured, rounds.of(f"{name} floor"), FLOOR)
        a_second = Samples(tuple(1e6 / taken_us for taken_us in measured.values), "/s")
        yield Line(GROUP, f"leases {where}", a_second, None, _WITHIN)


Ask = Callable[[str, str], bytes]


def _lease_us(ask: Ask) -> float:
    begin_s = time.perf_counter()
    lease = json.loads(ask("/v1/leases", "POST"))
    ask(f"/v1/leases/{lease['id']}", "DELETE")
    return (time.perf_counter() - begin_s) * 1e6


def _floor_us(ask: Ask) -> float:
    begin_s = time.perf_counter()
    for _ in range(2):
        ask("/v1/devices", "GET")
    return (time.perf_counter() - begin_s) * 1e6


def _ask_newly(path: str, target: str, method: str) -> bytes:
    with Http(path) as http:
        return http.ask(target, method)[0]
