"""MPS clients: list them from control daemons, NVML and the kernel, terminate them, and attribute Xids."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from yunion_mps import reasons
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.errors import BusyError, NotAllowedError, NotFoundError, YunionError
from yunion_mps.host.proc import (
    command_of,
    is_kernel_thread,
    started_ticks,
    user_name,
)
from yunion_mps.host.processes import Process
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.events import processes_of_xids
from yunion_mps.models import Event
from yunion_mps.mps.clients import terminate
from yunion_mps.mps.processes import find_control_program, running_servers
from yunion_mps.paths import Paths
from yunion_mps.service.observer import Observer
from yunion_mps.service.permissions import is_privileged
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers
    from yunion_mps.mps.domain import Domain

log = logging.getLogger(__name__)

#: How long a client has to end after its server has disconnected it.
_GRACE_S = 5.0
_LIST_JOBS = "list the clients: yunion-mps who --clients"
#: The kernel logs an Xid, and the server notices it, a moment after the driver reports it.
_XID_SETTLE_S = 0.5


class ClientService:
    def __init__(self, supervisor: Supervisor, observer: Observer) -> None:
        self._supervisor = supervisor
        self._observer = observer
        self._listing = asyncio.Lock()  # one listing at a time, to limit the load of many requests

    async def clients(self, *, seen: bool = False) -> answers.ClientList:
        """The servers and clients of all domains, and processes that wait for another user's server.

        `errors` says which are unknown, and why. With `seen` only NVML and the kernel are queried, and no
        control daemon, because a hung server would block its control daemon for every other process; a driver
        that hangs does not delay it for long.
        """
        if seen:
            return (await self._observer.observe()).clients
        async with self._listing:
            return await self._observer.query_all()

    async def terminate(self, pid: int, uid: int, *, force: bool) -> answers.Termination:
        """Terminate a client for the user `uid`: its server disconnects it, then it gets SIGTERM.

        A process outside MPS only gets SIGTERM. With `force` SIGKILL follows if that does not end it. Raises
        BusyError during a stop, NotFoundError if it is not a client, NotAllowedError if it is another user's
        or not a job, and without `force` ControlError if its server does not disconnect it.
        """
        if self._supervisor.stopping:
            what = "the daemon is stopping and waiting for running jobs to end"
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
                steps.append("its MPS server disconnected it" if disconnected else "it had no MPS server")
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
    """Records Xids, the process that caused each, and MPS servers that accept no more jobs because of it."""

    def __init__(self, paths: Paths, supervisor: Supervisor, clients: ClientService) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._clients = clients
        self._analyzing: set[str] = set()

    async def analyze(self, address: str, xid: int) -> None:
        """Record the Xid of the GPU at once, then the process that the kernel names, and failed servers."""
        self._supervisor.note_xid(address, xid)
        if address in self._analyzing:
            return  # one fault causes many Xids
        self._analyzing.add(address)
        try:
            await self._analyze(address, xid)
        except YunionError as error:
            log.warning(
                "GPU %s: the effects of Xid %d could not be determined: %s", address, xid, error.message
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
                f"Xid {xid} was caused by PID {pid} ({who})",
                "according to the kernel log",
                "",
                reasons.XID,
            )
        for server in (await self._clients.clients())["servers"]:
            if server["state"] == SERVER_FAULT:
                cause = f"suspected: PID {suspects[0]}" if suspects else "a fault in one of its jobs"
                self._record(
                    server["domain"],
                    f"MPS server (PID {server['pid']}) is in state {SERVER_FAULT}",
                    cause,
                    "its jobs on that GPU failed; new jobs can start after the failed ones have ended",
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
        what = "is the init process"
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
