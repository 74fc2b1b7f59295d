"""A client of the daemon for programs in Python: leases, devices, GPUs, the daemon's state and its events.

    with Client().lease(memory="6GiB", wait_s=60) as lease:
        subprocess.run(["./simulate"], env=lease.environ(), check=True)

AsyncClient has the same methods for asyncio. Every failure is a YunionError with a `message`, a `hint` and a
`code`; docs/python.md has them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

#: Where names are, besides values and errors: each is imported when it is used, because the command line
#: imports parts of this package and none of these.
_MODULES = {
    "AsyncClient": "client.clients",
    "AsyncLease": "client.lease",
    "Client": "client.clients",
    "Lease": "client.lease",
}


def __getattr__(name: str) -> Any:
    """The public names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    usual = "errors" if name.endswith("Error") else "client.values"
    return getattr(import_module(f"yunion_mps.{_MODULES.get(name, usual)}"), name)
