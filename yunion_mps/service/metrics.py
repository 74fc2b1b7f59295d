"""The facts behind the metrics, collected at one point in time.

A scrape does not wait long for the driver: if it hangs, the use is that of an earlier observation.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import revision
from yunion_mps.models import DomainStatus
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.observer import HostUsage, Observer
from yunion_mps.service.queries import Filters, Queries
from yunion_mps.service.status import StatusService
from yunion_mps.service.usage import LatestPoll
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers

#: The buckets of request durations in s, from a cached answer to a reload that waits for jobs.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class LatencyHistogram(NamedTuple):
    """The number of answers in each bucket of `BOUNDS_S` (the last: above all), and their total time in s."""

    counts: tuple[int, ...]
    sum_s: float


class RequestCounts(NamedTuple):
    """The answers by route, method and status, and their latencies by route."""

    answers: Mapping[tuple[str, str, int], int] = {}
    latencies: Mapping[str, LatencyHistogram] = {}


class ClockReadings(NamedTuple):
    """The current wall-clock time in s since 1970, and the monotonic time that domains use."""

    wall_s: float
    clock_s: float


class LeaseFacts(NamedTuple):
    """The leases by binding, and the queued requests; `longest_s` is how long the first has waited."""

    leases: Mapping[str, int] = {}
    waiting: int = 0
    longest_s: float = 0.0


class Facts(NamedTuple):
    """All facts; `status`, `gpus` and `devices` are the service's answers.

    `unusable` are the unusable GPUs (addresses). `leased_budgets` are the budgets (MiB and percent) of leased
    devices by address, because a reload may have changed them for the next lease. `probe_s` is each control
    daemon's latest response time, `events` the number of events since the start by kind and severity. `use`
    is None until the driver has answered. `latest` is the last poll, and `peaks_mib` the peak memory use of
    leased devices, by address.
    """

    now: ClockReadings
    revision: str
    status: answers.Status
    gpus: Sequence[answers.Gpu]
    devices: Sequence[answers.Device]
    domains: Sequence[DomainStatus]
    probe_s: Mapping[str, float]
    queue: LeaseFacts
    events: Mapping[tuple[str, str], int]
    requests: RequestCounts
    use: HostUsage | None = None
    unusable: Collection[str] = ()
    leased_budgets: Mapping[str, tuple[int, float]] = {}
    latest: LatestPoll = LatestPoll()
    peaks_mib: Mapping[str, int] = {}


class MetricsCollector:
    def __init__(
        self,
        supervisor: Supervisor,
        queries: Queries,
        leases: LeaseService,
        status: StatusService,
        observer: Observer,
        requests: Callable[[], RequestCounts],
    ) -> None:
        self._supervisor = supervisor
        self._queries = queries
        self._leases = leases
        self._status = status
        self._observer = observer
        self._requests = requests
        self._revision = revision()  # now, because an upgrade may replace the files while this runs

    async def facts(self) -> Facts:
        """All facts; if the driver does not answer in time, the use is that of an earlier observation."""
        clients, use = await self._observer.observe()
        supervisor, queries = self._supervisor, self._queries
        now = ClockReadings(time.time(), asyncio.get_running_loop().time())
        leases = self._leases.ledger.leases.values()
        waits_s = [now.wall_s - queued.since_s for queued in self._leases.queue.requests]
        return Facts(
            now,
            self._revision,
            self._status.of(clients),
            queries.gpus()["gpus"],
            queries.devices(Filters(), 0, 0)["isolated_devices"],
            supervisor.snapshot().domains,
            {one.in_effect.name: one.probe_s for one in supervisor.domains if one.probe_s is not None},
            LeaseFacts(
                Counter(lease.holder.binding for lease in leases), len(waits_s), max(waits_s, default=0.0)
            ),
            dict(supervisor.event_log.counts),
            self._requests(),
            use,
            queries.unusable_gpus(),
            {
                device.addr: (device.memory_limit_mib, device.thread_percentage)
                for lease in leases
                for device in lease.devices
            },
            queries.usage.latest,
            self._leases.peaks.by_device(),
        )
