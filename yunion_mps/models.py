"""The values that the parts hand to each other. All of them are frozen; a unit stands in the name.

They are named tuples and not dataclasses because `dataclasses` takes 7 ms to import, on the path of every
start of the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from yunion_mps.reasons import NO_REASON, Reason

EXCLUSIVE_PROCESS = "Exclusive_Process"
DEFAULT = "Default"
PROHIBITED = "Prohibited"

#: The Dev_type of every device that we serve, as Cloudpods names it.
DEV_TYPE = "NVIDIA_MPS"

#: The kind of device that containers are given, in the Container Device Interface's words.
CDI_KIND = "yunion.io/mps"

#: Names in a process's environment the lease that it uses.
LEASE_VARIABLE = "YUNION_MPS_LEASE"

#: Stands for all devices of the host if one control daemon serves them.
ALL = "all"

#: The priorities of a client in CUDA_MPS_CLIENT_PRIORITY's order: the value there is the place here
#: (nvidia-cuda-mps-control(1), set_default_client_priority). They are hints to the CUDA driver.
NORMAL = "normal"
BELOW_NORMAL = "below_normal"
PRIORITIES = (NORMAL, BELOW_NORMAL)


class Source(NamedTuple):
    """Where a value of the configuration stands; `line` is None for a default."""

    file: str
    line: int | None


class SliceEntry(NamedTuple):
    """One of an entry's `slices`; a percentage of None is to be made from the memory's share."""

    memory_mib: int
    thread_percentage: float | None = None
    priority: str = NORMAL


class DeviceEntry(NamedTuple):
    """One `NVIDIA_MPS` entry of host_container_device.yml.

    It divides the GPU into `virtual_number` equal devices, into `slices`, or opens it for any amount of
    memory in units of `memory_unit_mib`; the other two are 0 or empty. `divided_at` is where the one that is
    given stands. A `thread_overcommit` of None is what `cuda_mps_thread_percentage` says.
    """

    path: str
    virtual_number: int
    path_at: Source
    divided_at: Source
    slices: tuple[SliceEntry, ...] = ()
    memory_unit_mib: int = 0
    memory_reserve_mib: int = 0
    thread_overcommit: float | None = None


class Config(NamedTuple):
    """What both files say, with the defaults filled in.

    `sources` has for each key of host.conf where it stands. `gpu_memory_unit_mib`, the unit of requests for
    memory in units, is the device file's.
    """

    enable_cuda_mps: bool
    container_device_config_file: str
    cuda_mps_pipe_directory: str
    cuda_mps_log_directory: str
    cuda_mps_replicas: int
    cuda_mps_compute_mode: str
    cuda_mps_scope: str
    cuda_mps_thread_percentage: str
    cuda_mps_combine: int
    cuda_mps_max_clients: int | None
    cuda_mps_stop_timeout_s: int
    cuda_mps_multiuser: bool
    devices: tuple[DeviceEntry, ...]
    sources: Mapping[str, Source]
    gpu_memory_unit_mib: int = 1024
    gpu_memory_unit_at: Source = Source("default", None)
    metrics_listen: str | None = None
    metrics_allow_public: bool = False
    metrics_textfile: str | None = None
    web_listen: str | None = None
    web_allow_public: bool = False
    cuda_mps_pipe_group: str | None = None
    max_leases_per_user: int | None = None
    max_lease_ttl_s: int = 30 * 86_400


class PcieLink(NamedTuple):
    """The most that a GPU's PCI Express link can do."""

    version: str
    transfer_rate_per_lane: str
    lane_width: int
    throughput: str


class Driver(NamedTuple):
    """The NVIDIA driver: its version, and that of the CUDA driver API it brings (None if unknown)."""

    version: str
    cuda_version: str | None


class Gpu(NamedTuple):
    """One physical GPU. What the driver does not report is None; `reason` says why it cannot be used."""

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
    reason: Reason = NO_REASON

    @property
    def address(self) -> str:
        """The PCI address without its domain if that is 0000, as Cloudpods shows it."""
        return self.pci_address[5:] if self.pci_address.startswith("0000:") else self.pci_address


class Inventory(NamedTuple):
    """The driver and the GPUs found, in PCI order.

    `served` are the UUIDs of those that have served devices before, also of those that are lost since.
    """

    driver: Driver
    gpus: tuple[Gpu, ...]
    served: tuple[str, ...] = ()


class Device(NamedTuple):
    """One MPS device: the `slot`-th part of a GPU, or of its pool, with its budget.

    `reserve_mib` is kept free of the GPU's memory beside the limit, for what MPS itself needs for a client.
    """

    id: str
    addr: str
    gpu_uuid: str
    slot: int
    memory_limit_mib: int
    memory_total_mib: int
    thread_percentage: float
    budget_enforced: bool
    domain: str
    priority: str = NORMAL
    reserve_mib: int = 0

    @property
    def gpu_address(self) -> str:
        return self.addr.rpartition("-")[0]


class Slice(NamedTuple):
    """One of the unequal devices of a GPU: what it may use."""

    memory_limit_mib: int
    thread_percentage: float
    priority: str = NORMAL


class Pool(NamedTuple):
    """A GPU whose memory is handed out in any number of units; every client is a device of its own.

    `memory_mib` is what can be handed out to one client alone: a multiple of the unit. Each client takes
    `reserve_mib` beside its units, and all together take at most `memory_total_mib`; `clients` is how many of
    them MPS allows. Threads go with the memory, times `thread_overcommit`; None does not limit them.
    """

    gpu_uuid: str
    domain: str
    unit_mib: int
    memory_mib: int
    memory_total_mib: int
    reserve_mib: int
    clients: int
    thread_overcommit: float | None = 1.0


class PlannedGpu(NamedTuple):
    """One GPU of a domain and how it is divided: into equal devices, `slices`, or by amounts of a `pool`.

    `memory_limit_mib` and `thread_percentage` are the most that one client gets; the limit is None if the
    control daemon serves the GPU and the plan does not, so that it is left as it is. `slices` has a row for
    each slot if the devices differ from that; a pool has no devices until they are leased.
    """

    uuid: str
    memory_limit_mib: int | None = None
    device_count: int = 0
    thread_percentage: float = 0.0
    slices: tuple[Slice, ...] = ()
    pool: Pool | None = None


class DomainPlan(NamedTuple):
    """One control daemon: its GPUs in CUDA's order, and the limits that it gives to a client by default.

    `pipe_group` is the group that alone may enter the pipe directory, empty if every user may.
    """

    name: str
    pipe_directory: str
    log_directory: str
    gpus: tuple[PlannedGpu, ...]
    thread_percentage: float
    multiuser: bool = False
    pipe_group: str = ""

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self.gpus)

    @property
    def memory_limits_mib(self) -> tuple[int | None, ...]:
        """By GPU, in the order by which the control daemon numbers them."""
        return tuple(gpu.memory_limit_mib for gpu in self.gpus)

    def memory_limit_of(self, gpu_uuid: str) -> int | None:
        """What one client may get of the GPU, in MiB; None if it is not served, such as a lost one."""
        return next((gpu.memory_limit_mib for gpu in self.gpus if gpu.uuid == gpu_uuid), None)

    def for_gpus(self, gpu_uuids: Iterable[str]) -> DomainPlan:
        """The plan for these GPUs, in this order; one that it does not divide has no limit."""
        known = {gpu.uuid: gpu for gpu in self.gpus}
        return self._replace(gpus=tuple(known.get(uuid) or PlannedGpu(uuid) for uuid in gpu_uuids))

    def same_control_daemon(self, other: DomainPlan) -> bool:
        """Whether a control daemon that runs for `other` can serve this plan: at most limits differ."""
        return self._of_its_process() == other._of_its_process()

    def _of_its_process(self) -> tuple[object, ...]:
        """What a control daemon has from its start to its end."""
        places = (self.name, self.pipe_directory, self.log_directory, self.pipe_group)
        return (*places, self.gpu_uuids, self.multiuser)


class Plan(NamedTuple):
    """What should be. `compute_modes` is by GPU UUID, and `unavailable` has reasons by PCI address.

    `parked` has the GPUs that served before and cannot now, divided as they will be when they can again:
    their devices are listed, and no control daemon is started for them.
    """

    host_id: str
    domains: tuple[DomainPlan, ...] = ()
    compute_modes: Mapping[str, str] = {}
    devices: tuple[Device, ...] = ()
    unavailable: Mapping[str, Reason] = {}
    pools: tuple[Pool, ...] = ()
    parked: tuple[DomainPlan, ...] = ()


class DomainStatus(NamedTuple):
    """What state a domain is in, why, and the control daemon's PID.

    `plan` is in effect: what its clients get. `pending`, if not empty, says what will change and what that
    waits for; `waits_for` has the MPS servers (PIDs) that have to end for it.
    """

    plan: DomainPlan
    state: str
    reason: Reason
    pid: int | None
    since_s: float
    restarts: int
    pending: str = ""
    waits_for: tuple[int, ...] = ()


class Event(NamedTuple):
    """Something that changed: what, why, and what it means for the devices and the jobs on them.

    `kind` is one of domain, limit, gpu, compute_mode, configuration, client, lease and daemon; `severity`
    one of info, warning and error; `subject` is the name of what changed, such as a GPU's address. A warning
    or an error has a reason code.
    """

    severity: str
    kind: str
    subject: str
    what: str
    cause: str = ""
    consequence: str = ""
    code: str = ""


class Owner(NamedTuple):
    """The owner of a lease: a user, or the `unit` of a job, because all job units share one user."""

    uid: int
    unit: str = ""


class Holder(NamedTuple):
    """The holder of a lease, and what ends it.

    `binding` is `process` (it ends with `pid`, which together with `started`, in clock ticks since the boot,
    names a process for good), `container` (the same, of a container's first process), `connection` (with the
    connection to the daemon, and as `process` once that is another daemon) or `name` (`ttl_s` after it was
    last renewed). `unit` is the job's unit that it was taken for, empty if there is none, and `command` the
    command line that the process is about to execute, empty if it did not say.
    """

    binding: str
    uid: int
    pid: int | None = None
    started: int | None = None
    name: str = ""
    ttl_s: float = 0.0
    unit: str = ""
    command: str = ""

    @property
    def owner(self) -> Owner:
        return Owner(self.uid, self.unit)


class Lease(NamedTuple):
    """Devices that are given to one holder until it ends, as they were then; `since_s` is in s since 1970.

    `idempotency_key` is what the holder has sent as such with its request, empty if nothing. `cdi`: container
    engines find it as a device for as long as it lives. `ends_s` (of the monotonic clock) is when a lease
    taken by name expires, None for others; `is_extended`: a start of the daemon has postponed that. `request`
    is what the holder has requested, as text: the same name with the same request finds this lease.
    """

    id: str
    devices: tuple[Device, ...]
    holder: Holder
    since_s: float
    environment: Mapping[str, str] = {}
    idempotency_key: str = ""
    cdi: bool = False
    ends_s: float | None = None
    is_extended: bool = False
    request: str = ""

    @property
    def addresses(self) -> str:
        return ", ".join(device.addr for device in self.devices)


class Snapshot(NamedTuple):
    """What is in effect, read back from NVML and the control daemons.

    `warnings` name what is configured and the host cannot do, so that it is left out.
    """

    version: int
    enabled: bool
    notice: Reason
    plan: Plan
    inventory: Inventory
    domains: tuple[DomainStatus, ...]
    warnings: tuple[Reason, ...] = ()
