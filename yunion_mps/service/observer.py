"""Observes which processes use the GPUs, and sums up their use by GPU, device and domain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import started_s, started_ticks, uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.models import DomainPlan
from yunion_mps.mps.processes import is_server
from yunion_mps.paths import Paths
from yunion_mps.service.holdings import NO_CLIENTS
from yunion_mps.service.processes import (
    GpuProcesses,
    list_processes,
    query_control_daemon,
    query_driver,
    servers_from_kernel,
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


class ServedDomain(NamedTuple):
    """One domain: its GPUs (UUIDs), its servers (PIDs), and the start of its control daemon."""

    name: str
    gpu_uuids: tuple[str, ...]
    servers: frozenset[int]
    started_s: float | None


class ProcessFacts(NamedTuple):
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


def host_usage(seen: ProcessFacts, budgets: Mapping[str, Budget]) -> HostUsage:
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


class Observation(NamedTuple):
    """The processes on the GPUs, and their use; the latter is None until the driver has answered."""

    clients: answers.ClientList
    use: HostUsage | None = None


class _Domain(NamedTuple):
    """A domain at the beginning of an observation, and the PID of its control daemon."""

    plan: DomainPlan
    pid: int | None
    servers: tuple[int, ...]


class Observer:
    """Observes the processes, one observation at a time, which all who wait for it share."""

    def __init__(
        self, paths: Paths, supervisor: Supervisor, devices: ProcessDevices, usage: UsageHistory
    ) -> None:
        self._supervisor = supervisor
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
            if self._observing is None:
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
        domains, sm = self._domains(), self._usage.latest.load.processes
        listed = await on_thread(
            lambda: list_processes(
                [query_control_daemon(one.plan, one.pid, one.servers) for one in domains if one.pid],
                query_driver(nvml, sm),
                gpus,
                self._containers,
            )
        )
        self._failed = {one["pid"] for one in listed["servers"] if one["state"] == SERVER_FAULT}
        return listed

    def _domains(self) -> list[_Domain]:
        return [
            _Domain(domain.in_effect, domain.status().pid, tuple(domain.server_pids()))
            for domain in self._supervisor.domains
        ]

    async def _observe(self) -> None:
        nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
        domains, sm, known = self._domains(), self._usage.latest.load.processes, self._devices.known()
        before, failed = self._latest.use if nvml else None, self._failed

        def work() -> Observation:
            driver = query_driver(nvml, sm)
            kernel = [
                servers_from_kernel(one.plan, one.pid, one.servers, failed) for one in domains if one.pid
            ]
            clients = list_processes(kernel, driver, gpus, self._containers)
            is_known = nvml is not None and not driver.failure
            return Observation(clients, self._use(domains, driver, known) if is_known else before)

        try:
            self._latest = await on_thread(work)
        except YunionError as error:
            failure = f"cannot list the processes on the GPUs: {error.message}"
            self._latest = Observation({**NO_CLIENTS, "errors": [failure]}, before)
        finally:
            self._observing = None

    def _use(self, domains: list[_Domain], driver: GpuProcesses, known: KnownDevices) -> HostUsage:
        """Sum up the use; thread-safe."""
        served = tuple(
            ServedDomain(
                one.plan.name,
                one.plan.gpu_uuids,
                frozenset(one.servers),
                started_s(one.pid) if one.pid else None,
            )
            for one in domains
        )
        servers = {pid for domain in served for pid in domain.servers}
        pids = {pid for of_gpu in (*driver.memory.values(), *driver.through_mps.values()) for pid in of_gpu}
        pids -= servers
        others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
        jobs = {pid: ticks for pid in pids - others if (ticks := started_ticks(pid)) is not None}
        devices = self._devices.of(jobs, known)
        facts = ProcessFacts(time.time(), served, driver.memory, driver.through_mps, devices, others)
        return host_usage(facts, known.budgets)
