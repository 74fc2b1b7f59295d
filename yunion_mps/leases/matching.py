"""What of all that there is would do for a request, free or not."""

from __future__ import annotations

from collections.abc import Iterator

from yunion_mps.leases.offers import Offer, Offers, PoolOffer
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Device


def devices_for(request: LeaseRequest, offers: Offers) -> list[Offer]:
    """The devices that would do; a request for memory gets no equal share, and the smallest slice.

    Several are of no GPU whose devices can never be one budget.
    """
    found = [
        one for one in offers.devices if request.takes(one.device) and (one.sliced or not request.memory_mib)
    ]
    if request.number > 1 and not request.across:
        apart = {some[0].gpu_uuid for some in least(request, offers) if offers.why_apart(some)}
        found = [one for one in found if one.device.gpu_uuid not in apart]
    if request.memory_mib:
        found.sort(key=lambda one: one.device.memory_limit_mib)
    return found


def pools_for(request: LeaseRequest, offers: Offers) -> list[PoolOffer]:
    """The GPUs whose memory would do, where it is handed out in units."""
    return [
        one
        for one in offers.pools
        if request.gpu in ("", one.pool.gpu_uuid, one.gpu)
        and not (request.enforced and one.pool.gpu_uuid in offers.unenforced)
    ]


def needs_mib(device: Device) -> int:
    """How much of its GPU's memory goes with the device: its budget, and what is reserved beside it."""
    return device.memory_limit_mib + device.reserve_mib


def least(request: LeaseRequest, offers: Offers) -> Iterator[tuple[Device, ...]]:
    """Yield the smallest devices that a request for several could get, if everything were free and served.

    They are of each GPU that has enough, or, where they are to be across GPUs, of each control daemon.
    """
    if request.number == 1:
        return
    by_gpu: dict[str, list[Device]] = {}
    for offer in offers.devices:
        if request.takes(offer.device):
            by_gpu.setdefault(offer.device.gpu_uuid, []).append(offer.device)
    if not by_gpu:
        return
    groups = [sorted(devices, key=needs_mib) for devices in by_gpu.values()]
    if request.across:
        by_domain: dict[str, list[Device]] = {}
        for smallest, *_ in groups:
            by_domain.setdefault(smallest.domain, []).append(smallest)
        yield tuple(smallest for smallest, *_ in groups)[: request.number]
        groups = list(by_domain.values())
    for devices in groups:
        if len(devices) >= request.number:
            yield tuple(devices[: request.number])
