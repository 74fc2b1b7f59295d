"""MIG instances that other programs use, or have destroyed since the last poll.

A whole instance belongs to one lease, so it is not leased while a process without a lease uses it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from yunion_mps.enums import NOT_SHARED
from yunion_mps.errors import HostError, YunionError
from yunion_mps.host.proc import is_exiting, process_name, uid_of, user_name
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.scan import INSTANCE_GONE
from yunion_mps.models import Device, Lease
from yunion_mps.reasons import NO_REASON, PROCESS_WITHOUT_LEASE, Reason
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.fleet import Processes
from yunion_mps.tasks import within

#: How long a lease waits for the driver; if that is slow, the monitor reports it.
_DRIVER_TIMEOUT_S = 2.0


async def _no_poll() -> None:
    """Do nothing, because there is no monitor yet."""


class InstanceCheck:
    """Checks the MIG instances of leases, and tells `Queries` which ones others use."""

    def __init__(self, supervisor: Supervisor, queries: Queries) -> None:
        self._supervisor = supervisor
        self._queries = queries
        #: Polls the GPUs at once.
        self.poll: Callable[[], Awaitable[None]] = _no_poll

    def note(self, processes: Processes, granting: Lease | None = None) -> None:
        """Note which whole instances processes without a lease use; `granting` does not count yet."""
        new = granting.devices if granting else ()
        leased = self._queries.ledger.ways_of_sharing().keys() - {device.gpu_uuid for device in new}
        whole = _whole(self._supervisor.snapshot().plan.devices)
        used = ((uuid, _describe_use(processes.get(uuid, {}))) for uuid in whole if uuid not in leased)
        self._queries.set_used({uuid: reason for uuid, reason in used if reason})

    async def why_unusable(self, lease: Lease, *, is_new: bool) -> Reason:
        """Why a lease cannot have its devices, empty if it can; the GPUs are polled if one is missing.

        Use by other processes matters only if the lease is new. If the driver does not answer, the reason is
        empty, too.
        """
        nvml = self._supervisor.nvml if any(device.is_on_instance for device in lease.devices) else None
        if nvml is None:
            return NO_REASON
        slow = HostError("the driver is slow to answer", "")
        try:
            processes = await within(_DRIVER_TIMEOUT_S, on_thread(nvml.processes), slow)
        except YunionError:
            return NO_REASON
        self.note(processes, lease if is_new else None)
        if any(device.gpu_uuid not in processes for device in lease.devices):
            await self.poll()
            return INSTANCE_GONE
        used = self._queries.used_by_others
        return next((used[uuid] for uuid in _whole(lease.devices) if uuid in used), NO_REASON)


def _whole(devices: Iterable[Device]) -> list[str]:
    """The UUIDs of the instances that are one device."""
    return [device.gpu_uuid for device in devices if device.sharing == NOT_SHARED]


def _describe_use(processes: Mapping[int, int | None]) -> Reason:
    """Which processes use an instance without a lease; empty if none does."""
    running = sorted(pid for pid in processes if not is_exiting(pid))
    if not running:
        return NO_REASON
    uid = uid_of(running[0])
    user = "an unknown user" if uid is None else user_name(uid)
    use = f"and {len(running) - 1} more use" if running[1:] else "uses"
    text = f"PID {running[0]} of {user} ({process_name(running[0])}) {use} it without a lease"
    return Reason(text, PROCESS_WITHOUT_LEASE)
