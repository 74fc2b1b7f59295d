"""The queue: requests that wait, first come, first served.

One that does not fit yet reserves the free devices that it will need; later requests get the rest. So a
request for four devices is not starved by many for one, and requests for other GPUs do not wait for it. One
that waits for a control daemon to serve its user reserves the control daemon: later requests of other users
do not get its devices. No I/O, no waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.allocator import Allocator, Reservation, no_reservation
from yunion_mps.leases.request import Candidates, LeaseRequest, QueuedRequest
from yunion_mps.models import Device, Lease
from yunion_mps.reasons import NO_REASON, Reason

#: The largest number of distinct requests whose reason is determined.
_MAX_EXPLAINED = 20


class Grant(NamedTuple):
    """What a queued request gets: its new lease, which equal requests share."""

    lease: Lease
    is_new: bool
    is_shared: bool


class _Choices(NamedTuple):
    """The candidates for one user, and their devices that are free."""

    candidates: Candidates
    free: list[Device]


class Queue:
    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.requests: list[QueuedRequest] = []

    def add(self, queued: QueuedRequest) -> None:
        self.requests.append(queued)
        self.requests.sort(key=lambda request: request.position)

    def remove_answered(self, lease: Lease) -> list[QueuedRequest]:
        """The requests that this lease was granted for; they are queued no longer."""
        answered = [request for request in self.requests if request.is_answered_by(lease)]
        for request in answered:
            self.requests.remove(request)
        return answered

    def next(self, candidates: Candidates) -> tuple[QueuedRequest, tuple[Device, ...]] | None:
        """The first request that fits now, and its devices; None if none does.

        It stays queued until it is removed; call this again once the ledger has its lease.
        """
        reserved = no_reservation()
        for queued, candidates_for_user in self._in_turn(candidates, reserved):
            with contextlib.suppress(NothingFreeError):
                return queued, self._allocator.choose(queued.request, candidates_for_user, reserved)
        return None

    def reservation(self, candidates: Candidates, excluding: QueuedRequest | None = None) -> Reservation:
        """What is free, but reserved for the queued requests, not counting `excluding`."""
        reserved = no_reservation()
        for _ in self._in_turn(candidates, reserved, excluding):
            pass
        return reserved

    def choose(self, queued: QueuedRequest, candidates: Candidates) -> tuple[Device, ...]:
        """The devices that a request would get now, behind the queued ones; raises NothingFreeError."""
        reserved = self.reservation(candidates, excluding=queued)
        candidates_for_user = candidates.for_user(queued.holder.user_uid, reserved.users)
        return self._allocator.choose(queued.request, candidates_for_user, reserved)

    def why_not(self, queued: QueuedRequest, candidates: Candidates) -> NothingFreeError:
        """Why this request still waits."""
        try:
            self.choose(queued, candidates)
        except NothingFreeError as error:
            return error
        return NothingFreeError(f"{queued.request} cannot be allocated now", "try again")

    def reasons(self, candidates: Candidates) -> dict[int, Reason]:
        """Why each request still waits, by position; those far behind in the queue have none."""
        first: dict[tuple[LeaseRequest, int | None], QueuedRequest] = {}
        for queued in self.requests:
            first.setdefault((queued.request, queued.holder.user_uid), queued)
        why: dict[tuple[LeaseRequest, int | None], Reason] = {}
        for kind, queued in islice(first.items(), _MAX_EXPLAINED):
            why[kind] = self.why_not(queued, candidates).reason
        return {
            queued.position: why.get((queued.request, queued.holder.user_uid), NO_REASON)
            for queued in self.requests
        }

    def _in_turn(
        self, candidates: Candidates, reserved: Reservation, excluding: QueuedRequest | None = None
    ) -> Iterator[tuple[QueuedRequest, Candidates]]:
        """Yield each request that may fit, with the candidates for its user; then reserve what it needs.

        This runs whenever a lease ends, and hundreds of requests may be queued. So a cheap check skips those
        without a free device, and of equal requests that cannot be satisfied only one is tried.
        """
        unsatisfiable: set[tuple[LeaseRequest, int | None]] = set()
        choices: dict[int | None, _Choices] = {}
        for queued in self.requests:
            request, uid = queued.request, queued.holder.user_uid
            if queued is excluding or (request, uid) in unsatisfiable:
                continue
            if uid not in choices:
                choices[uid] = self._choices(candidates.for_user(uid, reserved.users))
            candidates_for_user, free = choices[uid]
            if _may_fit(request, free, reserved):
                yield queued, candidates_for_user
                needed = self._allocator.reserve(request, candidates_for_user, reserved)
                if any(needed):
                    reserved.add(needed)
                    continue
            unsatisfiable.add((request, uid))
            domain = self._allocator.domain_to_reserve(request, candidates_for_user, reserved)
            if domain and uid is not None:
                reserved.users[domain] = uid
                choices.clear()  # the other users no longer have this domain's devices

    def _choices(self, candidates: Candidates) -> _Choices:
        served = (candidate.device for candidate in candidates.devices if not candidate.reason)
        return _Choices(candidates, self._allocator.ledger.free_singly(served))


def _may_fit(request: LeaseRequest, free: Iterable[Device], reserved: Reservation) -> bool:
    """Whether a single device could be free for the request; memory of pools is not looked at."""
    if request.memory_mib:
        return True
    return any(request.matches(device) and device.id not in reserved.devices for device in free)
