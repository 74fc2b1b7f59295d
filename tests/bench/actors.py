"""Actors of Ray: how long one takes from its creation until its first answer, with and without a device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.running import running
from bench.values import Line, Rounds, Settings
from engines.processes import ENGINES
from engines.ray_cluster import Driver, Ray
from integration.daemon_host import eventually
from integration.lease_host import leases_of


def lines(settings: Settings) -> Iterator[Line]:
    if not (ENGINES / "ray").exists():
        sys.stderr.write("bench: ray is skipped, because Ray is not installed: run scripts/setup engines\n")
        return
    rounds = Rounds("ms")
    with running(1) as daemon, Ray([daemon]).start() as ray, ray.driver() as driver:

        def with_device_ms() -> float:
            taken_ms = _start_ms(driver, "**yunion_mps.ray.options()")
            eventually(lambda: leases_of(daemon) == [], "the end of the lease")
            return taken_ms

        steps: list[tuple[str, Callable[[], float]]] = [
            ("plain", partial(_start_ms, driver, "")),
            ("device", with_device_ms),
        ]
        rounds.run(settings.rounds(15, 3), steps)
    floor_is = "an actor without a device"
    yield Line("start of a Ray actor with a device", rounds.of("device"), rounds.of("plain"), floor_is)


def _start_ms(driver: Driver, options: str) -> float:
    begin_s = time.perf_counter()
    driver(f"one = actor({options})")
    place = driver("ray.get(one.here.remote())")
    taken_ms = (time.perf_counter() - begin_s) * 1000
    assert place.endswith("/None") != bool(options), f"an actor with the options {options!r} is at {place}"
    driver("ray.kill(one)")
    return taken_ms
