"""Frozen values that are passed between packages; units are part of the names.

They are named tuples because importing `dataclasses` would add 7 ms to every start of the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps.addresses import gpu_of, is_on_instance, physical_gpu, short_address
from yunion_mps.enums import DEV_TYPES, MPS, NORMAL, TIME_SLICING
from yunion_mps.mig import MigInstance, MigLayout, MigProfile
from yunion_mps.reasons import NO_REASON, Reason

EXCLUSIVE_PROCESS = "Exclusive_Process"
DEFAULT = "Default"
PROHIBITED = "Prohibited"

#: The kind of our devices in the Container Device Interface.
CDI_KIND = "yunion.io/mps"

#: The environment variable that names the lease a process uses.
LEASE_VARIABLE = "YUNION_MPS_LEASE"

#: Stands for all devices of the host if one control daemon serves them.
ALL = "all"


def known_members(kind: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a record that its named tuple `kind` has; others are of a newer version."""
    return {name: record[name] for name in kind._fields if name in record}


class PcieLink(NamedTuple):
    version: str
    transfer_rate_per_lane: str
    lane_width: int
    throughput: str


class Driver(NamedTuple):
    """The NVIDIA driver's version, and that of its CUDA driver API (None if unknown)."""

    version: str
    cuda_version: str | None


class Gpu(NamedTuple):
    """A physical GPU, or a MIG instance of one, which has a `parent` and is used like a GPU of its own.

    Values that the driver does not report are None; `reason` says why it is unusable. `mig_pending` is the
    mode after the next reset. An instance has an `identity`, by the place that it occupies, because its UUID
    changes when it is made again; ids of devices are derived from it. `sm_percentage` is its share of the
    SMs of its parent. `mode_is_fixed`: its compute mode stays as it is, because the driver does not support
    changing it, or does not report it.
    """

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
    mig_profiles: tuple[MigProfile, ...] = ()
    mig_instances: tuple[MigInstance, ...] = ()
    mig_pending: bool | None = None
    parent: str = ""
    identity: str = ""
    sm_percentage: float | None = None
    mode_is_fixed: bool = False

    @property
    def address(self) -> str:
        """The PCI address, without its domain if that is 0000, as Cloudpods shows it."""
        return short_address(self.pci_address)

    @property
    def mig_profile(self) -> str:
        """The profile of an instance; empty for a whole GPU."""
        return self.identity.rpartition("/")[2].partition("@")[0]

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance; `parent` says of which GPU, unless only the address is known."""
        return is_on_instance(self.pci_address)

    @property
    def physical_address(self) -> str:
        """The PCI address of the GPU itself, also for an instance."""
        return physical_gpu(self.pci_address)


class Controller(NamedTuple):
    """A display controller of any vendor, as sysfs and udev describe it.

    `vendor` is as in sysfs (`0x10de`). `driver` is the kernel driver that is bound to it, empty if none is.
    `render_node` is None without one.
    """

    pci_address: str
    vendor: str
    driver: str = ""
    render_node: str | None = None


class MeantGpu(NamedTuple):
    """The GPU that an entry's path led to when it was resolved for the first time.

    `replaced` is the UUID of the card that was in its place before, until the operator's next reload.
    """

    uuid: str
    pci_address: str
    replaced: str = ""


class Inventory(NamedTuple):
    """The driver and the GPUs found, in PCI order.

    `served` has the UUIDs of the GPUs that have served devices, including lost ones. `controllers` are all
    display controllers of the host. `meant` has what the entries' paths meant before, by `GpuPath.name`.
    `drm_is_loaded`: whether nvidia-drm, which makes render nodes, is loaded; None if unknown.
    `meant_is_damaged`: that could not be read; `meant_is_hidden`: only root can read it. `driver_reason` is
    why the driver reported no GPU; empty if it answered.
    """

    driver: Driver
    gpus: tuple[Gpu, ...]
    served: tuple[str, ...] = ()
    controllers: tuple[Controller, ...] = ()
    meant: Mapping[str, MeantGpu] = {}
    driver_reason: Reason = NO_REASON
    meant_is_damaged: bool = False
    meant_is_hidden: bool = False
    drm_is_loaded: bool | None = None


class Device(NamedTuple):
    """The `slot`-th part of a GPU or of its pool, with its budget.

    Its memory is unknown (None) on a time-sliced GPU whose driver does not report any.
    `domain` is the domain that serves it; empty if it is not shared through MPS. Then nothing enforces its
    budget. `reserve_mib` of the GPU's memory is kept free in addition to the limit, for MPS' own use.
    """

    id: str
    addr: str
    gpu_uuid: str
    slot: int
    memory_limit_mib: int | None
    memory_total_mib: int | None
    thread_percentage: float
    budget_enforced: bool
    domain: str
    priority: str = NORMAL
    reserve_mib: int = 0
    sharing: str = MPS

    @property
    def gpu_address(self) -> str:
        return gpu_of(self.addr)

    @property
    def is_on_instance(self) -> bool:
        return is_on_instance(self.addr)

    @property
    def dev_type(self) -> str:
        return DEV_TYPES[self.sharing]


class Slice(NamedTuple):
    """The budget of one of a GPU's unequal devices."""

    memory_limit_mib: int
    thread_percentage: float
    priority: str = NORMAL


class Pool(NamedTuple):
    """A GPU whose memory is leased in units; every client is a device.

    `memory_mib`, a multiple of the unit, is the most that a single client can get. Each client takes
    `reserve_mib` in addition to its units, and all together take at most `memory_total_mib`; MPS allows
    `clients` of them. Threads are proportional to memory, times `thread_overcommit`; None does not limit
    them. If `thread_percentage` is not 0, each client has that or what its request names instead, and all
    together have at most 100 times `thread_overcommit`.
    """

    gpu_uuid: str
    domain: str
    unit_mib: int
    memory_mib: int
    memory_total_mib: int
    reserve_mib: int
    clients: int
    thread_overcommit: float | None = 1.0
    thread_percentage: int = 0


class PlannedGpu(NamedTuple):
    """A GPU that is divided into equal devices, into `slices`, or into amounts from a `pool`.

    `memory_limit_mib` and `thread_percentage` are the most that one client gets; the limit is None if the
    control daemon serves the GPU but the plan does not, so that the GPU is left alone. `slices` has an item
    for each slot if the devices differ from that; a pool has no devices until they are leased.
    """

    uuid: str
    memory_limit_mib: int | None = None
    device_count: int = 0
    thread_percentage: float = 0.0
    slices: tuple[Slice, ...] = ()
    pool: Pool | None = None

    @property
    def is_sliced(self) -> bool:
        """Whether it is divided by `slices`, and not into equal devices that one client may combine."""
        return bool(self.slices) and self.most_combined == 1

    @property
    def most_combined(self) -> int:
        """How many of its equal devices one client may combine; 1 if it may not, or if they differ."""
        if not self.slices or self.memory_limit_mib is None:
            return 1
        return self.memory_limit_mib // max(share.memory_limit_mib for share in self.slices)


class DirectGpu(NamedTuple):
    """A GPU whose equal devices need no control daemon, because it is not shared through MPS.

    Nothing enforces `memory_limit_mib`, the budget of each device, except on a MIG instance that is one; None
    if it is unknown.
    """

    uuid: str
    memory_limit_mib: int | None
    device_count: int
    sharing: str = TIME_SLICING
    thread_percentage: float = 100.0


class DomainPlan(NamedTuple):
    """A control daemon: its GPUs in CUDA's order, and the default limits of its clients.

    Only the group `pipe_group` may enter the pipe directory; if it is empty, every user may.
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
        """By GPU, in the control daemon's numbering."""
        return tuple(gpu.memory_limit_mib for gpu in self.gpus)

    def memory_limit_of(self, gpu_uuid: str) -> int | None:
        """Return the limit of one client in MiB; None if the GPU is not served, for example lost."""
        return next((gpu.memory_limit_mib for gpu in self.gpus if gpu.uuid == gpu_uuid), None)

    def for_gpus(self, gpu_uuids: Iterable[str]) -> DomainPlan:
        """Return the plan for these GPUs, in this order; GPUs that it does not divide have no limit."""
        by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        return self._replace(gpus=tuple(by_uuid.get(uuid) or PlannedGpu(uuid) for uuid in gpu_uuids))

    def same_control_daemon(self, other: DomainPlan) -> bool:
        """Whether the control daemon of `other` can serve this plan: they differ in limits at most."""
        return self._of_its_process() == other._of_its_process()

    def _of_its_process(self) -> tuple[object, ...]:
        """Return what cannot change while the control daemon runs."""
        places = (self.name, self.pipe_directory, self.log_directory, self.pipe_group)
        return (*places, self.gpu_uuids, self.multiuser)


class MissingGpu(NamedTuple):
    """An entry whose GPU is not there: its path, where it is written (`FILE:LINE`), and the reason.

    `reserved_for` is what the entry reserves the GPU for, empty if nothing.
    """

    path: str
    place: str
    reason: Reason
    reserved_for: str = ""


class Plan(NamedTuple):
    """The plan for the host. `unavailable` has reasons by PCI address, the other mappings are by GPU UUID.

    `parked` has the GPUs that served before and cannot now, divided as they will be when they can again:
    their devices are listed, but no control daemon is started for them. `direct` has the GPUs that are shared
    without MPS, lost ones included: no control daemon serves them. `sharing` has the way of sharing of each
    divided GPU, by PCI address, unusable ones included. `pending` has the GPUs whose devices are still shared
    as before, and what the new way of sharing waits for. `kept_modes` has the PCI addresses of the GPUs whose
    compute mode is kept as configured, and `memory_mib` the configured memory of GPUs, by PCI address.
    `missing` has the entries whose GPUs are unknown, and `meant` what all entries mean, by `GpuPath.name`.
    `warnings` say what works otherwise than configured, such as an entry whose path leads to another GPU
    than before.
    """

    host_id: str
    domains: tuple[DomainPlan, ...] = ()
    compute_modes: Mapping[str, str] = {}
    devices: tuple[Device, ...] = ()
    unavailable: Mapping[str, Reason] = {}
    pools: tuple[Pool, ...] = ()
    parked: tuple[DomainPlan, ...] = ()
    reserved: Mapping[str, str] = {}
    over_budget: Mapping[str, str] = {}
    direct: tuple[DirectGpu, ...] = ()
    sharing: Mapping[str, str] = {}
    pending: Mapping[str, Reason] = {}
    layouts: tuple[MigLayout, ...] = ()
    time_slices: Mapping[str, str] = {}
    kept_modes: frozenset[str] = frozenset()
    memory_mib: Mapping[str, int] = {}
    missing: tuple[MissingGpu, ...] = ()
    meant: Mapping[str, MeantGpu] = {}
    warnings: tuple[Reason, ...] = ()

    def divides(self, gpu: Gpu) -> bool:
        """Whether an entry divides this GPU or MIG instance, or did and its leases have not ended."""
        if gpu.pci_address in self.sharing or gpu.pci_address in self.unavailable:
            return True
        return self.has_layout(gpu)

    @property
    def offered(self) -> frozenset[str]:
        """The UUIDs of the GPUs whose devices can be leased."""
        return frozenset([one.gpu_uuid for one in self.devices] + [one.gpu_uuid for one in self.pools])

    def has_layout(self, gpu: Gpu) -> bool:
        """Whether there is a MIG layout for this GPU, or for the GPU of this instance."""
        return (gpu.parent or gpu.uuid) in {layout.gpu_uuid for layout in self.layouts}

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """Those of all divided GPUs that are usable, or were."""
        served = {uuid for domain in (*self.domains, *self.parked) for uuid in domain.gpu_uuids}
        return frozenset(served | {gpu.uuid for gpu in self.direct})


class DomainStatus(NamedTuple):
    """The state of a domain, its reason, and the control daemon's PID.

    `plan` is in effect: what its clients get. `pending` says what will change, if anything, and what it waits
    for; `waits_for` has the PIDs of the MPS servers that have to end first. `failing_users` has the users
    (uids) for whom MPS servers do not start, and why, while they start for others.
    """

    plan: DomainPlan
    state: str
    reason: Reason
    pid: int | None
    since_s: float
    restarts: int
    pending: str = ""
    waits_for: tuple[int, ...] = ()
    failing_users: Mapping[int, Reason] = {}


class Event(NamedTuple):
    """A change: what, why, and the consequence for devices and jobs.

    `subject` names what changed, for example a GPU's address. Warnings and errors have a reason code.
    """

    severity: str
    kind: str
    subject: str
    what: str
    cause: str = ""
    consequence: str = ""
    code: str = ""


class Owner(NamedTuple):
    """The owner of a lease: a user, or the `unit` of a job, because all job units run as one user."""

    uid: int
    unit: str = ""


class Holder(NamedTuple):
    """The holder of a lease, and what ends it.

    `binding` is `process` (the lease ends with `pid`, which `started`, in clock ticks since boot, makes
    unique), `container` (the same, with the container's first process; there is no `pid` before it starts),
    `connection` (ends with the connection to the daemon; after a restart of the daemon, as `process`) or
    `name` (ends `ttl_s` after the last renewal, or when released if that is 0). `unit` is the job's unit that
    it was taken for, and `command` the command line that the process will execute; both may be empty.
    `job_uid` is the user whose processes use the devices, if root has said so. `is_attested`: root, not the
    owner, has named `pid` as the container's first process.
    """

    binding: str
    uid: int
    pid: int | None = None
    started: int | None = None
    name: str = ""
    ttl_s: float = 0.0
    unit: str = ""
    command: str = ""
    job_uid: int | None = None
    is_attested: bool = False

    @property
    def user_uid(self) -> int | None:
        """The user (uid) whose processes use the devices; None if unknown.

        Root takes leases by name, and for containers, whose processes run as any user.
        """
        if self.job_uid is not None:
            return self.job_uid
        is_any = self.uid == 0 and self.binding in ("name", "container")
        return None if is_any else self.uid

    @property
    def is_awaited(self) -> bool:
        """Whether it is a container that has not started yet."""
        return self.binding == "container" and self.pid is None

    @property
    def owner(self) -> Owner:
        return Owner(self.uid, self.unit)


class Lease(NamedTuple):
    """Devices that belong to one holder until the lease ends, as they were when it began.

    `since_s` is in s since 1970. `cdi`: container engines can use the lease as a CDI device. `ends_s`
    (monotonic clock) is the expiry of a lease taken by name, None if it does not expire; `is_extended`: a
    daemon's start has postponed it. The same name and `request`, or `idempotency_key`, finds this lease.
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

    @property
    def cdi_name(self) -> str:
        return (self.holder.binding == "container" and self.holder.name) or self.id


#: How much of a lease's id identifies it.
_LEASE_ID_LENGTH = 8


class ServedUser(NamedTuple):
    """A user (uid) whom a control daemon serves, since when (s since 1970), and because of what.

    That is a lease, or jobs without one on the MPS server with the PID `server`. `is_next`: a client of this
    user waits, or has waited, for that server to end, which therefore accepts no clients of anybody.
    """

    uid: int
    since_s: float
    lease: Lease | None = None
    server: int = 0
    is_next: bool = False

    @property
    def because_of(self) -> str:
        if self.lease is None:
            return f"jobs on the MPS server (PID {self.server})"
        name = self.lease.holder.name or self.lease.id[:_LEASE_ID_LENGTH]
        return f"lease {name} on {self.lease.addresses}"


class Condition(NamedTuple):
    """Something on the host that keeps programs from their devices, and what the operator should do."""

    reason: Reason
    hint: str


class Snapshot(NamedTuple):
    """The state in effect, read back from NVML and the control daemons.

    `warnings` name configured settings that do not work on this host and are left out, and `conditions` what
    is wrong with the host beside its GPUs and domains.
    """

    version: int
    enabled: bool
    notice: Reason
    plan: Plan
    inventory: Inventory
    domains: tuple[DomainStatus, ...]
    warnings: tuple[Reason, ...] = ()
    conditions: tuple[Condition, ...] = ()
