"""Targets: where a request that waits is going to get its devices, and what it reserves of that. Pure.

A request waits for one target: devices of one GPU or of several, or amounts of pools. What is free of the
target is reserved. A target is preferred that no lease of a later request blocks: because later requests get
nothing of what it needs, the request is granted at the latest once all leases of earlier requests have ended.
The order of targets is total and a reservation only grows, so the request does not go back and forth between
two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.models import Device, Pool
from yunion_mps.leases.ledger import (
    NOTHING,
    Amounts,
    Ledger,
    combinable_kind,
    groups_across,
    needs_mib,
)
from yunion_mps.leases.match import GpuDevices, Match, Reservation, no_reservation
from yunion_mps.leases.request import Candidates, PoolCandidate
from yunion_mps.planning.division import thread_tenths

#: When a device is free: now, once the leases of earlier requests have ended, or only after later ones.
_NOW, _THEN, _LATER = range(3)


#: What is compared of two choices: `lacks_then`, `lacks_now` and `gpus`.
_Order = tuple[float, float, tuple[str, ...]]


class Target(NamedTuple):
    """Devices or amounts that would satisfy a request, and what is reserved of them."""

    #: How much of it is not free once the leases of earlier requests have ended.
    lacks_then: float
    #: How much of it is not free now.
    lacks_now: float
    #: The UUIDs of its GPUs.
    gpus: tuple[str, ...]
    #: The names of its domains.
    domains: set[str]
    reservation: Reservation
    #: Whether one of its domains is withheld from the user.
    is_withheld: bool

    @property
    def is_free_in_part(self) -> bool:
        """Whether something of it is free, and its domains can serve the user now."""
        return any(self.reservation) and not self.is_withheld


class _UsablePool(NamedTuple):
    """A pool that is served, and has enough for the request if nothing of it is leased."""

    candidate: PoolCandidate
    #: What the request takes of it.
    needed: Amounts
    #: What is free of it now.
    left: Amounts


class _Choice(NamedTuple):
    """Devices or pools that may become the target."""

    #: As of the target.
    lacks_then: float
    lacks_now: float
    gpus: tuple[str, ...]
    devices: Sequence[Device] = ()
    pools: Sequence[_UsablePool] = ()

    @property
    def order(self) -> _Order:
        """The lowest is the best."""
        return self.lacks_then, self.lacks_now, self.gpus


class _Outlook(NamedTuple):
    """What of a match is free when."""

    match: Match
    #: The leases of later requests alone.
    later: Ledger
    #: The domains (names) that serve another user because of these leases.
    later_domains: set[str]
    #: The devices that are served, for a user whose MPS servers start.
    usable: Sequence[GpuDevices]

    def ranks(self, gpu: GpuDevices) -> list[int]:
        """Return when each of the GPU's devices is free."""
        free_ids = _ids(self.match.free.get(gpu.gpu_uuid, ()))
        then: set[str] = set()
        if gpu.domain not in self.later_domains:
            then = self.later.free_devices(gpu.devices)
        ranks: list[int] = []
        for device in gpu.devices:
            if device.id in free_ids:
                ranks.append(_NOW)
            else:
                ranks.append(_THEN if device.id in then else _LATER)
        return ranks

    def most_free_then(self, gpu: GpuDevices) -> int:
        """Return how many of the devices are free at most, once leases of earlier requests have ended."""
        if gpu.domain in self.later_domains:
            return len(self.match.free.get(gpu.gpu_uuid, ()))
        if not self.later.has_leases_on(gpu.gpu_uuid):
            return len(gpu.devices)
        return sum(device.id not in self.later.lease_of for device in gpu.devices)


def best_target(match: Match, later: Ledger) -> Target | None:
    """Return what a request that does not fit yet waits for; None if nothing that is served would do.

    later: the leases of later requests.
    """
    outlook = _outlook(match, later)
    request = match.selection.request
    choices: list[_Choice] = []
    if request.devices:
        choices.append(_named_devices(outlook))
    elif request.across:
        choices += _devices_across(outlook)
        choices += _pools_across(outlook)
    else:
        choices += _devices_of_best_gpu(outlook)
        choices += [_pool_choice(outlook, [usable], 1) for usable in _usable_pools(outlook)]
    best = min(choices, key=lambda choice: choice.order, default=None)
    return _target(match, best) if best else None


def _target(match: Match, choice: _Choice) -> Target:
    reservation = _reserve_devices(match, choice.devices)
    for usable in choice.pools:
        _reserve_amounts(reservation, match, usable.candidate.pool)
    domains = {device.domain for device in choice.devices}
    domains.update(usable.candidate.pool.domain for usable in choice.pools)
    return Target(
        lacks_then=choice.lacks_then,
        lacks_now=choice.lacks_now,
        gpus=choice.gpus,
        domains=domains,
        reservation=reservation,
        is_withheld=not domains.isdisjoint(match.withheld),
    )


def _outlook(match: Match, later: Ledger) -> _Outlook:
    candidates = match.selection.candidates
    failing = candidates.domains_failing(match.uid)
    usable: list[GpuDevices] = []
    for gpu in match.selection.gpus:
        if not gpu.reason and gpu.domain not in failing:
            usable.append(gpu)
    return _Outlook(
        match=match,
        later=later,
        later_domains=_domains_of_others(later, match.uid, candidates),
        usable=usable,
    )


def _domains_of_others(leases: Ledger, uid: int | None, candidates: Candidates) -> set[str]:
    """Return the names of the domains that serve another user because of these leases."""
    names: set[str] = set()
    if uid is None:
        return names
    for lease in leases.leases.values():
        name = lease.devices[0].domain
        domain = candidates.domains.get(name)
        if domain and not domain.multiuser and lease.holder.user_uid not in (None, uid):
            names.add(name)
    return names


def _ids(devices: Iterable[Device]) -> set[str]:
    return {device.id for device in devices}


# -- devices


def _named_devices(outlook: _Outlook) -> _Choice:
    devices: list[Device] = []
    ranks: list[int] = []
    for gpu in outlook.usable:
        devices += gpu.devices
        ranks += outlook.ranks(gpu)
    return _device_choice(devices, ranks, number=len(outlook.match.selection.devices))


def _devices_of_best_gpu(outlook: _Outlook) -> list[_Choice]:
    """Return the best devices of one GPU; none if no GPU has enough that can be combined.

    Most GPUs cannot be better than the best one by the numbers of their free devices, so only a few are
    looked at in detail. This is done for each of hundreds of requests.
    """
    number = outlook.match.selection.request.number
    bounds: list[tuple[_Order, GpuDevices]] = []
    for gpu in outlook.usable:
        if len(gpu.devices) >= number:
            most_then = min(number, outlook.most_free_then(gpu))
            most_now = min(number, len(outlook.match.free.get(gpu.gpu_uuid, ())))
            bound: _Order = ((number - most_then) / number, (number - most_now) / number, (gpu.gpu_uuid,))
            bounds.append((bound, gpu))
    bounds.sort(key=lambda bound_of_gpu: bound_of_gpu[0])
    best: _Choice | None = None
    for bound, gpu in bounds:
        if best and best.order <= bound:
            break
        choice = _combination(outlook, gpu)
        if choice and (best is None or choice.order < best.order):
            best = choice
    return [best] if best else []


def _combination(outlook: _Outlook, gpu: GpuDevices) -> _Choice | None:
    """Return devices of one GPU that can be combined, those that are free first; None if there are none.

    The smallest of the GPU's devices are the ones that are most likely to be combinable.
    """
    number = outlook.match.selection.request.number
    candidates = outlook.match.selection.candidates
    ranked = list(zip(outlook.ranks(gpu), gpu.devices))
    orders = [sorted(ranked, key=_rank_of)]
    for worst in (_THEN, _LATER):
        orders.append([(rank, device) for rank, device in ranked if rank <= worst])
    for ordered in orders:
        ranks = [rank for rank, _ in ordered[:number]]
        first = [device for _, device in ordered[:number]]
        if len(first) == number and (number == 1 or not candidates.why_not_combinable(first)):
            return _device_choice(first, ranks, number)
    return None


def _rank_of(ranked: tuple[int, Device]) -> int:
    return ranked[0]


def _devices_across(outlook: _Outlook) -> list[_Choice]:
    """Return a choice for each kind of devices that can be in one lease.

    Kinds that could not satisfy the request if everything were free and served are left out.
    """
    selection = outlook.match.selection
    number = selection.request.number
    kinds: set[tuple[bool, str]] = set()
    for group in groups_across(gpu.devices[0] for gpu in selection.gpus):
        if len(group) >= number:
            kinds.add(combinable_kind(group[0]))
    firsts: list[Device] = []
    rank_of: dict[str, int] = {}
    for gpu in outlook.usable:
        rank, device = _first_of(outlook, gpu)
        firsts.append(device)
        rank_of[device.id] = rank
    prefers_small = selection.prefers_small
    firsts.sort(key=lambda device: (rank_of[device.id], needs_mib(device) if prefers_small else 0))
    choices: list[_Choice] = []
    for group in groups_across(firsts):
        if combinable_kind(group[0]) in kinds:
            devices = group[:number]
            choices.append(_device_choice(devices, [rank_of[device.id] for device in devices], number))
    return choices


def _first_of(outlook: _Outlook, gpu: GpuDevices) -> tuple[int, Device]:
    """Return the device of the GPU that is free first, and when."""
    free = outlook.match.free.get(gpu.gpu_uuid)
    if free:
        return _NOW, free[0]
    if not outlook.most_free_then(gpu):
        return _LATER, gpu.devices[0]
    return min(zip(outlook.ranks(gpu), gpu.devices), key=_rank_of)


def _device_choice(devices: Sequence[Device], ranks: Sequence[int], number: int) -> _Choice:
    """Return these devices as a choice; there are fewer than the `number` if some are not served.

    ranks: when each of the devices is free.
    """
    return _Choice(
        lacks_then=(number - ranks.count(_NOW) - ranks.count(_THEN)) / number,
        lacks_now=(number - ranks.count(_NOW)) / number,
        gpus=tuple(sorted({device.gpu_uuid for device in devices})),
        devices=devices,
    )


def _reserve_devices(match: Match, devices: Iterable[Device]) -> Reservation:
    """Reserve those of the devices that no lease has, and as much of their memory as there is.

    Memory may be missing because of leases of a previous division.
    """
    reservation = no_reservation()
    needed_mib: Counter[str] = Counter()
    left_mib: dict[str, int] = {}
    for device in devices:
        gpu = device.gpu_uuid
        if device.id in match.ledger.lease_of or device.id in match.reserved.devices:
            continue
        reservation.devices.add(device.id)
        if device.memory_total_mib is not None:
            needed_mib[gpu] += needs_mib(device)
            left_mib[gpu] = (
                match.ledger.left_mib(gpu, device.memory_total_mib) - match.reserved.memory_mib[gpu]
            )
    for gpu, mib in needed_mib.items():
        reserved_mib = min(mib, left_mib[gpu])
        if reserved_mib > 0:
            reservation.memory_mib[gpu] = reserved_mib
    return reservation


# -- pools


def _usable_pools(outlook: _Outlook) -> list[_UsablePool]:
    match = outlook.match
    selection = match.selection
    failing = selection.candidates.domains_failing(match.uid)
    rooms = {room.candidate.pool.gpu_uuid: room for room in match.rooms}
    pools: list[_UsablePool] = []
    for candidate in selection.pools:
        pool = candidate.pool
        if candidate.reason or pool.domain in failing:
            continue
        room = rooms.get(pool.gpu_uuid)  # none if it is withheld from the user now
        usable = _UsablePool(
            candidate=candidate,
            needed=selection.needs[pool.gpu_uuid],
            left=room.left if room else NOTHING,
        )
        if _capacity(pool).covers(usable.needed):
            pools.append(usable)
    return pools


def _capacity(pool: Pool) -> Amounts:
    return Amounts(memory_mib=pool.memory_total_mib, thread_tenths=thread_tenths(pool), clients=pool.clients)


def _pools_across(outlook: _Outlook) -> list[_Choice]:
    """Return a choice for each domain, whose pools can be in one lease."""
    number = outlook.match.selection.request.number
    by_kind: dict[tuple[bool, str], list[_UsablePool]] = {}
    for usable in _usable_pools(outlook):
        by_kind.setdefault(usable.candidate.kind, []).append(usable)
    choices: list[_Choice] = []
    for pools in by_kind.values():
        in_order = sorted(pools, key=lambda usable: _pool_choice(outlook, [usable], 1).order)
        of_different_gpus: dict[str, _UsablePool] = {}
        for usable in in_order:
            of_different_gpus.setdefault(physical_gpu(usable.candidate.gpu), usable)
        choices.append(_pool_choice(outlook, list(of_different_gpus.values())[:number], number))
    return choices


def _pool_choice(outlook: _Outlook, pools: Sequence[_UsablePool], number: int) -> _Choice:
    """Return these pools as a choice; there are fewer than the `number` if some are not served."""
    missing = number - len(pools)
    lacks_then = float(missing)
    lacks_now = float(missing)
    for usable in pools:
        pool = usable.candidate.pool
        lacks_now += _lack(usable.needed, usable.left)
        if pool.domain in outlook.later_domains:
            lacks_then += _lack(usable.needed, NOTHING)
        elif outlook.later.has_leases_on(pool.gpu_uuid):
            lacks_then += _lack(usable.needed, outlook.later.left_of(pool))
    return _Choice(
        lacks_then=lacks_then,
        lacks_now=lacks_now,
        gpus=tuple(sorted(usable.candidate.pool.gpu_uuid for usable in pools)),
        pools=pools,
    )


def _lack(needed: Amounts, left: Amounts) -> float:
    """Return the sum of the shares that are missing of each kind of amount: 0 if there is enough of all."""
    if left.covers(needed):
        return 0.0
    missing = 0.0
    for needed_amount, left_amount in zip(needed, left):
        if left_amount < needed_amount:
            missing += 1 - left_amount / needed_amount
    return missing


def _reserve_amounts(reservation: Reservation, match: Match, pool: Pool) -> None:
    """Reserve what is free of the needed amounts.

    If they never fit beside what is reserved for earlier requests, they include that. Of a pool whose memory
    is leased, other requests get nothing either.
    """
    reserved = match.reserved.of_pool(pool)
    if not match.ledger.free_mib(pool, reserved):
        return
    capacity = _capacity(pool).without(reserved)
    needed = match.selection.needs[pool.gpu_uuid]
    left = match.ledger.left_of(pool, reserved)
    counters = (reservation.memory_mib, reservation.thread_tenths, reservation.clients)
    amounts = zip(counters, needed, needed.without(reserved), capacity, left)
    for counter, needed_amount, needed_beside, most, left_amount in amounts:
        amount = min(left_amount, needed_amount if needed_amount <= most else needed_beside)
        if amount:
            counter[pool.gpu_uuid] += amount
