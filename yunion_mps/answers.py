"""What the daemon answers, as types: plain dictionaries with exactly these keys.

Memory is in MiB, times are RFC 3339 strings, and what is unknown is None. scripts/schemas makes the API's
schemas of these types. Import this module under TYPE_CHECKING if a program's start should not pay for it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps import enums
from yunion_mps.fields import (
    Count,
    DeviceAddress,
    Field,
    GpuAddress,
    Mib,
    MibByMinute,
    NumaNode,
    Percentage,
    Pid,
    PolledByMinute,
    ReasonCode,
    Time,
    Utilization,
    UtilizationByMinute,
    UtilizationList,
    Uuid,
    VendorDeviceId,
)


class PcieLink(TypedDict):
    """The most that a GPU's PCI Express link can do."""

    lane_width: Count
    throughput: Annotated[str, Field("Of all lanes together.", pattern="^[0-9]+\\.[0-9]{2} GB/s$")]
    transfer_rate_per_lane: Annotated[str, Field(pattern="^[0-9.]+GT/s$")]
    version: Annotated[str, Field("The version of PCI Express.", pattern="^[1-7]\\.0$")]


class Device(TypedDict):
    """One MPS device: a share of a GPU.

    It is pending, and not free, if leases from before a reload hold it or the memory that it needs; a device
    of such a lease is shown as it was given, and can still be used.
    """

    id: Annotated[Uuid, Field("The same after every restart.")]
    dev_type: Annotated[str, Field(const="NVIDIA_MPS")]
    model: Annotated[str | None, Field("The GPU's name.")]
    addr: DeviceAddress
    vendor_device_id: VendorDeviceId | None
    host_id: Uuid
    numa_node: NumaNode | None
    device_path: Annotated[str, Field("The GPU's UUID.")]
    pcie_info: PcieLink | None
    index: Annotated[int, Field("Always -1 for MPS devices.", const=-1)]
    device_minor: Annotated[int, Field("Always -1 for MPS devices.", const=-1)]
    mps_memory_limit: Annotated[Mib, Field("What the device may use, in MiB.")]
    mps_memory_total: Annotated[Mib, Field("What the GPU has, in MiB.")]
    mps_thread_percentage: Annotated[Percentage, Field("What the device may use of the SM threads.")]
    gpu_uuid: str
    state: Annotated[
        str, Field("Whether it can be used now.", enum=[enums.AVAILABLE, enums.UNAVAILABLE, enums.PENDING])
    ]
    reason: Annotated[str, Field("Why it is not available, or which leases a pending one waits for.")]
    reason_code: ReasonCode
    budget_enforced: Annotated[bool, Field("Whether MPS enforces the budget: only from Volta on.")]
    lease: Annotated[str | None, Field("The id of the lease that has it.")]
    free: Annotated[bool, Field("Whether a request can have it.")]


class DeviceDetails(Device):
    """One MPS device, and how to use it."""

    slot: Annotated[Count, Field("Which share of the GPU it is, from 0.")]
    domain: Annotated[str, Field("The control daemon that serves it.")]
    client_environment: Annotated[
        dict[str, str],
        Field("What a process sets to use the device; empty while no control daemon is to serve it."),
    ]


class DeviceList(TypedDict):
    """One page of the devices."""

    isolated_devices: Annotated[list[Device], Field("The devices of this page, in PCI order.")]
    total: Annotated[Count, Field("The devices that pass the filters, on all pages.")]
    limit: Count
    offset: Count


class Gpu(TypedDict):
    """One physical GPU."""

    uuid: str | None
    name: str | None
    addr: GpuAddress
    pci_address: Annotated[GpuAddress, Field("The whole PCI address.")]
    memory_total: Mib | None
    memory_free: Annotated[
        Mib | None, Field("MiB that are left of it; null unless its memory is leased by units.")
    ]
    memory_used: Annotated[Mib | None, Field("MiB in use, as nvidia-smi shows it.")]
    utilization: Utilization | None
    temperature_c: Annotated[int | None, Field("In degrees Celsius.")]
    power_w: Annotated[float | None, Field("The power that it draws, in watts.", minimum=0)]
    power_limit_w: Annotated[float | None, Field("The limit of that, in watts.", minimum=0)]
    compute_mode: Annotated[str | None, Field("As nvidia-smi names it.")]
    compute_capability: Annotated[str, Field(pattern="^[0-9]+\\.[0-9]+$")] | None
    mig_enabled: bool | None
    vendor_device_id: VendorDeviceId | None
    numa_node: NumaNode | None
    pcie_info: PcieLink | None
    render_node: str | None
    index: Annotated[Count | None, Field("NVML's index.")]
    device_minor: Annotated[Count | None, Field("The N of /dev/nvidiaN.")]
    devices: Annotated[Count, Field("How many devices it is divided into.")]
    state: Annotated[
        str, Field("Whether it serves devices.", enum=[enums.AVAILABLE, enums.UNAVAILABLE, enums.NOT_USED])
    ]
    reason: Annotated[str, Field("Why it cannot be used; empty if it can.")]
    reason_code: ReasonCode
    budget_enforced: Annotated[bool, Field("Whether MPS enforces budgets on it: only from Volta on.")]


class GpuList(TypedDict):
    """All GPUs of the host in PCI order, the broken ones with their reason, as of the last poll."""

    gpus: list[Gpu]
    total: Count


class Domain(TypedDict):
    """One of NVIDIA's control daemons, its GPUs and the limits in effect."""

    name: Annotated[str, Field("`host`, or the GPU's address with one control daemon per GPU.")]
    state: Annotated[str, Field(enum=enums.DOMAIN_STATES)]
    reason: Annotated[str, Field("Why it does not serve; empty if it does.")]
    reason_code: ReasonCode
    pending: Annotated[str, Field("What has not taken effect yet, and what that waits for.")]
    waits_for: Annotated[list[int], Field("PIDs of the MPS servers that this waits for.")]
    pid: Annotated[Pid | None, Field("The control daemon's PID.")]
    restarts: Annotated[Count, Field("How often it had to be started again.")]
    pipe_directory: str
    log_directory: str
    gpus: Annotated[list[str], Field("UUIDs of its GPUs, in CUDA's order.")]
    memory_limits: Annotated[
        list[Mib | None],
        Field("A client's default memory limit on each GPU in MiB; null if no longer configured."),
    ]
    thread_percentage: Annotated[Percentage, Field("A client's default share of the SM threads.")]


class Driver(TypedDict):
    """The NVIDIA driver; null if it was not read."""

    version: str | None
    cuda_version: Annotated[str | None, Field("The version of the CUDA driver API.")]


class DeviceCounts(TypedDict):
    """How many devices there are."""

    total: Count
    available: Count
    unavailable: Count
    pending: Count


class GpuCounts(TypedDict):
    """How many GPUs there are."""

    total: Count
    unavailable: Count


class StatusWarning(TypedDict):
    """Something that an operator must know although all runs."""

    code: Annotated[str, Field("A reason code.")]
    text: str
    hint: Annotated[str, Field("What to do.")]


class Status(TypedDict):
    """How the daemon, the control daemons and the devices are."""

    state: Annotated[
        str, Field("`degraded`: something does not serve; `failed`: nothing does.", enum=enums.HOST_STATES)
    ]
    notice: Annotated[str, Field("Why the host offers no devices at all, if so.")]
    notice_code: ReasonCode
    warnings: list[StatusWarning]
    version: Annotated[str, Field("The daemon's version.")]
    pid: Pid
    started: Time
    host_id: Uuid
    driver: Driver
    devices: DeviceCounts
    gpus: GpuCounts
    domains: list[Domain]


class Event(TypedDict):
    """Something that changed, why, and what that means for devices and jobs."""

    id: Annotated[int, Field("Grows, and is never used twice.", minimum=1)]
    time: Time
    severity: Annotated[str, Field(enum=enums.SEVERITIES)]
    kind: Annotated[str, Field("What it is about.", enum=enums.EVENT_KINDS)]
    subject: Annotated[str, Field("The name of what changed.")]
    what: str
    cause: Annotated[str, Field("Empty if unknown.")]
    consequence: Annotated[str, Field("Empty if there is none.")]
    code: ReasonCode


class EventList(TypedDict):
    """Events, the oldest first, and where to continue."""

    events: list[Event]
    last: Annotated[Count, Field("The id to continue from, with `after`; 0 before the first event.")]


class MinuteUse(TypedDict):
    """What processes used of a GPU or a device; a lease of several devices fills their memory in turn."""

    addr: Annotated[str, Field("The address of the GPU or device.")]
    memory_used: MibByMinute
    utilization: UtilizationByMinute


class Usage(TypedDict):
    """What was used, minute by minute; the last one is the present minute. What is not listed used none."""

    begin: Annotated[Time, Field("When the first minute began.")]
    step: Annotated[int, Field("Seconds from one number to the next.", const=60)]
    polled: PolledByMinute
    gpus: list[MinuteUse]
    devices: Annotated[list[MinuteUse], Field("By YUNION_MPS_DEVICE or the leases of processes.")]


class Change(TypedDict):
    """One thing that becomes another."""

    kind: Annotated[str, Field(enum=["control daemon", "budget", "compute mode", "setting"])]
    subject: Annotated[str, Field("A GPU's address, a domain's name or a key.")]
    before: Annotated[str, Field("Empty if there was none.")]
    after: Annotated[str, Field("Empty if there is to be none.")]
    effect: Annotated[str, Field("When, and for which devices.")]
    at_once: Annotated[bool, Field("False: it waits, at least for some devices.")]


class Pending(TypedDict):
    """What a domain waits for."""

    domain: str
    pending: Annotated[str, Field("What waits for what.")]
    leases: Annotated[list[str], Field("Ids of the leases that it waits for, if it waits for leases.")]


class ChangeList(TypedDict):
    """What another configuration changes, and when."""

    changes: list[Change]
    pending: Annotated[list[Pending], Field("What has not taken effect yet.")]


class ProcessFields(TypedDict):
    """A process; all but its PID is null if it has just ended."""

    pid: Pid
    uid: Count | None
    user: Annotated[str | None, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("Its command line, cut to 500 characters.", maxLength=500)]
    started: Time | None


class MpsServer(ProcessFields):
    """One MPS server."""

    domain: Annotated[str, Field("The control daemon that it belongs to.")]
    state: Annotated[
        str | None, Field("Null if the control daemon does not know it (before 550); FAULT: its jobs failed.")
    ]


class ContainerFields(TypedDict):
    """The container that a process is in; null if it is in none."""

    container: Annotated[str | None, Field("The container's name, or the beginning of its id.")]
    container_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None


class MpsClient(ProcessFields, ContainerFields):
    """One process that uses GPUs."""

    mps: Annotated[bool | None, Field("False: not through MPS, so that no budget holds it. Null: unknown.")]
    server: Annotated[Pid | None, Field("The PID of its MPS server.")]
    domain: Annotated[str, Field("The control daemon that serves it.")]
    device: Annotated[str | None, Field("Its device, by YUNION_MPS_DEVICE in its environment.")]
    gpus: Annotated[list[str], Field("Addresses of the GPUs on which it has memory.")]
    memory_by_gpu: Annotated[list[Mib | None], Field("What it has on each of these, in MiB.")]
    memory_used: Annotated[Mib | None, Field("What it has on its domain's GPUs, in MiB.")]
    sm_by_gpu: Annotated[UtilizationList, Field("Its SM utilization on each of its GPUs.")]


class WaitingClient(ProcessFields):
    """One process that waits for an MPS server because another user's server runs."""

    since: Annotated[Time, Field("When it asked for a server.")]
    server: Annotated[Pid, Field("The PID of the MPS server that it waits for.")]
    server_user: Annotated[str, Field("That server's user: a name, or the id if there is none.")]
    domain: Annotated[str, Field("The control daemon that keeps it waiting.")]


class ClientList(TypedDict):
    """Who uses the GPUs through MPS."""

    servers: list[MpsServer]
    clients: Annotated[list[MpsClient], Field("Clients, and other processes on their GPUs.")]
    waiting: Annotated[list[WaitingClient], Field("The first to come first.")]
    errors: Annotated[list[str], Field("What is not known, and why.")]
    total: Annotated[Count, Field("The number of clients.")]


class Termination(TypedDict):
    """How a client was ended."""

    pid: Pid
    ended: Annotated[bool, Field("Whether it has ended.")]
    how: Annotated[str, Field("What was done.")]


class Reexec(TypedDict):
    """The daemon's program starts again within moments, in the same process."""

    pid: Pid


class HolderFields(ContainerFields):
    """Who has, or waits for, devices."""

    pid: Annotated[Pid | None, Field("Its process; null if a name has it.")]
    uid: Count
    user: Annotated[str, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("The process' command line, cut to 100 characters.")]
    name: Annotated[str | None, Field("Its name; null if it is a process or a connection.")]
    since: Time


class LeaseRecord(HolderFields):
    """Devices that belong to one holder until the lease ends."""

    id: Annotated[str, Field("A random UUID.")]
    devices: Annotated[list[str], Field("The devices' addresses.")]
    gpus: Annotated[list[str], Field("Their GPUs' addresses.")]
    memory: Annotated[list[Mib], Field("Each device's memory in MiB.")]
    memory_peak: Annotated[list[Mib | None], Field("The most used of each since the lease began.")]
    sm_utilization: Annotated[UtilizationList, Field("The SM utilization of each device.")]
    thread_percentage: Annotated[Percentage, Field("The smallest of the devices'.")]
    budget_enforced: Annotated[bool, Field("Whether MPS enforces their budgets: only from Volta on.")]
    unenforced_gpus: Annotated[list[str], Field("Addresses of those of its GPUs that are older than Volta.")]
    binding: Annotated[str, Field("What ends it.", enum=enums.BINDINGS)]
    expires: Annotated[Time | None, Field("When it ends unless it is renewed; null if not by time.")]
    cdi: Annotated[str | None, Field("Its CDI device, for podman run --device.")]
    environment: Annotated[dict[str, str], Field("The environment of a process that uses the devices.")]


class QueuedRequest(HolderFields):
    """A request that waits for devices."""

    wants: Annotated[str, Field("What for.")]


class LeaseList(TypedDict):
    """All leases, and the requests that wait."""

    leases: list[LeaseRecord]
    waiting: Annotated[list[QueuedRequest], Field("In the order of their coming.")]
    total: Annotated[Count, Field("The number of leases.")]


class ProblemFields(TypedDict):
    """What every problem says."""

    type: Annotated[str, Field(const="about:blank")]
    title: Annotated[str, Field("The status in words.")]
    status: Annotated[int, Field("The HTTP status.", minimum=400, maximum=599)]
    detail: Annotated[str, Field("What is wrong.")]
    code: Annotated[str, Field("A reason code.")]


class ProblemDetails(ProblemFields, total=False):
    """What is wrong (RFC 9457)."""

    hint: Annotated[str, Field("What to do.")]
