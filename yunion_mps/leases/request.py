"""Lease requests, the candidates for them, and how the names in them are resolved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from yunion_mps.addresses import is_part, shown_address
from yunion_mps.enums import BINPACK, MPS, NOT_SHARED
from yunion_mps.errors import InfeasibleError, NotAllowedError, NotFoundError
from yunion_mps.host.proc import user_name
from yunion_mps.leases.served_users import next_for, why_not_served
from yunion_mps.models import ALL, Device, DomainPlan, Gpu, Holder, Lease, Owner, Pool, ServedUser, Snapshot
from yunion_mps.planning.division import enforces_budgets, pool_device, why_unenforced
from yunion_mps.planning.environment import (
    client_environment,
    require_one_budget,
    whole_environment,
    why_not_honoured,
)
from yunion_mps.reasons import NO_REASON, Reason
from yunion_mps.text import count
from yunion_mps.units import duration_text

#: The shortest prefix of a lease's id: as long as `who` shows it, so that no name matches by chance.
_SHORTEST_PREFIX = 8


class LeaseRequest(NamedTuple):
    """A request for `number` devices on one GPU or on different GPUs (`across`), or for `memory_mib` each.

    `devices` (ids or addresses, or all) requests just these. `gpu` (UUID or address) restricts the choice if
    it is not empty; a GPU includes its MIG instances. Without `allow_unlimited`, only GPUs that enforce
    budgets are used. Devices that are reserved are used only if that is for `reserved_for`. A
    `thread_percentage` of 0 leaves it to the GPU.
    """

    number: int = 1
    devices: tuple[str, ...] = ()
    gpu: str = ""
    across: bool = False
    placement: str = BINPACK
    memory_mib: int = 0
    allow_unlimited: bool = False
    reserved_for: str = ""
    thread_percentage: int = 0

    def matches(self, device: Device) -> bool:
        """Whether the device matches the request, free or not."""
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
        if self.devices:
            few = f"device{'s' if len(self.devices) > 1 else ''} {', '.join(self.devices)}"
            return "all devices" if ALL in self.devices else few
        where = f" of GPU {self.gpu}" if self.gpu else ""
        what = count(self.number, "device")
        if self.memory_mib:
            what = f"{what} of {self.memory_mib} MiB" if self.number > 1 else f"{self.memory_mib} MiB"
        if self.thread_percentage:
            what += f" with {self.thread_percentage} % of the threads"
        together = " on different GPUs" if self.across else " on one GPU"
        return what + where + (together if self.number > 1 and not self.gpu else "")


class QueuedRequest(NamedTuple):
    """A queued request: the lowest `position` is the first, `since_s` is in s since 1970.

    `cdi`: publish the lease as a CDI device. `sent` is the request as text, before names were resolved.
    """

    request: LeaseRequest
    holder: Holder
    idempotency_key: str = ""
    cdi: bool = False
    position: int = 0
    since_s: float = 0.0
    sent: str = ""

    @property
    def as_text(self) -> str:
        *request, reserved_for, percentage = self.request
        # Stored requests of earlier versions have neither.
        added: list[object] = [reserved_for, percentage] if percentage else []
        added = added or ([reserved_for] if reserved_for else [])
        if self.holder.job_uid is not None:
            added.append({"uid": self.holder.job_uid})
        return json.dumps([*request, self.cdi, self.holder.ttl_s, *added], separators=(",", ":"))

    @property
    def key(self) -> tuple[int, str] | None:
        """What identifies a repeated request: uid and idempotency key; None without an idempotency key."""
        return (self.holder.uid, self.idempotency_key) if self.idempotency_key else None

    def is_answered_by(self, lease: Lease) -> bool:
        """Whether the lease was granted for this request, or for another attempt at it.

        Requests are the same if they have the same content, and the same idempotency key or named holder.
        """
        holder, other = self.holder, lease.holder
        is_named = holder.name and (holder.name, holder.owner) == (other.name, other.owner)
        is_retry = holder == other and self.idempotency_key == lease.idempotency_key != ""
        return lease.request == self.sent and bool(is_named or is_retry)


class Candidate(NamedTuple):
    """A device in its current state: `reason` says why it is not served, empty if it is.

    `is_slice`: its GPU is divided by `slices`, so it can satisfy a request for memory.
    """

    device: Device
    reason: Reason = NO_REASON
    is_slice: bool = False


class PoolCandidate(NamedTuple):
    """A pool in its current state: `make` creates a device of a number of units in a slot."""

    pool: Pool
    gpu: str  # its address
    make: Callable[[int, int], Device]
    reason: Reason = NO_REASON


class WaitingGpu(NamedTuple):
    """A GPU that may have more devices later, and why it has none yet, or not all of them.

    Its MIG layout is not in effect, its entry's GPU is missing, or the driver does not work yet. One that
    cannot be used, and has never served, is waited for only by a request that names it.
    """

    gpu: str  # its address or path, empty if unknown
    reason: Reason
    reserved_for: str | None = None
    must_be_named: bool = False


class Unenforced(NamedTuple):
    """A GPU that enforces no budgets, as errors name it, and why."""

    gpu: str
    why: str


class Candidates(NamedTuple):
    """Everything that can be leased; `unenforced` has the GPUs without enforced budgets, by UUID.

    `domains` are the domains of all devices, by name: as they serve, or as planned if they do not serve.
    `planned` are those that are configured, whose limits may wait for MPS servers to end. `reserved` says, by
    GPU UUID, what devices are reserved for, and `users`, by domain, whom each control daemon serves.
    `failing_users` says, by domain and uid, why MPS servers of a user do not start there.
    """

    devices: Sequence[Candidate] = ()
    pools: Sequence[PoolCandidate] = ()
    unenforced: Mapping[str, Unenforced] = {}
    domains: Mapping[str, DomainPlan] = {}
    planned: Mapping[str, DomainPlan] = {}
    reserved: Mapping[str, str] = {}
    waiting: Sequence[WaitingGpu] = ()
    users: Mapping[str, Sequence[ServedUser]] = {}
    failing_users: Mapping[str, Mapping[int, Reason]] = {}

    def domains_failing(self, uid: int | None) -> set[str]:
        """Return the names of the domains where the MPS servers of this user do not start."""
        return {name for name, users in self.failing_users.items() if uid in users}

    def domains_withheld(self, uid: int | None, promised: Mapping[str, int] = {}) -> set[str]:
        """Return the names of the domains whose devices this user cannot have now; `promised` as below."""
        if uid is None:
            return set()
        serving_others = {name for name, users in self.users.items() if any(one.uid != uid for one in users)}
        promised_to_others = {name for name, other in promised.items() if other != uid}
        return serving_others | promised_to_others | self.domains_failing(uid)

    def for_user(self, uid: int | None, promised: Mapping[str, int] = {}) -> Candidates:
        """The candidates as this user can have them.

        That is, without those whose control daemon serves another user, or cannot start a server of this one.

        `promised` has the users (uids) of earlier requests whom control daemons serve next, by domain. A
        user that is not known can have all.
        """
        withheld = self.domains_withheld(uid, promised)
        if uid is None or not withheld:
            return self
        why: dict[str, Reason] = {}
        for name in withheld:
            reason = self.failing_users.get(name, {}).get(uid)
            reason = reason or why_not_served(self.users.get(name, ()), uid)
            why[name] = reason or next_for(promised[name])
        devices = [
            one._replace(reason=one.reason or why.get(one.device.domain, NO_REASON)) for one in self.devices
        ]
        pools = [one._replace(reason=one.reason or why.get(one.pool.domain, NO_REASON)) for one in self.pools]
        return self._replace(devices=devices, pools=pools)

    def waiting_for(self, request: LeaseRequest) -> WaitingGpu | None:
        """The GPU that the request may wait for; None if there is none."""
        uses = (None, request.reserved_for)
        for one in self.waiting:
            is_meant = request.gpu == one.gpu or not (request.gpu or one.must_be_named)
            if is_meant and one.reserved_for in uses:
                return one
        return None

    def usable_pools(self, request: LeaseRequest) -> list[PoolCandidate]:
        return [
            candidate
            for candidate in self.pools
            if request.gpu in ("", candidate.pool.gpu_uuid, candidate.gpu)
            and self.reserved.get(candidate.pool.gpu_uuid, request.reserved_for) == request.reserved_for
            and (request.allow_unlimited or candidate.pool.gpu_uuid not in self.unenforced)
        ]

    def matching_pools(self, request: LeaseRequest) -> list[PoolCandidate]:
        """The pools that could satisfy a request for memory; none for other requests."""
        pools = self.usable_pools(request) if request.memory_mib else []
        return [one for one in pools if one.pool.thread_percentage or not request.thread_percentage]

    def suitable(self, request: LeaseRequest) -> list[Candidate]:
        """The devices that could satisfy the request, as far as each by itself decides."""
        reserved = {uuid for uuid, use in self.reserved.items() if use != request.reserved_for}
        if reserved and ALL in request.devices:
            return []
        return [
            candidate
            for candidate in self.devices
            if request.matches(candidate.device)
            and (candidate.is_slice or not request.memory_mib)
            and candidate.device.gpu_uuid not in reserved
        ]

    def why_not_combinable(self, devices: Sequence[Device]) -> str:
        """Why devices of one domain cannot be combined into one budget, empty if they can."""
        return why_not_honoured(devices, self.domain_of(devices[0]))

    def domain_of(self, device: Device) -> DomainPlan | None:
        """The domain of the device, None if it is shared without MPS."""
        return self.domains[device.domain] if device.domain else None

    def environment(self, request: LeaseRequest, devices: Sequence[Device]) -> dict[str, str]:
        """The environment for a process with the devices; raises InfeasibleError if MPS would ignore it."""
        names = {device.domain for device in devices}
        if "" in names and len(names) > 1:
            what = "some of these devices are shared through MPS and some are not; a process can use one kind"
            raise InfeasibleError(what, "request devices that are shared in the same way: yunion-mps list")
        if len({device.is_on_instance for device in devices}) > 1:
            what = "some of these devices are on MIG instances and some are not; a process can use one kind"
            raise InfeasibleError(what, "use a separate lease (or job) and process for each")
        if len(names) > 1:
            hint = "request devices of one GPU, or serve all GPUs together: cuda_mps_scope: host"
            if all(device.is_on_instance for device in devices):
                hint = "request devices of one MIG instance; each has a control daemon of its own"
            what = "these devices have different control daemons; a process can use only one"
            raise InfeasibleError(what, hint)
        domain = self.domain_of(devices[0])
        if ALL in request.devices:
            return whole_environment(devices, domain)
        require_one_budget(devices, domain, self.planned.get(devices[0].domain))
        return client_environment(devices, domain)


def candidates_of(snapshot: Snapshot, reasons: Mapping[str, Reason]) -> Candidates:
    """The devices and pools; `reasons` says, by GPU UUID, why they are unusable, empty if they are not."""
    plan, gpus = snapshot.plan, snapshot.inventory.gpus
    why = {uuid: reason or plan.pending.get(uuid, NO_REASON) for uuid, reason in reasons.items()}
    sliced = {gpu.uuid for status in snapshot.domains for gpu in status.plan.gpus if gpu.is_sliced}
    devices = [Candidate(device, why[device.gpu_uuid], device.gpu_uuid in sliced) for device in plan.devices]
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    pools = [
        PoolCandidate(
            pool,
            addresses[pool.gpu_uuid],
            partial(pool_device, plan.host_id, pool, gpus=gpus),
            why[pool.gpu_uuid],
        )
        for pool in plan.pools
        if pool.gpu_uuid in addresses
    ]
    ways = {device.gpu_uuid: device.sharing for device in plan.devices}
    unenforced: dict[str, Unenforced] = {}
    for gpu in gpus:
        sharing = ways.get(gpu.uuid or "", MPS)
        is_enforced = sharing == NOT_SHARED or (sharing == MPS and enforces_budgets(gpu))
        if not gpu.uuid or is_enforced:
            continue
        unenforced[gpu.uuid] = Unenforced(f"{gpu.address} ({gpu.name})", why_unenforced(gpu, sharing))
    serving = (status.plan for status in snapshot.domains)
    domains = {domain.name: domain for domain in (*plan.parked, *plan.domains, *serving)}
    planned = {domain.name: domain for domain in plan.domains}
    layouts = {layout.gpu_uuid for layout in plan.layouts}
    waiting = []
    for gpu in gpus:
        reason = gpu.reason or plan.unavailable.get(gpu.pci_address)
        has_layout = gpu.uuid in layouts
        if reason and plan.divides(gpu) and (has_layout or gpu.uuid not in plan.offered):
            reserved_for = plan.reserved.get(gpu.uuid or "")
            waiting.append(WaitingGpu(gpu.address, reason, reserved_for, must_be_named=not has_layout))
    waiting += [WaitingGpu(entry.path, entry.reason, entry.reserved_for or None) for entry in plan.missing]
    if snapshot.inventory.driver_reason:
        waiting.append(WaitingGpu("", snapshot.inventory.driver_reason))
    failing_users = {one.plan.name: one.failing_users for one in snapshot.domains if one.failing_users}
    return Candidates(
        devices=devices,
        pools=pools,
        unenforced=unenforced,
        domains=domains,
        planned=planned,
        reserved=plan.reserved,
        waiting=waiting,
        failing_users=failing_users,
    )


# -- names


def find_gpu(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """The GPU of this address or UUID, or a unique prefix of either; raises NotFoundError."""
    return gpus[index_of_gpu(name, [(gpu.address, gpu.uuid or "") for gpu in gpus])]


def index_of_gpu(name: str, gpus: Sequence[tuple[str, str]]) -> int:
    """The index of that GPU among these addresses and UUIDs; raises NotFoundError."""
    name = shown_address(name)
    indices = [index for index, names in enumerate(gpus) if name in names]
    indices = indices or [
        index for index, names in enumerate(gpus) if any(other.startswith(name) for other in names)
    ]
    if len(indices) != 1:
        what = (
            f"{shorten(name)} matches {len(indices)} GPUs" if indices else f"there is no GPU {shorten(name)}"
        )
        raise NotFoundError(what, "list the GPUs: yunion-mps gpus")
    return indices[0]


def find_lease(name: str, leases: Mapping[str, Lease], caller: Owner) -> Lease:
    """Find a lease by its id, by its name if it is the caller's own, or by a prefix of its id.

    `leases` are by id. A name never matches another owner's lease, not even for root, because the caller's
    own lease of that name may have ended. Raises NotFoundError.
    """
    if name in leases:
        return leases[name]
    named = [lease for lease in leases.values() if lease.holder.name == name]
    prefixed = [
        lease for lease in leases.values() if len(name) >= _SHORTEST_PREFIX and lease.id.startswith(name)
    ]
    by_caller = [[lease for lease in some if lease.holder.owner == caller] for some in (named, prefixed)]
    matches = by_caller[0] or by_caller[1] or prefixed
    if not matches:
        hint = (
            ("refer to another owner's lease by its id: yunion-mps lease list")
            if named
            else "list the leases: yunion-mps lease list"
        )
        raise NotFoundError(f"there is no lease {shorten(name)}", hint)
    if len(matches) > 1:
        raise NotFoundError(f"{shorten(name)} matches {len(matches)} leases", "use a longer prefix of the id")
    return matches[0]


def owner_name(owner: Owner) -> str:
    """The unit's name, or else the user's."""
    return owner.unit or user_name(owner.uid)


def shorten(name: str) -> str:
    """A name from a caller, shortened and escaped for output."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])


class Quota(NamedTuple):
    """What a user may have at the same time; None: as much as there is."""

    leases: int | None = None
    devices: int | None = None


def refuse_over_quota(
    holder: Holder, devices: int, others: Iterable[tuple[Owner, int]], quota: Quota
) -> None:
    """Raise NotAllowedError if the owner may not have another lease, or so many more `devices`.

    `others` has the owner and the number of devices of each lease and of each other queued request, because
    queued requests are not checked again when granted. Root is not limited, because its container engine
    takes leases for all users.
    """
    if holder.uid == 0:
        return
    own = [number for owner, number in others if owner == holder.owner]
    name = owner_name(holder.owner)
    hint = (
        "release a lease: yunion-mps lease release LEASE; or end a request that waits; list: yunion-mps who"
    )
    if quota.leases is not None and len(own) >= quota.leases:
        what = f"{name} already has {len(own)} leases and queued requests"
        raise NotAllowedError(f"{what}; max_leases_per_user is {quota.leases}", hint)
    if quota.devices is not None and devices > quota.devices:
        what = f"a request for {count(devices, 'device')} exceeds max_devices_per_user ({quota.devices})"
        raise NotAllowedError(what, f"request at most {quota.devices}")
    if quota.devices is not None and sum(own) + devices > quota.devices:
        what = f"{name} already has {count(sum(own), 'device')}, leased or requested, and requests"
        what += f" {devices} more; max_devices_per_user is {quota.devices}"
        raise NotAllowedError(what, hint)


def refuse_too_long(holder: Holder, max_ttl_s: int) -> None:
    """Raise NotAllowedError if a lease by name may not live that long without a renewal."""
    if holder.ttl_s > max_ttl_s:
        longest = duration_text(max_ttl_s)
        what = f"a time to live of {duration_text(int(holder.ttl_s))} exceeds the limit of {longest}"
        hint = f"request at most {longest} and renew the lease, or raise max_lease_ttl_s in host.conf"
        raise NotAllowedError(what, hint)
