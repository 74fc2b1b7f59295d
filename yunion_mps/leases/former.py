"""Which devices of a division wait for leases that were given under a former one, and for which leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.names import cut
from yunion_mps.leases.offers import Offer
from yunion_mps.models import Device, Lease
from yunion_mps.process import user_name
from yunion_mps.supervisor.changes import LeaseWait

_MOST_NAMED = 3
#: So much of a lease's id tells it from the others.
_ID_LENGTH = 8


class FormerLeases(NamedTuple):
    """The leases of a GPU that were given under a former division, and the ids of the pending devices.

    Pending are the devices of these leases, and the devices of the new division that do not fit beside them.
    """

    leases: tuple[Lease, ...]
    pending: frozenset[str]

    def __str__(self) -> str:
        """The leases: `lease job-17 of alice, lease 7c1f0e7a of bob (PID 4260) and 2 more`."""
        text = ", ".join(_named(lease) for lease in self.leases[:_MOST_NAMED])
        more = len(self.leases) - _MOST_NAMED
        return f"{text} and {more} more" if more > 0 else text


def former_leases(ledger: Ledger, devices: Sequence[Device]) -> Mapping[str, FormerLeases]:
    """By UUID, the GPUs with leases that were not given by the division into `devices`."""
    divided = {device.id: _budget(device) for device in devices}
    gpus = {device.gpu_uuid for device in devices}
    leases: dict[str, dict[str, Lease]] = {}
    pending: dict[str, set[str]] = {}
    for lease in ledger.leases.values():
        for device in lease.devices:
            if device.gpu_uuid in gpus and divided.get(device.id) != _budget(device):
                leases.setdefault(device.gpu_uuid, {})[lease.id] = lease
                pending.setdefault(device.gpu_uuid, set()).add(device.id)
    concerned = [device for device in devices if device.gpu_uuid in leases]
    had = ledger.free_devices([Offer(device) for device in concerned]) | ledger.owners.keys()
    for device in concerned:
        if device.id not in had:
            pending[device.gpu_uuid].add(device.id)
    return {
        uuid: FormerLeases(tuple(found.values()), frozenset(pending[uuid])) for uuid, found in leases.items()
    }


def lease_waits(ledger: Ledger, devices: Sequence[Device]) -> Mapping[str, LeaseWait]:
    """By GPU UUID, how many of `devices` wait for leases of a former division, and for which."""
    ids = {device.id for device in devices}
    return {
        uuid: LeaseWait(number, tuple(lease.id for lease in former.leases), str(former))
        for uuid, former in former_leases(ledger, devices).items()
        if (number := len(former.pending & ids))
    }


def _budget(device: Device) -> tuple[int, float, str]:
    return device.memory_limit_mib, device.thread_percentage, device.priority


def _named(lease: Lease) -> str:
    holder = lease.holder
    text = f"lease {cut(holder.name) or lease.id[:_ID_LENGTH]} of {user_name(holder.uid)}"
    return text if holder.pid is None else f"{text} (PID {holder.pid})"
