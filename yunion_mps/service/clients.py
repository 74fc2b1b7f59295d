"""MPS clients: list them from control daemons, NVML and the kernel, terminate them, and attribute XIDs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import reasons
from yunion_mps.containers.lookup import Containers
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.errors import BusyError, NotAllowedError, NotFoundError, YunionError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import (
    command_of,
    is_kernel_thread,
    name_of,
    started_s,
    started_ticks,
    uid_of,
    user_name,
    variable_of,
)
from yunion_mps.host.processes import Process
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.events import processes_of_xids
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import DomainPlan, Event, Gpu
from yunion_mps.mps.clients import clients_of, server_state, terminate, waiting_clients
from yunion_mps.mps.processes import find_control_program, is_server, running_servers, server_pids
from yunion_mps.paths import Paths
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.service.permissions import is_privileged
from yunion_mps.service.usage import UsageHistory
from yunion_mps.supervisor import Supervisor
from yunion_mps.units import rfc3339

if TYPE_CHECKING:
    from yunion_mps import answers
    from yunion_mps.mps.domain import Domain

log = logging.getLogger(__name__)

#: How long a client has to end after its server has disconnected it.
_GRACE_S = 5.0
#: How much is shown of the variable that names a job's devices, because a job can set it to anything.
_MAX_DEVICE = 1000
#: The log's times are in whole seconds; a process that started this much later only reuses the PID.
_START_TOLERANCE_S = 5.0
_LIST_COMMAND = "yunion-mps who --clients"
_LIST_JOBS = f"list the clients: {_LIST_COMMAND}"
#: The kernel logs an XID, and the server notices it, a moment after the driver reports it.
_XID_SETTLE_S = 0.5


class _DomainClients(NamedTuple):
    """The servers and clients of one domain, as far as its control daemon answered."""

    plan: DomainPlan
    servers: Sequence[int]  # including servers that have outlived their control daemon
    states: Mapping[int, str | None]  # of the others
    clients: Mapping[int, int]  # the server's PID, by the client's
    failure: str


class _GpuProcesses(NamedTuple):
    """What the driver reports, by GPU UUID."""

    memory: Mapping[str, Mapping[int, int | None]]  # in MiB, by PID
    through_mps: Mapping[str, Collection[int]]  # a GPU that does not report them is missing
    sm: Mapping[str, Mapping[int, int]]  # the SM utilization of each process in %, as of the last poll


class ClientService:
    def __init__(self, paths: Paths, supervisor: Supervisor, usage: UsageHistory) -> None:
        self._supervisor = supervisor
        self._usage = usage
        self._containers = Containers(paths)
        self._listing = asyncio.Lock()  # one listing at a time, to limit the load of many requests

    async def clients(self, *, seen: bool = False) -> answers.ClientList:
        """The servers and clients of all domains, and processes that wait for another user's server.

        `errors` says which are unknown, and why. With `seen` only NVML and the kernel are queried, and no
        control daemon, because a hung server would block its control daemon for every other process.
        """
        async with self._listing:
            serving = [
                (domain.in_effect, pid, tuple(domain.server_pids()))
                for domain in self._supervisor.domains
                if (pid := domain.status().pid)
            ]
            nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
            sm = self._usage.latest.load.processes
            ask = _servers_from_kernel if seen else _query_control_daemon
            return await on_thread(
                lambda: _list([ask(*args) for args in serving], nvml, gpus, sm, self._containers)
            )

    async def terminate(self, pid: int, uid: int, *, force: bool) -> answers.Termination:
        """Terminate a client for the user `uid`: its server disconnects it, then it gets SIGTERM.

        A process outside MPS only gets SIGTERM. With `force` SIGKILL follows if that does not end it. Raises
        BusyError during a stop, NotFoundError if it is not a client, NotAllowedError if it is another user's
        or not a job, and without `force` ControlError if its server does not disconnect it.
        """
        if self._supervisor.stopping:
            what = "the daemon is stopping; running jobs have time to end"
            raise BusyError(what, f"end it directly: kill {pid}")
        began = started_ticks(pid)
        client = _find(await self.clients(), pid)
        if uid != client["uid"] and not is_privileged(uid):
            what = f"PID {pid} is a job of {client['user']}"
            raise NotAllowedError(what, "only root and its owner may end it")
        _refuse_unless_job(pid, self._supervisor.domains)
        process = Process.adopt(pid)
        if process is None:
            raise NotFoundError(f"PID {pid} has just ended", "")
        try:
            if started_ticks(pid) != began:  # it has ended, and its PID was reused
                raise NotFoundError(f"PID {pid} has just ended", "")
            how, ended = await self._end(process, client, force=force)
        finally:
            process.close()
        what = f"{client['command'] or 'a job'} (PID {pid}) of {client['user']}: {how}"
        cause = f"requested by {user_name(uid)}"
        log.warning("%s (%s)", what, cause)
        event = Event("warning", "client", client["domain"], what, cause, code=reasons.CLIENT_TERMINATED)
        self._supervisor.event_log.record(event)
        return {"pid": pid, "ended": ended, "how": how}

    async def _end(
        self, process: Process, client: answers.MpsClient | answers.WaitingClient, *, force: bool
    ) -> tuple[str, bool]:
        """Returns the steps that were taken, as text, and whether it has ended."""
        steps = []
        server = None if "since" in client else client["server"]  # a process that waits has none yet
        if server:
            status = next(s for s in self._supervisor.snapshot().domains if s.plan.name == client["domain"])
            program = find_control_program()
            try:
                disconnected = await on_thread(lambda: terminate(program, status.plan, server, process.pid))
                steps.append("its MPS server disconnected it" if disconnected else "no MPS server served it")
            except YunionError as error:
                if not force:
                    raise
                steps.append(f"its MPS server did not disconnect it ({error.message})")
        for number in (signal.SIGTERM, signal.SIGKILL) if force else (signal.SIGTERM,):
            process.signal(number)
            if await _has_ended(process):
                return "; ".join([*steps, f"ended by {number.name}"]), True
        return "; ".join([*steps, f"it is still running after {_GRACE_S:g} s"]), False


class XidAnalyzer:
    """Records XIDs, the process that caused each, and MPS servers that accept no more jobs because of it."""

    def __init__(self, paths: Paths, supervisor: Supervisor, clients: ClientService) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._clients = clients
        self._analyzing: set[str] = set()

    async def analyze(self, address: str, xid: int) -> None:
        """Record the XID of the GPU at once, then the process that the kernel names, and failed servers."""
        self._supervisor.note_xid(address, xid)
        if address in self._analyzing:
            return  # one fault causes many XIDs
        self._analyzing.add(address)
        try:
            await self._analyze(address, xid)
        except YunionError as error:
            log.warning(
                "GPU %s: the effects of XID %d could not be determined: %s", address, xid, error.message
            )
        finally:
            self._analyzing.discard(address)

    async def _analyze(self, address: str, xid: int) -> None:
        await asyncio.sleep(_XID_SETTLE_S)
        named = await on_thread(lambda: processes_of_xids(self._paths))
        suspects = [pid for at, number, pid in named if (at, number) == (address, xid)][-1:]
        for pid in suspects:
            who = command_of(pid) or "a process that has ended"
            self._record(
                address,
                f"XID {xid} came from PID {pid} ({who})",
                "according to the kernel log",
                "",
                reasons.XID,
            )
        for server in (await self._clients.clients())["servers"]:
            if server["state"] == SERVER_FAULT:
                cause = f"suspected: PID {suspects[0]}" if suspects else "a fault in one of its jobs"
                end = "; ".join(f"yunion-mps terminate {pid}" for pid in suspects) or _LIST_COMMAND
                consequence = "its jobs on that GPU have failed; new ones start once those have ended"
                self._record(
                    server["domain"],
                    f"MPS server (PID {server['pid']}) is in state {SERVER_FAULT}",
                    cause,
                    f"{consequence}: {end}",
                    reasons.SERVER_FAILED,
                )

    def _record(self, subject: str, what: str, cause: str, consequence: str, code: str) -> None:
        log.warning("%s: %s%s", subject, what, f"; {consequence}" if consequence else "")
        self._supervisor.event_log.record(Event("error", "client", subject, what, cause, consequence, code))


def _find(listed: answers.ClientList, pid: int) -> answers.MpsClient | answers.WaitingClient:
    clients: list[answers.MpsClient | answers.WaitingClient] = [*listed["clients"], *listed["waiting"]]
    for client in clients:
        if client["pid"] == pid:
            return client
    raise NotFoundError(f"PID {pid} is not an MPS client", _LIST_JOBS)


def _refuse_unless_job(pid: int, domains: Sequence[Domain]) -> None:
    """Raise NotAllowedError for a process that is no job, although the driver may list it on a GPU."""
    if pid == 1:
        what = "is the host's first process"
    elif is_kernel_thread(pid):
        what = "is a kernel thread"
    elif pid == os.getpid():
        what = "is this daemon"
    elif any(pid == domain.status().pid for domain in domains):
        what = "is a control daemon"
    elif any(pid in domain.server_pids() for domain in domains) or running_servers([pid]):
        what = "is an MPS server"
    else:
        return
    raise NotAllowedError(f"PID {pid} {what}, not a job", _LIST_JOBS)


async def _has_ended(process: Process) -> bool:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process.fileno(), ended.set)
    try:
        await asyncio.wait_for(ended.wait(), _GRACE_S)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(process.fileno())
    return True


def _query_control_daemon(plan: DomainPlan, control_pid: int, servers: Sequence[int]) -> _DomainClients:
    states: dict[int, str | None] = {}
    clients: dict[int, int] = {}
    failure = ""
    try:
        program = find_control_program()
        clients = {row.pid: row.server for row in clients_of(program, plan, control_pid)}
        states = {pid: server_state(program, plan, pid) for pid in server_pids(control_pid)}
    except YunionError as error:
        failure = f"domain {plan.name}: {error.message}; {error.hint}"
    return _DomainClients(plan, servers, states, clients, failure)


def _servers_from_kernel(plan: DomainPlan, control_pid: int, servers: Sequence[int]) -> _DomainClients:
    return _DomainClients(plan, servers, dict.fromkeys(server_pids(control_pid)), {}, "")


def _list(
    domains: Sequence[_DomainClients],
    nvml: Nvml | None,
    gpus: Iterable[Gpu],
    sm: Mapping[str, Mapping[int, int]],
    containers: Containers,
) -> answers.ClientList:
    driver = _GpuProcesses({}, {}, {})
    errors = [one.failure for one in domains if one.failure]
    try:
        # In this order, so that a process that starts between the two calls counts as an MPS client.
        driver = _GpuProcesses(nvml.processes(), nvml.mps_clients(), sm) if nvml else driver
    except YunionError as error:
        errors.append(error.message)
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    clients = [client for one in domains for client in _clients_json(one, driver, addresses, containers)]
    known = {client["pid"] for client in clients}
    return {
        "servers": [
            {**_process_json(pid), "domain": one.plan.name, "state": one.states.get(pid)}
            for one in domains
            for pid in one.servers
        ],
        "clients": clients,
        "waiting": [waiter for one in domains for waiter in _waiting_json(one) if waiter["pid"] not in known],
        "errors": errors,
        "total": len(clients),
    }


def _waiting_json(domain: _DomainClients) -> list[answers.WaitingClient]:
    """List the processes that wait for another user's server, with details from the kernel."""
    waiting: list[answers.WaitingClient] = []
    for one in waiting_clients(domain.plan, domain.servers):
        details = _process_json(one.pid)
        started, owner = details["started"], uid_of(one.server)
        if owner is not None and started is not None and started < rfc3339(one.since_s + _START_TOLERANCE_S):
            waiting.append(
                {
                    **details,
                    "since": rfc3339(one.since_s),
                    "server": one.server,
                    "server_user": user_name(owner),
                    "domain": domain.plan.name,
                }
            )
    return waiting


def _clients_json(
    domain: _DomainClients,
    driver: _GpuProcesses,
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
        known = [mib for mib in memory.values() if mib is not None]
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
                "device": printable(variable_of(pid, DEVICE_VARIABLE) or "")[:_MAX_DEVICE] or None,
                "gpus": [addresses.get(uuid, uuid) for uuid in memory],
                "memory_by_gpu_mib": list(memory.values()),
                "memory_used_mib": sum(known) if known else None,
                "sm_utilization_by_gpu": [driver.sm.get(uuid, {}).get(pid) for uuid in memory],
            }
        )
    return rows


def _uses_mps(pid: int, domain: _DomainClients, driver: _GpuProcesses, gpus: Collection[str]) -> bool | None:
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
