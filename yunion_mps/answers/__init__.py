"""What the daemon answers, as types: plain dictionaries with exactly these keys.

Memory is in MiB, times are RFC 3339 strings, and what is unknown is None. scripts/schemas makes the API's
schemas of these types. Import this package under TYPE_CHECKING if a program's start should not pay for it.
"""

from yunion_mps.answers.devices import (
    ClientListJson as ClientListJson,
    ContainerFieldsJson as ContainerFieldsJson,
    DeviceJson as DeviceJson,
    DeviceBudgetJson as DeviceBudgetJson,
    DeviceDetailsJson as DeviceDetailsJson,
    DeviceListJson as DeviceListJson,
    GpuJson as GpuJson,
    GpuListJson as GpuListJson,
    HolderFieldsJson as HolderFieldsJson,
    LeaseDetailsJson as LeaseDetailsJson,
    LeaseListJson as LeaseListJson,
    LeaseRecordJson as LeaseRecordJson,
    MpsClientJson as MpsClientJson,
    MpsServerJson as MpsServerJson,
    PcieLinkJson as PcieLinkJson,
    PoolJson as PoolJson,
    PoolListJson as PoolListJson,
    ProcessFieldsJson as ProcessFieldsJson,
    QueuedRequestJson as QueuedRequestJson,
    TerminationJson as TerminationJson,
    TerminationListJson as TerminationListJson,
    VariableFieldsJson as VariableFieldsJson,
    WaitingClientJson as WaitingClientJson,
)
from yunion_mps.answers.host import (
    ChangeJson as ChangeJson,
    ChangeListJson as ChangeListJson,
    DeviceCountsJson as DeviceCountsJson,
    DomainJson as DomainJson,
    DriverJson as DriverJson,
    EventJson as EventJson,
    EventListJson as EventListJson,
    GpuCountsJson as GpuCountsJson,
    LeaseCountsJson as LeaseCountsJson,
    LossJson as LossJson,
    MinuteUseJson as MinuteUseJson,
    PendingJson as PendingJson,
    ProblemDetailsJson as ProblemDetailsJson,
    ProblemFieldsJson as ProblemFieldsJson,
    ReexecJson as ReexecJson,
    ServedUserJson as ServedUserJson,
    ServiceFieldsJson as ServiceFieldsJson,
    StatusJson as StatusJson,
    StatusProblemJson as StatusProblemJson,
    UsageJson as UsageJson,
)
