"""Placement: which devices of a match a request gets, or what is reserved for it. Pure.

If a GPU's memory is handed out in units, devices of the requested size are created.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import SPREAD
from yunion_mps.core.models import Device
from yunion_mps.leases.ledger import Ledger, combinable_kind, groups_across, needs_mib
from yunion_mps.leases.match import Match, PoolRoom, Reservation, Selection, match_now, no_reservation
from yunion_mps.leases.request import Candidate, Candidates, PoolCandidate, devices_of_candidates


def choose_devices(match: Match) -> tuple[Device, ...]:
    """Return the devices that the request gets now; none if they are not free."""
    return choose_from_pools(match) or choose_existing(match)


def choose_from_pools(match: Match) -> tuple[Device, ...]:
    """Return new devices of the requested memory; none if there is not enough.

    Binpack prefers the pools that have the least left. GPUs that enforce budgets are preferred to those
    that do not.
    """
    selection = match.selection
    request = selection.request
    fits = [room for room in match.rooms if room.is_enough]
    if len(fits) < selection.gpus:
        return ()
    sign = -1 if request.placement == SPREAD else 1
    unenforced = selection.candidates.unenforced
    fits.sort(key=lambda room: (room.candidate.pool.gpu_uuid in unenforced, sign * room.left_mib))
    devices: list[Device] = []
    for room in fits[: selection.gpus]:
        devices += _create_devices(room, selection.devices_each, match.ledger)
    if not request.thread_percentage:
        return tuple(devices)
    percentage = float(request.thread_percentage)
    return tuple(device._replace(thread_percentage=percentage) for device in devices)


def _create_devices(room: PoolRoom, number: int, ledger: Ledger) -> list[Device]:
    """Return `number` devices of the pool, in slots that no lease has."""
    devices: list[Device] = []
    slot = 0
    while len(devices) < number:
        device = room.candidate.make(room.units, slot)
        if device.id not in ledger.lease_of:
            devices.append(device)
        slot += 1
    return devices


def choose_existing(match: Match) -> tuple[Device, ...]:
    """Return as many free devices as requested, none if they do not fit; all that are named, or none.

    Binpack fills the fullest GPU first, spread the emptiest; among equal GPUs, and among the MIG instances of
    one, the number of free devices decides. GPUs that enforce budgets come first.
    """
    selection = match.selection
    request = selection.request
    if request.devices:
        free = _flat(match.free.values())
        if len(free) < len(selection.devices):
            return ()
        return tuple(free)
    fits = [devices for devices in match.free.values() if len(devices) >= selection.devices_each]
    if len(fits) > 1:
        fits = _in_order(fits, match)
    if request.across:
        for group in groups_across(devices[0] for devices in fits):
            if len(group) >= request.number:
                return tuple(group[: request.number])
        return ()
    for devices in fits:
        combinable = _combinable(devices, request.number, selection.candidates)
        if combinable:
            return combinable
    return ()


def _in_order(fits: Iterable[Sequence[Device]], match: Match) -> list[Sequence[Device]]:
    """Return the free devices of GPUs, those of the GPU that is used first at the front."""
    selection = match.selection
    used = match.ledger.used_shares(devices_of_candidates(selection.candidates.devices))
    sign = -1 if selection.request.placement == SPREAD else 1

    def order(devices: Sequence[Device]) -> tuple[bool, float, int]:
        share = used.get(physical_gpu(devices[0].addr), 0.0)
        return not devices[0].budget_enforced, -sign * share, sign * len(devices)

    return sorted(fits, key=order)


def _combinable(devices: Sequence[Device], number: int, candidates: Candidates) -> tuple[Device, ...]:
    """Return the first or the smallest `number` devices if they can be combined; none if neither can."""
    if number == 1:
        return (devices[0],)
    for ordered in (devices, sorted(devices, key=needs_mib)):
        if not candidates.why_not_combinable(ordered[:number]):
            return tuple(ordered[:number])
    return ()


def _flat(groups: Iterable[Sequence[Device]]) -> list[Device]:
    devices: list[Device] = []
    for group in groups:
        devices += group
    return devices


def reserve(match: Match) -> Reservation:
    """Return the free devices or memory to reserve for a request that does not fit yet."""
    request = match.selection.request
    if request.memory_mib:
        return _reserve_memory(match)
    most_first = sorted(match.free.values(), key=len, reverse=True)
    devices: Sequence[Device] = ()
    if request.devices:
        devices = _flat(most_first)
    elif request.across:
        devices = _largest_group_across(match.selection, most_first)
    elif most_first:
        devices = most_first[0][: request.number]
    return no_reservation()._replace(devices={device.id for device in devices})


def _reserve_memory(match: Match) -> Reservation:
    """Return what the pools that come closest have of the memory and threads, if memory is left."""
    selection = match.selection
    needed_mib = selection.devices_each * selection.request.memory_mib
    shortfalls: list[_Shortfall] = []
    for room in match.rooms:
        if room.left_mib <= 0:
            continue
        needed_tenths = selection.devices_each * selection.needs_tenths(room.candidate)
        free_tenths = min(needed_tenths, room.left_tenths)
        missing = max(0, 1 - room.left_mib / needed_mib)
        if needed_tenths:
            missing += 1 - free_tenths / needed_tenths
        shortfalls.append(_Shortfall(room.candidate.pool.gpu_uuid, missing, room.left_mib, free_tenths))
    shortfalls.sort(key=lambda shortfall: (shortfall.missing, -shortfall.left_mib, shortfall.gpu_uuid))
    reservation = no_reservation()
    for shortfall in shortfalls[: selection.gpus]:
        reservation.memory_mib[shortfall.gpu_uuid] = min(shortfall.left_mib, needed_mib)
        reservation.thread_tenths[shortfall.gpu_uuid] = shortfall.free_tenths
    return reservation


class _Shortfall(NamedTuple):
    """What a pool lacks for a request, and what of it can be reserved."""

    gpu_uuid: str
    #: The missing fractions of the memory and of the threads, together: 0 to 2.
    missing: float
    #: How much memory one more client could get.
    left_mib: int
    #: How many tenths of a percent of the threads can be reserved.
    free_tenths: int


def _largest_group_across(selection: Selection, by_gpu: Iterable[Sequence[Device]]) -> list[Device]:
    """Return the largest group of free devices, one of each GPU, that can be in one lease.

    Kinds of devices that could not satisfy the request if everything were free are left out.

    by_gpu: the free devices of each GPU, at least one.
    """
    number = selection.request.number
    kinds: set[tuple[bool, str]] = set()
    for group in groups_across(devices_of_candidates(selection.devices)):
        if len(group) >= number:
            kinds.add(combinable_kind(group[0]))
    firsts = [devices[0] for devices in by_gpu]
    free = groups_across(device for device in firsts if combinable_kind(device) in kinds)
    return max(free, key=len, default=[])[:number]


def satisfying_domains(selection: Selection) -> set[str]:
    """Return the names of the domains that could satisfy the request now if nothing of them were leased."""
    devices: dict[str, list[Candidate]] = {}
    pools: dict[str, list[PoolCandidate]] = {}
    for candidate in selection.devices:
        devices.setdefault(candidate.device.domain, []).append(candidate)
    for pool in selection.pools:
        pools.setdefault(pool.pool.domain, []).append(pool)
    unleased = Ledger()
    satisfying: set[str] = set()
    for name in {*devices, *pools}:
        of_domain = selection._replace(devices=devices.get(name, []), pools=pools.get(name, []))
        if choose_devices(match_now(of_domain, unleased)):
            satisfying.add(name)
    return satisfying
