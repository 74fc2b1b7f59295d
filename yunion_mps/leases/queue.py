"""The queue: requests that wait, first come, first served.

One that does not fit yet reserves the free devices that it will need; later requests get the rest. So a
request for four devices is not starved by many for one, and requests for other GPUs do not wait for it. No
I/O, no waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.allocator import Allocator, Reservation, no_reservation
from yunion_mps.leases.request import Candidates, LeaseRequest, QueuedRequest
from yunion_mps.models import Device, Lease


class Grant(NamedTuple):
    """What a queued request gets: its new lease, which equal requests share."""

    lease: Lease
    is_new: bool
    is_shared: bool


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
        for queued in self._in_turn(candidates, reserved):
            with contextlib.suppress(NothingFreeError):
                return queued, self._allocator.choose(queued.request, candidates, reserved)
        return None

    def reservation(self, candidates: Candidates, excluding: QueuedRequest | None = None) -> Reservation:
        """What is free, but reserved for the queued requests, not counting `excluding`."""
        reserved = no_reservation()
        for _ in self._in_turn(candidates, reserved, excluding):
            pass
        return reserved

    def why_not(self, queued: QueuedRequest, candidates: Candidates) -> NothingFreeError:
        """Why this request still waits."""
        try:
            self._allocator.choose(queued.request, candidates, self.reservation(candidates, excluding=queued))
        except NothingFreeError as error:
            return error
        return NothingFreeError(f"{queued.request} cannot be allocated now", "try again")

    def _in_turn(
        self, candidates: Candidates, reserved: Reservation, excluding: QueuedRequest | None = None
    ) -> Iterator[QueuedRequest]:
        """Yield each request that may fit, and then add to `reserved` what it needs.

        This runs whenever a lease ends, and hundreds of requests may be queued. So a cheap check skips those
        without a free device, and of equal requests that cannot be satisfied only one is tried.
        """
        unsatisfiable = set[LeaseRequest]()
        served = (candidate.device for candidate in candidates.devices if not candidate.reason)
        free = self._allocator.ledger.free_singly(served)
        for queued in self.requests:
            request = queued.request
            if queued is excluding or request in unsatisfiable:
                continue
            if not request.memory_mib and not any(
                request.matches(device) and device.id not in reserved.devices for device in free
            ):
                continue
            yield queued
            more = self._allocator.reserve(request, candidates, reserved)
            if not any(more):
                unsatisfiable.add(request)
            reserved.devices.update(more.devices)
            reserved.memory_mib.update(more.memory_mib)
            reserved.thread_tenths.update(more.thread_tenths)
