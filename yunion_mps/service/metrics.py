"""The facts behind the metrics, collected at one point in time.

Facts that are known already are collected on the event loop; a thread calls the driver and reads /proc. A
scrape does not wait long for that thread: if the driver hangs, it shows the last known use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import revision
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import started_s, started_ticks, uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.queue import Queue
from yunion_mps.leases.storage import MemoryPeaks
from yunion_mps.models import DomainStatus
from yunion_mps.mps.processes import is_server
from yunion_mps.service.queries import Filters, Queries
from yunion_mps.service.usage import Budget, DeviceUsage, LatestPoll, ProcessDevices, usage_by_device
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: The buckets of request durations in s, from a cached answer to a reload that waits for jobs.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)

#: How long a scrape waits for the driver's list of processes.
DRIVER_TIMEOUT_S = 2.0


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


class LeaseCounts(NamedTuple):
    """The leases by binding, and the queued requests; `longest_s` is how long the first has waited."""

    leases: Mapping[str, int] = {}
    waiting: int = 0
    longest_s: float = 0.0


class ServedDomain(NamedTuple):
    """One domain: its GPUs (UUIDs), its servers (PIDs), and the start of its control daemon."""

    name: str
    gpu_uuids: tuple[str, ...]
    servers: frozenset[int]
    started_s: float | None


class Observation(NamedTuple):
    """What NVML and the kernel report about processes.

    `memory` is in MiB by GPU UUID and PID, `through_mps` the MPS clients by GPU UUID (a GPU that does not
    report them is missing), `devices` the addresses of each process's devices, and `others` unknown MPS
    servers and processes that have ended since, which do not count as use outside MPS.
    """

    taken_s: float
    domains: tuple[ServedDomain, ...]
    memory: Mapping[str, Mapping[int, int | None]]
    through_mps: Mapping[str, Collection[int]]
    devices: Mapping[int, tuple[str, ...]]
    others: frozenset[int] = frozenset()


class GpuUsage(NamedTuple):
    """The use of one GPU; `outside_mps` is None if the driver does not report which processes use MPS."""

    clients: int
    outside_mps: int | None


class DomainUsage(NamedTuple):
    """The use of one domain; `started_s` is when its control daemon was started, in s since 1970."""

    servers: int
    clients: int
    started_s: float | None


class HostUsage(NamedTuple):
    """The use of GPUs (by UUID), of devices in use (by address), and of domains (by name)."""

    taken_s: float
    gpus: Mapping[str, GpuUsage]
    devices: Mapping[str, DeviceUsage]
    domains: Mapping[str, DomainUsage]


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
    queue: LeaseCounts
    events: Mapping[tuple[str, str], int]
    requests: RequestCounts
    use: HostUsage | None = None
    unusable: Collection[str] = ()
    leased_budgets: Mapping[str, tuple[int, float]] = {}
    latest: LatestPoll = LatestPoll()
    peaks_mib: Mapping[str, int] = {}


def host_usage(seen: Observation, budgets: Mapping[str, Budget]) -> HostUsage:
    """Compute the use from an observation; `budgets` has those of all devices, by address."""
    servers = {pid for domain in seen.domains for pid in domain.servers}
    outside_mps = {
        uuid: set(processes) - set(seen.through_mps[uuid]) - servers - seen.others
        for uuid, processes in seen.memory.items()
        if uuid in seen.through_mps
    }
    clients = {
        uuid: {*seen.memory.get(uuid, ()), *seen.through_mps.get(uuid, ())}
        - servers
        - seen.others
        - outside_mps.get(uuid, set())
        for uuid in {*seen.memory, *seen.through_mps}
    }
    memory = {
        uuid: {pid: seen.memory.get(uuid, {}).get(pid) for pid in pids} for uuid, pids in clients.items()
    }
    return HostUsage(
        seen.taken_s,
        {
            uuid: GpuUsage(
                len(clients[uuid]),
                len(outside_mps[uuid]) if uuid in outside_mps else None,
            )
            for uuid in seen.memory
        },
        usage_by_device(memory, seen.devices, budgets),
        {
            domain.name: DomainUsage(
                len(domain.servers),
                len(set().union(*(clients.get(uuid, ()) for uuid in domain.gpu_uuids))),
                domain.started_s,
            )
            for domain in seen.domains
        },
    )


class MetricsCollector:
    def __init__(
        self,
        supervisor: Supervisor,
        queries: Queries,
        ledger: Ledger,
        queue: Queue,
        devices: ProcessDevices,
        peaks: MemoryPeaks,
        requests: Callable[[], RequestCounts],
    ) -> None:
        self._supervisor = supervisor
        self._queries = queries
        self._ledger = ledger
        self._queue = queue
        self._devices = devices
        self._peaks = peaks
        self._requests = requests
        self._revision = revision()  # now, because an upgrade may replace the files while this runs
        self._observing: asyncio.Task[HostUsage] | None = None
        self._began_s = 0.0
        self._use: HostUsage | None = None

    async def facts(self) -> Facts:
        """All facts; if the driver does not answer in time, the use is that of an earlier scrape."""
        await self.observe()
        supervisor, queries = self._supervisor, self._queries
        now = ClockReadings(time.time(), asyncio.get_running_loop().time())
        leases = self._ledger.leases.values()
        waits_s = [now.wall_s - queued.since_s for queued in self._queue.requests]
        return Facts(
            now,
            self._revision,
            queries.status(),
            queries.gpus()["gpus"],
            queries.devices(Filters(), 0, 0)["isolated_devices"],
            supervisor.snapshot().domains,
            {one.in_effect.name: one.probe_s for one in supervisor.domains if one.probe_s is not None},
            LeaseCounts(
                Counter(lease.holder.binding for lease in leases), len(waits_s), max(waits_s, default=0.0)
            ),
            dict(supervisor.event_log.counts),
            self._requests(),
            self._use,
            queries.unusable_gpus(),
            {
                device.addr: (device.memory_limit_mib, device.thread_percentage)
                for lease in leases
                for device in lease.devices
            },
            queries.usage.latest,
            self._peaks.by_device(),
        )

    async def observe(self) -> None:
        """Observe which processes use the GPUs; a slow observation is used by a later scrape."""
        nvml = self._supervisor.nvml
        if nvml is None:
            self._use = None
            return
        loop = asyncio.get_running_loop()
        if self._observing is None:
            self._observing = asyncio.ensure_future(self._observed(nvml))
            self._began_s = loop.time()
        left_s = max(0.0, self._began_s + DRIVER_TIMEOUT_S - loop.time())
        await asyncio.wait({self._observing}, timeout=left_s)
        if self._observing.done():
            observing, self._observing = self._observing, None
            try:
                self._use = observing.result()
            except YunionError as error:
                log.debug("cannot list the processes on the GPUs: %s", error.message)

    async def _observed(self, nvml: Nvml) -> HostUsage:
        domains = [
            (domain.in_effect, frozenset(domain.server_pids()), domain.status().pid)
            for domain in self._supervisor.domains
        ]
        known = self._devices.known()

        def work() -> HostUsage:
            # In this order, so that a process that starts between the two calls counts as an MPS client.
            memory, through_mps = nvml.processes(), nvml.mps_clients()
            served = tuple(
                ServedDomain(plan.name, plan.gpu_uuids, servers, started_s(pid) if pid else None)
                for plan, servers, pid in domains
            )
            servers = {pid for domain in served for pid in domain.servers}
            pids = {pid for of_gpu in (*memory.values(), *through_mps.values()) for pid in of_gpu} - servers
            others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
            jobs = {pid: ticks for pid in pids - others if (ticks := started_ticks(pid)) is not None}
            devices = self._devices.of(jobs, known)
            observation = Observation(time.time(), served, memory, through_mps, devices, others)
            return host_usage(observation, known.budgets)

        return await on_thread(work)
