"""A scrape of the metrics, what others notice of it, and what stays in memory after it."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

from bench.asking import Http, request_for
from bench.idling import memory_mib
from bench.running import Daemon, running
from bench.values import Aim, Line, Samples, Settings

GROUP = "scrape"
TARGET = "/metrics"
#: GPUs, and devices of each.
SIZES = ((1, 4), (64, 48))
#: Metrics are kept for a second, so the next one is asked for after it.
_EXPIRY_S = 1.1
_FLOOR = "no floor: it is made each time"


def lines(settings: Settings) -> Iterator[Line]:
    """Three lines for a small host and for the largest."""
    for gpus, number in SIZES:
        with running(gpus, number) as daemon:
            daemon.answered_ms()
            rounds = [_scrape(daemon) for _ in range(settings.rounds(10, 3) + 1)][1:]
            devices = f"{gpus * number:,} devices"
            took, beside = (Samples(tuple(each), "ms") for each in zip(*rounds))
            yield Line(GROUP, f"a scrape, {devices}", took, None, _FLOOR, Aim(1000, "ms"))
            yield Line(GROUP, f"longest wait beside it, {devices}", beside, None, _FLOOR, Aim(50, "ms"))
            time.sleep(_EXPIRY_S)  # what is kept for those who scrape within it does not stay
            resident = Samples((memory_mib(daemon.pid, "Rss"),), "MiB")
            yield Line(GROUP, f"RSS after it, {devices}", resident, None, _FLOOR, Aim(40, "MiB"))


def _scrape(daemon: Daemon) -> tuple[float, float]:
    """How long it took, and the longest of the answers to another client meanwhile, in ms."""
    time.sleep(_EXPIRY_S)
    longest_s = 0.0
    with Http(daemon.socket) as other, Http(daemon.socket) as scraper:
        begin_s = time.perf_counter()
        scraper.send(request_for(TARGET))
        while not select.select([scraper], [], [], 0)[0]:
            asked_s = time.perf_counter()
            other.ask("/v1/status")
            longest_s = max(longest_s, time.perf_counter() - asked_s)
        scraper.answer(TARGET)
        return (time.perf_counter() - begin_s) * 1e3, longest_s * 1e3
