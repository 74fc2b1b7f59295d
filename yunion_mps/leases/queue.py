"""Those who wait for devices: first come, first served, and nobody is overtaken for good.

Whoever cannot be served yet has the free devices kept that bring its wish nearer; the rest goes to those
behind. So a wish for four devices is not starved by many for one, nor does it hold up those for other GPUs.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.ledger import NOTHING_KEPT, Kept, Ledger, Offers, Wish
from yunion_mps.models import Device

T = TypeVar("T")


class Waiter(NamedTuple, Generic[T]):
    """One wish that waits, since when (in s since 1970), and whose it is."""

    wish: Wish
    since_s: float
    whose: T


class Queue(Generic[T]):
    """The waiters in the order of their coming."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiters: list[Waiter[T]] = []

    def next(self, offers: Offers) -> tuple[Waiter[T], tuple[Device, ...]] | None:
        """The first who can be served now, and with what; None where nobody can be.

        It stays in the queue until it is removed; the next one is asked for when the ledger has its lease.
        """
        kept = NOTHING_KEPT
        for waiter in self.waiters:
            try:
                return waiter, self._ledger.choose(waiter.wish, offers, kept)
            except NothingFreeError:
                kept |= self._ledger.claims(waiter.wish, offers, kept)
        return None

    def spoken_for(self, offers: Offers, besides: Waiter[T] | None = None) -> Kept:
        """What is free and kept for those who wait, `besides` left out."""
        kept = NOTHING_KEPT
        for waiter in self.waiters:
            if waiter is not besides:
                kept |= self._ledger.claims(waiter.wish, offers, kept)
        return kept
