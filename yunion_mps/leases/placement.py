"""Placement: which devices of a match a request gets. Pure.

If a GPU's memory is handed out in units, devices of the requested size are created.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import SPREAD
from yunion_mps.core.models import Device
from yunion_mps.leases.ledger import Ledger, groups_across, needs_mib
from yunion_mps.leases.match import GpuDevices, Match, PoolRoom, Selection, match_now
from yunion_mps.leases.request import PoolCandidate, devices_of_candidates


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
    sign = -1 if request.placement == SPREAD else 1
    unenforced = selection.candidates.unenforced
    fits.sort(key=lambda room: (room.candidate.pool.gpu_uuid in unenforced, sign * room.left_mib))
    if request.across:
        fits = _rooms_across(fits, request.number)
    devices: list[Device] = []
    for room in fits[: selection.gpus_needed]:
        devices += _create_devices(room, selection.devices_each, match.ledger)
    if not request.thread_percentage:
        return tuple(devices)
    percentage = float(request.thread_percentage)
    return tuple(device._replace(thread_percentage=percentage) for device in devices)


def _rooms_across(rooms: Iterable[PoolRoom], number: int) -> list[PoolRoom]:
    """Return the first rooms on different GPUs that can be in one lease; none if there are fewer."""
    kinds: dict[tuple[bool, str], dict[str, PoolRoom]] = {}
    for room in rooms:
        of_kind = kinds.setdefault(room.candidate.kind, {})
        of_kind.setdefault(physical_gpu(room.candidate.gpu), room)
    for on_different_gpus in kinds.values():
        if len(on_different_gpus) >= number:
            return list(on_different_gpus.values())[:number]
    return []


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
    if len(fits) < selection.gpus_needed:
        return ()
    if len(fits) > 1:
        fits = _in_order(fits, match)
    if request.across:
        for group in groups_across(devices[0] for devices in fits):
            if len(group) >= request.number:
                return tuple(group[: request.number])
        return ()
    for devices in fits:
        smallest = devices[: request.number]
        if len(smallest) == 1 or not selection.candidates.why_not_combinable(smallest):
            return tuple(smallest)
    return ()


def _in_order(fits: Iterable[Sequence[Device]], match: Match) -> list[Sequence[Device]]:
    """Return the free devices of GPUs, those of the GPU that is used first at the front."""
    selection = match.selection
    used = match.ledger.used_shares(devices_of_candidates(selection.candidates.devices))
    sign = -1 if selection.request.placement == SPREAD else 1

    def order(devices: Sequence[Device]) -> tuple[bool, float, int, int]:
        share = used.get(physical_gpu(devices[0].addr), 0.0)
        smallest_mib = needs_mib(devices[0]) if selection.prefers_small else 0
        return not devices[0].budget_enforced, -sign * share, sign * len(devices), smallest_mib

    return sorted(fits, key=order)


def _flat(groups: Iterable[Sequence[Device]]) -> list[Device]:
    devices: list[Device] = []
    for group in groups:
        devices += group
    return devices


def satisfying_domains(selection: Selection) -> set[str]:
    """Return the names of the domains that could satisfy the request now if nothing of them were leased."""
    gpus: dict[str, list[GpuDevices]] = {}
    pools: dict[str, list[PoolCandidate]] = {}
    for gpu in selection.gpus:
        gpus.setdefault(gpu.domain, []).append(gpu)
    for pool in selection.pools:
        pools.setdefault(pool.pool.domain, []).append(pool)
    unleased = Ledger()
    satisfying: set[str] = set()
    for name in {*gpus, *pools}:
        of_domain = selection._replace(gpus=gpus.get(name, []), pools=pools.get(name, []))
        if choose_devices(match_now(of_domain, unleased)):
            satisfying.add(name)
    return satisfying
