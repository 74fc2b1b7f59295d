"""Placement: which devices can satisfy a request, and which GPU is used first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import SPREAD
from yunion_mps.core.models import Device
from yunion_mps.leases.ledger import (
    combinable_kind,
    group_by_gpu,
    groups_across,
    needs_mib,
    of_different_gpus,
)
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest, devices_of_candidates


def smallest_groups(request: LeaseRequest, candidates: Candidates) -> Iterator[tuple[Device, ...]]:
    """Yield the smallest groups of devices that could satisfy a request if everything were free and served.

    There is a group for each GPU with enough devices, or, across GPUs, for each kind.
    """
    if request.number == 1:
        return
    by_gpu = group_by_gpu(devices_of_candidates(candidates.suitable(request)))
    if not by_gpu:
        return
    groups = [sorted(devices, key=needs_mib) for devices in by_gpu.values()]
    if request.across:
        smallest = [devices[0] for devices in groups]
        yield tuple(of_different_gpus(smallest)[: request.number])
        groups = groups_across(smallest)
    for devices in groups:
        if len(devices) >= request.number:
            yield tuple(devices[: request.number])


def matching_devices(request: LeaseRequest, candidates: Candidates) -> list[Candidate]:
    """Return the suitable devices; if the request is for memory, the smallest first.

    If it is for several devices, GPUs whose devices can never be combined are left out.
    """
    matching = candidates.suitable(request)
    if request.number > 1 and not request.across:
        uncombinable: set[str] = set()
        for group in smallest_groups(request, candidates):
            if candidates.why_not_combinable(group):
                uncombinable.add(group[0].gpu_uuid)
        matching = [candidate for candidate in matching if candidate.device.gpu_uuid not in uncombinable]
    if request.memory_mib:
        matching.sort(key=lambda candidate: needs_mib(candidate.device))
    return matching


def largest_group_across(
    request: LeaseRequest, candidates: Candidates, by_gpu: Iterable[Sequence[Device]]
) -> list[Device]:
    """Return the largest group of free devices, one of each GPU, that can be in one lease.

    Kinds of devices that could not satisfy the request if everything were free are left out.

    by_gpu: the free devices of each GPU, at least one.
    """
    matching = devices_of_candidates(matching_devices(request, candidates))
    kinds: set[tuple[bool, str]] = set()
    for group in groups_across(matching):
        if len(group) >= request.number:
            kinds.add(combinable_kind(group[0]))
    firsts = [devices[0] for devices in by_gpu]
    free = groups_across(device for device in firsts if combinable_kind(device) in kinds)
    return max(free, key=len, default=[])[: request.number]


def place(
    request: LeaseRequest,
    by_gpu: Mapping[str, Sequence[Device]],
    candidates: Candidates,
    used: Mapping[str, float] = {},
) -> tuple[Device, ...]:
    """Return as many devices as requested, none if they do not fit.

    Binpack fills the fullest GPU first, spread the emptiest; among equal GPUs, and among the MIG instances of
    one, the number of free devices decides. GPUs that enforce budgets come first.

    by_gpu: the free devices of each GPU, by UUID.
    used: the share of each physical GPU (address) that is leased, from 0 to 1.
    """
    number_each = 1 if request.across else request.number
    fits = [devices for devices in by_gpu.values() if len(devices) >= number_each]
    sign = -1 if request.placement == SPREAD else 1

    def order(devices: Sequence[Device]) -> tuple[bool, float, int]:
        share = used.get(physical_gpu(devices[0].addr), 0.0)
        return not devices[0].budget_enforced, -sign * share, sign * len(devices)

    fits.sort(key=order)
    if request.across:
        for group in groups_across(devices[0] for devices in fits):
            if len(group) >= request.number:
                return tuple(group[: request.number])
        return ()
    for devices in fits:
        combinable = _combinable(devices, request.number, candidates)
        if combinable:
            return combinable
    return ()


def _combinable(devices: Sequence[Device], number: int, candidates: Candidates) -> tuple[Device, ...]:
    """Return the first or the smallest `number` devices if they can be combined; none if neither can."""
    if number == 1:
        return (devices[0],)
    for ordered in (devices, sorted(devices, key=needs_mib)):
        if not candidates.why_not_combinable(ordered[:number]):
            return tuple(ordered[:number])
    return ()
