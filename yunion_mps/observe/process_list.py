"""Lists the processes that use the GPUs: what control daemons, the driver and the kernel say about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.enums import SERVER_FAULT
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import DomainPlan, Gpu, Lease, PlannedGpu
from yunion_mps.core.text import printable
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import command_of, process_name, started_s, user_name, variable_of
from yunion_mps.host.process_info import uid_of
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.mps.clients import BusyServerError, clients_of, server_state, waiting_clients
from yunion_mps.mps.processes import find_control_program, is_server, server_pids
from yunion_mps.observe.attribution import Attribution
from yunion_mps.planning.environment import DEVICE_VARIABLE

if TYPE_CHECKING:
    from yunion_mps import answers

#: How much is shown of the variable that names a job's devices: a job can set it to anything.
_MAX_VARIABLE = 1000
#: The log's times are in whole seconds; a process that started this much later only reuses the PID.
_START_TOLERANCE_S = 5.0


class ListFailure(str):
    """Why not all processes are known, as text, and of which domain; empty for all."""

    domain: str

    def __new__(cls, text: str, domain: str = "") -> ListFailure:  # noqa: PYI034 - there is no Self before 3.11
        failure = super().__new__(cls, text)
        failure.domain = domain
        return failure


def domain_of_failure(error: str) -> str:
    """Return the domain of one of the errors of a list of processes; empty for all domains."""
    return error.domain if isinstance(error, ListFailure) else ""


class ObservedDomain(NamedTuple):
    """A domain at the beginning of an observation."""

    plan: DomainPlan
    #: Its control daemon; 0 if it has none.
    pid: int
    #: When the control daemon was started, in s since 1970; None if it has none.
    started_s: float | None
    #: The PIDs of its servers.
    servers: tuple[int, ...]


class DomainProcesses(NamedTuple):
    """The servers and clients of one domain, as far as its control daemon answered."""

    plan: DomainPlan
    #: The PIDs of its servers, including those that have outlived their control daemon.
    servers: Sequence[int]
    #: The state of each server that has not; None if it is unknown.
    states: Mapping[int, str | None]
    #: The server's PID, by the client's.
    clients: Mapping[int, int]
    #: Why not all of these are known; empty if they are.
    failure: str


class GpuProcesses(NamedTuple):
    """What the driver reports, by GPU UUID."""

    #: The memory that processes use, in MiB, by PID.
    memory: Mapping[str, Mapping[int, int | None]] = {}
    #: The processes (PIDs) that use it through MPS; a GPU that does not report them is missing.
    through_mps: Mapping[str, Collection[int]] = {}
    #: The SM utilization of each process in %, by PID, as of the last poll.
    sm: Mapping[str, Mapping[int, int]] = {}
    #: Why the driver reports nothing; empty if it does.
    failure: str = ""


def query_control_daemon(domain: ObservedDomain) -> DomainProcesses:
    """Ask the control daemon for the servers and clients; what it does not answer is in `failure`."""
    plan = domain.plan
    states: dict[int, str | None] = {}
    clients: dict[int, int] = {}
    failure = ""
    try:
        program = find_control_program()
        clients = {row.pid: row.server for row in clients_of(program, plan, domain.pid)}
        states = {pid: server_state(program, plan, pid) for pid in server_pids(domain.pid)}
    except BusyServerError as error:  # nothing but its end helps
        failure = f"domain {plan.name}: {error.message}"
    except YunionError as error:
        failure = f"domain {plan.name}: {error.message}; {error.hint}"
    return DomainProcesses(plan, domain.servers, states, clients, failure)


def servers_from_kernel(domain: ObservedDomain, failed: Collection[int] = ()) -> DomainProcesses:
    """Return the servers, of which only those that are known to have `failed` have a state."""
    states: dict[int, str | None] = {}
    if domain.pid:
        for pid in server_pids(domain.pid):
            states[pid] = SERVER_FAULT if pid in failed else None
    return DomainProcesses(domain.plan, domain.servers, states, {}, "")


def without_mps(gpu_uuids: Iterable[str]) -> DomainProcesses:
    """Return the processes on these GPUs, which no control daemon serves, as those of a nameless domain."""
    plan = DomainPlan("", "", "", tuple(map(PlannedGpu, gpu_uuids)), 100.0)
    return DomainProcesses(plan, (), {}, {}, "")


def query_driver(nvml: Nvml | None, sm: Mapping[str, Mapping[int, int]]) -> GpuProcesses:
    """Return what the driver reports, with the SM utilization `sm` of the last poll; nothing without NVML."""
    if nvml is None:
        return GpuProcesses()
    try:
        # In this order, so that a process that starts between the two calls counts as an MPS client.
        return GpuProcesses(nvml.processes(), nvml.mps_clients(), sm)
    except YunionError as error:
        return GpuProcesses(failure=error.message)


def list_processes(
    domains: Sequence[DomainProcesses],
    driver: GpuProcesses,
    gpus: Iterable[Gpu],
    containers: Containers,
    leases: Iterable[Lease],
) -> answers.ClientListJson:
    """Return the servers, clients and waiting processes of the domains, and what is not known.

    driver: the processes on the GPUs, as NVML reports them
    gpus: the GPUs with their addresses, which the driver does not report
    leases: those that a process can belong to
    """
    attribution = Attribution.by_kernel(leases, containers)
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    servers: list[answers.MpsServerJson] = []
    clients: list[answers.MpsClientJson] = []
    errors: list[str] = []
    for domain in domains:
        for pid in domain.servers:
            servers.append(
                {**_process_json(pid), "domain": domain.plan.name, "state": domain.states.get(pid)}
            )
        clients += _clients_json(domain, driver, addresses, containers, attribution)
        if domain.failure:
            errors.append(ListFailure(domain.failure, domain.plan.name))
    if driver.failure:
        errors.append(ListFailure(driver.failure))
    listed = {client["pid"] for client in clients}
    waiting: list[answers.WaitingClientJson] = []
    for domain in domains:
        if domain.plan.name:
            waiting += [row for row in _waiting_json(domain, attribution) if row["pid"] not in listed]
    return {
        "servers": servers,
        "clients": clients,
        "waiting": waiting,
        "errors": errors,
        "total": len(clients),
    }


def _waiting_json(domain: DomainProcesses, attribution: Attribution) -> list[answers.WaitingClientJson]:
    """List the processes that wait for another user's server, with details from the kernel."""
    waiting: list[answers.WaitingClientJson] = []
    for client in waiting_clients(domain.plan, domain.servers):
        details = _process_json(client.pid)
        started = details["started"]
        owner = uid_of(client.server)
        latest = rfc3339(client.since_s + _START_TOLERANCE_S)
        if owner is not None and started is not None and started < latest:
            waiting.append(
                {
                    **details,
                    "device": _device_of(client.pid),
                    "lease": attribution.lease_of(client.pid),
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
    attribution: Attribution,
) -> list[answers.MpsClientJson]:
    """Return the processes that the control daemon lists, and those that NVML sees on its GPUs.

    The clients of a server that is about to end, or has no control daemon, are not listed although they run.
    """
    on_gpus: dict[int, dict[str, int | None]] = {}
    for uuid in domain.plan.gpu_uuids:
        for pid, mib in driver.memory.get(uuid, {}).items():
            if pid not in domain.servers:
                on_gpus.setdefault(pid, {})[uuid] = mib
    # A client that no control daemon lists has the only server that it can have.
    silent = [pid for pid in domain.servers if pid not in domain.states]
    possible = silent if silent else domain.servers
    only_server = possible[0] if len(possible) == 1 else None
    rows: list[answers.MpsClientJson] = []
    for pid in sorted({*domain.clients, *on_gpus}):
        memory = on_gpus.get(pid, {})
        through_mps = _uses_mps(pid, domain, driver, memory)
        gpus: list[str] = []
        utilization: list[int | None] = []
        used_mib: int | None = None
        for uuid, mib in memory.items():
            gpus.append(addresses.get(uuid, uuid))
            utilization.append(driver.sm.get(uuid, {}).get(pid))
            if mib is not None:
                used_mib = (used_mib or 0) + mib
        container = containers.of(pid)
        rows.append(
            {
                **_process_json(pid),
                "container": container.name if container else None,
                "container_id": container.id if container else None,
                "mps": through_mps,
                "server": None if through_mps is False else domain.clients.get(pid, only_server),
                "domain": domain.plan.name,
                "device": _device_of(pid),
                "lease": attribution.lease_of(pid, gpus),
                "gpus": gpus,
                "memory_by_gpu_mib": list(memory.values()),
                "memory_used_mib": used_mib,
                "sm_utilization_by_gpu": utilization,
            }
        )
    return rows


def _uses_mps(pid: int, domain: DomainProcesses, driver: GpuProcesses, gpus: Collection[str]) -> bool | None:
    """Return whether the process uses the GPUs through MPS.

    None if that is unknown, or if they are shared without MPS. False only for a process that runs, uses one
    of the GPUs, and is a client according to neither the control daemon nor the driver.
    """
    if pid in domain.clients:
        return True
    for uuid in gpus:
        if pid in driver.through_mps.get(uuid, ()):
            return True
    if not domain.plan.name:
        return None
    is_known = bool(gpus) and all(uuid in driver.through_mps for uuid in gpus)
    if is_known and uid_of(pid) is not None and not is_server(pid):
        return False
    return None


def _process_json(pid: int) -> answers.ProcessFieldsJson:
    """Return the process's details from the kernel; all but the PID are None if it has ended."""
    uid = uid_of(pid)
    begun_s = started_s(pid)
    return {
        "pid": pid,
        "uid": uid,
        "user": None if uid is None else user_name(uid),
        "command": command_of(pid, 500) or process_name(pid) or None,
        "started": None if begun_s is None else rfc3339(begun_s),
    }


def possible_client(pid: int, server: answers.MpsServerJson | None) -> answers.MpsClientJson:
    """Return a process that may be a client of this server, with what the kernel knows about it.

    If `server` is None, it may be a client of any.
    """
    return {
        **_process_json(pid),
        "container": None,
        "container_id": None,
        "mps": None,
        "server": server["pid"] if server else None,
        "domain": server["domain"] if server else "",
        "device": _device_of(pid),
        "lease": None,
        "gpus": [],
        "memory_by_gpu_mib": [],
        "memory_used_mib": None,
        "sm_utilization_by_gpu": [],
    }


def _device_of(pid: int) -> str | None:
    return printable(variable_of(pid, DEVICE_VARIABLE) or "")[:_MAX_VARIABLE] or None
