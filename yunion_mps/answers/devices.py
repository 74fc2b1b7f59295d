"""Devices and GPUs, and who uses them: processes, leases, and queued requests."""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps.answers.fields import (
    Count,
    DeviceAddress,
    Field,
    GpuAddress,
    Mib,
    NumaNode,
    Percentage,
    Pid,
    ReasonCode,
    Time,
    Utilization,
    UtilizationList,
    Uuid,
    VendorDeviceId,
)
from yunion_mps.core import enums


class PcieLinkJson(TypedDict):
    """The capability of a GPU's PCI Express link."""

    lane_width: Count
    throughput: Annotated[str, Field("Of all lanes combined.", pattern="^[0-9]+\\.[0-9]{2} GB/s$")]
    transfer_rate_per_lane: Annotated[str, Field(pattern="^[0-9.]+GT/s$")]
    version: Annotated[str, Field("The version of PCI Express.", pattern="^[1-7]\\.0$")]


class DeviceJson(TypedDict):
    """One device: a share of a GPU, with Cloudpods' field names and ours.

    It is pending, and not free, if leases from before a reload hold it or the memory that it needs; a device
    of such a lease is shown as it was leased, and can still be used.
    """

    id: Annotated[Uuid, Field("Does not change across restarts.")]
    dev_type: Annotated[
        str,
        Field(
            "The type, as Cloudpods names it; NVIDIA_GPU for a whole MIG instance.",
            enum=[*enums.DEV_TYPES.values()],
        ),
    ]
    model: Annotated[str | None, Field("The GPU's name.")]
    addr: DeviceAddress
    vendor_device_id: VendorDeviceId | None
    host_id: Uuid
    numa_node: NumaNode | None
    device_path: Annotated[str, Field("The GPU's UUID.")]
    pcie_info: PcieLinkJson | None
    index: Annotated[int, Field("Always -1 for MPS devices.", const=-1)]
    device_minor: Annotated[int, Field("Always -1 for MPS devices.", const=-1)]
    mps_memory_limit: Annotated[Mib | None, Field("Cloudpods' name of `memory_mib`.")]
    mps_memory_total: Annotated[Mib | None, Field("Cloudpods' name of `gpu_memory_mib`.")]
    mps_thread_percentage: Annotated[Percentage, Field("Cloudpods' name of `thread_percentage`.")]
    memory_mib: Annotated[
        Mib | None,
        Field(
            "Memory that the device may use, in MiB; null if the memory of its time-sliced GPU is unknown."
        ),
    ]
    gpu_memory_mib: Annotated[Mib | None, Field("Memory of the GPU, in MiB; null if it is unknown.")]
    thread_percentage: Annotated[Percentage, Field("Share of the SM threads that the device may use.")]
    gpu_uuid: str
    state: Annotated[
        str,
        Field(
            "`free`: it can be leased now; `reserved`: only for what its GPU is reserved for; "
            "`no memory`: other leases of its GPU have its memory.",
            enum=enums.DEVICE_STATES,
        ),
    ]
    reason: Annotated[
        str, Field("Why it is unavailable or reserved, or which leases a pending one waits for.")
    ]
    reason_code: ReasonCode
    budget_enforced: Annotated[
        bool, Field("Whether it is enforced: through MPS from Volta on, and by a MIG instance.")
    ]
    mig_profile: Annotated[str | None, Field("The profile of the MIG instance, such as 1g.10gb.")]
    sharing: Annotated[str, Field("How its GPU is shared.", enum=enums.SHARING)]
    reserved_for: Annotated[str | None, Field("What its GPU is reserved for, as configured.")]
    free_for: Annotated[
        str | None,
        Field(
            "If it is free: the only user who can lease it now, because its control daemon serves them. "
            "Null: everybody; empty: no user, until others' jobs have ended."
        ),
    ]
    not_free_for: Annotated[
        list[str],
        Field("If it is free: users who cannot lease it, because their MPS servers do not start."),
    ]
    lease: Annotated[str | None, Field("The id of its lease.")]
    holder: Annotated[str | None, Field("Who has its lease: `alice (PID 4260)`, `bob (job-17)`.")]


class DeviceDetailsJson(DeviceJson):
    """One device, and how to use it."""

    slot: Annotated[Count, Field("The number of the share on its GPU, from 0.")]
    domain: Annotated[str, Field("The domain that serves it; empty if it needs none.")]
    client_environment: Annotated[
        dict[str, str],
        Field("The variables of a process that uses the device; empty if no control daemon serves it."),
    ]


class DeviceListJson(TypedDict):
    """One page of the devices."""

    isolated_devices: Annotated[list[DeviceJson], Field("The devices of this page, in PCI order.")]
    total: Annotated[Count, Field("The number of devices that match the filters, on all pages.")]
    limit: Count
    offset: Count


class GpuJson(TypedDict):
    """One physical GPU, or a MIG instance, which follows its GPU."""

    uuid: str | None
    name: str | None
    addr: GpuAddress
    pci_address: Annotated[GpuAddress, Field("The full PCI address.")]
    memory_mib: Annotated[
        Mib | None, Field("As configured, or else as the driver reports it; null if it is unknown.")
    ]
    memory_free_mib: Annotated[Mib | None, Field("Free to lease; null unless its memory is leased in units.")]
    free_for: Annotated[
        str | None,
        Field(
            "The only user who can lease its devices or memory now. Null: everybody; empty: no user, until "
            "others' jobs have ended."
        ),
    ]
    memory_used_mib: Annotated[Mib | None, Field("In use, as nvidia-smi shows it.")]
    utilization: Utilization | None
    temperature_c: Annotated[int | None, Field("In degrees Celsius.")]
    power_w: Annotated[float | None, Field("The power that it draws, in watts.", minimum=0)]
    power_limit_w: Annotated[float | None, Field("Its power limit, in watts.", minimum=0)]
    compute_mode: Annotated[str | None, Field("As nvidia-smi names it.")]
    compute_capability: Annotated[str, Field(pattern="^[0-9]+\\.[0-9]+$")] | None
    mig_enabled: bool | None
    vendor_device_id: VendorDeviceId | None
    numa_node: NumaNode | None
    pcie_info: PcieLinkJson | None
    render_node: str | None
    index: Annotated[Count | None, Field("NVML's index.")]
    device_minor: Annotated[Count | None, Field("The N of /dev/nvidiaN.")]
    devices: Annotated[
        Count,
        Field("How many devices it has, including those created for leases and those on its MIG instances."),
    ]
    state: Annotated[
        str,
        Field(
            "Whether it serves devices; `pending`: it does, but its MIG layout is not in effect yet.",
            enum=[enums.AVAILABLE, enums.PENDING, enums.UNAVAILABLE, enums.NOT_USED],
        ),
    ]
    reason: Annotated[str, Field("Why it cannot be used; empty if it can.")]
    reason_code: ReasonCode
    budget_enforced: Annotated[
        bool,
        Field(
            "Whether budgets are enforced on it: through MPS from Volta on, and never by time-slicing; "
            "for a GPU in MIG mode, whether they are enforced on all of its instances."
        ),
    ]
    sharing: Annotated[
        str | None,
        Field(
            "How it is shared, `mig` by its instances; null if it is not used.",
            enum=[*enums.SHARING, enums.MIG, None],
        ),
    ]
    time_slice: Annotated[
        str | None,
        Field(
            "Its time slice as configured, or as it was configured and is not restored yet; null: none is "
            "configured, or the GPU refused it.",
            enum=[*enums.TIME_SLICES, None],
        ),
    ]
    mig_layout: Annotated[
        str | None,
        Field("Its configured MIG layout, such as `4 x 1g.10gb + 1 x 3g.40gb`; null if it has none."),
    ]
    parent: Annotated[str | None, Field("The UUID of the GPU of which it is a MIG instance.")]
    mig_profile: Annotated[str | None, Field("The profile of the MIG instance, such as 1g.10gb.")]
    reserved_for: Annotated[str | None, Field("What it is reserved for, as configured.")]


class GpuListJson(TypedDict):
    """All GPUs of the host in PCI order, as of the last poll; unavailable ones with the reason."""

    gpus: list[GpuJson]
    total: Count


class PoolJson(TypedDict):
    """A GPU whose memory is leased in units, as devices that are created for leases."""

    gpu_uuid: str
    addr: Annotated[GpuAddress, Field("The GPU's address.")]
    model: Annotated[str | None, Field("The GPU's name.")]
    numa_node: NumaNode | None
    memory_unit_mib: Annotated[Mib, Field("A request is rounded up to a multiple of this.")]
    memory_reserve_mib: Annotated[Mib, Field("Kept free beside the memory of each lease.")]
    memory_mib: Annotated[Mib, Field("The most that a single lease can get.")]
    memory_free_mib: Annotated[Mib, Field("The most that another lease can get now.")]
    gpu_memory_mib: Annotated[Mib, Field("Memory of the GPU, in MiB.")]
    thread_overcommit: Annotated[
        float | None,
        Field("A lease has its share of the memory times this of the SM threads; null: all.", minimum=1),
    ]
    thread_percentage: Annotated[
        int | None,
        Field("The percentage of the SM threads of a lease whose request names none; null: in proportion to "
              "its memory.", minimum=1, maximum=100),
    ]  # fmt: skip
    thread_percentage_total: Annotated[
        float | None,
        Field(
            "The percentage of the SM threads that all leases may have together; null: not counted.",
            minimum=0,
        ),
    ]
    thread_percentage_free: Annotated[
        float | None, Field("The part of that which can still be leased; null: not counted.", minimum=0)
    ]
    state: Annotated[str, Field("Whether it serves leases.", enum=[enums.AVAILABLE, enums.UNAVAILABLE])]
    reason: Annotated[str, Field("Why it cannot be used; empty if it can.")]
    reason_code: ReasonCode
    budget_enforced: Annotated[bool, Field("Whether MPS enforces budgets on it: only from Volta on.")]
    reserved_for: Annotated[str | None, Field("What it is reserved for, as configured.")]
    free_for: Annotated[
        str | None,
        Field(
            "The only user who can lease its memory now, because its control daemon serves them. Null: "
            "everybody; empty: no user, until others' jobs have ended."
        ),
    ]


class PoolListJson(TypedDict):
    """All pools in PCI order."""

    pools: list[PoolJson]
    total: Count


class ProcessFieldsJson(TypedDict):
    """A process; all fields except its PID are null if it has just ended."""

    pid: Pid
    uid: Count | None
    user: Annotated[str | None, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("Its command line, truncated to 500 characters.", maxLength=500)]
    started: Time | None


class MpsServerJson(ProcessFieldsJson):
    """One MPS server."""

    domain: Annotated[str, Field("The domain that it belongs to.")]
    state: Annotated[
        str | None, Field("Null if the control daemon does not list it (before 550). FAULT: its jobs failed.")
    ]


class ContainerFieldsJson(TypedDict):
    """The container that a process runs in; null if there is none."""

    container: Annotated[str | None, Field("The container's name, or the beginning of its id.")]
    container_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None


class VariableFieldsJson(TypedDict):
    """What a process uses."""

    device: Annotated[str | None, Field("Its device: YUNION_MPS_DEVICE of its environment; null if not set.")]
    lease: Annotated[
        str | None,
        Field("The id of the lease that the process belongs to; null if it has none, or if that is unknown."),
    ]


class MpsClientJson(ProcessFieldsJson, ContainerFieldsJson, VariableFieldsJson):
    """One process that uses GPUs."""

    mps: Annotated[
        bool | None,
        Field("False: outside MPS, so no budget limits it. Null: unknown, or its GPUs do not use MPS."),
    ]
    server: Annotated[Pid | None, Field("The PID of its MPS server.")]
    domain: Annotated[str, Field("The domain that serves it.")]
    gpus: Annotated[list[str], Field("Addresses of the GPUs on which it has memory.")]
    memory_by_gpu_mib: Annotated[list[Mib | None], Field("Its memory on each of these.")]
    memory_used_mib: Annotated[Mib | None, Field("Its memory on all GPUs of its domain.")]
    sm_utilization_by_gpu: Annotated[UtilizationList, Field("Its SM utilization on each of its GPUs.")]


class WaitingClientJson(ProcessFieldsJson, VariableFieldsJson):
    """One process that waits for an MPS server because another user's server is running."""

    since: Annotated[Time, Field("When it asked for a server.")]
    server: Annotated[Pid, Field("The PID of the MPS server that it waits for.")]
    server_user: Annotated[str, Field("That server's user: a name, or the id if there is none.")]
    domain: Annotated[str, Field("The domain in which it is waiting.")]


class ClientListJson(TypedDict):
    """The clients and servers of MPS."""

    servers: list[MpsServerJson]
    clients: Annotated[list[MpsClientJson], Field("Clients, and other processes on their GPUs.")]
    waiting: Annotated[list[WaitingClientJson], Field("In order of arrival.")]
    errors: Annotated[list[str], Field("What could not be determined, and why.")]
    total: Annotated[Count, Field("The number of clients.")]


class TerminationJson(TypedDict):
    """How a client was terminated."""

    pid: Pid
    user: Annotated[str | None, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("Its command line, truncated to 500 characters.", maxLength=500)]
    ended: Annotated[bool, Field("Whether it has ended.")]
    how: Annotated[str, Field("What was done, or why nothing was.")]
    reason_code: ReasonCode


class TerminationListJson(TypedDict):
    """How the clients of a lease or device were terminated."""

    terminations: list[TerminationJson]
    total: Annotated[Count, Field("The number of clients.")]


class HolderFieldsJson(ContainerFieldsJson):
    """The holder of a lease, or the requester of a queued request."""

    pid: Annotated[Pid | None, Field("Its process; null if it is bound to a name.")]
    uid: Count
    user: Annotated[str, Field("Its user's name, or the id if it has none.")]
    for_user: Annotated[
        str | None, Field("The user whose processes use the devices, if root has named one (`holder.uid`).")
    ]
    command: Annotated[str | None, Field("The process's command line, truncated to 100 characters.")]
    name: Annotated[str | None, Field("Its name; null unless it is bound to a name.")]
    since: Time


class DeviceBudgetJson(TypedDict):
    """The budget of one leased device, and its use."""

    addr: Annotated[str, Field("The device's address.")]
    gpu: Annotated[str, Field("Its GPU's address.")]
    memory_mib: Annotated[Mib | None, Field("Null if the memory of its time-sliced GPU is unknown.")]
    thread_percentage: Annotated[Percentage, Field("Share of the SM threads that the device may use.")]
    memory_peak_mib: Annotated[Mib | None, Field("Its highest use since the lease began.")]
    sm_utilization: Annotated[
        Utilization | None, Field("Null: the driver has no sample, or does not report it.")
    ]


class LeaseRecordJson(HolderFieldsJson):
    """Devices that belong to one holder until the lease ends."""

    id: Annotated[str, Field("A random UUID.")]
    devices: Annotated[list[str], Field("The devices' addresses.")]
    gpus: Annotated[list[str], Field("Their GPUs' addresses.")]
    budgets: Annotated[list[DeviceBudgetJson], Field("The budget and use of each device.")]
    thread_percentage: Annotated[
        Percentage, Field("Share of each GPU's SM threads that a process may use; shares of a GPU add up.")
    ]
    budget_enforced: Annotated[
        bool,
        Field("Whether their budgets are enforced: through MPS from Volta on, and never by time-slicing."),
    ]
    unenforced_gpus: Annotated[list[str], Field("Addresses of its GPUs that enforce no budgets.")]
    sharing: Annotated[
        str,
        Field("How its GPUs are shared; `none` if each device is a whole instance.", enum=enums.SHARING),
    ]
    binding: Annotated[str, Field("What the lease is bound to, and ends with.", enum=enums.BINDINGS)]
    expires: Annotated[Time | None, Field("When it ends unless it is renewed; null if it does not expire.")]
    cdi: Annotated[str | None, Field("Its CDI device, for podman run --device.")]
    environment: Annotated[dict[str, str], Field("The environment of a process that uses the devices.")]


class LeaseDetailsJson(LeaseRecordJson):
    """A lease, and how its devices are used now."""

    state: Annotated[
        str | None,
        Field("`idle`: no process uses its devices. Null: unknown.", enum=[*enums.LEASE_STATES, None]),
    ]
    reason: Annotated[str, Field("Why its devices are unavailable or pending.")]
    reason_code: ReasonCode


class QueuedRequestJson(HolderFieldsJson):
    """A request that waits for devices."""

    requested: Annotated[str, Field("The requested devices.")]
    reason: Annotated[str, Field("Why it waits; empty if the queue is so long that it was not determined.")]
    reason_code: ReasonCode


class LeaseListJson(TypedDict):
    """All leases, and the queued requests."""

    leases: list[LeaseDetailsJson]
    waiting: Annotated[list[QueuedRequestJson], Field("In order of arrival.")]
    errors: Annotated[list[str], Field("What could not be determined about their use, and why.")]
    total: Annotated[Count, Field("The number of leases.")]
