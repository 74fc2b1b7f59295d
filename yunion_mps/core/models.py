"""Frozen values that are passed between packages; units are part of the names.

They are named tuples because importing `dataclasses` would add 7 ms to every start of the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.core.addresses import gpu_of, is_on_instance, physical_gpu, short_address
from yunion_mps.core.enums import (
    ABOUT_DEVICES,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    ABOUT_WAY_OF_SHARING,
    DEV_TYPES,
    MPS,
    NORMAL,
    NOTICE,
    TIME_SLICING,
)
from yunion_mps.core.mig import MigInstance, MigLayout, MigProfile
from yunion_mps.core.reasons import NO_REASON, Reason

if TYPE_CHECKING:
    from yunion_mps.core.conditions import Condition

#: Compute modes, as nvidia-smi prints them: contexts of one process are allowed, of any number, or of none.
#: Source: nvidia-smi(1), section "GPU ATTRIBUTES", Compute Mode.
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
    """Return the members of a record that its named tuple has; others are of a newer version.

    kind: the type of the named tuple.
    """
    return {name: record[name] for name in kind._fields if name in record}


class PcieLink(NamedTuple):
    """The link of a GPU at its fastest, with Cloudpods' names and units."""

    #: PCI Express' version, `3.0`.
    version: str
    #: `8GT/s`.
    transfer_rate_per_lane: str
    #: The number of lanes.
    lane_width: int
    #: That of all lanes, `15.76 GB/s`.
    throughput: str


class Driver(NamedTuple):
    """The NVIDIA driver."""

    version: str
    #: The version of its CUDA driver API, such as 12.2; None if it is unknown.
    cuda_version: str | None


class Gpu(NamedTuple):
    """A physical GPU, or a MIG instance of one, which has a `parent` and is used like a GPU of its own.

    Values that the driver does not report are None.
    """

    #: As in sysfs (`addresses`); that of an instance ends in `-g` and the instance's id.
    pci_address: str
    uuid: str | None = None
    name: str | None = None
    #: NVML's number of the GPU; None if NVML does not report it.
    nvml_index: int | None = None
    #: The number of its device node, /dev/nvidia0.
    minor: int | None = None
    memory_mib: int | None = None
    #: nvidia-smi's name of the mode.
    compute_mode: str | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    #: PCI's vendor and device id, `10de:1b38`.
    vendor_device_id: str | None = None
    #: -1 if it has none.
    numa_node: int | None = None
    link: PcieLink | None = None
    #: `/dev/dri/renderD128`.
    render_node: str | None = None
    #: Why it is unusable; empty if it is usable.
    reason: Reason = NO_REASON
    #: The kinds of instances that it can have.
    mig_profiles: tuple[MigProfile, ...] = ()
    #: The instances that it has.
    mig_instances: tuple[MigInstance, ...] = ()
    #: The MIG mode after the next reset.
    mig_pending: bool | None = None
    #: The UUID of the instance's GPU; empty for a whole GPU.
    parent: str = ""
    #: The place that the instance occupies, from which the ids of its devices are derived, because its UUID
    #: changes when it is created again.
    identity: str = ""
    #: The instance's share of the SMs of its parent.
    sm_percentage: float | None = None
    #: Its compute mode stays as it is: the driver does not support changing it, or does not report it.
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


def gpus_by_uuid(gpus: Iterable[Gpu]) -> dict[str | None, Gpu]:
    """Return the GPUs by UUID; one that does not report it is at None."""
    return {gpu.uuid: gpu for gpu in gpus}


def gpus_by_address(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs by PCI address."""
    return {gpu.pci_address: gpu for gpu in gpus}


class Controller(NamedTuple):
    """A display controller of any vendor, as sysfs and udev describe it."""

    pci_address: str
    #: As in sysfs: `0x10de`.
    vendor: str
    #: The kernel driver that is bound to it; empty if none is.
    driver: str = ""
    render_node: str | None = None


class MeantGpu(NamedTuple):
    """The GPU that an entry's path led to when it was resolved for the first time."""

    uuid: str
    pci_address: str
    #: The UUID of the card that was in its place before, until the operator's next reload.
    replaced: str = ""


class Inventory(NamedTuple):
    """What was found on the host."""

    driver: Driver
    #: The GPUs, each followed by its MIG instances, in PCI order.
    gpus: tuple[Gpu, ...]
    #: The UUIDs of the GPUs that have served devices, including lost ones.
    served: tuple[str, ...] = ()
    #: All display controllers of the host.
    controllers: tuple[Controller, ...] = ()
    #: What the entries' paths meant before, by `GpuPath.name`.
    meant: Mapping[str, MeantGpu] = {}
    #: Why the driver reported no GPU; empty if it answered.
    driver_reason: Reason = NO_REASON
    #: What the paths meant could not be read.
    meant_is_damaged: bool = False
    #: Only root can read what the paths meant.
    meant_is_hidden: bool = False
    #: Whether nvidia-drm, which creates render nodes, is loaded; None if that is unknown.
    drm_is_loaded: bool | None = None


class Device(NamedTuple):
    """A part of a GPU or of its pool, with its budget."""

    id: str
    #: The address of its GPU, `-` and the slot.
    addr: str
    gpu_uuid: str
    #: Its number on the GPU, from 0.
    slot: int
    #: Its budget; None on a time-sliced GPU whose driver reports no memory.
    memory_limit_mib: int | None
    #: The memory of its GPU.
    memory_total_mib: int | None
    #: Its budget of SM threads.
    thread_percentage: float
    budget_enforced: bool
    #: The domain that serves it; empty if it is not shared through MPS. Then nothing enforces its budget.
    domain: str
    priority: str = NORMAL
    #: How much of the GPU's memory is kept free in addition to the limit, for MPS' own use.
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
    """A GPU whose memory is leased in units; every client is a device."""

    gpu_uuid: str
    domain: str
    unit_mib: int
    #: The most that a single client can get, a multiple of the unit.
    memory_mib: int
    #: The most that all clients together take.
    memory_total_mib: int
    #: What each client takes in addition to its units.
    reserve_mib: int
    #: How many clients MPS allows.
    clients: int
    #: Threads are proportional to memory, times this; None does not limit them.
    thread_overcommit: float | None = 1.0
    #: If it is not 0, each client has this percentage or what its request names instead, and all together
    #: have at most 100 times `thread_overcommit`.
    thread_percentage: int = 0


class PlannedGpu(NamedTuple):
    """A GPU that is divided into equal devices, into `slices`, or into amounts from a `pool`."""

    uuid: str
    #: The most that one client gets; None if the control daemon serves the GPU but the plan does not, so that
    #: the GPU is left alone.
    memory_limit_mib: int | None = None
    #: The number of devices; a pool has none until they are leased.
    device_count: int = 0
    #: The most that one client gets of the SM threads.
    thread_percentage: float = 0.0
    #: The budget of each slot if the devices differ from the most that one client gets.
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
    """A GPU whose equal devices need no control daemon, because it is not shared through MPS."""

    uuid: str
    #: The budget of each device, which nothing enforces, except on a MIG instance that is one device; None if
    #: it is unknown.
    memory_limit_mib: int | None
    device_count: int
    sharing: str = TIME_SLICING
    thread_percentage: float = 100.0


class DomainPlan(NamedTuple):
    """A control daemon with the default limits of its clients."""

    name: str
    pipe_directory: str
    log_directory: str
    #: In CUDA's order, which is that of the control daemon's numbers.
    gpus: tuple[PlannedGpu, ...]
    thread_percentage: float
    #: Whether it serves all users at once.
    multiuser: bool = False
    #: The only group that may enter the pipe directory; if it is empty, every user may.
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
        for gpu in self.gpus:
            if gpu.uuid == gpu_uuid:
                return gpu.memory_limit_mib
        return None

    def for_gpus(self, gpu_uuids: Iterable[str]) -> DomainPlan:
        """Return the plan for these GPUs, in this order; GPUs that it does not divide have no limit."""
        by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        return self._replace(gpus=tuple(by_uuid.get(uuid, PlannedGpu(uuid)) for uuid in gpu_uuids))

    def same_control_daemon(self, other: DomainPlan) -> bool:
        """Return whether the control daemon of `other` can serve this plan: they differ in limits at most."""
        return self._of_its_process() == other._of_its_process()

    def _of_its_process(self) -> DomainPlan:
        """Return the plan without what can change while the control daemon runs."""
        return self._replace(gpus=tuple(map(PlannedGpu, self.gpu_uuids)), thread_percentage=0.0)


class MissingGpu(NamedTuple):
    """An entry whose GPU is not there."""

    path: str
    #: Where it is written: `FILE:LINE`.
    place: str
    reason: Reason
    #: What the entry reserves the GPU for; empty if nothing.
    reserved_for: str = ""


class Plan(NamedTuple):
    """The plan for the host, which `planning.plan.make_plan` computes."""

    #: The UUID from which the ids of devices are derived, together with their GPUs.
    host_id: str
    #: The control daemons to run, in the order of their first GPUs.
    domains: tuple[DomainPlan, ...] = ()
    #: The compute mode that each whole GPU should have, by UUID; GPUs that are left alone are missing.
    compute_modes: Mapping[str, str] = {}
    #: All devices, in the order of their GPUs and slots; those of pools are added when they are leased.
    devices: tuple[Device, ...] = ()
    #: Why GPUs that entries divide cannot be used now, by PCI address.
    unavailable: Mapping[str, Reason] = {}
    #: The GPUs whose memory is leased in units.
    pools: tuple[Pool, ...] = ()
    #: The GPUs that served before and cannot now, divided as they will be when they can again: their devices
    #: are listed, but no control daemon is started for them.
    parked: tuple[DomainPlan, ...] = ()
    #: What GPUs and MIG instances are reserved for, by UUID.
    reserved: Mapping[str, str] = {}
    #: What happens to a job that exceeds its budget, by GPU UUID.
    over_budget: Mapping[str, str] = {}
    #: The GPUs that are shared without MPS, lost ones included: no control daemon serves them.
    direct: tuple[DirectGpu, ...] = ()
    #: The way of sharing of each divided GPU, by PCI address, unusable ones included.
    sharing: Mapping[str, str] = {}
    #: The GPUs (UUIDs) whose devices are still shared as before, and what the new way of sharing waits for.
    pending: Mapping[str, Reason] = {}
    #: The MIG mode and instances that GPUs should have.
    layouts: tuple[MigLayout, ...] = ()
    #: The time slices to set, by GPU UUID.
    time_slices: Mapping[str, str] = {}
    #: The PCI addresses of the GPUs whose compute mode is kept, as configured.
    kept_modes: frozenset[str] = frozenset()
    #: The configured memory of GPUs, by PCI address.
    memory_mib: Mapping[str, int] = {}
    #: The entries whose GPUs are unknown.
    missing: tuple[MissingGpu, ...] = ()
    #: What all entries mean, by `GpuPath.name`.
    meant: Mapping[str, MeantGpu] = {}
    #: What works otherwise than configured, such as an entry whose path leads to another GPU than before.
    warnings: tuple[Reason, ...] = ()

    def divides(self, gpu: Gpu) -> bool:
        """Return whether an entry divides this GPU or MIG instance, or did and its leases have not ended."""
        if gpu.pci_address in self.sharing or gpu.pci_address in self.unavailable:
            return True
        return self.has_layout(gpu)

    @property
    def offered(self) -> frozenset[str]:
        """The UUIDs of the GPUs whose devices can be leased."""
        uuids = {device.gpu_uuid for device in self.devices}
        uuids.update(pool.gpu_uuid for pool in self.pools)
        return frozenset(uuids)

    def has_layout(self, gpu: Gpu) -> bool:
        """Return whether there is a MIG layout for this GPU, or for the GPU of this instance."""
        return (gpu.parent or gpu.uuid) in {layout.gpu_uuid for layout in self.layouts}

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The UUIDs of all divided GPUs that are usable, or were."""
        uuids = {gpu.uuid for gpu in self.direct}
        for domain in (*self.domains, *self.parked):
            uuids.update(domain.gpu_uuids)
        return frozenset(uuids)


class DomainStatus(NamedTuple):
    """The status of a domain at one moment, which `Domain.status` returns and snapshots have."""

    #: The plan in effect: what its clients get.
    plan: DomainPlan
    #: One of `DOMAIN_STATES`.
    state: str
    #: Why it is in this state; empty if it is ready.
    reason: Reason
    #: The PID of its control daemon; None if it has none.
    pid: int | None
    #: When it came into this state, by the monotonic clock; 0 if it was never started.
    since_s: float
    #: How often it has failed since this daemon started; each time its next start was scheduled.
    restarts: int
    #: What will change, and what the change waits for; empty if nothing is pending.
    pending: str = ""
    #: The PIDs of the MPS servers that have to end first, orphans among them.
    waits_for: tuple[int, ...] = ()
    #: The users (uids) for whom MPS servers do not start, and why, while they start for others.
    failing_users: Mapping[int, Reason] = {}
    #: The PIDs of servers that have outlived their control daemon.
    orphans: tuple[int, ...] = ()


class Event(NamedTuple):
    """A change: what, why, and the consequence for devices and jobs."""

    severity: str
    kind: str
    #: What changed, for example a GPU's address.
    subject: str
    what: str
    cause: str = ""
    consequence: str = ""
    #: The reason code of a warning or an error.
    code: str = ""
    #: What its repetitions have in common, if not its texts: a user may choose these. It is not stored.
    common: str = ""

    def stored(self) -> dict[str, str]:
        """Return what is stored and answered of it: all but `common`."""
        fields = self._asdict()
        del fields["common"]
        return fields


class Owner(NamedTuple):
    """The owner of a lease: a user, or the unit of a job, because all job units run as one user."""

    uid: int
    #: The systemd unit of the job; empty for a user's own leases.
    unit: str = ""


class Holder(NamedTuple):
    """The holder of a lease, and what ends it."""

    #: `process`: the lease ends with the process. `container`: the same, with the container's first process.
    #: `connection`: it ends with the connection to the daemon; after a restart of the daemon, as `process`.
    #: `name`: it ends `ttl_s` after the last renewal, or when it is released if that is 0.
    binding: str
    uid: int
    #: None for a container that has not started yet, and for most leases by name.
    pid: int | None = None
    #: When the process started, in clock ticks since boot, which makes its PID unique.
    started: int | None = None
    name: str = ""
    ttl_s: float = 0.0
    #: The job's unit that it was taken for; empty if there is none.
    unit: str = ""
    #: The command line that the process will execute; empty if it is not known.
    command: str = ""
    #: The user whose processes use the devices, if root has said so.
    job_uid: int | None = None
    #: Root, not the owner, has named `pid` as the container's first process.
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

    The same request, with the same name or idempotency key, finds this lease.
    """

    id: str
    devices: tuple[Device, ...]
    holder: Holder
    #: In s since 1970.
    since_s: float
    #: The variables for a process that uses the devices.
    environment: Mapping[str, str] = {}
    idempotency_key: str = ""
    #: Whether container engines can use the lease as a CDI device.
    cdi: bool = False
    #: The expiry of a lease taken by name, by the monotonic clock; None if it does not expire.
    ends_s: float | None = None
    #: A daemon's start has postponed the expiry.
    is_extended: bool = False
    #: The content of the request (`QueuedRequest.as_text`).
    request: str = ""
    #: When its request began to wait, in s since 1970; 0 if that is not known.
    requested_s: float = 0.0

    @property
    def addresses(self) -> str:
        """The addresses of its devices, separated by commas."""
        return ", ".join(device.addr for device in self.devices)

    @property
    def cdi_name(self) -> str:
        """The name of its device in the Container Device Interface."""
        is_named = self.holder.binding == "container" and self.holder.name
        return self.holder.name if is_named else self.id


#: How much of a lease's id identifies it.
_LEASE_ID_LENGTH = 8


class ServedUser(NamedTuple):
    """A user whom a control daemon serves."""

    uid: int
    #: In s since 1970.
    since_s: float
    #: The lease because of which it serves the user; None if because of jobs without one.
    lease: Lease | None = None
    #: The PID of the MPS server with these jobs.
    server: int = 0
    #: A client of this user waits, or has waited, for that server to end, which therefore accepts no clients
    #: of any user.
    is_next: bool = False

    @property
    def because_of(self) -> str:
        """The lease or the jobs, as texts name them."""
        if self.lease is None:
            return f"jobs on the MPS server (PID {self.server})"
        name = self.lease.holder.name or self.lease.id[:_LEASE_ID_LENGTH]
        return f"lease {name} on {self.lease.addresses}"


class Snapshot(NamedTuple):
    """The state in effect, read back from NVML and the control daemons; `Supervisor.snapshot` makes it."""

    #: The number of this snapshot since the daemon started; another state has a higher one.
    version: int
    #: Whether MPS is enabled (`enable_cuda_mps`).
    enabled: bool
    #: The plan in effect, as clients get it.
    plan: Plan
    #: The GPUs at the last poll, each with the reason why it cannot be used, if any.
    inventory: Inventory
    #: The domains in the order of their first GPUs, with those that wait for the end of another one.
    domains: tuple[DomainStatus, ...]
    #: Everything that is wrong or pending on the host, as far as that does not depend on leases and on what
    #: processes do.
    conditions: tuple[Condition, ...] = ()

    @property
    def notice(self) -> Reason:
        """Why the host offers no devices, or what is left of an earlier run; empty if all is well."""
        for condition in self.conditions:
            if condition.status == NOTICE:
                return condition.reason
        return NO_REASON

    @property
    def faults(self) -> dict[str, Reason]:
        """Why GPUs (addresses) do not serve as configured: because of the GPU, or of its MIG layout."""
        reasons: dict[str, Reason] = {}
        for condition in self.conditions:
            if condition.kind in (ABOUT_GPU, ABOUT_MIG_LAYOUT):
                reasons[condition.subject] = condition.reason
        return reasons

    @property
    def unusable(self) -> dict[str, Reason]:
        """Why no device of a GPU (UUID) can be used now; GPUs whose devices can are left out."""
        return self._by_uuid(ABOUT_DEVICES)

    @property
    def waits(self) -> dict[str, Reason]:
        """Why GPUs (UUIDs) get no new leases: they wait for another way of sharing, or a MIG layout."""
        return self._by_uuid(ABOUT_WAY_OF_SHARING, ABOUT_MIG_LAYOUT)

    def _by_uuid(self, *kinds: str) -> dict[str, Reason]:
        uuids = {gpu.address: gpu.uuid for gpu in self.inventory.gpus if gpu.uuid}
        reasons: dict[str, Reason] = {}
        for condition in self.conditions:
            if condition.kind in kinds:
                reasons[uuids.get(condition.subject, condition.subject)] = condition.reason
        return reasons
