"""What the daemon answers, as types: plain dictionaries with exactly these keys.

Memory is in MiB, times are RFC 3339 strings, and what is unknown is None. scripts/schemas makes the API's
schemas of these types. Import this package under TYPE_CHECKING if a program's start should not pay for it.
"""

from yunion_mps.answers.devices import Device, DeviceDetails, DeviceList, Gpu, GpuList, PcieLink
from yunion_mps.answers.host import (
    Change,
    ChangeList,
    DeviceCounts,
    Domain,
    Driver,
    Event,
    EventList,
    GpuCounts,
    LeaseCounts,
    MinuteUse,
    Pending,
    ProblemDetails,
    ProblemFields,
    Reexec,
    ServiceFields,
    Status,
    StatusProblem,
    Usage,
)
from yunion_mps.answers.leases import HolderFields, LeaseDetails, LeaseList, LeaseRecord, QueuedRequest
from yunion_mps.answers.processes import (
    ClientList,
    ContainerFields,
    MpsClient,
    MpsServer,
    ProcessFields,
    Termination,
    WaitingClient,
)

__all__ = [
    "Change",
    "ChangeList",
    "ClientList",
    "ContainerFields",
    "Device",
    "DeviceCounts",
    "DeviceDetails",
    "DeviceList",
    "Domain",
    "Driver",
    "Event",
    "EventList",
    "Gpu",
    "GpuCounts",
    "GpuList",
    "HolderFields",
    "LeaseCounts",
    "LeaseDetails",
    "LeaseList",
    "LeaseRecord",
    "MinuteUse",
    "MpsClient",
    "MpsServer",
    "PcieLink",
    "Pending",
    "ProblemDetails",
    "ProblemFields",
    "ProcessFields",
    "QueuedRequest",
    "Reexec",
    "ServiceFields",
    "Status",
    "StatusProblem",
    "Termination",
    "Usage",
    "WaitingClient",
]
