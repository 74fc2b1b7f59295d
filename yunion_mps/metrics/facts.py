"""What the metrics are made of: taken at one moment, and never changed after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from yunion_mps.http.counting import Counted
from yunion_mps.metrics.use import Use
from yunion_mps.models import DomainStatus

Json = dict[str, Any]


class Moment(NamedTuple):
    """Now: the wall clock's time in s since 1970, and that of the clock which domains count by."""

    wall_s: float
    clock_s: float


class Queue(NamedTuple):
    """Who has devices, by what ends it, and who waits; `longest_s` is how long the first of them has."""

    leases: Mapping[str, int] = {}
    waiting: int = 0
    longest_s: float = 0.0


class Facts(NamedTuple):
    """All of it: `status`, `gpus` and `devices` are the service's own words.

    `ill` are the addresses of GPUs that cannot be used themselves, and `given` is by address the budget (MiB
    and percent) that who has a device was given, which a reload may have changed for the next one.
    `probe_s` is by domain how long its control daemon took to answer last, and `events` are how many were
    recorded since the start, by kind and severity. `use` is None where nobody could tell yet.
    """

    now: Moment
    revision: str
    status: Json
    gpus: Sequence[Json]
    devices: Sequence[Json]
    domains: Sequence[DomainStatus]
    probe_s: Mapping[str, float]
    queue: Queue
    events: Mapping[tuple[str, str], int]
    requests: Counted
    use: Use | None = None
    ill: Collection[str] = ()
    given: Mapping[str, tuple[int, float]] = {}
