"""Which of the free devices that would do a request gets: binpack fills GPUs, spread leaves them room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from yunion_mps.leases.matching import needs_mib
from yunion_mps.leases.offers import Offers
from yunion_mps.leases.request import SPREAD, LeaseRequest
from yunion_mps.models import Device


def pick(request: LeaseRequest, by_gpu: Mapping[str, Sequence[Device]], offers: Offers) -> tuple[Device, ...]:
    """As many as are wanted, by the placement: binpack fills the fullest GPU first, spread the emptiest.

    GPUs that enforce budgets go before others.
    """
    need = 1 if request.across else request.number
    fits = [devices for devices in by_gpu.values() if len(devices) >= need]
    sign = -1 if request.placement == SPREAD else 1
    fits.sort(key=lambda devices: (not devices[0].budget_enforced, sign * len(devices)))
    if not request.across:
        return next(filter(None, (_together(devices, request.number, offers) for devices in fits)), ())
    if len(fits) < request.number:
        return ()
    return tuple(devices[0] for devices in fits[: request.number])


def _together(devices: Sequence[Device], number: int, offers: Offers) -> tuple[Device, ...]:
    """So many that can be one budget, the first ones or the smallest; empty where these cannot."""
    if number == 1:
        return (devices[0],)
    for ordered in (devices, sorted(devices, key=needs_mib)):
        if not offers.why_apart(ordered[:number]):
            return tuple(ordered[:number])
    return ()
