"""What the daemon answers, as types: plain dictionaries with just these keys. Memory is in MiB."""

from __future__ import annotations

from typing import TypedDict


class PcieLink(TypedDict):
    """The most that a GPU's PCI Express link can do."""

    lane_width: int
    throughput: str
    transfer_rate_per_lane: str
    version: str


class Device(TypedDict):
    """One MPS device; `reason` says why it is not available, `lease` is the id of the one that has it.

    It is `pending`, and not `free`, if leases from before a reload hold it or the memory that it needs.
    """

    id: str
    dev_type: str
    model: str | None
    addr: str
    vendor_device_id: str | None
    host_id: str
    numa_node: int | None
    device_path: str
    pcie_info: PcieLink | None
    index: int
    device_minor: int
    mps_memory_limit: int
    mps_memory_total: int
    mps_thread_percentage: float
    gpu_uuid: str
    state: str
    reason: str
    budget_enforced: bool
    lease: str | None
    free: bool


class DeviceDetails(Device):
    """One device, and the environment of a process that uses it."""

    slot: int
    domain: str
    client_environment: dict[str, str]


class LeaseRecord(TypedDict):
    """A lease as everybody sees it; times are in s since 1970, `memory` is of each device.

    `budget_enforced` is False if a GPU older than Volta does not enforce it; `unenforced_gpus` names these;
    `binding` is `process`, `connection`, `name` or `container`, and `expires` is None where it does not
    end by time.
    """

    id: str
    devices: list[str]
    gpus: list[str]
    memory: list[int]
    thread_percentage: float
    budget_enforced: bool
    unenforced_gpus: list[str]
    binding: str
    pid: int | None
    uid: int
    user: str
    command: str | None
    container: str | None
    container_id: str | None
    name: str | None
    since: float
    expires: float | None
    cdi: str | None
    environment: dict[str, str]


class Event(TypedDict):
    """Something that changed at `time` (s since 1970), why, and what it means for devices and jobs."""

    id: int
    time: float
    severity: str
    kind: str
    subject: str
    what: str
    cause: str
    consequence: str
