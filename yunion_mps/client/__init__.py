"""A client of the daemon for programs in Python: leases, devices, GPUs, the daemon's state and its events.

    with Client().lease(memory="6GiB", wait_s=60) as lease:
        subprocess.run(["./simulate"], env=lease.environ(), check=True)

AsyncClient has the same methods for asyncio. Every failure is a YunionError with a `message`, a `hint` and a
`code`; docs/python.md has them all.
"""

from __future__ import annotations

from yunion_mps.client.clients import AsyncClient, Client
from yunion_mps.client.lease import AsyncHeldLease, HeldLease
from yunion_mps.client.values import (
    DeviceDetails,
    DeviceInfo,
    DomainInfo,
    EventInfo,
    GpuInfo,
    LeaseDetails,
    LeaseRecord,
    PcieLinkInfo,
    PoolInfo,
    QueuedRequestInfo,
    Status,
)
from yunion_mps.core.errors import (
    BusyError,
    HostError,
    InfeasibleError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    UnreachableError,
    VersionError,
    YunionError,
)

__all__ = [
    "AsyncClient",
    "AsyncHeldLease",
    "BusyError",
    "Client",
    "DeviceDetails",
    "DeviceInfo",
    "DomainInfo",
    "EventInfo",
    "GpuInfo",
    "HeldLease",
    "HostError",
    "InfeasibleError",
    "LeaseDetails",
    "LeaseRecord",
    "NotAllowedError",
    "NotFoundError",
    "NothingFreeError",
    "PcieLinkInfo",
    "PoolInfo",
    "QueuedRequestInfo",
    "Status",
    "UnreachableError",
    "VersionError",
    "YunionError",
]
