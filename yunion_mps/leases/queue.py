"""Those who wait for devices: first come, first served, and nobody is overtaken for good.

Whoever cannot be served yet has the free devices kept that bring its request nearer; the rest goes to those
behind. So a request for four devices is not starved by many for one, nor do those for other GPUs wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.ledger import NOTHING_KEPT, Kept, Ledger
from yunion_mps.leases.offers import Offers
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Device


class Waiter(NamedTuple):
    """One request that waits, since when (in s since 1970), and whose it is."""

    request: LeaseRequest
    since_s: float
    whose: Any


class Queue:
    """The waiters in the order of their coming."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiters: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        """Take a waiter in, behind those who have waited as long."""
        place = sum(one.since_s <= waiter.since_s for one in self.waiters)
        self.waiters.insert(place, waiter)

    def next(self, offers: Offers) -> tuple[Waiter, tuple[Device, ...]] | None:
        """The first who can be served now, and with what; None where nobody can be.

        It stays in the queue until it is removed; the next one is asked for when the ledger has its lease.
        """
        kept, hopeless = NOTHING_KEPT, set[LeaseRequest]()
        free = self._ledger.free_singly(offers.devices)
        for waiter in self.waiters:
            if waiter.request in hopeless or _is_hopeless(waiter.request, free, kept):
                continue
            try:
                return waiter, self._ledger.choose(waiter.request, offers, kept)
            except NothingFreeError:
                kept = self._keep(waiter.request, offers, kept, hopeless)
        return None

    def spoken_for(self, offers: Offers, besides: Waiter | None = None) -> Kept:
        """What is free and kept for those who wait, `besides` left out."""
        kept, hopeless = NOTHING_KEPT, set[LeaseRequest]()
        free = self._ledger.free_singly(offers.devices)
        for waiter in self.waiters:
            if waiter is besides or waiter.request in hopeless or _is_hopeless(waiter.request, free, kept):
                continue
            kept = self._keep(waiter.request, offers, kept, hopeless)
        return kept

    def _keep(self, request: LeaseRequest, offers: Offers, kept: Kept, hopeless: set[LeaseRequest]) -> Kept:
        """What is kept with what the request needs; or note that nothing is there for any of its kind.

        So hundreds who wait for the same cost no more than one: this is done at every lease's end.
        """
        claims = self._ledger.claims(request, offers, kept)
        if not any(claims):
            hopeless.add(request)
        return kept | claims


def _is_hopeless(request: LeaseRequest, free: Sequence[Device], kept: Kept) -> bool:
    """Whether none of the devices that are free would do for the request, were it alone.

    So those who wait for other things each cost no more than a look at what is free, which is little.
    """
    return not request.memory_mib and not any(
        request.takes(device) and device.id not in kept.devices for device in free
    )
