"""A client of the daemon for programs in Python: leases, devices, GPUs, the daemon's state and its events.

    with Client().lease(memory="6GiB", wait_s=60) as lease:
        subprocess.run(["./simulate"], env=lease.environ(), check=True)

AsyncClient has the same methods for asyncio. Every failure is a YunionError with a `message`, a `hint` and a
`code`; docs/python.md has them all.
"""

from __future__ import annotations

from yunion_mps.client.clients import AsyncClient, Client
from yunion_mps.client.lease import AsyncLease, Lease
from yunion_mps.client.values import (
    Device,
    DeviceDetails,
    Domain,
    Event,
    Gpu,
    LeaseDetails,
    LeaseRecord,
    PcieLink,
    Pool,
    QueuedRequest,
    Status,
)
from yunion_mps.errors import (
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
    "AsyncLease",
    "BusyError",
    "Client",
    "Device",
    "DeviceDetails",
    "Domain",
    "Event",
    "Gpu",
    "HostError",
    "InfeasibleError",
    "Lease",
    "LeaseDetails",
    "LeaseRecord",
    "NotAllowedError",
    "NotFoundError",
    "NothingFreeError",
    "PcieLink",
    "Pool",
    "QueuedRequest",
    "Status",
    "UnreachableError",
    "VersionError",
    "YunionError",
]
