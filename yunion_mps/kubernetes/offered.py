"""Which of the daemon's devices and pools are offered to pods, and which of them no pod should get."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypedDict, TypeVar

from yunion_mps.core.enums import FREE, KUBERNETES, LEASED, RESERVED

if TYPE_CHECKING:
    from yunion_mps.answers import GpuJson, PoolJson


class KnownDevice(TypedDict):
    """The members of a `Device` that are read: hosts have thousands, which would take 10 MiB in full."""

    addr: str
    gpu_uuid: str
    numa_node: int | None
    memory_mib: int | None
    thread_percentage: float
    state: str
    reason: str
    lease: str | None
    holder: str | None
    reserved_for: str | None
    mig_profile: str | None
    sharing: str


DeviceT = TypeVar("DeviceT", bound=KnownDevice)


def select_offered(
    devices: Iterable[DeviceT], pools: Iterable[PoolJson], gpus: Iterable[GpuJson]
) -> tuple[list[DeviceT], list[PoolJson]]:
    """Return what is offered: of GPUs reserved for Kubernetes or, if there are none, of those not reserved.

    The devices of leases come last: those of a replaced GPU have the same addresses as the new GPU's.
    """
    by_address: dict[str, DeviceT] = {}
    for device in devices:
        if not _is_made_for_a_lease(device):
            by_address.setdefault(device["addr"], device)
    use = KUBERNETES if any(gpu["reserved_for"] == KUBERNETES for gpu in gpus) else None
    offered = [device for device in by_address.values() if device["reserved_for"] == use]
    return offered, [pool for pool in pools if pool["reserved_for"] == use]


def _is_made_for_a_lease(device: KnownDevice) -> bool:
    """Return whether the device is part of a pool, whose memory is offered instead."""
    return device["addr"].rpartition("-")[2].startswith("m")


def unhealthy_cause(device: KnownDevice, other_leases: Collection[str]) -> str:
    """Return why no container may get the device, empty if one may, or has it.

    `other_leases` are those of other holders, read after the device, so one that has ended since is missing.
    """
    is_ours = device["state"] == LEASED and device["lease"] not in other_leases
    if is_ours or device["state"] in (FREE, RESERVED):
        return ""
    if device["reason"]:
        return device["reason"]
    return f"leased to {device['holder']}" if device["holder"] else device["state"]
