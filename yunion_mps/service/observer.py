"""Observes which processes use the GPUs, and sums up their use by GPU, device and domain.

The processes are those that control daemons, the driver and the kernel list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import started_s, started_ticks, uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import is_server
from yunion_mps.paths import Paths
from yunion_mps.service.holdings import NO_CLIENTS
from yunion_mps.service.process_list import (
    GpuProcesses,
    ObservedDomain,
    list_processes,
    query_control_daemon,
    query_driver,
    servers_from_kernel,
    without_mps,
)
from yunion_mps.service.usage import (
    Budget,
    DeviceUsage,
    KnownDevices,
    ProcessDevices,
    UsageHistory,
    usage_by_device,
)
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers

#: How long an answer waits for the driver's list of processes.
DRIVER_TIMEOUT_S = 2.0
_SLOW = "the driver is slow to answer, so the list of clients is out of date"


class ProcessFacts(NamedTuple):
    """What the driver and the kernel report about processes.

    `devices` are the addresses of each process's devices, and `others` unknown MPS servers and processes that
    have ended since, which do not count as use outside MPS. `direct` are the UUIDs of GPUs without MPS.
    """

    taken_s: float
    domains: Sequence[ObservedDomain]
    driver: GpuProcesses
    devices: Mapping[int, tuple[str, ...]]
    others: frozenset[int] = frozenset()
    direct: frozenset[str] = frozenset()


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


def host_usage(seen: ProcessFacts, budgets: Mapping[str, Budget]) -> HostUsage:
    """Compute the use from an observation; `budgets` has those of all devices, by address."""
    memory, through_mps = seen.driver.memory, seen.driver.through_mps
    servers = {pid for domain in seen.domains for pid in domain.servers}
    outside_mps = {
        uuid: set(processes) - set(through_mps[uuid]) - servers - seen.others
        for uuid, processes in memory.items()
        if uuid in through_mps and uuid not in seen.direct
    }
    clients = {
        uuid: {*memory.get(uuid, ()), *through_mps.get(uuid, ())}
        - servers
        - seen.others
        - outside_mps.get(uuid, set())
        for uuid in {*memory, *through_mps}
    }
    clients_memory = {
        uuid: {pid: memory.get(uuid, {}).get(pid) for pid in pids} for uuid, pids in clients.items()
    }
    return HostUsage(
        seen.taken_s,
        {
            uuid: GpuUsage(len(clients[uuid]), len(outside_mps[uuid]) if uuid in outside_mps else None)
            for uuid in memory
        },
        usage_by_device(clients_memory, seen.devices, budgets),
        {
            domain.plan.name: DomainUsage(
                len(domain.servers),
                len(set().union(*(clients.get(uuid, ()) for uuid in domain.plan.gpu_uuids))),
                domain.started_s,
            )
            for domain in seen.domains
        },
    )


class Observation(NamedTuple):
    """The processes on the GPUs, and their use; the latter is None until the driver has answered."""

    clients: answers.ClientList
    use: HostUsage | None = None


class Observer:
    """Observes the processes, one observation at a time, which all who wait for it share."""

    def __init__(
        self,
        paths: Paths,
        supervisor: Supervisor,
        devices: ProcessDevices,
        usage: UsageHistory,
        ledger: Ledger,
    ) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._devices = devices
        self._usage = usage
        self._containers = Containers(paths)
        self._latest = Observation(NO_CLIENTS)
        self._observing: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._failed: set[int] = set()

    async def observe(self) -> Observation:
        """Return an observation that began after this call.

        If the driver does not answer in time, it is the latest one, and an error in it says so; the
        observation that waits for the driver continues.
        """
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        while True:
            if self._observing is None or self._observing.done():
                self._observing = asyncio.ensure_future(self._observe())
                self._began_s = loop.time()
            observing, began_s = self._observing, self._began_s
            await asyncio.wait({observing}, timeout=max(0.0, began_s + DRIVER_TIMEOUT_S - loop.time()))
            if not observing.done():
                clients = self._latest.clients
                return self._latest._replace(clients={**clients, "errors": [*clients["errors"], _SLOW]})
            if began_s >= arrived_s:
                return self._latest

    async def query_all(self) -> answers.ClientList:
        """The processes as the control daemons list them, too, however long that takes.

        Only control daemons know of failed servers, so later observations show these as failed, too.
        """
        nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
        domains, sm, direct = self._domains(), self._usage.latest.load.processes, self._direct()
        leases = list(self._ledger.leases.values())
        listed = await on_thread(
            lambda: list_processes(
                [*(query_control_daemon(domain) for domain in domains if domain.pid), without_mps(direct)],
                query_driver(nvml, sm),
                gpus,
                self._containers,
                leases,
            )
        )
        self._failed = {server["pid"] for server in listed["servers"] if server["state"] == SERVER_FAULT}
        return listed

    def _domains(self) -> list[ObservedDomain]:
        pids = [domain.status().pid or 0 for domain in self._supervisor.domains]
        return [
            ObservedDomain(
                domain.in_effect, pid, started_s(pid) if pid else None, tuple(domain.server_pids())
            )
            for domain, pid in zip(self._supervisor.domains, pids)
        ]

    def _direct(self) -> frozenset[str]:
        """The GPUs that are shared without MPS and are in no domain any longer."""
        served = {uuid for domain in self._supervisor.domains for uuid in domain.in_effect.gpu_uuids}
        return frozenset(gpu.uuid for gpu in self._supervisor.snapshot().plan.direct) - served

    async def _observe(self) -> None:
        nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
        domains, sm, known = self._domains(), self._usage.latest.load.processes, self._devices.known()
        before, failed, direct = self._latest.use if nvml else None, self._failed, self._direct()
        leases = list(self._ledger.leases.values())

        def work() -> Observation:
            driver = query_driver(nvml, sm)
            kernel = [servers_from_kernel(domain, failed) for domain in domains if domain.pid]
            shown = [*kernel, without_mps(direct)]
            clients = list_processes(shown, driver, gpus, self._containers, leases)
            is_known = nvml is not None and not driver.failure
            return Observation(clients, self._use(domains, driver, known, direct) if is_known else before)

        try:
            self._latest = await on_thread(work)
        except YunionError as error:
            failure = f"cannot list the processes on the GPUs: {error.message}"
            self._latest = Observation({**NO_CLIENTS, "errors": [failure]}, before)

    def _use(
        self,
        domains: list[ObservedDomain],
        driver: GpuProcesses,
        known: KnownDevices,
        direct: frozenset[str],
    ) -> HostUsage:
        """Sum up the use; thread-safe."""
        servers = {pid for domain in domains for pid in domain.servers}
        pids = {pid for of_gpu in (*driver.memory.values(), *driver.through_mps.values()) for pid in of_gpu}
        pids -= servers
        others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
        jobs = {pid: ticks for pid in pids - others if (ticks := started_ticks(pid)) is not None}
        devices = self._devices.of(jobs, known)
        facts = ProcessFacts(time.time(), domains, driver, devices, others, direct)
        return host_usage(facts, known.budgets)
