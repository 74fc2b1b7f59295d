"""The values that the parts hand to each other. All of them are frozen; a unit stands in the name.

They are named tuples and not dataclasses because `dataclasses` takes 7 ms to import, on the path of every
start of the daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

EXCLUSIVE_PROCESS = "Exclusive_Process"
DEFAULT = "Default"
PROHIBITED = "Prohibited"

#: The Dev_type of every device that we serve, as Cloudpods names it.
DEV_TYPE = "NVIDIA_MPS"


class Source(NamedTuple):
    """Where a value of the configuration stands; `line` is None for a default."""

    file: str
    line: int | None


class DeviceEntry(NamedTuple):
    """One `NVIDIA_MPS` entry of host_container_device.yml."""

    path: str
    virtual_number: int
    path_at: Source
    virtual_number_at: Source


class Config(NamedTuple):
    """What both files say, with the defaults filled in; `sources` tells for each key where it stands."""

    enable_cuda_mps: bool
    container_device_config_file: str
    cuda_mps_pipe_directory: str
    cuda_mps_log_directory: str
    cuda_mps_replicas: int
    cuda_mps_compute_mode: str
    cuda_mps_scope: str
    cuda_mps_thread_percentage: str
    cuda_mps_max_clients: int | None
    cuda_mps_stop_timeout_s: int
    cuda_mps_multiuser: bool
    devices: tuple[DeviceEntry, ...]
    sources: Mapping[str, Source]


class PcieLink(NamedTuple):
    """The most that a GPU's PCI Express link can do."""

    version: str
    transfer_rate_per_lane: str
    lane_width: int
    throughput: str


class Driver(NamedTuple):
    """The NVIDIA driver: its version, and that of the CUDA driver API it brings (None where unknown)."""

    version: str
    cuda_version: str | None


class Gpu(NamedTuple):
    """One physical GPU. What the driver does not tell is None; `reason` says why it cannot be used, if so."""

    pci_address: str
    uuid: str | None = None
    name: str | None = None
    nvml_index: int | None = None
    minor: int | None = None
    memory_mib: int | None = None
    compute_mode: str | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    vendor_device_id: str | None = None
    numa_node: int | None = None
    link: PcieLink | None = None
    render_node: str | None = None
    reason: str = ""

    @property
    def address(self) -> str:
        """The PCI address without its domain where that is 0000, as Cloudpods shows it."""
        return self.pci_address[5:] if self.pci_address.startswith("0000:") else self.pci_address


class Inventory(NamedTuple):
    """The driver and the GPUs found, in PCI order."""

    driver: Driver
    gpus: tuple[Gpu, ...]


class Device(NamedTuple):
    """One MPS device: the `slot`-th share of a GPU, with its budget."""

    id: str
    addr: str
    gpu_uuid: str
    slot: int
    memory_limit_mib: int
    memory_total_mib: int
    thread_percentage: float
    budget_enforced: bool
    domain: str


class DomainPlan(NamedTuple):
    """One control daemon: its GPUs in CUDA's order, and the limits that it gives to a client by default.

    `numbers` and `percentages` are by GPU: the devices that it is divided into, and the percentage of each.
    """

    name: str
    pipe_directory: str
    log_directory: str
    gpu_uuids: tuple[str, ...]
    memory_limits_mib: tuple[int | None, ...]
    thread_percentage: float
    numbers: tuple[int, ...] = ()
    percentages: tuple[float, ...] = ()
    multiuser: bool = False

    def same_control_daemon(self, other: DomainPlan) -> bool:
        """Whether a control daemon that runs for `other` can serve this plan: at most limits differ."""
        mine = (self.name, self.pipe_directory, self.log_directory, self.gpu_uuids, self.multiuser)
        return mine == (
            other.name,
            other.pipe_directory,
            other.log_directory,
            other.gpu_uuids,
            other.multiuser,
        )


class Plan(NamedTuple):
    """What should be. `compute_modes` and `unavailable` are by GPU UUID and by PCI address respectively."""

    host_id: str
    domains: tuple[DomainPlan, ...] = ()
    compute_modes: Mapping[str, str] = {}
    devices: tuple[Device, ...] = ()
    unavailable: Mapping[str, str] = {}


class DomainStatus(NamedTuple):
    """What a domain is at: the state, why, and the control daemon's PID.

    `plan` is what its clients get; `pending`, where not empty, says what is to become of it and what that
    waits for; `pending_plan` is the plan that then holds, None where the control daemon is to end, and
    `waits_for` are the MPS servers (PIDs) whose end that waits for.
    """

    plan: DomainPlan
    state: str
    reason: str
    pid: int | None
    since_s: float
    restarts: int
    pending: str = ""
    pending_plan: DomainPlan | None = None
    waits_for: tuple[int, ...] = ()


class Event(NamedTuple):
    """Something that changed: what, why, and what it means for the devices and the jobs on them.

    `kind` is one of domain, limit, gpu, compute_mode, configuration, client, lease and daemon; `severity`
    one of info, warning and error; `subject` is the name of what changed, such as a GPU's address.
    """

    severity: str
    kind: str
    subject: str
    what: str
    cause: str = ""
    consequence: str = ""


class Holder(NamedTuple):
    """Who has a lease, and what ends it.

    `binding` is `process` (it ends with `pid`, which together with `started`, in clock ticks since the boot,
    names a process for good), `connection` (with the connection to the daemon, and as `process` once that is
    another daemon) or `name` (`ttl_s` after it was last renewed).
    """

    binding: str
    uid: int
    pid: int | None = None
    started: int | None = None
    name: str = ""
    ttl_s: float = 0.0


class Lease(NamedTuple):
    """Devices that are given to one holder until it ends, as they were then; `since_s` is in s since 1970."""

    id: str
    devices: tuple[Device, ...]
    holder: Holder
    since_s: float
    environment: Mapping[str, str] = {}


class Snapshot(NamedTuple):
    """What is, read back from NVML and the control daemons; `taken_s` is the wall clock's time.

    `remarks` are what the host cannot do of what is configured, and goes without.
    """

    version: int
    taken_s: float
    enabled: bool
    notice: str
    plan: Plan
    inventory: Inventory
    domains: tuple[DomainStatus, ...]
    remarks: tuple[str, ...] = ()
