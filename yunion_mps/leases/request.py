"""Lease requests, the candidates for them, and how the names in them are resolved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from yunion_mps.core.addresses import is_on_instance, is_part, shown_address
from yunion_mps.core.enums import BINPACK, MPS, NOT_SHARED
from yunion_mps.core.errors import InfeasibleError, NotAllowedError, NotFoundError
from yunion_mps.core.models import (
    ALL,
    Device,
    DomainPlan,
    Gpu,
    Holder,
    Lease,
    Owner,
    Plan,
    Pool,
    ServedUser,
    Snapshot,
    gpus_by_uuid,
)
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.text import count
from yunion_mps.core.units import duration_text
from yunion_mps.host.proc import user_name
from yunion_mps.leases.served_users import next_for, why_not_served
from yunion_mps.planning.division import enforces_budgets, pool_device, why_unenforced
from yunion_mps.planning.environment import (
    client_environment,
    require_one_budget,
    whole_environment,
    why_not_honoured,
)

#: The shortest prefix of a lease's id: as long as `who` shows it, so that no name matches by chance.
_SHORTEST_PREFIX = 8


class LeaseRequest(NamedTuple):
    """A request for devices on one GPU or on different GPUs, or for an amount of memory for each of them."""

    #: The number of devices.
    number: int = 1
    #: Ids or addresses of devices, or all; if it is not empty, just these are requested.
    devices: tuple[str, ...] = ()
    #: The only GPU (UUID or address) whose devices are used, with its MIG instances; empty: any GPU's.
    gpu: str = ""
    #: Whether each device is to be on a different GPU.
    across: bool = False
    placement: str = BINPACK
    #: The memory of each device; 0: that of the device.
    memory_mib: int = 0
    #: Whether GPUs that enforce no budgets may be used.
    allow_unlimited: bool = False
    #: Reserved devices are used only if they are reserved for this.
    reserved_for: str = ""
    #: The percentage of SM threads of each device; 0 leaves it to the GPU.
    thread_percentage: int = 0

    def matches(self, device: Device) -> bool:
        """Return whether the device matches the request, free or not."""
        if not (self.allow_unlimited or device.budget_enforced):
            return False
        if self.memory_mib and (device.memory_limit_mib or 0) < self.memory_mib:
            return False
        if device.thread_percentage < self.thread_percentage:
            return False
        if self.devices and not {ALL, device.id, device.addr}.intersection(self.devices):
            return False
        return not self.gpu or self.gpu == device.gpu_uuid or is_part(device.addr, self.gpu)

    def __str__(self) -> str:
        if ALL in self.devices:
            return "all devices"
        if self.devices:
            names = ", ".join(self.devices)
            return f"devices {names}" if len(self.devices) > 1 else f"device {names}"
        text = count(self.number, "device")
        if self.memory_mib:
            text = f"{text} of {self.memory_mib} MiB" if self.number > 1 else f"{self.memory_mib} MiB"
        if self.thread_percentage:
            text += f" with {self.thread_percentage} % of the threads"
        if self.gpu:
            return f"{text} of GPU {self.gpu}"
        if self.number > 1:
            return f"{text} on different GPUs" if self.across else f"{text} on one GPU"
        return text


class QueuedRequest(NamedTuple):
    """A request that waits for its turn, or is granted at once."""

    request: LeaseRequest
    holder: Holder
    idempotency_key: str = ""
    #: Whether the lease is published as a CDI device.
    cdi: bool = False
    #: The place in the queue: the lowest is the first.
    position: int = 0
    #: When it began to wait, in s since 1970.
    since_s: float = 0.0
    #: The request as text, before names were resolved.
    sent: str = ""

    @property
    def as_text(self) -> str:
        """The content of the request as JSON, by name; requests with the same content have the same text.

        Members with their default values are left out, so a member that a later version adds changes no
        stored text.
        """
        members = self.request._asdict()
        members["cdi"] = self.cdi
        members["ttl_s"] = self.holder.ttl_s
        members["job_uid"] = self.holder.job_uid
        return _text_of(members)

    @property
    def key(self) -> tuple[int, str] | None:
        """What identifies a repeated request: uid and idempotency key; None without an idempotency key."""
        return (self.holder.uid, self.idempotency_key) if self.idempotency_key else None

    def is_answered_by(self, lease: Lease) -> bool:
        """Return whether the lease was granted for this request, or for another attempt at it.

        Requests are the same if they have the same content, and the same idempotency key or named holder.
        """
        if lease.request != self.sent:
            return False
        has_same_name = self.holder.name != "" and self.holder.name == lease.holder.name
        if has_same_name and self.holder.owner == lease.holder.owner:
            return True
        has_same_key = self.idempotency_key != "" and self.idempotency_key == lease.idempotency_key
        return has_same_key and self.holder == lease.holder


#: The members of a stored request of earlier versions, which had a list, by position. The last item may be an
#: object with the `uid` of the job's user.
_POSITIONS = (
    "number",
    "devices",
    "gpu",
    "across",
    "placement",
    "memory_mib",
    "allow_unlimited",
    "cdi",
    "ttl_s",
    "reserved_for",
    "thread_percentage",
)
#: The default values of all members of a stored request.
_DEFAULTS: Mapping[str, Any] = {
    **LeaseRequest._field_defaults,
    "devices": [],
    "cdi": False,
    "ttl_s": 0.0,
    "job_uid": None,
}


def _text_of(members: Mapping[str, Any]) -> str:
    """Return the text of a stored request, without members that have their default values."""
    stored: dict[str, Any] = {}
    for name, value in members.items():
        member = list(value) if isinstance(value, tuple) else value
        if name not in _DEFAULTS or member != _DEFAULTS[name]:
            stored[name] = member
    return json.dumps(stored, separators=(",", ":"), sort_keys=True)


def request_by_name(text: str) -> str:
    """Return a stored request as `QueuedRequest.as_text` has it, also if an earlier version wrote it."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(values, list):
        return text
    members = dict(zip(_POSITIONS, values))
    if values and isinstance(values[-1], dict):
        members = dict(zip(_POSITIONS, values[:-1]))
        members["job_uid"] = values[-1].get("uid")
    return _text_of(members)


class Candidate(NamedTuple):
    """A device in its current state."""

    device: Device
    #: Why it is not served; empty if it is.
    reason: Reason = NO_REASON
    #: Whether its GPU is divided by `slices`, so that it can satisfy a request for memory.
    is_slice: bool = False


def devices_of_candidates(candidates: Iterable[Candidate]) -> list[Device]:
    return [candidate.device for candidate in candidates]


class PoolCandidate(NamedTuple):
    """A pool in its current state."""

    pool: Pool
    #: The address of its GPU.
    gpu: str
    #: Creates a device of a number of units in a slot.
    make: Callable[[int, int], Device]
    #: Why it is not served; empty if it is.
    reason: Reason = NO_REASON

    @property
    def kind(self) -> tuple[bool, str]:
        """What the pools of a lease have in common, as `combinable_kind` says of devices."""
        return is_on_instance(self.gpu), self.pool.domain


class WaitingGpu(NamedTuple):
    """A GPU that may have more devices later, and why it has none yet, or not all of them.

    Its MIG layout is not in effect, its entry's GPU is missing, or the driver does not work yet.
    """

    #: Its address or path; empty if it is unknown.
    gpu: str
    reason: Reason
    #: What its devices will be reserved for; None if that is not known, or for nothing.
    reserved_for: str | None = None
    #: Only a request that names it waits for it: it cannot be used, and has never served.
    must_be_named: bool = False

    def may_serve(self, request: LeaseRequest) -> bool:
        """Return whether the request may wait for this GPU."""
        if self.reserved_for not in (None, request.reserved_for):
            return False
        return request.gpu == self.gpu or not (request.gpu or self.must_be_named)


class Unenforced(NamedTuple):
    """A GPU that enforces no budgets."""

    #: The GPU as errors name it.
    gpu: str
    why: str


class Candidates(NamedTuple):
    """Everything that can be leased."""

    devices: Sequence[Candidate] = ()
    pools: Sequence[PoolCandidate] = ()
    #: The GPUs without enforced budgets, by UUID.
    unenforced: Mapping[str, Unenforced] = {}
    #: The domains of all devices, by name: as they serve, or as planned if they do not serve.
    domains: Mapping[str, DomainPlan] = {}
    #: The domains that are configured, by name; their limits may wait for MPS servers to end.
    planned: Mapping[str, DomainPlan] = {}
    #: What devices are reserved for, by GPU UUID.
    reserved: Mapping[str, str] = {}
    waiting: Sequence[WaitingGpu] = ()
    #: Whom each control daemon serves, by domain.
    users: Mapping[str, Sequence[ServedUser]] = {}
    #: Why MPS servers of a user do not start, by domain and uid.
    failing_users: Mapping[str, Mapping[int, Reason]] = {}

    def domains_failing(self, uid: int | None) -> set[str]:
        """Return the names of the domains where the MPS servers of this user do not start."""
        return {name for name, users in self.failing_users.items() if uid in users}

    def domains_not_of(self, uid: int, promised: Mapping[str, Sequence[int]]) -> set[str]:
        """Return the names of the domains that serve one user at a time, but not this one now and next.

        promised: as in `domains_withheld`.
        """
        names = {name for name, domain in self.domains.items() if not domain.multiuser}
        names.update(self.users)
        for name, users in self.users.items():
            uids = {user.uid for user in users}
            if uids == {uid} and not promised.get(name):
                names.discard(name)
        return names

    def domains_withheld(self, uid: int | None, promised: Mapping[str, Sequence[int]] = {}) -> set[str]:
        """Return the names of the domains whose devices this user cannot have now.

        promised: the users (uids) of earlier requests whom control daemons serve next, by domain.
        """
        if uid is None:
            return set()
        withheld = self.domains_failing(uid)
        for name, users in self.users.items():
            if any(user.uid != uid for user in users):
                withheld.add(name)
        for name, uids in promised.items():
            if any(other != uid for other in uids):
                withheld.add(name)
        return withheld

    def why_withheld(self, name: str, uid: int, promised: Mapping[str, Sequence[int]]) -> Reason:
        """Return why this user cannot have the devices of a domain that is withheld from them."""
        failing = self.failing_users.get(name, {}).get(uid)
        reason = failing or why_not_served(self.users.get(name, ()), uid)
        return reason or next_for(next(other for other in promised[name] if other != uid))

    def waiting_for(self, request: LeaseRequest) -> WaitingGpu | None:
        """Return the GPU that the request may wait for; None if there is none."""
        for gpu in self.waiting:
            if gpu.may_serve(request):
                return gpu
        return None

    def usable_pools(self, request: LeaseRequest) -> list[PoolCandidate]:
        """Return the pools on the request's GPU that it may use, whatever amounts it names."""
        usable: list[PoolCandidate] = []
        for candidate in self.pools:
            uuid = candidate.pool.gpu_uuid
            is_reserved = self.reserved.get(uuid, request.reserved_for) != request.reserved_for
            is_refused = uuid in self.unenforced and not request.allow_unlimited
            if request.gpu in ("", uuid, candidate.gpu) and not is_reserved and not is_refused:
                usable.append(candidate)
        return usable

    def matching_pools(self, request: LeaseRequest) -> list[PoolCandidate]:
        """Return the pools that could satisfy a request for memory; none for other requests."""
        if not request.memory_mib:
            return []
        pools = self.usable_pools(request)
        if not request.thread_percentage:
            return pools
        return [candidate for candidate in pools if candidate.pool.thread_percentage]

    def suitable(self, request: LeaseRequest) -> list[Candidate]:
        """Return the devices that could satisfy the request, as far as each by itself decides."""
        reserved = {uuid for uuid, use in self.reserved.items() if use != request.reserved_for}
        if reserved and ALL in request.devices:
            return []
        suitable: list[Candidate] = []
        for candidate in self.devices:
            if candidate.device.gpu_uuid in reserved or not request.matches(candidate.device):
                continue
            if candidate.is_slice or not request.memory_mib:
                suitable.append(candidate)
        return suitable

    def why_not_combinable(self, devices: Sequence[Device]) -> str:
        """Return why devices of one domain cannot be combined into one budget; empty if they can."""
        return why_not_honoured(devices, self.domain_of(devices[0]))

    def domain_of(self, device: Device) -> DomainPlan | None:
        """Return the domain of the device; None if it is shared without MPS."""
        return self.domains[device.domain] if device.domain else None

    def environment(self, request: LeaseRequest, devices: Sequence[Device]) -> dict[str, str]:
        """Return the environment for a process with the devices.

        Raises InfeasibleError if one process cannot use these devices, or MPS would ignore a limit.
        """
        domain_names: set[str] = set()
        are_on_instances: set[bool] = set()
        for device in devices:
            domain_names.add(device.domain)
            are_on_instances.add(device.is_on_instance)
        if "" in domain_names and len(domain_names) > 1:
            text = "some of these devices are shared through MPS and some are not; a process can use one kind"
            raise InfeasibleError(text, "request devices that are shared in the same way: yunion-mps list")
        if len(are_on_instances) > 1:
            text = "some of these devices are on MIG instances and some are not; a process can use one kind"
            raise InfeasibleError(text, "use a separate lease (or job) and process for each")
        if len(domain_names) > 1:
            hint = "request devices of one GPU, or serve all GPUs together: cuda_mps_scope: host"
            if are_on_instances == {True}:
                hint = "request devices of one MIG instance; each has a control daemon of its own"
            text = "these devices have different control daemons; a process can use only one"
            raise InfeasibleError(text, hint)
        domain = self.domain_of(devices[0])
        if ALL in request.devices:
            return whole_environment(devices, domain)
        require_one_budget(devices, domain, self.planned.get(devices[0].domain))
        return client_environment(devices, domain)


def candidates_of(snapshot: Snapshot, reasons: Mapping[str, Reason]) -> Candidates:
    """Return the devices and pools of a snapshot.

    reasons: why devices and pools cannot be used, by GPU UUID; empty if they can.
    """
    plan = snapshot.plan
    gpus = snapshot.inventory.gpus
    waits = snapshot.waits
    why = {uuid: reason or waits.get(uuid, NO_REASON) for uuid, reason in reasons.items()}
    devices: list[Candidate] = []
    sliced: set[str] = set()
    domains = {domain.name: domain for domain in (*plan.parked, *plan.domains)}
    failing_users: dict[str, Mapping[int, Reason]] = {}
    for status in snapshot.domains:
        domains[status.plan.name] = status.plan
        sliced.update(gpu.uuid for gpu in status.plan.gpus if gpu.is_sliced)
        if status.failing_users:
            failing_users[status.plan.name] = status.failing_users
    for device in plan.devices:
        devices.append(Candidate(device, why[device.gpu_uuid], device.gpu_uuid in sliced))
    return Candidates(
        devices=devices,
        pools=_pool_candidates(plan, gpus, why),
        unenforced=_unenforced_gpus(plan, gpus),
        domains=domains,
        planned={domain.name: domain for domain in plan.domains},
        reserved=plan.reserved,
        waiting=_waiting_gpus(snapshot),
        failing_users=failing_users,
    )


def _pool_candidates(plan: Plan, gpus: Sequence[Gpu], why: Mapping[str, Reason]) -> list[PoolCandidate]:
    by_uuid = gpus_by_uuid(gpus)
    candidates: list[PoolCandidate] = []
    for pool in plan.pools:
        gpu = by_uuid.get(pool.gpu_uuid)
        if gpu:
            make = partial(pool_device, plan.host_id, pool, gpus=gpus)
            candidates.append(PoolCandidate(pool, gpu.address, make, why[pool.gpu_uuid]))
    return candidates


def _unenforced_gpus(plan: Plan, gpus: Sequence[Gpu]) -> dict[str, Unenforced]:
    """Return the GPUs whose budgets nothing enforces, by UUID."""
    ways = {device.gpu_uuid: device.sharing for device in plan.devices}
    unenforced: dict[str, Unenforced] = {}
    for gpu in gpus:
        sharing = ways.get(gpu.uuid or "", MPS)
        is_enforced = sharing == NOT_SHARED or (sharing == MPS and enforces_budgets(gpu))
        if gpu.uuid and not is_enforced:
            unenforced[gpu.uuid] = Unenforced(f"{gpu.address} ({gpu.name})", why_unenforced(gpu, sharing))
    return unenforced


def _waiting_gpus(snapshot: Snapshot) -> list[WaitingGpu]:
    """Return the GPUs that may have more devices later."""
    plan = snapshot.plan
    layouts = {layout.gpu_uuid for layout in plan.layouts}
    faults = snapshot.faults
    waiting: list[WaitingGpu] = []
    for gpu in snapshot.inventory.gpus:
        reason = faults.get(gpu.address)
        has_layout = gpu.uuid in layouts
        if reason and (has_layout or gpu.uuid not in plan.offered):
            reserved_for = plan.reserved.get(gpu.uuid or "")
            waiting.append(WaitingGpu(gpu.address, reason, reserved_for, must_be_named=not has_layout))
    for entry in plan.missing:
        waiting.append(WaitingGpu(entry.path, entry.reason, entry.reserved_for or None))
    if snapshot.inventory.driver_reason:
        waiting.append(WaitingGpu("", snapshot.inventory.driver_reason))
    return waiting


# -- names


def find_gpu(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU of this address or UUID, or a unique prefix of either.

    Raises NotFoundError if there is none, or more than one.
    """
    return gpus[index_of_gpu(name, [(gpu.address, gpu.uuid or "") for gpu in gpus])]


def index_of_gpu(name: str, gpus: Sequence[tuple[str, str]]) -> int:
    """Return the index of that GPU among these addresses and UUIDs.

    Raises NotFoundError if there is none, or more than one.
    """
    name = shown_address(name)
    equal: list[int] = []
    prefixed: list[int] = []
    for index, (address, uuid) in enumerate(gpus):
        if name in (address, uuid):
            equal.append(index)
        if address.startswith(name) or uuid.startswith(name):
            prefixed.append(index)
    indices = equal or prefixed
    if len(indices) == 1:
        return indices[0]
    message = f"there is no GPU {shorten(name)}"
    if indices:
        message = f"{shorten(name)} matches {len(indices)} GPUs"
    raise NotFoundError(message, "list the GPUs: yunion-mps gpus")


def find_lease(name: str, leases: Mapping[str, Lease], caller: Owner) -> Lease:
    """Return the lease with this id, with this name if it is the caller's own, or with an id that begins so.

    A name never matches another owner's lease, not even for root, because the caller's own lease of that name
    may have ended. The caller's own leases precede others with the same prefix.

    leases: all leases, by id.

    Raises NotFoundError if there is none, or more than one.
    """
    if name in leases:
        return leases[name]
    named: list[Lease] = []
    prefixed: list[Lease] = []
    for lease in leases.values():
        if lease.holder.name == name:
            named.append(lease)
        if len(name) >= _SHORTEST_PREFIX and lease.id.startswith(name):
            prefixed.append(lease)
    matches = _owned_by(caller, named) or _owned_by(caller, prefixed) or prefixed
    if not matches:
        hint = "list the leases: yunion-mps lease list"
        if named:
            hint = "refer to another owner's lease by its id: yunion-mps lease list"
        raise NotFoundError(f"there is no lease {shorten(name)}", hint)
    if len(matches) > 1:
        raise NotFoundError(f"{shorten(name)} matches {len(matches)} leases", "use a longer prefix of the id")
    return matches[0]


def _owned_by(owner: Owner, leases: Iterable[Lease]) -> list[Lease]:
    return [lease for lease in leases if lease.holder.owner == owner]


def owner_name(owner: Owner) -> str:
    """Return the unit's name, or else the user's."""
    return owner.unit or user_name(owner.uid)


def shorten(name: str) -> str:
    """Return a name from a caller, shortened and escaped for output."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])


class Quota(NamedTuple):
    """What a user may have at the same time; None: as much as there is."""

    leases: int | None = None
    devices: int | None = None


def refuse_over_quota(
    holder: Holder, devices: int, others: Iterable[tuple[Owner, int]], quota: Quota
) -> None:
    """Raise NotAllowedError if the owner may not have another lease, or so many more devices.

    Root is not limited, because its container engine takes leases for all users.

    holder: who requests the devices.
    devices: the number of devices of the request.
    others: the owner and the number of devices of each lease and of each other queued request, because queued
    requests are not checked again when granted.
    """
    if holder.uid == 0:
        return
    own = [number for owner, number in others if owner == holder.owner]
    name = owner_name(holder.owner)
    hint = (
        "release a lease: yunion-mps lease release LEASE; or end a request that waits; list: yunion-mps who"
    )
    if quota.leases is not None and len(own) >= quota.leases:
        message = f"{name} already has {len(own)} leases and queued requests"
        raise NotAllowedError(f"{message}; max_leases_per_user is {quota.leases}", hint)
    if quota.devices is not None and devices > quota.devices:
        message = f"a request for {count(devices, 'device')} exceeds max_devices_per_user ({quota.devices})"
        raise NotAllowedError(message, f"request at most {quota.devices}")
    if quota.devices is not None and sum(own) + devices > quota.devices:
        message = f"{name} already has {count(sum(own), 'device')}, leased or requested, and requests"
        message += f" {devices} more; max_devices_per_user is {quota.devices}"
        raise NotAllowedError(message, hint)


def refuse_too_long(holder: Holder, max_ttl_s: int) -> None:
    """Raise NotAllowedError if a lease by name may not live that long without a renewal."""
    if holder.ttl_s > max_ttl_s:
        longest = duration_text(max_ttl_s)
        message = f"a time to live of {duration_text(int(holder.ttl_s))} exceeds the limit of {longest}"
        hint = f"request at most {longest} and renew the lease, or raise max_lease_ttl_s in host.conf"
        raise NotAllowedError(message, hint)
