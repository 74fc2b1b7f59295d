"""What the daemon answers, as types: plain dictionaries with exactly these keys.

Memory is in MiB, times are RFC 3339 strings, and what is unknown is None. scripts/schemas makes the API's
schemas of these types. Import this package under TYPE_CHECKING if a program's start should not pay for it.
"""

from yunion_mps.answers.devices import (
    ClientList as ClientList,
    ContainerFields as ContainerFields,
    Device as Device,
    DeviceBudget as DeviceBudget,
    DeviceDetails as DeviceDetails,
    DeviceList as DeviceList,
    Gpu as Gpu,
    GpuList as GpuList,
    HolderFields as HolderFields,
    LeaseDetails as LeaseDetails,
    LeaseList as LeaseList,
    LeaseRecord as LeaseRecord,
    MpsClient as MpsClient,
    MpsServer as MpsServer,
    PcieLink as PcieLink,
    Pool as Pool,
    PoolList as PoolList,
    ProcessFields as ProcessFields,
    QueuedRequest as QueuedRequest,
    Termination as Termination,
    TerminationList as TerminationList,
    VariableFields as VariableFields,
    WaitingClient as WaitingClient,
)
from yunion_mps.answers.host import (
    Change as Change,
    ChangeList as ChangeList,
    DeviceCounts as DeviceCounts,
    Domain as Domain,
    Driver as Driver,
    Event as Event,
    EventList as EventList,
    GpuCounts as GpuCounts,
    LeaseCounts as LeaseCounts,
    Loss as Loss,
    MinuteUse as MinuteUse,
    Pending as Pending,
    ProblemDetails as ProblemDetails,
    ProblemFields as ProblemFields,
    Reexec as Reexec,
    ServedUser as ServedUser,
    ServiceFields as ServiceFields,
    Status as Status,
    StatusProblem as StatusProblem,
    Usage as Usage,
)
