"""What of the candidates fits a request, and what holds it: computed once, and handed on.

A `Selection` is what could satisfy the request, free or not; it stays the same as long as the candidates do.
A `Match` is a selection at one moment, with what leases, served users and earlier requests leave of it. The
choice (`placement`), the reservation (`targets`), the reason why a request waits and the error of one that
never fits (`refusals`) are made of these alone. No I/O, no waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.models import Device, Pool
from yunion_mps.core.reasons import OTHER_USER, Reason
from yunion_mps.leases.ledger import (
    Amounts,
    Ledger,
    group_by_gpu,
    groups_across,
    needs_mib,
    of_different_gpus,
)
from yunion_mps.leases.request import (
    Candidate,
    Candidates,
    LeaseRequest,
    PoolCandidate,
    devices_of_candidates,
)
from yunion_mps.planning.division import units_for


class Reservation(NamedTuple):
    """What is free, but reserved for earlier requests."""

    #: Ids of devices.
    devices: set[str]
    #: Memory by GPU UUID: of pools, and of the devices.
    memory_mib: Counter[str]
    #: Tenths of a percent of the SM threads, of pools that count them, by GPU UUID.
    thread_tenths: Counter[str]
    #: How many clients of pools, by GPU UUID.
    clients: Counter[str]
    #: The users (uids) that each domain will serve next, in their order.
    users: dict[str, tuple[int, ...]]

    def add(self, other: Reservation) -> None:
        """Reserve what `other` has, too."""
        self.devices.update(other.devices)
        self.memory_mib.update(other.memory_mib)
        self.thread_tenths.update(other.thread_tenths)
        self.clients.update(other.clients)
        for name, uids in other.users.items():
            self.users[name] = self.users.get(name, ()) + uids

    def of_pool(self, pool: Pool) -> Amounts:
        """Return what is reserved of the pool."""
        return Amounts(
            memory_mib=self.memory_mib.get(pool.gpu_uuid, 0),
            thread_tenths=self.thread_tenths.get(pool.gpu_uuid, 0),
            clients=self.clients.get(pool.gpu_uuid, 0),
        )


def no_reservation() -> Reservation:
    """Return an empty reservation."""
    return Reservation(
        devices=set(), memory_mib=Counter(), thread_tenths=Counter(), clients=Counter(), users={}
    )


NO_RESERVATION = no_reservation()


class GpuDevices(NamedTuple):
    """Devices of one GPU, at least one. The GPU is served or not as a whole."""

    gpu_uuid: str
    domain: str
    #: Why the GPU is not served; empty if it is.
    reason: Reason
    #: Whether the GPU is divided by `slices`.
    is_slice: bool
    #: How much of the GPU's memory the smallest device takes, and all of them together.
    least_mib: int
    all_mib: int
    devices: Sequence[Device]
    #: Whether these are all devices of the GPU; then selections share the object.
    is_whole: bool = False


class DividedGpu(NamedTuple):
    """All devices of a GPU, prepared for many requests."""

    in_order: GpuDevices
    smallest_first: GpuDevices
    #: The devices by their budget, which is all that a request for any device compares; the smallest first.
    equal: Sequence[Sequence[Device]]


class Selection(NamedTuple):
    """What could satisfy a request if everything were free and served."""

    request: LeaseRequest
    #: What it was selected from.
    candidates: Candidates
    #: The devices of the candidates.
    divided: Sequence[DividedGpu]
    #: The devices that fit; if the request is for memory or several devices, the smallest of each GPU first.
    #: If it is for several devices of one GPU, GPUs whose devices can never be combined are left out.
    gpus: Sequence[GpuDevices]
    #: The pools that a request for memory can get it from.
    pools: Sequence[PoolCandidate]
    #: What the devices that one GPU is to have take of its pool, by GPU UUID.
    needs: Mapping[str, Amounts]
    #: If the request is for several devices, the smallest ones that it could get: of each GPU with enough,
    #: or, on different GPUs, of each kind. Those that can never be combined are among them.
    groups: Sequence[Sequence[Device]]

    @property
    def devices(self) -> list[Device]:
        return _devices_of(self.gpus)

    @property
    def size(self) -> int:
        """How many GPUs and needs it has, and devices that it does not share with other selections."""
        unshared = sum(len(gpu.devices) for gpu in self.gpus if not gpu.is_whole)
        return len(self.gpus) + len(self.needs) + unshared

    @property
    def is_empty(self) -> bool:
        return not self.gpus and not self.pools

    @property
    def prefers_small(self) -> bool:
        """Whether small devices come first: if the request is for memory or several devices of one GPU."""
        return self.request.memory_mib > 0 or (self.request.number > 1 and not self.request.across)

    @property
    def gpus_needed(self) -> int:
        """On how many GPUs the devices are to be."""
        return self.request.number if self.request.across else 1

    @property
    def devices_each(self) -> int:
        """How many devices each of these GPUs is to have."""
        return 1 if self.request.across else self.request.number


class PoolRoom(NamedTuple):
    """What a pool that is served has left for a request."""

    candidate: PoolCandidate
    #: The units of each device.
    units: int
    #: How much memory one more client could get.
    left_mib: int
    #: What more clients could get together.
    left: Amounts
    #: What the devices that one GPU is to have take.
    needed: Amounts
    #: What is reserved for earlier requests.
    reserved: Amounts

    @property
    def is_enough(self) -> bool:
        return self.left.covers(self.needed)


class Match(NamedTuple):
    """A selection at one moment: what of it is free for the request in its turn."""

    selection: Selection
    #: The leases, which hold what is not free.
    ledger: Ledger
    #: The user who is to be served; None if that is not known.
    uid: int | None
    #: What is kept for earlier requests.
    reserved: Reservation
    #: The names of the domains whose devices this user cannot have now.
    withheld: set[str]
    #: The devices that can be leased together, by GPU UUID.
    free: Mapping[str, Sequence[Device]]
    #: What the pools have left, those that are served.
    rooms: Sequence[PoolRoom]


class Unserved(NamedTuple):
    """A device or a pool that fits, but is not served, or not for this user."""

    reason: Reason
    #: The address of its GPU.
    gpu: str
    #: The name of its domain.
    domain: str


class Held(NamedTuple):
    """By what a match is held, as far as it is not free."""

    #: How many devices are leased, of those that only a lease keeps from the user.
    leased: int
    #: How many devices are pending, and why, for each GPU.
    pending: Sequence[tuple[int, Reason]]
    #: How many devices are kept for earlier requests.
    reserved: int
    #: What is not served, or not for this user.
    unserved: Sequence[Unserved]


def divide_by_gpu(candidates: Iterable[Candidate]) -> list[DividedGpu]:
    """Return the devices of each GPU, prepared for many requests."""
    divided: list[DividedGpu] = []
    for gpu in _group_candidates(candidates):
        in_order = gpu._replace(is_whole=True)
        by_budget: dict[tuple[int | None, float, bool], list[Device]] = {}
        for device in in_order.devices:
            budget = (device.memory_limit_mib, device.thread_percentage, device.budget_enforced)
            by_budget.setdefault(budget, []).append(device)
        smallest_first = in_order
        if len(by_budget) > 1:
            smallest_first = in_order._replace(devices=sorted(in_order.devices, key=needs_mib))
        equal = sorted(by_budget.values(), key=lambda devices: needs_mib(devices[0]))
        divided.append(DividedGpu(in_order=in_order, smallest_first=smallest_first, equal=equal))
    return divided


def _group_candidates(candidates: Iterable[Candidate]) -> list[GpuDevices]:
    groups: dict[tuple[str, Reason], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.device.gpu_uuid, candidate.reason), []).append(candidate)
    gpus: list[GpuDevices] = []
    for of_gpu in groups.values():
        first = of_gpu[0]
        devices = devices_of_candidates(of_gpu)
        gpu = GpuDevices(
            gpu_uuid=first.device.gpu_uuid,
            domain=first.device.domain,
            reason=first.reason,
            is_slice=first.is_slice,
            least_mib=min(map(needs_mib, devices)),
            all_mib=sum(map(needs_mib, devices)),
            devices=devices,
        )
        gpus.append(gpu)
    return gpus


def _devices_of(gpus: Iterable[GpuDevices]) -> list[Device]:
    devices: list[Device] = []
    for gpu in gpus:
        devices += gpu.devices
    return devices


def select(
    request: LeaseRequest, candidates: Candidates, divided: Sequence[DividedGpu] | None = None
) -> Selection:
    """Return what of the candidates could satisfy the request if everything were free and served.

    divided: the devices of the candidates by GPU, if they have been divided before
    """
    pools = candidates.matching_pools(request)
    selection = Selection(
        request=request,
        candidates=candidates,
        divided=divide_by_gpu(candidates.devices) if divided is None else divided,
        gpus=(),
        pools=pools,
        needs={candidate.pool.gpu_uuid: _needs(request, candidate.pool) for candidate in pools},
        groups=(),
    )
    if request.devices:
        return selection._replace(gpus=_group_candidates(candidates.suitable(request)))
    gpus = _fitting_gpus(selection)
    if request.number == 1:
        return selection._replace(gpus=gpus)
    groups = _smallest_groups(request, gpus)
    if groups and not request.across:
        uncombinable: set[str] = set()
        for group in groups:
            if candidates.why_not_combinable(group):
                uncombinable.add(group[0].gpu_uuid)
        gpus = [gpu for gpu in gpus if gpu.gpu_uuid not in uncombinable]
    return selection._replace(gpus=gpus, groups=groups)


def _needs(request: LeaseRequest, pool: Pool) -> Amounts:
    """Return what the devices that one GPU is to have take of its pool.

    They take no threads if these follow the memory and are not counted.
    """
    number = 1 if request.across else request.number
    client_mib = units_for(pool, request.memory_mib) * pool.unit_mib + pool.reserve_mib
    percentage = 0
    if pool.thread_percentage:
        percentage = request.thread_percentage or pool.thread_percentage
    return Amounts(memory_mib=number * client_mib, thread_tenths=number * 10 * percentage, clients=number)


def _fitting_gpus(selection: Selection) -> list[GpuDevices]:
    """Return the devices that could satisfy a request for any device, as far as each by itself decides."""
    request = selection.request
    reserved = selection.candidates.reserved
    gpus: list[GpuDevices] = []
    for divided in selection.divided:
        gpu = divided.smallest_first if selection.prefers_small else divided.in_order
        is_reserved = reserved.get(gpu.gpu_uuid, request.reserved_for) != request.reserved_for
        if is_reserved or (request.memory_mib and not gpu.is_slice):
            continue
        matching = [equal for equal in divided.equal if request.matches(equal[0])]
        if len(matching) == len(divided.equal):
            gpus.append(gpu)
        elif matching:
            ids: set[str] = set()
            for equal in matching:
                ids.update(device.id for device in equal)
            devices = [device for device in gpu.devices if device.id in ids]
            part = gpu._replace(
                least_mib=needs_mib(matching[0][0]),
                all_mib=sum(map(needs_mib, devices)),
                devices=devices,
                is_whole=False,
            )
            gpus.append(part)
    return gpus


def _smallest_groups(request: LeaseRequest, gpus: Sequence[GpuDevices]) -> list[Sequence[Device]]:
    """Return the smallest groups of devices: of each GPU with enough, or, across GPUs, of each kind.

    Across GPUs, the first group has devices of all kinds, because its error says that kinds do not mix.

    gpus: the devices of each, the smallest first.
    """
    groups: list[Sequence[Device]] = []
    of_gpus = [gpu.devices for gpu in gpus]
    if request.across and of_gpus:
        smallest = [of_gpu[0] for of_gpu in of_gpus]
        groups.append(of_different_gpus(smallest)[: request.number])
        of_gpus = [*groups_across(smallest)]
    for alike in of_gpus:
        if len(alike) >= request.number:
            groups.append(alike[: request.number])
    return groups


def match_now(
    selection: Selection,
    ledger: Ledger,
    reserved: Reservation = NO_RESERVATION,
    uid: int | None = None,
) -> Match:
    """Return which devices and pools of the selection the user `uid` could get now.

    reserved: what requests that are earlier in the queue will need
    """
    withheld = selection.candidates.domains_withheld(uid, reserved.users)
    pools: list[PoolCandidate] = []
    for pool in selection.pools:
        if not pool.reason and pool.pool.domain not in withheld:
            pools.append(pool)
    return Match(
        selection=selection,
        ledger=ledger,
        uid=uid,
        reserved=reserved,
        withheld=withheld,
        free=_free_by_gpu(selection.gpus, withheld, ledger, reserved),
        rooms=_rooms(selection, pools, ledger, reserved),
    )


def _free_by_gpu(
    gpus: Iterable[GpuDevices], withheld: Collection[str], ledger: Ledger, reserved: Reservation
) -> dict[str, Sequence[Device]]:
    """Return the devices that can be leased together, by GPU UUID.

    withheld: the names of the domains whose devices are left out.
    """
    is_all_free = not ledger.leases and not reserved.devices
    free: dict[str, Sequence[Device]] = {}
    for gpu in gpus:
        uuid = gpu.gpu_uuid
        if gpu.reason or gpu.domain in withheld:
            continue
        total_mib = gpu.devices[0].memory_total_mib
        if total_mib is not None:
            left_mib = ledger.left_mib(uuid, total_mib) - reserved.memory_mib.get(uuid, 0)
            if gpu.least_mib > left_mib:  # as on most GPUs if requests wait
                continue
            if is_all_free and gpu.all_mib <= left_mib:
                free[uuid] = gpu.devices
                continue
        free_of_gpu = ledger.free_of_gpu(gpu.devices, reserved.devices, reserved.memory_mib.get(uuid, 0))
        if free_of_gpu:
            free[uuid] = free_of_gpu
    return free


def match_if_unused(selection: Selection) -> Match:
    """Return the match if everything were free and served."""
    unleased = Ledger()
    return Match(
        selection=selection,
        ledger=unleased,
        uid=None,
        reserved=NO_RESERVATION,
        withheld=set(),
        free=group_by_gpu(selection.devices),
        rooms=_rooms(selection, selection.pools, unleased, NO_RESERVATION),
    )


def _rooms(
    selection: Selection, pools: Iterable[PoolCandidate], ledger: Ledger, reserved: Reservation
) -> list[PoolRoom]:
    rooms: list[PoolRoom] = []
    for candidate in pools:
        pool = candidate.pool
        reserved_amounts = reserved.of_pool(pool)
        left = ledger.left_of(pool, reserved_amounts)
        room = PoolRoom(
            candidate=candidate,
            units=units_for(pool, selection.request.memory_mib),
            left_mib=ledger.free_mib(pool, reserved_amounts),
            left=left,
            needed=selection.needs[pool.gpu_uuid],
            reserved=reserved_amounts,
        )
        rooms.append(room)
    return rooms


def count_held(match: Match) -> Held:
    """Return by what the match is held. Only the reason why a request waits needs it: the choice does not."""
    unserved: list[Unserved] = []
    leasable: set[str] = set()
    ids: set[str] = set()
    why_withheld = _why_withheld(match)
    for gpu in match.selection.gpus:
        reason = gpu.reason or why_withheld.get(gpu.domain)
        for device in gpu.devices:
            ids.add(device.id)
            if reason:
                unserved.append(Unserved(reason, device.gpu_address, device.domain))
            if not reason or reason.code == OTHER_USER:
                leasable.add(device.id)
    for pool in match.selection.pools:
        reason = pool.reason or why_withheld.get(pool.pool.domain)
        if reason:
            unserved.append(Unserved(reason, pool.gpu, pool.pool.domain))
    leased = leasable.intersection(match.ledger.lease_of)
    pending: list[tuple[int, Reason]] = []
    for wait in match.ledger.lease_waits(devices_of_candidates(match.selection.candidates.devices)).values():
        waiting = leasable & wait.pending
        if waiting:
            leased -= waiting
            pending.append((len(waiting), wait.reason))
    return Held(
        leased=len(leased),
        pending=pending,
        reserved=len(match.reserved.devices & ids),
        unserved=unserved,
    )


def _why_withheld(match: Match) -> dict[str, Reason]:
    """Return why the user cannot have the devices of domains now, by their names."""
    if match.uid is None:
        return {}
    candidates = match.selection.candidates
    why: dict[str, Reason] = {}
    for name in match.withheld:
        why[name] = candidates.why_withheld(name, match.uid, match.reserved.users)
    return why
