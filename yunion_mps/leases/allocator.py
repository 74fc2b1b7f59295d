"""The allocator, which matches requests with what can be leased now, given the leases of a ledger. No I/O."""

from __future__ import annotations

from yunion_mps.core.models import Device
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import (
    NO_RESERVATION,
    DividedGpu,
    Match,
    Reservation,
    Selection,
    divide_by_gpu,
    match_now,
    select,
)
from yunion_mps.leases.placement import choose_devices
from yunion_mps.leases.refusals import why_waiting
from yunion_mps.leases.request import Candidates, LeaseRequest

#: How many GPUs the selections that are kept may have together, or devices of their own: about 1 MB.
_MAX_KEPT = 100_000
#: A selection by itself takes as much memory as so many GPUs in it.
_SIZE = 100


class Allocator:
    """Matches requests, chooses their devices, and keeps their selections as long as the candidates stay.

    The lease service asks for the selection of a request that comes, and the queue for its matches.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        #: The candidates that the selections are of, whatever users are served.
        self._candidates = Candidates()
        self._divided: list[DividedGpu] = []
        self._selections: dict[LeaseRequest, Selection] = {}
        self._kept = 0

    def select(self, request: LeaseRequest, candidates: Candidates) -> Selection:
        """Return what of the candidates could satisfy the request if everything were free and served."""
        without_users = candidates._replace(users={})
        have_changed = without_users != self._candidates
        if have_changed:
            self._divided = divide_by_gpu(candidates.devices)
        if have_changed or self._kept > _MAX_KEPT:
            self._selections.clear()
            self._kept = 0
        self._candidates = without_users  # the newest object, because that is compared fast
        selection = self._selections.get(request)
        if selection is None:
            selection = select(request, without_users, self._divided)
            self._selections[request] = selection
            self._kept += _SIZE + selection.size
        return selection._replace(candidates=candidates)

    def match(
        self,
        request: LeaseRequest,
        candidates: Candidates,
        reserved: Reservation = NO_RESERVATION,
        uid: int | None = None,
    ) -> Match:
        """Return what of the candidates is free now for the request, which is of the user `uid`.

        reserved: what requests that are earlier in the queue will need
        """
        return match_now(self.select(request, candidates), self.ledger, reserved, uid)

    def choose(
        self,
        request: LeaseRequest,
        candidates: Candidates,
        reserved: Reservation = NO_RESERVATION,
        uid: int | None = None,
    ) -> tuple[Device, ...]:
        """Return the devices that satisfy the request of the user `uid` now.

        Raises NothingFreeError with the reason if there are none.
        """
        match = self.match(request, candidates, reserved, uid)
        devices = choose_devices(match)
        if not devices:
            raise why_waiting(match)
        return devices
