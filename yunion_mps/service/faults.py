"""After an XID: which process was at work, and whether an MPS server has ceased to take jobs for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from yunion_mps.errors import YunionError
from yunion_mps.host.proc import command_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.events import processes_of_xids
from yunion_mps.models import Event
from yunion_mps.paths import Paths
from yunion_mps.service.clients import Clients
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

FAULT = "FAULT"
#: The kernel writes its line, and the server finds out, a moment after the driver has told us.
_MOMENT_S = 0.5


class Faults:
    """Takes note of XIDs, and finds out what came of them."""

    def __init__(self, paths: Paths, supervisor: Supervisor, clients: Clients) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._clients = clients
        self._at_work: set[str] = set()

    async def after_xid(self, address: str, xid: int) -> None:
        """Record the XID at once, then whom the kernel names, then the servers that have failed for it."""
        self._supervisor.note_xid(address, xid)
        if address in self._at_work:
            return  # XIDs of one fault come in numbers
        self._at_work.add(address)
        try:
            await self._find_out(address, xid)
        except YunionError as error:
            log.warning(
                "GPU %s: the effects of XID %d could not be determined: %s", address, xid, error.message
            )
        finally:
            self._at_work.discard(address)

    async def _find_out(self, address: str, xid: int) -> None:
        await asyncio.sleep(_MOMENT_S)
        named = await on_thread(lambda: processes_of_xids(self._paths))
        suspects = [pid for at, number, pid in named if (at, number) == (address, xid)][-1:]
        for pid in suspects:
            who = command_of(pid) or "a process that has ended"
            self._record(address, f"XID {xid} came from PID {pid} ({who})", "the kernel's log names it", "")
        for server in (await self._clients.clients())["servers"]:
            if server["state"] == FAULT:
                self._record(server["domain"], *_of_server(server, suspects))

    def _record(self, subject: str, what: str, cause: str, means: str) -> None:
        log.warning("%s: %s%s", subject, what, f"; {means}" if means else "")
        self._supervisor.event_log.record(Event("error", "client", subject, what, cause, means))


def _of_server(server: dict[str, Any], suspects: list[int]) -> tuple[str, str, str]:
    what = f"MPS server (PID {server['pid']}) is in state {FAULT}"
    cause = f"suspected: PID {suspects[0]}" if suspects else "a fault of one of its jobs"
    ends = f"yunion-mps clients terminate {suspects[0]}" if suspects else "yunion-mps clients"
    means = f"its jobs on that GPU have failed, and new ones start once those have ended: {ends}"
    return what, cause, means
