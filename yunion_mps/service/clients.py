"""Who uses the GPUs through MPS: servers and clients, from control daemons, NVML and the kernel."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.errors import BusyError, NotAllowedError, NotFoundError, YunionError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import started_ticks, uid_of, user_name, variable_of
from yunion_mps.host.processes import Process
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory import Nvml
from yunion_mps.models import DomainPlan, Event, Gpu
from yunion_mps.mps.clients import clients_of, server_state, terminate, waiting_clients
from yunion_mps.mps.processes import find_control_program, is_server, server_pids
from yunion_mps.paths import Paths
from yunion_mps.planning import DEVICE_VARIABLE
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: How long a client has to end by itself once its server has let go of it.
_GRACE_S = 5.0
#: What a job says its devices are is its own word, and may be of any length.
_LONGEST_DEVICE = 1000
#: By so much a process may have begun after the moment at which a log names its PID.
_SAME_S = 5.0


class _Asked(NamedTuple):
    """What one control daemon told."""

    plan: DomainPlan
    servers: tuple[int, ...]  # also those that have outlived their control daemon
    states: Mapping[int, str | None]  # of those that have not
    clients: Mapping[int, int]  # PID: its server's
    trouble: str


class _Seen(NamedTuple):
    """What the driver told, by GPU UUID."""

    memory: Mapping[str, Mapping[int, int | None]]  # in MiB, of each process
    through_mps: Mapping[str, Collection[int]]  # a GPU that does not tell is missing


class Clients:
    """Finds clients, and ends them safely."""

    def __init__(self, paths: Paths, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._containers = Containers(paths)
        self._asking = asyncio.Lock()  # one question at a time is enough, however many ask it

    async def clients(self, *, seen: bool = False) -> Json:
        """The servers and clients of all domains, and who waits for another user's server.

        `troubles` says of which nothing is known, and why.

        With `seen` only what NVML and the kernel see: no control daemon is asked, which a server that hangs
        could keep from serving anybody.
        """
        async with self._asking:
            return await self._clients(seen=seen)

    async def _clients(self, *, seen: bool) -> Json:
        serving = [
            (domain.plan, pid, tuple(domain.server_pids()))
            for domain in self._supervisor.domains
            if (pid := domain.status().pid)
        ]
        nvml, gpus = self._supervisor.nvml, self._supervisor.snapshot().inventory.gpus
        ask = _not_asked if seen else _ask
        return await on_thread(lambda: _look(serving, nvml, gpus, ask, self._containers))

    async def terminate(self, pid: int, uid: int, *, force: bool) -> Json:
        """End a client: its server lets go of it first, then it gets SIGTERM, and with `force` SIGKILL.

        Raises BusyError during a stop, NotFoundError where it is none, NotAllowedError where it is another
        user's, ControlError where its server does not let go of it and `force` was not asked for.
        """
        if self._supervisor.stopping:
            what = "the daemon is stopping, and its jobs have their time to end"
            raise BusyError(what, f"end this one by hand: kill {pid}")
        began = started_ticks(pid)
        answer = await self.clients()
        waiting = ({**one, "server": None} for one in answer["waiting"])  # none has it yet
        found = next((one for one in (*answer["clients"], *waiting) if one["pid"] == pid), None)
        if found is None:
            raise NotFoundError(f"PID {pid} is no client of MPS", "list the clients with: yunion-mps clients")
        if uid not in (0, os.geteuid(), found["uid"]):
            what = f"PID {pid} is a job of {found['user']}"
            raise NotAllowedError(what, "only root and its owner may end it")
        process = Process.adopt(pid)
        if process is None:
            raise NotFoundError(f"PID {pid} has just ended", "")
        try:
            if started_ticks(pid) != began:  # it ended meanwhile, and its PID is another's
                raise NotFoundError(f"PID {pid} has just ended", "")
            how, ended = await self._end(process, found, force=force)
        finally:
            process.close()
        what = f"{found['command'] or 'a job'} (PID {pid}) of {found['user']}: {how}"
        cause = f"uid {uid} asked for its end"
        log.warning("%s, for %s", what, cause)
        self._supervisor.event_log.record(Event("warning", "client", found["domain"] or "", what, cause))
        return {"pid": pid, "ended": ended, "how": how}

    async def _end(self, process: Process, found: Json, *, force: bool) -> tuple[str, bool]:
        """How it ended, or what was done for that, and whether it ended."""
        steps = []
        if found["server"]:
            status = next(s for s in self._supervisor.snapshot().domains if s.plan.name == found["domain"])
            program, server = find_control_program(), found["server"]
            try:
                let_go = await on_thread(lambda: terminate(program, status.plan, server, process.pid))
                steps.append("its MPS server let go of it" if let_go else "no MPS server had it")
            except YunionError as error:
                if not force:
                    raise
                steps.append(f"its MPS server did not let go of it ({error.message})")
        for number in (signal.SIGTERM, signal.SIGKILL) if force else (signal.SIGTERM,):
            process.signal(number)
            if await _ended(process):
                return "; ".join([*steps, f"ended by {number.name}"]), True
        return "; ".join([*steps, f"it goes on after {_GRACE_S:g} s: end it with --force"]), False


async def _ended(process: Process) -> bool:
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


def _look(
    serving: Iterable[tuple[DomainPlan, int, tuple[int, ...]]],
    nvml: Nvml | None,
    gpus: Iterable[Gpu],
    ask: Callable[[DomainPlan, int, tuple[int, ...]], _Asked],
    containers: Containers,
) -> Json:
    asked = [ask(plan, pid, servers) for plan, pid, servers in serving]
    seen = _Seen({}, {})
    troubles = [f"domain {one.plan.name}: {one.trouble}" for one in asked if one.trouble]
    try:
        # In this order: whoever begins between the two questions is known to use MPS.
        seen = _Seen(nvml.processes(), nvml.mps_clients()) if nvml else seen
    except YunionError as error:
        troubles.append(error.message)
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    clients = [client for one in asked for client in _clients_json(one, seen, addresses, containers)]
    servers = [
        {**_process_json(pid), "domain": one.plan.name, "state": one.states.get(pid)}
        for one in asked
        for pid in one.servers
    ]
    known = {client["pid"] for client in clients}
    waiting = [waiter for one in asked for waiter in _waiting_json(one) if waiter["pid"] not in known]
    return {
        "servers": servers,
        "clients": clients,
        "waiting": waiting,
        "troubles": troubles,
        "total": len(clients),
    }


def _waiting_json(asked: _Asked) -> list[Json]:
    """Those that another user's server keeps waiting, with the kernel's word on them."""
    found = []
    for one in waiting_clients(asked.plan, asked.servers):
        about = _process_json(one.pid)
        owner = uid_of(one.server)
        # The log's moment is cut to seconds; whoever began well after it only has the PID of one that waited.
        if owner is not None and about["started"] is not None and about["started"] < one.since_s + _SAME_S:
            whose = {"server": one.server, "server_user": user_name(owner), "domain": asked.plan.name}
            found.append({**about, "since": one.since_s, **whose})
    return found


def _ask(plan: DomainPlan, control_pid: int, servers: tuple[int, ...]) -> _Asked:
    states: dict[int, str | None] = {}
    clients: dict[int, int] = {}
    trouble = ""
    try:
        program = find_control_program()
        clients = {row.pid: row.server for row in clients_of(program, plan, control_pid)}
        states = {pid: server_state(program, plan, pid) for pid in server_pids(control_pid)}
    except YunionError as error:
        trouble = f"{error.message}; {error.hint}"
    return _Asked(plan, servers, states, clients, trouble)


def _not_asked(plan: DomainPlan, control_pid: int, servers: tuple[int, ...]) -> _Asked:
    return _Asked(plan, servers, dict.fromkeys(server_pids(control_pid)), {}, "")


def _clients_json(
    asked: _Asked, seen: _Seen, addresses: Mapping[str | None, str], containers: Containers
) -> list[Json]:
    """Those that the control daemon names, and those that NVML sees on its GPUs.

    A server that is about to end names none, although they run, and one without a control daemon neither.
    """
    on_gpus: dict[int, dict[str, int | None]] = {}
    for uuid in asked.plan.gpu_uuids:
        for pid, mib in seen.memory.get(uuid, {}).items():
            if pid not in asked.servers:
                on_gpus.setdefault(pid, {})[uuid] = mib
    silent = [pid for pid in asked.servers if pid not in asked.states] or asked.servers
    only = silent[0] if len(silent) == 1 else None
    found = []
    for pid in sorted({*asked.clients, *on_gpus}):
        memory = on_gpus.get(pid, {})
        known = [mib for mib in memory.values() if mib is not None]
        through_mps = _uses_mps(pid, asked, seen, memory)
        inside = containers.of(pid)
        found.append(
            {
                **_process_json(pid),
                "container": inside.name if inside else None,
                "container_id": inside.id if inside else None,
                "mps": through_mps,
                "server": None if through_mps is False else asked.clients.get(pid, only),
                "domain": asked.plan.name,
                "device": printable(variable_of(pid, DEVICE_VARIABLE) or "")[:_LONGEST_DEVICE] or None,
                "gpus": [addresses.get(uuid, uuid) for uuid in memory],
                "memory_by_gpu": list(memory.values()),
                "memory_used": sum(known) if known else None,
            }
        )
    return found


def _uses_mps(pid: int, asked: _Asked, seen: _Seen, gpus: Collection[str]) -> bool | None:
    """Whether the process uses the GPUs through MPS; None where nobody can tell.

    Past MPS is only who is there, has one of the GPUs, and is no client by anybody's word.
    """
    if pid in asked.clients or any(pid in seen.through_mps.get(uuid, ()) for uuid in gpus):
        return True
    told = bool(gpus) and all(uuid in seen.through_mps for uuid in gpus)
    return False if told and uid_of(pid) is not None and not is_server(pid) else None


def _process_json(pid: int) -> Json:
    """The kernel's word on a process; all but the PID is null where it has ended meanwhile."""
    import psutil

    uid = uid_of(pid)
    about: Json = {"pid": pid, "uid": uid, "user": None, "command": None, "started": None}
    if uid is not None:
        about["user"] = user_name(uid)
        try:
            process = psutil.Process(pid)
            about["command"] = printable(" ".join(process.cmdline()) or process.name())[:500]
            about["started"] = process.create_time()
        except psutil.Error:
            return about
    return about
