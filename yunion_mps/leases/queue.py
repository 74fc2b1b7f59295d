"""The queue: requests that wait, first come, first served.

One that does not fit yet reserves the free devices that it will need; later requests get the rest. So a
request for four devices is not starved by many for one, and requests for other GPUs do not wait for it. One
that waits for a control daemon to serve its user reserves the control daemon: later requests of other users
do not get its devices. No I/O, no waiting.

A request reserves nothing while only leases of its own owner keep it from being granted. And it reserves for
an hour, then lets later requests pass for an hour, and so on: it may wait for a job of weeks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import Device, Lease, Owner
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import Match, Reservation, Selection, match_now, no_reservation
from yunion_mps.leases.placement import choose_devices, reserve, satisfying_domains
from yunion_mps.leases.refusals import why_waiting
from yunion_mps.leases.request import Candidates, LeaseRequest, QueuedRequest

#: The largest number of distinct requests whose reason is determined.
_MAX_EXPLAINED = 20
#: How long a request reserves, and then lets later ones pass.
RESERVES_S = 3600.0


class Grant(NamedTuple):
    """What a queued request gets."""

    lease: Lease
    #: False if an earlier attempt of the request has got the lease.
    is_new: bool
    #: Whether other queued requests that are equal get the same lease.
    is_shared: bool


class _Turn(NamedTuple):
    """The turn of a queued request."""

    queued: QueuedRequest
    #: What is free for it; None if it certainly does not fit now.
    match: Match | None


class Queue:
    """The requests that wait; the lease service adds and removes them.

    clock: returns the time in s since 1970, as that of requests.
    """

    def __init__(self, allocator: Allocator, clock: Callable[[], float] = time.time) -> None:
        self._allocator = allocator
        self._clock = clock
        self.requests: list[QueuedRequest] = []
        #: The users (uids) whom control daemons are to serve next, by domain, as of the last `next`.
        self.promised: Mapping[str, int] = {}

    def add(self, queued: QueuedRequest) -> None:
        self.requests.append(queued)
        self.requests.sort(key=lambda request: request.position)

    def remove_answered(self, lease: Lease) -> list[QueuedRequest]:
        """Remove and return the requests that this lease was granted for."""
        answered = [request for request in self.requests if request.is_answered_by(lease)]
        for request in answered:
            self.requests.remove(request)
        return answered

    def next(self, candidates: Candidates) -> tuple[QueuedRequest, tuple[Device, ...]] | None:
        """Return the first request that fits now, and its devices; None if none does.

        It stays queued until it is removed; call this again once the ledger has its lease.
        """
        reserved = no_reservation()
        for queued, match in self._in_turn(candidates, reserved):
            devices = choose_devices(match) if match else ()
            if devices:
                return queued, devices
        self.promised = reserved.users
        return None

    def reservation(self, candidates: Candidates, before: QueuedRequest | None = None) -> Reservation:
        """Return what is free, but reserved for the queued requests, or only for those before `before`."""
        reserved = no_reservation()
        for _ in self._in_turn(candidates, reserved, before):
            pass
        return reserved

    def choose(self, queued: QueuedRequest, candidates: Candidates) -> tuple[Device, ...]:
        """Return the devices that a request would get in its turn; one that is not queued comes last.

        Raises NothingFreeError if it would get none now.
        """
        reserved = self.reservation(candidates, before=queued)
        return self._allocator.choose(queued.request, candidates, reserved, queued.holder.user_uid)

    def why_not(self, queued: QueuedRequest, candidates: Candidates) -> NothingFreeError:
        """Return why this request still waits."""
        try:
            self.choose(queued, candidates)
        except NothingFreeError as error:
            return error
        return NothingFreeError(f"{queued.request} cannot be allocated now", "try again")

    def reasons(self, candidates: Candidates) -> dict[int, Reason]:
        """Return why each request waits, by position; empty for those that come after many different ones."""
        reserved = no_reservation()
        why: dict[tuple[LeaseRequest, int | None], Reason] = {}
        turns = self._in_turn(candidates, reserved)
        for queued, match in islice(turns, _MAX_EXPLAINED):
            uid = queued.holder.user_uid
            match_of_turn = match or self._allocator.match(queued.request, candidates, reserved, uid)
            if not choose_devices(match_of_turn):
                why[queued.request, uid] = why_waiting(match_of_turn).reason
        reasons: dict[int, Reason] = {}
        for queued in self.requests:
            reasons[queued.position] = why.get((queued.request, queued.holder.user_uid), NO_REASON)
        return reasons

    def _in_turn(
        self, candidates: Candidates, reserved: Reservation, before: QueuedRequest | None = None
    ) -> Iterator[_Turn]:
        """Yield each request in turn, up to `before`, and then reserve what it needs.

        This runs whenever a lease ends, and hundreds of requests may be queued. So a cheap check finds those
        without a free device, and of equal requests that cannot be satisfied only one is yielded.
        """
        passed_over: set[tuple[LeaseRequest, int | None]] = set()
        served = [candidate.device for candidate in candidates.devices if not candidate.reason]
        free = self._allocator.ledger.free_singly(served)
        domains_of: dict[LeaseRequest, set[str]] = {}
        withheld: dict[int | None, set[str]] = {}
        owned = self._leases_by_owner()
        for queued in self.requests:
            if queued is before:
                return
            request = queued.request
            uid = queued.holder.user_uid
            if (request, uid) in passed_over:
                continue
            if uid not in withheld:
                withheld[uid] = candidates.domains_withheld(uid, reserved.users)
            match = None
            if _may_fit(request, free, reserved, withheld[uid]):
                match = self._allocator.match(request, candidates, reserved, uid)
            yield _Turn(queued, match)
            if self._reserves(queued, candidates, owned.get(queued.holder.owner, ())):
                needed = reserve(match) if match else no_reservation()
                if any(needed):
                    reserved.add(needed)
                    continue
                if self._promise(queued, candidates, reserved, withheld[uid], domains_of):
                    withheld.clear()  # the other users no longer have the devices of these domains
            passed_over.add((request, uid))

    def _leases_by_owner(self) -> dict[Owner, list[Lease]]:
        """Return the leases of each owner but root, who takes leases for all users."""
        owned: dict[Owner, list[Lease]] = {}
        for lease in self._allocator.ledger.leases.values():
            if lease.holder.uid != 0:
                owned.setdefault(lease.holder.owner, []).append(lease)
        return owned

    def _reserves(self, queued: QueuedRequest, candidates: Candidates, own: Collection[Lease]) -> bool:
        """Return whether the request reserves what it will need; `own` has the leases of its owner."""
        waited_s = max(0.0, self._clock() - queued.since_s)
        periods = int(waited_s // RESERVES_S)
        lets_others_pass = periods % 2 == 1
        if lets_others_pass:
            return False
        if not own:
            return True
        selection = self._allocator.select(queued.request, candidates)
        return not _fits_beside((), selection) or _fits_beside(own, selection)

    def _promise(
        self,
        queued: QueuedRequest,
        candidates: Candidates,
        reserved: Reservation,
        withheld: Collection[str],
        domains_of: dict[LeaseRequest, set[str]],
    ) -> bool:
        """Promise the request's user the domains that are `withheld` from them; return whether there are any.

        All that could satisfy it: which one is the first to have no other user is not known. Those that are
        promised to another user already come after that user's turn. One that cannot start a server of this
        user is not kept from others.

        domains_of: a cache of the domains that could satisfy a request.
        """
        uid = queued.holder.user_uid
        if uid is None or not withheld:
            return False
        if queued.request not in domains_of:
            selection = self._allocator.select(queued.request, candidates)
            domains_of[queued.request] = satisfying_domains(selection)
        promised = domains_of[queued.request].intersection(withheld).difference(reserved.users)
        promised -= candidates.domains_failing(uid)
        reserved.users.update(dict.fromkeys(promised, uid))
        return bool(promised)


def _fits_beside(leases: Iterable[Lease], selection: Selection) -> bool:
    """Return whether the request could be granted if these were the only leases."""
    return bool(choose_devices(match_now(selection, Ledger(leases))))


def _may_fit(
    request: LeaseRequest, free: Iterable[Device], reserved: Reservation, withheld: Collection[str]
) -> bool:
    """Return whether a device could be free for the request, outside the domains that are `withheld`.

    The memory of pools is not checked.
    """
    if request.memory_mib:
        return True
    for device in free:
        if device.id not in reserved.devices and device.domain not in withheld and request.matches(device):
            return True
    return False
