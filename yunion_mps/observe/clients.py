"""MPS clients: list them from control daemons, NVML and the kernel, and attribute Xids."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from yunion_mps.core import reasons
from yunion_mps.core.enums import SERVER_FAULT
from yunion_mps.core.errors import YunionError
from yunion_mps.core.models import Event
from yunion_mps.core.paths import Paths
from yunion_mps.host.proc import command_of, user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.gpu_events import processes_of_xids
from yunion_mps.observe.observer import Observer
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: The kernel logs an Xid, and the server notices it, a moment after the driver reports it.
_XID_SETTLE_S = 0.5
#: The consequence of an MPS server's failure.
_FAILED_SERVER = "its jobs on that GPU failed; new jobs can start after the failed ones have ended"


class ClientService:
    """Lists the MPS servers and clients; HTTP, the terminator and reloads call it."""

    def __init__(self, observer: Observer, conversation: asyncio.Lock) -> None:
        """`conversation` is held while control daemons are queried: each serves one front-end at a time."""
        self._observer = observer
        self.conversation = conversation

    async def clients(self, *, seen: bool = False) -> answers.ClientListJson:
        """Return the servers and clients of all domains, and processes that wait for another user's server.

        `errors` says which are unknown, and why. With `seen` only NVML and the kernel are queried, and no
        control daemon, because a hung server would block its control daemon for every other process; a driver
        that hangs does not delay it for long.
        """
        if seen:
            return (await self._observer.observe()).clients
        async with self.conversation:
            return await self._observer.query_all()


class XidAnalyzer:
    """Records Xids, the process that caused each, and MPS servers that accept no more jobs because of it.

    Source: NVIDIA: Xid Errors; NVIDIA: Multi-Process Service, section "Memory Protection and Error
    Containment".
    """

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
        suspect: int | None = None
        for named_address, named_xid, pid in named:
            if (named_address, named_xid) == (address, xid):
                suspect = pid  # the last one
        server_cause = "a fault in one of its jobs"
        if suspect is not None:
            server_cause = f"suspected: PID {suspect}"
            uid = uid_of(suspect)
            process = command_of(suspect) or "a process that has ended"
            if uid is not None:
                process += f", {user_name(uid)}"
            event = Event(
                severity="error",
                kind="client",
                subject=address,
                what=f"Xid {xid} was caused by PID {suspect} ({process})",
                cause="according to the kernel log",
                code=reasons.XID,
            )
            self._record(event)
        for server in (await self._clients.clients())["servers"]:
            if server["state"] == SERVER_FAULT:
                whose = f" of {server['user']}" if server["user"] else ""
                event = Event(
                    severity="error",
                    kind="client",
                    subject=server["domain"],
                    what=f"MPS server (PID {server['pid']}){whose} is in state {SERVER_FAULT}",
                    cause=server_cause,
                    consequence=_FAILED_SERVER,
                    code=reasons.SERVER_FAILED,
                )
                self._record(event)

    def _record(self, event: Event) -> None:
        consequence = f"; {event.consequence}" if event.consequence else ""
        log.warning("%s: %s%s", event.subject, event.what, consequence)
        self._supervisor.event_log.record(event)
