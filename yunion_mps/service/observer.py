"""Observes which processes use the GPUs, and sums up their use by GPU, device and domain.

The processes are those that control daemons, the driver and the kernel list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import command_of, name_of, started_s, started_ticks, uid_of, user_name, variable_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import LEASE_VARIABLE, DomainPlan, Gpu
from yunion_mps.mps.clients import clients_of, server_state, waiting_clients
from yunion_mps.mps.processes import find_control_program, is_server, server_pids
from yunion_mps.paths import Paths
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.service.holdings import NO_CLIENTS
from yunion_mps.service.usage import (
    Budget,
    DeviceUsage,
    KnownDevices,
    ProcessDevices,
    UsageHistory,
    usage_by_device,
)
from yunion_mps.supervisor import Supervisor
from yunion_mps.text import printable
from yunion_mps.units import rfc3339

if TYPE_CHECKING:
    from yunion_mps import answers

#: How long an answer waits for the driver's list of processes.
DRIVER_TIMEOUT_S = 2.0
_SLOW = "the driver is slow to answer, so the list of clients is out of date"
#: How much is shown of a variable that names a job's devices or lease: a job can set it to anything.
_MAX_VARIABLE = 1000
#: The log's times are in whole seconds; a process that started this much later only reuses the PID.
_START_TOLERANCE_S = 5.0


class ObservedDomain(NamedTuple):
    """A domain at the beginning of an observation: its servers, and its control daemon (PID 0 if none)."""

    plan: DomainPlan
    pid: int
    started_s: float | None
    servers: tuple[int, ...]


class DomainProcesses(NamedTuple):
    """The servers and clients of one domain, as far as its control daemon answered."""

    plan: DomainPlan
    servers: Sequence[int]  # including servers that have outlived their control daemon
    states: Mapping[int, str | None]  # of the others
    clients: Mapping[int, int]  # the server's PID, by the client's
    failure: str


class GpuProcesses(NamedTuple):
    """What the driver reports, by GPU UUID."""

    memory: Mapping[str, Mapping[int, int | None]] = {}  # in MiB, by PID
    through_mps: Mapping[str, Collection[int]] = {}  # a GPU that does not report them is missing
    sm: Mapping[str, Mapping[int, int]] = {}  # the SM utilization of each process in %, as of the last poll
    failure: str = ""


def query_control_daemon(domain: ObservedDomain) -> DomainProcesses:
    plan = domain.plan
    states: dict[int, str | None] = {}
    clients: dict[int, int] = {}
    failure = ""
    try:
        program = find_control_program()
        clients = {row.pid: row.server for row in clients_of(program, plan, domain.pid)}
        states = {pid: server_state(program, plan, pid) for pid in server_pids(domain.pid)}
    except YunionError as error:
        failure = f"domain {plan.name}: {error.message}; {error.hint}"
    return DomainProcesses(plan, domain.servers, states, clients, failure)


def servers_from_kernel(domain: ObservedDomain, failed: Collection[int]) -> DomainProcesses:
    """The servers, of which only those that are known to have `failed` have a state."""
    states = {pid: SERVER_FAULT if pid in failed else None for pid in server_pids(domain.pid)}
    return DomainProcesses(domain.plan, domain.servers, states, {}, "")


def query_driver(nvml: Nvml | None, sm: Mapping[str, Mapping[int, int]]) -> GpuProcesses:
    if nvml is None:
        return GpuProcesses()
    try:
        # In this order, so that a process that starts between the two calls counts as an MPS client.
        return GpuProcesses(nvml.processes(), nvml.mps_clients(), sm)
    except YunionError as error:
        return GpuProcesses(failure=error.message)


def list_processes(
    domains: Sequence[DomainProcesses], driver: GpuProcesses, gpus: Iterable[Gpu], containers: Containers
) -> answers.ClientList:
    errors = [failure for failure in (*(domain.failure for domain in domains), driver.failure) if failure]
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    clients = [
        client for domain in domains for client in _clients_json(domain, driver, addresses, containers)
    ]
    listed = {client["pid"] for client in clients}
    return {
        "servers": [
            {**_process_json(pid), "domain": domain.plan.name, "state": domain.states.get(pid)}
            for domain in domains
            for pid in domain.servers
        ],
        "clients": clients,
        "waiting": [
            waiter for domain in domains for waiter in _waiting_json(domain) if waiter["pid"] not in listed
        ],
        "errors": errors,
        "total": len(clients),
    }


def _waiting_json(domain: DomainProcesses) -> list[answers.WaitingClient]:
    """List the processes that wait for another user's server, with details from the kernel."""
    waiting: list[answers.WaitingClient] = []
    for client in waiting_clients(domain.plan, domain.servers):
        details = _process_json(client.pid)
        started, owner = details["started"], uid_of(client.server)
        latest = rfc3339(client.since_s + _START_TOLERANCE_S)
        if owner is not None and started is not None and started < latest:
            waiting.append(
                {
                    **details,
                    **_variables_json(client.pid),
                    "since": rfc3339(client.since_s),
                    "server": client.server,
                    "server_user": user_name(owner),
                    "domain": domain.plan.name,
                }
            )
    return waiting


def _clients_json(
    domain: DomainProcesses,
    driver: GpuProcesses,
    addresses: Mapping[str | None, str],
    containers: Containers,
) -> list[answers.MpsClient]:
    """The processes that the control daemon lists, and those that NVML sees on its GPUs.

    The clients of a server that is about to end, or has no control daemon, are not listed although they run.
    """
    on_gpus: dict[int, dict[str, int | None]] = {}
    for uuid in domain.plan.gpu_uuids:
        for pid, mib in driver.memory.get(uuid, {}).items():
            if pid not in domain.servers:
                on_gpus.setdefault(pid, {})[uuid] = mib
    silent = [pid for pid in domain.servers if pid not in domain.states] or domain.servers
    only = silent[0] if len(silent) == 1 else None
    rows: list[answers.MpsClient] = []
    for pid in sorted({*domain.clients, *on_gpus}):
        memory = on_gpus.get(pid, {})
        known_mib = [mib for mib in memory.values() if mib is not None]
        through_mps = _uses_mps(pid, domain, driver, memory)
        inside = containers.of(pid)
        rows.append(
            {
                **_process_json(pid),
                "container": inside.name if inside else None,
                "container_id": inside.id if inside else None,
                "mps": through_mps,
                "server": None if through_mps is False else domain.clients.get(pid, only),
                "domain": domain.plan.name,
                **_variables_json(pid),
                "gpus": [addresses.get(uuid, uuid) for uuid in memory],
                "memory_by_gpu_mib": list(memory.values()),
                "memory_used_mib": sum(known_mib) if known_mib else None,
                "sm_utilization_by_gpu": [driver.sm.get(uuid, {}).get(pid) for uuid in memory],
            }
        )
    return rows


def _uses_mps(pid: int, domain: DomainProcesses, driver: GpuProcesses, gpus: Collection[str]) -> bool | None:
    """Whether the process uses the GPUs through MPS; None if unknown.

    False only for a process that runs, uses one of the GPUs, and is a client according to neither the control
    daemon nor the driver.
    """
    if pid in domain.clients or any(pid in driver.through_mps.get(uuid, ()) for uuid in gpus):
        return True
    is_known = bool(gpus) and all(uuid in driver.through_mps for uuid in gpus)
    return False if is_known and uid_of(pid) is not None and not is_server(pid) else None


def _process_json(pid: int) -> answers.ProcessFields:
    """The process's details from the kernel; all but the PID are None if it has ended."""
    uid, begun_s = uid_of(pid), started_s(pid)
    return {
        "pid": pid,
        "uid": uid,
        "user": None if uid is None else user_name(uid),
        "command": command_of(pid, 500) or name_of(pid) or None,
        "started": None if begun_s is None else rfc3339(begun_s),
    }


def _variables_json(pid: int) -> answers.VariableFields:
    texts = (printable(variable_of(pid, name) or "") for name in (DEVICE_VARIABLE, LEASE_VARIABLE))
    device, lease = (text[:_MAX_VARIABLE] or None for text in texts)
    return {"device": device, "lease": lease}


class ProcessFacts(NamedTuple):
    """What the driver and the kernel report about processes.

    `devices` are the addresses of each process's devices, and `others` unknown MPS servers and processes that
    have ended since, which do not count as use outside MPS.
    """

    taken_s: float
    domains: Sequence[ObservedDomain]
    driver: GpuProcesses
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
    memory, through_mps = seen.driver.memory, seen.driver.through_mps
    servers = {pid for domain in seen.domains for pid in domain.servers}
    outside_mps = {
        uuid: set(processes) - set(through_mps[uuid]) - servers - seen.others
        for uuid, processes in memory.items()
        if uuid in through_mps
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
        domains, sm = self._domains(), self._usage.latest.load.processes
        listed = await on_thread(
            lambda: list_processes(
                [query_control_daemon(domain) for domain in domains if domain.pid],
                query_driver(nvml, sm),
                gpus,
                self._containers,
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

    async def _observe(self) -> None:
        nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
        domains, sm, known = self._domains(), self._usage.latest.load.processes, self._devices.known()
        before, failed = self._latest.use if nvml else None, self._failed

        def work() -> Observation:
            driver = query_driver(nvml, sm)
            kernel = [servers_from_kernel(domain, failed) for domain in domains if domain.pid]
            clients = list_processes(kernel, driver, gpus, self._containers)
            is_known = nvml is not None and not driver.failure
            return Observation(clients, self._use(domains, driver, known) if is_known else before)

        try:
            self._latest = await on_thread(work)
        except YunionError as error:
            failure = f"cannot list the processes on the GPUs: {error.message}"
            self._latest = Observation({**NO_CLIENTS, "errors": [failure]}, before)

    def _use(self, domains: list[ObservedDomain], driver: GpuProcesses, known: KnownDevices) -> HostUsage:
        """Sum up the use; thread-safe."""
        servers = {pid for domain in domains for pid in domain.servers}
        pids = {pid for of_gpu in (*driver.memory.values(), *driver.through_mps.values()) for pid in of_gpu}
        pids -= servers
        others = frozenset(pid for pid in pids if uid_of(pid) is None or is_server(pid))
        jobs = {pid: ticks for pid in pids - others if (ticks := started_ticks(pid)) is not None}
        devices = self._devices.of(jobs, known)
        facts = ProcessFacts(time.time(), domains, driver, devices, others)
        return host_usage(facts, known.budgets)
