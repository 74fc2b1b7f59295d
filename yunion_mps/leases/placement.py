"""Placement: which devices can satisfy a request, and which GPU is used first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from yunion_mps.addresses import physical_gpu
from yunion_mps.enums import SPREAD
from yunion_mps.leases.ledger import (
    combinable_kind,
    group_by_gpu,
    groups_across,
    needs_mib,
    of_different_gpus,
)
from yunion_mps.leases.request import Candidate, Candidates, LeaseRequest
from yunion_mps.models import Device


def smallest_groups(request: LeaseRequest, candidates: Candidates) -> Iterator[tuple[Device, ...]]:
    """Yield the smallest groups of devices that could satisfy a request if everything were free and served.

    There is a group for each GPU with enough devices, or, across GPUs, for each kind.
    """
    if request.number == 1:
        return
    by_gpu = group_by_gpu(candidate.device for candidate in candidates.suitable(request))
    if not by_gpu:
        return
    groups = [sorted(devices, key=needs_mib) for devices in by_gpu.values()]
    if request.across:
        smallest = [smallest for smallest, *_ in groups]
        yield tuple(of_different_gpus(smallest)[: request.number])
        groups = groups_across(smallest)
    for devices in groups:
        if len(devices) >= request.number:
            yield tuple(devices[: request.number])


def matching_devices(request: LeaseRequest, candidates: Candidates) -> list[Candidate]:
    """The suitable devices; if the request is for memory, the smallest first.

    If it is for several devices, GPUs whose devices can never be combined are left out.
    """
    matching = candidates.suitable(request)
    if request.number > 1 and not request.across:
        groups = smallest_groups(request, candidates)
        apart = {some[0].gpu_uuid for some in groups if candidates.why_not_combinable(some)}
        matching = [candidate for candidate in matching if candidate.device.gpu_uuid not in apart]
    if request.memory_mib:
        matching.sort(key=lambda candidate: needs_mib(candidate.device))
    return matching


def largest_group_across(
    request: LeaseRequest, candidates: Candidates, by_gpu: Iterable[Sequence[Device]]
) -> list[Device]:
    """The largest group of free devices, one of each GPU, that can be in one lease.

    Kinds of devices that could not satisfy the request if everything were free are left out.
    """
    possible = groups_across(candidate.device for candidate in matching_devices(request, candidates))
    kinds = {combinable_kind(group[0]) for group in possible if len(group) >= request.number}
    free = groups_across(devices[0] for devices in by_gpu if combinable_kind(devices[0]) in kinds)
    return max(free, key=len, default=[])[: request.number]


def place(
    request: LeaseRequest,
    by_gpu: Mapping[str, Sequence[Device]],
    candidates: Candidates,
    used: Mapping[str, float] = {},
) -> tuple[Device, ...]:
    """As many devices as requested: binpack fills the fullest GPU first, spread the emptiest.

    `used` is the share of each physical GPU (address) that is leased; among equal GPUs, and among the MIG
    instances of one, the number of free devices decides. GPUs that enforce budgets come first.
    """
    need = 1 if request.across else request.number
    fits = [devices for devices in by_gpu.values() if len(devices) >= need]
    sign = -1 if request.placement == SPREAD else 1

    def order(devices: Sequence[Device]) -> tuple[bool, float, int]:
        share = used.get(physical_gpu(devices[0].addr), 0.0)
        return not devices[0].budget_enforced, -sign * share, sign * len(devices)

    fits.sort(key=order)
    if not request.across:
        return next(filter(None, (_combinable(devices, request.number, candidates) for devices in fits)), ())
    apart = groups_across(first for first, *_ in fits)
    enough = (firsts for firsts in apart if len(firsts) >= request.number)
    return tuple(next(enough, [])[: request.number])


def _combinable(devices: Sequence[Device], number: int, candidates: Candidates) -> tuple[Device, ...]:
    """The first or the smallest `number` devices, if they can be combined; empty if neither can."""
    if number == 1:
        return (devices[0],)
    for ordered in (devices, sorted(devices, key=needs_mib)):
        if not candidates.why_not_combinable(ordered[:number]):
            return tuple(ordered[:number])
    return ()
