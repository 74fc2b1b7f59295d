"""MIG instances that other programs use, or have destroyed since the last poll.

A whole instance belongs to one lease, so it is not leased while a process without a lease uses it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.errors import HostError, YunionError
from yunion_mps.core.models import Device, Lease
from yunion_mps.core.reasons import NO_REASON, PROCESS_WITHOUT_LEASE, Reason
from yunion_mps.core.tasks import within
from yunion_mps.host.proc import is_exiting, process_name, user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.scan import INSTANCE_GONE
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.fleet import Processes

#: How long a lease waits for the driver; if that is slow, the monitor reports it.
_DRIVER_TIMEOUT_S = 2.0


class InstanceCheck:
    """Checks the MIG instances of leases, and tells `Queries` which ones others use."""

    def __init__(self, supervisor: Supervisor, queries: Queries, poll: Callable[[], Awaitable[None]]) -> None:
        """`poll` polls the GPUs at once."""
        self._supervisor = supervisor
        self._queries = queries
        self._poll = poll

    def note(self, processes: Processes, granting: Lease | None = None) -> None:
        """Note which whole instances processes without a lease use; `granting` does not count yet."""
        leased = set(self._queries.ledger.ways_of_sharing())
        if granting:
            leased.difference_update(device.gpu_uuid for device in granting.devices)
        reasons: dict[str, Reason] = {}
        for uuid in _whole(self._supervisor.snapshot().plan.devices):
            reason = NO_REASON if uuid in leased else _describe_use(processes.get(uuid, {}))
            if reason:
                reasons[uuid] = reason
        self._queries.set_used(reasons)

    async def why_unusable(self, lease: Lease, *, is_new: bool) -> Reason:
        """Return why a lease cannot have its devices, empty if it can; poll the GPUs if one is missing.

        Use by other processes matters only if the lease is new. If the driver does not answer, the reason is
        empty, too.
        """
        if not any(device.is_on_instance for device in lease.devices):
            return NO_REASON
        nvml = self._supervisor.nvml
        if nvml is None:
            return NO_REASON
        slow = HostError("the driver is slow to answer", "")
        try:
            processes = await within(_DRIVER_TIMEOUT_S, on_thread(nvml.processes), slow)
        except YunionError:
            return NO_REASON
        self.note(processes, lease if is_new else None)
        for device in lease.devices:
            if device.gpu_uuid not in processes:
                await self._poll()
                return INSTANCE_GONE
        for uuid in _whole(lease.devices):
            if uuid in self._queries.used_by_others:
                return self._queries.used_by_others[uuid]
        return NO_REASON


def _whole(devices: Iterable[Device]) -> list[str]:
    """Return the UUIDs of the instances that are one device."""
    return [device.gpu_uuid for device in devices if device.sharing == NOT_SHARED]


def _describe_use(processes: Mapping[int, int | None]) -> Reason:
    """Return which processes use an instance without a lease; empty if none does."""
    running = sorted(pid for pid in processes if not is_exiting(pid))
    if not running:
        return NO_REASON
    first = running[0]
    uid = uid_of(first)
    user = "an unknown user" if uid is None else user_name(uid)
    users = f"PID {first} of {user} ({process_name(first)})"
    text = f"{users} uses it without a lease"
    if len(running) > 1:
        text = f"{users} and {len(running) - 1} more use it without a lease"
    return Reason(text, PROCESS_WITHOUT_LEASE)
