"""The facts about the host and the daemon at one moment, from which the metrics are made."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import revision
from yunion_mps.core.exposition import Sample
from yunion_mps.core.models import DomainStatus
from yunion_mps.leases.holders import kubernetes_labels
from yunion_mps.observe.observer import HostUsage
from yunion_mps.observe.usage import LatestPoll
from yunion_mps.service.services import Services

if TYPE_CHECKING:
    from yunion_mps import answers

#: Read now, because an upgrade may replace the files while this program runs.
_REVISION = revision()


class RequestCounts(NamedTuple):
    """The API's answers by route, method and status, and the histogram of their latencies by route."""

    answers: Mapping[tuple[str, str, int], int] = {}
    latencies: Sequence[Sample] = ()


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
    """All facts; `status`, `gpus` and `devices` are the API's answers.

    `unusable` are the unusable GPUs (addresses). `leased_budgets` are the budgets (MiB and percent) of leased
    devices by address, because a reload may have changed them for the next lease. `probe_s` is each control
    daemon's latest response time, `events` the number of events since the start by kind and severity. `use`
    is None until the driver has answered. `latest` is the last poll, `peaks_mib` the peak memory use of
    leased devices, and `pods` the labels of the pods or claims that have leased devices, by address.
    `over_budget_terminations` is how many processes were terminated since the start, by GPU address.
    """

    clocks: ClockReadings
    revision: str
    status: answers.StatusJson
    gpus: Sequence[answers.GpuJson]
    devices: Sequence[answers.DeviceJson]
    domains: Sequence[DomainStatus]
    probe_s: Mapping[str, float]
    queue: LeaseFacts
    events: Mapping[tuple[str, str], int]
    requests: RequestCounts
    use: HostUsage | None = None
    unusable: Collection[str] = ()
    leased_budgets: Mapping[str, tuple[int | None, float]] = {}
    latest: LatestPoll = LatestPoll()
    peaks_mib: Mapping[str, int] = {}
    pods: Mapping[str, Mapping[str, str]] = {}
    over_budget_terminations: Mapping[str, int] = {}


async def collect_facts(services: Services, requests: RequestCounts) -> Facts:
    """Return all facts; if the driver does not answer in time, the use is the last known one."""
    clients, use = await services.observer.observe()
    supervisor = services.supervisor
    queries = services.queries
    clocks = ClockReadings(time.time(), asyncio.get_running_loop().time())
    leases = services.leases.ledger.leases.values()
    waits_s = [clocks.wall_s - queued.since_s for queued in services.leases.queue.requests]
    probe_s: dict[str, float] = {}
    for domain in supervisor.domains:
        if domain.probe_s is not None:
            probe_s[domain.in_effect.name] = domain.probe_s
    budgets: dict[str, tuple[int | None, float]] = {}
    pods: dict[str, Mapping[str, str]] = {}
    for lease in leases:
        labels = kubernetes_labels(lease.holder, services.leases.containers)
        for device in lease.devices:
            budgets[device.addr] = (device.memory_limit_mib, device.thread_percentage)
            if labels:
                pods[device.addr] = labels
    bindings = Counter(lease.holder.binding for lease in leases)
    return Facts(
        clocks=clocks,
        revision=_REVISION,
        status=services.status.of(clients),
        gpus=queries.gpus()["gpus"],
        devices=queries.all_devices(),
        domains=supervisor.snapshot().domains,
        probe_s=probe_s,
        queue=LeaseFacts(bindings, len(waits_s), max(waits_s, default=0.0)),
        events=dict(supervisor.event_log.counts),
        requests=requests,
        use=use,
        unusable=queries.unusable_gpus(),
        leased_budgets=budgets,
        latest=queries.usage.latest,
        peaks_mib=services.leases.peaks.by_device(),
        pods=pods,
        over_budget_terminations=services.budgets.terminations,
    )
