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
    group_by_gpu,
    groups_across,
    needs_mib,
)
from yunion_mps.leases.match import Match, Reservation, no_reservation
from yunion_mps.leases.request import Candidates, PoolCandidate, devices_of_candidates

#: When a device is free: now, once the leases of earlier requests have ended, or only after later ones.
_NOW, _THEN, _LATER = range(3)


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

    @property
    def order(self) -> tuple[float, float, tuple[str, ...]]:
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
    usable: Sequence[Device]
    #: The devices (ids) that can be leased now, and once the leases of earlier requests have ended.
    now: set[str]
    then: set[str]

    def rank(self, device: Device) -> int:
        """Return when the device is free."""
        if device.id in self.now:
            return _NOW
        if device.id in self.then and device.domain not in self.later_domains:
            return _THEN
        return _LATER


def best_target(match: Match, later: Ledger) -> Target | None:
    """Return what a request that does not fit yet waits for; None if nothing that is served would do.

    later: the leases of later requests.
    """
    outlook = _outlook(match, later)
    request = match.selection.request
    targets: list[Target] = []
    if request.devices:
        targets.append(_device_target(outlook, outlook.usable, len(match.selection.devices)))
    elif request.across:
        targets += _device_targets_across(outlook)
        targets += _pool_targets_across(outlook)
    else:
        targets += _device_targets_on_one_gpu(outlook)
        targets += [_pool_target(outlook, [candidate], 1) for candidate in _usable_pools(outlook)]
    return min(targets, key=lambda target: target.order, default=None)


def _outlook(match: Match, later: Ledger) -> _Outlook:
    candidates = match.selection.candidates
    failing = candidates.domains_failing(match.uid)
    usable: list[Device] = []
    for candidate in match.selection.devices:
        if not candidate.reason and candidate.device.domain not in failing:
            usable.append(candidate.device)
    return _Outlook(
        match=match,
        later=later,
        later_domains=_domains_of_others(later, match.uid, candidates),
        usable=usable,
        now=_ids(match.free.values()),
        then=_ids(later.free_by_gpu(usable).values()),
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


def _ids(groups: Iterable[Iterable[Device]]) -> set[str]:
    ids: set[str] = set()
    for devices in groups:
        ids.update(device.id for device in devices)
    return ids


# -- devices


def _device_targets_on_one_gpu(outlook: _Outlook) -> list[Target]:
    number = outlook.match.selection.request.number
    targets: list[Target] = []
    for devices in group_by_gpu(outlook.usable).values():
        combination = _combination(outlook, devices)
        if combination:
            targets.append(_device_target(outlook, combination, number))
    return targets


def _combination(outlook: _Outlook, devices: Sequence[Device]) -> Sequence[Device]:
    """Return devices of one GPU that can be combined, those that are free first; none if there are none.

    devices: the smallest first, which are the ones that are most likely to be combinable
    """
    number = outlook.match.selection.request.number
    candidates = outlook.match.selection.candidates
    orders = [sorted(devices, key=outlook.rank)]
    for worst in (_THEN, _LATER):
        orders.append([device for device in devices if outlook.rank(device) <= worst])
    for ordered in orders:
        first = ordered[:number]
        if len(first) == number and (number == 1 or not candidates.why_not_combinable(first)):
            return first
    return ()


def _device_targets_across(outlook: _Outlook) -> list[Target]:
    """Return a target for each kind of devices that can be in one lease.

    Kinds that could not satisfy the request if everything were free and served are left out.
    """
    selection = outlook.match.selection
    number = selection.request.number
    kinds: set[tuple[bool, str]] = set()
    for group in groups_across(devices_of_candidates(selection.devices)):
        if len(group) >= number:
            kinds.add(combinable_kind(group[0]))
    by_rank = sorted(outlook.usable, key=outlook.rank)
    targets: list[Target] = []
    for group in groups_across(by_rank):
        if combinable_kind(group[0]) in kinds:
            targets.append(_device_target(outlook, group[:number], number))
    return targets


def _device_target(outlook: _Outlook, devices: Sequence[Device], number: int) -> Target:
    """Return these devices as a target; there are fewer than the `number` if some are not served."""
    ranks = [outlook.rank(device) for device in devices]
    return Target(
        lacks_then=(number - ranks.count(_NOW) - ranks.count(_THEN)) / number,
        lacks_now=(number - ranks.count(_NOW)) / number,
        gpus=tuple(sorted({device.gpu_uuid for device in devices})),
        domains={device.domain for device in devices},
        reservation=_reserve_devices(outlook.match, devices),
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


def _usable_pools(outlook: _Outlook) -> list[PoolCandidate]:
    """Return the pools that are served, and have enough for the request if nothing of them is leased."""
    selection = outlook.match.selection
    failing = selection.candidates.domains_failing(outlook.match.uid)
    usable: list[PoolCandidate] = []
    for candidate in selection.pools:
        is_served = not candidate.reason and candidate.pool.domain not in failing
        if is_served and _capacity(candidate.pool).covers(selection.needs_of(candidate.pool)):
            usable.append(candidate)
    return usable


def _capacity(pool: Pool) -> Amounts:
    return Ledger().left_of(pool)


def _pool_targets_across(outlook: _Outlook) -> list[Target]:
    """Return a target for each domain, whose pools can be in one lease."""
    number = outlook.match.selection.request.number
    by_kind: dict[tuple[bool, str], list[PoolCandidate]] = {}
    for candidate in _usable_pools(outlook):
        by_kind.setdefault(candidate.kind, []).append(candidate)
    targets: list[Target] = []
    for candidates in by_kind.values():
        in_order = sorted(candidates, key=lambda candidate: _pool_target(outlook, [candidate], 1).order)
        of_different_gpus: dict[str, PoolCandidate] = {}
        for candidate in in_order:
            of_different_gpus.setdefault(physical_gpu(candidate.gpu), candidate)
        targets.append(_pool_target(outlook, list(of_different_gpus.values())[:number], number))
    return targets


def _pool_target(outlook: _Outlook, candidates: Sequence[PoolCandidate], number: int) -> Target:
    """Return these pools as a target; there are fewer than the `number` if some are not served."""
    match = outlook.match
    missing = number - len(candidates)
    lacks_then = float(missing)
    lacks_now = float(missing)
    reservation = no_reservation()
    for candidate in candidates:
        pool = candidate.pool
        needed = match.selection.needs_of(pool)
        left = match.ledger.left_of(pool).without(match.reserved.of_pool(pool))
        is_withheld = pool.domain in match.withheld
        lacks_now += _lack(needed, NOTHING if is_withheld else left)
        is_of_others = pool.domain in outlook.later_domains
        lacks_then += _lack(needed, NOTHING if is_of_others else outlook.later.left_of(pool))
        _reserve_amounts(reservation, match, pool)
    return Target(
        lacks_then=lacks_then,
        lacks_now=lacks_now,
        gpus=tuple(sorted(candidate.pool.gpu_uuid for candidate in candidates)),
        domains={candidate.pool.domain for candidate in candidates},
        reservation=reservation,
    )


def _lack(needed: Amounts, left: Amounts) -> float:
    """Return the sum of the shares that are missing of each kind of amount: 0 if there is enough of all."""
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
    needed = match.selection.needs_of(pool)
    left = match.ledger.left_of(pool).without(reserved)
    counters = (reservation.memory_mib, reservation.thread_tenths, reservation.clients)
    amounts = zip(counters, needed, needed.without(reserved), capacity, left)
    for counter, needed_amount, needed_beside, most, left_amount in amounts:
        amount = min(left_amount, needed_amount if needed_amount <= most else needed_beside)
        if amount:
            counter[pool.gpu_uuid] += amount
