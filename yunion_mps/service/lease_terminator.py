"""Terminates the processes of leases safely, also before a lease is released.

The processes of a lease that expires are left alone: perhaps its client merely could not renew it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from typing import TYPE_CHECKING

from yunion_mps.core.errors import HostError, NotFoundError, YunionError
from yunion_mps.core.models import Owner
from yunion_mps.core.reasons import PROCESSES_UNKNOWN
from yunion_mps.core.tasks import within
from yunion_mps.host.control_groups import ControlGroup
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.permissions import attested_container, find_own_lease
from yunion_mps.service.terminate import KILL, SignalSequence, Terminator

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: How long a release waits for the lease's processes, in s. By then they have been killed, unless the driver
#: or the control daemon hangs.
_DEADLINE_S = 30.0


class LeaseTerminator:
    """Terminates the processes of leases, for their owners and for root; HTTP calls it."""

    def __init__(self, leases: LeaseService, terminator: Terminator) -> None:
        self._leases = leases
        self._terminator = terminator

    async def terminate(
        self, name: str, caller: Owner, signals: SignalSequence
    ) -> list[answers.TerminationJson]:
        """Terminate the processes of a lease without releasing it; raises NotFoundError, NotAllowedError."""
        return await self._terminator.terminate_lease(
            self._own(name, caller),
            caller.uid,
            signals=signals,
            even_if_unknown=signal.SIGKILL in signals or not signals,
            container=self._container(name, caller),
        )

    async def release(self, name: str, caller: Owner) -> answers.LeaseRecordJson:
        """Kill the lease's processes safely, then release it; return it.

        Raises what `LeaseService.release` raises, and HostError with the code PROCESSES_UNKNOWN, with nothing
        released, if processes of the lease may be unknown.
        """
        lease = self._own(name, caller)
        cause = f"its lease {lease['name'] or lease['id']} was released"
        await self._kill(lease, caller.uid, cause, self._container(name, caller))
        with contextlib.suppress(NotFoundError):  # it ended with its process
            return self._leases.release(lease["id"], caller)
        return lease

    def _own(self, name: str, caller: Owner) -> answers.LeaseRecordJson:
        lease = find_own_lease(name, self._leases.ledger.leases, caller)
        return self._leases.lease(lease.id, caller)

    def _container(self, name: str, caller: Owner) -> ControlGroup | None:
        lease = find_own_lease(name, self._leases.ledger.leases, caller)
        return attested_container(lease.holder, self._leases.containers)

    async def _kill(
        self, lease: answers.LeaseRecordJson, uid: int, cause: str, container: ControlGroup | None
    ) -> None:
        late = HostError(f"they were not terminated within {_DEADLINE_S:g} s")
        try:
            work = self._terminator.terminate_lease(lease, uid, cause, signals=KILL, container=container)
            await within(_DEADLINE_S, work, late)
        except YunionError as error:
            if error.code == PROCESSES_UNKNOWN:
                raise
            log.warning("processes of lease %s may still be running: %s", lease["id"], error.message)
