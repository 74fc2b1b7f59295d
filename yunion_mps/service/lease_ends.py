"""Leases that end before their processes do: the processes are terminated safely first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from yunion_mps.errors import HostError, NotFoundError, YunionError
from yunion_mps.models import Owner
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.permissions import check_may_change
from yunion_mps.service.terminate import KILL, SignalSequence, Terminator
from yunion_mps.tasks import within

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: How long the end of a lease is delayed by its processes, in s: by then they have been killed, unless the
#: driver or the control daemon hangs.
_DEADLINE_S = 30.0


class LeaseEnds:
    def __init__(self, leases: LeaseService, terminator: Terminator) -> None:
        self._leases = leases
        self._terminator = terminator
        self._expiring: set[asyncio.Task[None]] = set()
        leases.holders.expire = self._expire

    async def terminate(self, name: str, caller: Owner, signals: SignalSequence) -> list[answers.Termination]:
        """Terminate the processes of a lease, which continues; raises NotFoundError, NotAllowedError."""
        return await self._terminator.end_lease(self._own(name, caller), caller.uid, signals=signals)

    async def release(self, name: str, caller: Owner) -> answers.LeaseRecord:
        """Kill the lease's processes safely, then end it; raises what `LeaseService.release` raises."""
        lease = self._own(name, caller)
        await self._kill(lease, caller.uid, f"its lease {lease['name'] or lease['id']} was released")
        with contextlib.suppress(NotFoundError):  # it ended with its process
            return self._leases.release(lease["id"], caller)
        return lease

    def _own(self, name: str, caller: Owner) -> answers.LeaseRecord:
        lease = self._leases.lease(name, caller)
        check_may_change(self._leases.ledger.leases[lease["id"]], caller)
        return lease

    def _expire(self, lease_id: str, cause: str) -> None:
        task = asyncio.ensure_future(self._end_expired(lease_id, cause))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _end_expired(self, lease_id: str, cause: str) -> None:
        """Kill the lease's processes safely, then end it, unless it has been renewed meanwhile."""
        lease = self._leases.ledger.leases.get(lease_id)
        if lease is None:
            return
        record = self._leases.lease(lease_id, lease.holder.owner)
        await self._kill(record, lease.holder.uid, f"its lease ended: {cause}")
        current = self._leases.ledger.leases.get(lease_id)
        if current and (current.ends_s or 0.0) <= time.monotonic():
            self._leases.end(lease_id, cause)

    async def _kill(self, lease: answers.LeaseRecord, uid: int, cause: str) -> None:
        late = HostError(f"they were not terminated within {_DEADLINE_S:g} s")
        try:
            work = self._terminator.end_lease(lease, uid, cause, signals=KILL)
            await within(_DEADLINE_S, work, late)
        except YunionError as error:
            log.warning("processes of lease %s may still be running: %s", lease["id"], error.message)
