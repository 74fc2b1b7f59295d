"""Devices and GPUs."""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps import enums
from yunion_mps.fields import (
    Count,
    DeviceAddress,
    Field,
    GpuAddress,
    Mib,
    NumaNode,
    Percentage,
    ReasonCode,
    Utilization,
    Uuid,
    VendorDeviceId,
)


class PcieLink(TypedDict):
    """The capability of a GPU's PCI Express link."""

    lane_width: Count
    throughput: Annotated[str, Field("Of all lanes combined.", pattern="^[0-9]+\\.[0-9]{2} GB/s$")]
    transfer_rate_per_lane: Annotated[str, Field(pattern="^[0-9.]+GT/s$")]
    version: Annotated[str, Field("The version of PCI Express.", pattern="^[1-7]\\.0$")]


class Device(TypedDict):
    """One MPS device: a share of a GPU, with Cloudpods' field names and ours.

    It is pending, and not free, if leases from before a reload hold it or the memory that it needs; a device
    of such a lease is shown as it was leased, and can still be used.
    """

    id: Annotated[Uuid, Field("Does not change across restarts.")]
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
    mps_memory_limit: Annotated[Mib, Field("Cloudpods' name of `memory_mib`.")]
    mps_memory_total: Annotated[Mib, Field("Cloudpods' name of `gpu_memory_mib`.")]
    mps_thread_percentage: Annotated[Percentage, Field("Cloudpods' name of `thread_percentage`.")]
    memory_mib: Annotated[Mib, Field("Memory that the device may use, in MiB.")]
    gpu_memory_mib: Annotated[Mib, Field("Memory of the GPU, in MiB.")]
    thread_percentage: Annotated[Percentage, Field("Share of the SM threads that the device may use.")]
    gpu_uuid: str
    state: Annotated[
        str,
        Field(
            "`free`: it can be leased now; `no room`: other leases of its GPU have its memory.",
            enum=enums.DEVICE_STATES,
        ),
    ]
    reason: Annotated[str, Field("Why it is unavailable, or which leases a pending one waits for.")]
    reason_code: ReasonCode
    budget_enforced: Annotated[bool, Field("Whether MPS enforces the budget: only from Volta on.")]
    lease: Annotated[str | None, Field("The id of its lease.")]
    holder: Annotated[str | None, Field("Who has its lease: `alice (PID 4260)`, `bob (job-17)`.")]


class DeviceDetails(Device):
    """One MPS device, and how to use it."""

    slot: Annotated[Count, Field("The number of the share on its GPU, from 0.")]
    domain: Annotated[str, Field("The control daemon that serves it.")]
    client_environment: Annotated[
        dict[str, str],
        Field("The variables of a process that uses the device; empty if no control daemon serves it."),
    ]


class DeviceList(TypedDict):
    """One page of the devices."""

    isolated_devices: Annotated[list[Device], Field("The devices of this page, in PCI order.")]
    total: Annotated[Count, Field("The number of devices that match the filters, on all pages.")]
    limit: Count
    offset: Count


class Gpu(TypedDict):
    """One physical GPU."""

    uuid: str | None
    name: str | None
    addr: GpuAddress
    pci_address: Annotated[GpuAddress, Field("The full PCI address.")]
    memory_mib: Mib | None
    memory_free_mib: Annotated[Mib | None, Field("Free to lease; null unless its memory is leased in units.")]
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
    """All GPUs of the host in PCI order, as of the last poll; unavailable ones with the reason."""

    gpus: list[Gpu]
    total: Count
