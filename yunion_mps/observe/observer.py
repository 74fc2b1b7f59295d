"""Observes which processes use the GPUs, and sums up their use by GPU, device and domain.

The processes are those that control daemons, the driver and the kernel list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.enums import SERVER_FAULT
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import Gpu, Lease
from yunion_mps.core.paths import Paths
from yunion_mps.host.proc import started_s, started_ticks
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import is_server
from yunion_mps.observe.holdings import NO_CLIENTS
from yunion_mps.observe.process_list import (
    DomainProcesses,
    GpuProcesses,
    ObservedDomain,
    list_processes,
    query_control_daemon,
    query_driver,
    servers_from_kernel,
    without_mps,
)
from yunion_mps.observe.usage import (
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
    """What the driver and the kernel report about processes."""

    #: When that was, in s since 1970.
    taken_s: float
    domains: Sequence[ObservedDomain]
    driver: GpuProcesses
    #: The addresses of each process's devices, by PID.
    devices: Mapping[int, tuple[str, ...]]
    #: Unknown MPS servers, and processes that have ended since: they do not count as use outside MPS.
    others: frozenset[int] = frozenset()
    #: The UUIDs of GPUs that are shared without MPS.
    direct: frozenset[str] = frozenset()


class GpuUsage(NamedTuple):
    """The use of one GPU."""

    #: How many processes use it through MPS, or without MPS if it is shared so.
    clients: int
    #: How many use it outside MPS; None if the driver does not report which processes use MPS.
    outside_mps: int | None


class DomainUsage(NamedTuple):
    """The use of one domain."""

    #: The number of its MPS servers.
    servers: int
    #: The number of its MPS clients.
    clients: int
    #: When its control daemon was started, in s since 1970; None if it has none.
    started_s: float | None


class HostUsage(NamedTuple):
    """The use of all GPUs, as of one observation."""

    #: When that was, in s since 1970.
    taken_s: float
    #: By UUID.
    gpus: Mapping[str, GpuUsage]
    #: The devices in use, by address.
    devices: Mapping[str, DeviceUsage]
    #: By name.
    domains: Mapping[str, DomainUsage]


def host_usage(seen: ProcessFacts, budgets: Mapping[str, Budget]) -> HostUsage:
    """Return the use according to an observation; `budgets` has those of all devices, by address."""
    memory = seen.driver.memory
    through_mps = seen.driver.through_mps
    not_counted = set(seen.others)
    for domain in seen.domains:
        not_counted.update(domain.servers)
    clients: dict[str, set[int]] = {}
    clients_memory: dict[str, dict[int, int | None]] = {}
    gpus: dict[str, GpuUsage] = {}
    for uuid in dict.fromkeys((*memory, *through_mps)):
        on_gpu = memory.get(uuid, {})
        users = {*on_gpu, *through_mps.get(uuid, ())} - not_counted
        outside_mps: int | None = None
        if uuid in memory and uuid in through_mps and uuid not in seen.direct:
            outsiders = users.difference(through_mps[uuid])
            outside_mps = len(outsiders)
            users -= outsiders
        clients[uuid] = users
        clients_memory[uuid] = {pid: on_gpu.get(pid) for pid in users}
        if uuid in memory:
            gpus[uuid] = GpuUsage(clients=len(users), outside_mps=outside_mps)
    domains: dict[str, DomainUsage] = {}
    for domain in seen.domains:
        of_domain: set[int] = set()
        for uuid in domain.plan.gpu_uuids:
            of_domain |= clients.get(uuid, set())
        domains[domain.plan.name] = DomainUsage(
            servers=len(domain.servers), clients=len(of_domain), started_s=domain.started_s
        )
    return HostUsage(
        taken_s=seen.taken_s,
        gpus=gpus,
        devices=usage_by_device(clients_memory, seen.devices, budgets),
        domains=domains,
    )


class Observation(NamedTuple):
    """The processes on the GPUs, and their use."""

    clients: answers.ClientListJson
    #: None until the driver has answered.
    use: HostUsage | None = None


class _Subjects(NamedTuple):
    """What is observed, read on the event loop, where it changes; a thread then observes it."""

    #: None while the daemon waits for the driver.
    nvml: Nvml | None
    gpus: Sequence[Gpu]
    domains: Sequence[ObservedDomain]
    #: The SM utilization of processes in %, by GPU UUID and PID, as of the last poll.
    sm: Mapping[str, Mapping[int, int]]
    #: The UUIDs of the GPUs that are shared without MPS and are in no domain any longer.
    direct: frozenset[str]
    leases: Sequence[Lease]


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
            observing = self._observing
            began_s = self._began_s
            await asyncio.wait({observing}, timeout=max(0.0, began_s + DRIVER_TIMEOUT_S - loop.time()))
            if not observing.done():
                clients = self._latest.clients
                return self._latest._replace(clients={**clients, "errors": [*clients["errors"], _SLOW]})
            if began_s >= arrived_s:
                return self._latest

    async def query_all(self) -> answers.ClientListJson:
        """Return the processes as the control daemons list them, too, however long that takes.

        Only control daemons know of failed servers, so later observations show these as failed, too.
        """
        subjects = self._subjects()

        def work() -> answers.ClientListJson:
            domains: list[DomainProcesses] = []
            for domain in subjects.domains:
                if domain.pid:
                    domains.append(query_control_daemon(domain))
                elif domain.servers:  # they have outlived it, and only the driver knows their clients
                    domains.append(servers_from_kernel(domain))
            return self._list(subjects, domains, query_driver(subjects.nvml, subjects.sm))

        listed = await on_thread(work)
        self._failed = {server["pid"] for server in listed["servers"] if server["state"] == SERVER_FAULT}
        return listed

    def _subjects(self) -> _Subjects:
        snapshot = self._supervisor.snapshot()
        domains: list[ObservedDomain] = []
        served: set[str] = set()
        for domain in self._supervisor.domains:
            pid = domain.status().pid or 0
            observed = ObservedDomain(
                plan=domain.in_effect,
                pid=pid,
                started_s=started_s(pid) if pid else None,
                servers=tuple(domain.server_pids()),
            )
            domains.append(observed)
            served.update(domain.in_effect.gpu_uuids)
        return _Subjects(
            nvml=self._supervisor.nvml,
            gpus=snapshot.inventory.gpus,
            domains=domains,
            sm=self._usage.latest.load.processes,
            direct=frozenset(gpu.uuid for gpu in snapshot.plan.direct) - served,
            leases=list(self._ledger.leases.values()),
        )

    def _list(
        self, subjects: _Subjects, domains: Iterable[DomainProcesses], driver: GpuProcesses
    ) -> answers.ClientListJson:
        """List the processes of these domains and of the GPUs without MPS; thread-safe."""
        of_domains = [*domains, without_mps(subjects.direct)]
        return list_processes(of_domains, driver, subjects.gpus, self._containers, subjects.leases)

    async def _observe(self) -> None:
        subjects = self._subjects()
        known = self._devices.known()
        failed = self._failed
        before = self._latest.use if subjects.nvml else None

        def work() -> Observation:
            driver = query_driver(subjects.nvml, subjects.sm)
            domains: list[DomainProcesses] = []
            for domain in subjects.domains:
                if domain.pid or domain.servers:
                    domains.append(servers_from_kernel(domain, failed))
            clients = self._list(subjects, domains, driver)
            if subjects.nvml is None or driver.failure:
                return Observation(clients, before)
            return Observation(clients, self._use(subjects, driver, known))

        try:
            self._latest = await on_thread(work)
        except YunionError as error:
            failure = f"cannot list the processes on the GPUs: {error.message}"
            self._latest = Observation({**NO_CLIENTS, "errors": [failure]}, before)

    def _use(self, subjects: _Subjects, driver: GpuProcesses, known: KnownDevices) -> HostUsage:
        """Sum up the use; thread-safe."""
        pids: set[int] = set()
        for on_gpu in (*driver.memory.values(), *driver.through_mps.values()):
            pids.update(on_gpu)
        for domain in subjects.domains:
            pids.difference_update(domain.servers)
        others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
        jobs: dict[int, int] = {}
        for pid in pids - others:
            ticks = started_ticks(pid)
            if ticks is not None:
                jobs[pid] = ticks
        facts = ProcessFacts(
            taken_s=time.time(),
            domains=subjects.domains,
            driver=driver,
            devices=self._devices.of(jobs, known),
            others=others,
            direct=subjects.direct,
        )
        return host_usage(facts, known.budgets)
