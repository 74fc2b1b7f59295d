"""Leases and those who wait, as the outside sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from yunion_mps.containers.lookup import Containers
from yunion_mps.host.proc import command_of, started_ticks, user_name
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import CDI_KIND, Device, Holder, Lease

Json = dict[str, Any]


def lease_json(lease: Lease, expires_s: float | None, containers: Containers) -> Json:
    """One lease; `expires_s` is in s since 1970, None where it ends with a process or a connection."""
    holder = lease.holder
    return {
        "id": lease.id,
        "devices": [device.addr for device in lease.devices],
        "gpus": _gpus(lease.devices),
        "memory": [device.memory_limit_mib for device in lease.devices],
        "thread_percentage": min(device.thread_percentage for device in lease.devices),
        "budget_enforced": all(device.budget_enforced for device in lease.devices),
        "unenforced_gpus": _gpus(device for device in lease.devices if not device.budget_enforced),
        "binding": holder.binding,
        **_who(holder, containers),
        "name": holder.name or None,
        "since": lease.since_s,
        "expires": expires_s,
        "cdi": f"{CDI_KIND}={lease.id}" if lease.cdi else None,
        "environment": dict(lease.environment),
    }


def leases_json(
    leases: Iterable[tuple[Lease, float | None]],
    waiting: Iterable[tuple[LeaseRequest, float, Holder]],
    containers: Containers,
) -> Json:
    """All leases, and those who wait in the order of their coming."""
    given = [lease_json(lease, expires_s, containers) for lease, expires_s in leases]
    waiters = [
        {**_who(holder, containers), "name": holder.name or None, "since": since_s, "wants": str(request)}
        for request, since_s, holder in waiting
    ]
    return {"leases": given, "waiting": waiters, "total": len(given)}


def _gpus(devices: Iterable[Device]) -> list[str]:
    return list(dict.fromkeys(device.gpu_address for device in devices))


def _who(holder: Holder, containers: Containers) -> Json:
    pid = holder.pid
    runs = pid is not None and started_ticks(pid) == holder.started
    inside = containers.of(pid) if pid is not None and runs else None
    return {
        "pid": pid,
        "uid": holder.uid,
        "user": user_name(holder.uid),
        "command": (holder.command or command_of(pid)) if pid is not None and runs else None,
        "container": inside.name if inside else None,
        "container_id": inside.id if inside else None,
    }
