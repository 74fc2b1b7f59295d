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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from yunion_mps.core.errors import NothingFreeError
from yunion_mps.core.models import Device, Lease, Owner
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.match import Match, Reservation, Selection, match_now, no_reservation
from yunion_mps.leases.placement import choose_devices, satisfying_domains
from yunion_mps.leases.refusals import why_waiting
from yunion_mps.leases.request import Candidates, LeaseRequest, PoolCandidate, QueuedRequest
from yunion_mps.leases.targets import Target, best_target

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
        #: The users (uids) whom control daemons are to serve next, one after the other, by domain, as of the
        #: last `next`.
        self.promised: Mapping[str, Sequence[int]] = {}

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

        This runs whenever a lease ends, and hundreds of requests may be queued. So of equal requests only one
        is yielded as long as nothing more is reserved.
        """
        turns = _Turns(self._allocator, candidates, reserved)
        own_leases = _OwnLeases(self._allocator.ledger)
        held_by_own: dict[tuple[LeaseRequest, Owner], bool] = {}
        for queued in self.requests:
            if queued is before:
                return
            if not turns.is_known(queued):
                yield _Turn(queued, turns.match(queued))
            since_s = self._reserving_since_s(queued)
            if since_s is None:
                continue
            needed = turns.needed(queued, since_s)
            if not any(needed):
                continue
            request = queued.request
            owner = queued.holder.owner
            if (request, owner) not in held_by_own:
                own = own_leases.of(owner)
                held_by_own[request, owner] = self._is_held_by_own(request, candidates, own)
            if not held_by_own[request, owner]:
                turns.reserve(needed)

    def _reserving_since_s(self, queued: QueuedRequest) -> float | None:
        """Return when the request began to reserve, in s since 1970; None while it lets later ones pass."""
        waited_s = max(0.0, self._clock() - queued.since_s)
        periods = int(waited_s // RESERVES_S)
        lets_others_pass = periods % 2 == 1
        return None if lets_others_pass else queued.since_s + periods * RESERVES_S

    def _is_held_by_own(self, request: LeaseRequest, candidates: Candidates, own: Ledger) -> bool:
        """Return whether the leases of the request's owner, if there were no others, would make it wait."""
        if not own.leases:
            return False
        selection = self._allocator.select(request, candidates)
        return not _fits_beside(own, selection) and _fits_beside(Ledger(), selection)


class _Turns:
    """What the turns of a queue have in common, while each reserves what the next ones do not get."""

    def __init__(self, allocator: Allocator, candidates: Candidates, reserved: Reservation) -> None:
        self._allocator = allocator
        self._candidates = candidates
        self.reserved = reserved
        self._later = _LaterLeases(allocator.ledger)
        lease_of = allocator.ledger.lease_of
        #: The devices that are neither leased nor reserved, and the pools with memory for another client.
        self._unleased: list[Device] = []
        for candidate in candidates.devices:
            if not candidate.reason and candidate.device.id not in lease_of:
                self._unleased.append(candidate.device)
        self._pools = self._pools_with_memory(candidates.pools)
        #: As long as nothing more is reserved, by request and user (uid).
        self._matches: dict[tuple[LeaseRequest, int | None], Match | None] = {}
        self._targets: dict[tuple[LeaseRequest, int | None, int], Target | None] = {}
        #: The domains (names) that can be promised to each user (uid), as long as no other one is promised.
        self._contested: dict[int, set[str]] = {}
        #: The domains that could satisfy a request.
        self._domains_of: dict[LeaseRequest, set[str]] = {}

    def is_known(self, queued: QueuedRequest) -> bool:
        """Return whether an equal request has had its turn, and nothing was reserved since."""
        return (queued.request, queued.holder.user_uid) in self._matches

    def match(self, queued: QueuedRequest) -> Match | None:
        """Return what is free for the request; None if it certainly does not fit now."""
        request = queued.request
        uid = queued.holder.user_uid
        match = None
        if self._may_use(request):
            match = self._allocator.match(request, self._candidates, self.reserved, uid)
        self._matches[request, uid] = match
        return match

    def needed(self, queued: QueuedRequest, since_s: float) -> Reservation:
        """Return what is free of the request's target, and the domains that are to serve its user next.

        since_s: when the request began to reserve.
        """
        target = self._target(queued, since_s)
        needed = no_reservation()
        if target:
            needed.add(target.reservation)
        uid = queued.holder.user_uid
        if uid is not None:
            domains = self._domains_to_promise(queued.request, uid, target)
            needed.users.update(dict.fromkeys(domains, (uid,)))
        return needed

    def reserve(self, needed: Reservation) -> None:
        """Reserve this, too."""
        self.reserved.add(needed)
        self._matches.clear()
        self._targets.clear()
        if needed.devices:
            self._unleased = [device for device in self._unleased if device.id not in needed.devices]
        if needed.memory_mib or needed.clients:
            self._pools = self._pools_with_memory(self._pools)
        if needed.users:
            self._contested.clear()

    def _pools_with_memory(self, pools: Iterable[PoolCandidate]) -> list[PoolCandidate]:
        ledger = self._allocator.ledger
        with_memory: list[PoolCandidate] = []
        for candidate in pools:
            if ledger.free_mib(candidate.pool, self.reserved.of_pool(candidate.pool)):
                with_memory.append(candidate)
        return with_memory

    def _may_use(self, request: LeaseRequest) -> bool:
        """Return whether the request needs anything of what is neither leased nor reserved."""
        if request.memory_mib and self._pools:
            return True
        return any(request.matches(device) for device in self._unleased)

    def _target(self, queued: QueuedRequest, since_s: float) -> Target | None:
        uid = queued.holder.user_uid
        match = self._matches[queued.request, uid]
        if match is None:
            return None
        later = self._later.after(since_s)
        key = (queued.request, uid, len(later.leases))
        if key not in self._targets:
            self._targets[key] = best_target(match, later)
        return self._targets[key]

    def _domains_to_promise(self, request: LeaseRequest, uid: int, target: Target | None) -> set[str]:
        """Return the domains (names) that are to serve this user next, because the request waits for them.

        Those of its target; if they serve another user now or nothing of the target is free, all that could
        satisfy it, because which one is the first to be free is not known. Those that are promised to other
        users come after their turns, and are kept from the later requests of these users as well. One that
        cannot start a server of this user is not kept from others.
        """
        contested = self._contested_domains(uid)
        if not contested:
            return contested
        if target and target.is_free_in_part:
            return contested & target.domains
        if request not in self._domains_of:
            selection = self._allocator.select(request, self._candidates)
            self._domains_of[request] = satisfying_domains(selection)
        return contested & self._domains_of[request]

    def _contested_domains(self, uid: int) -> set[str]:
        """Return the domains (names) that can be promised to this user."""
        if uid not in self._contested:
            contested = self._candidates.domains_not_of(uid, self.reserved.users)
            contested -= self._candidates.domains_failing(uid)
            contested -= {name for name, uids in self.reserved.users.items() if uid in uids}
            self._contested[uid] = contested
        return self._contested[uid]


class _LaterLeases:
    """The leases of requests that began to wait after a moment, as a ledger for each moment."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._leases: list[Lease] = []
        self._requested_s: list[float] = []
        self._ledgers: dict[int, Ledger] = {}

    def after(self, time_s: float) -> Ledger:
        """Return the leases of requests that began to wait after this, in s since 1970."""
        if not self._ledgers:  # made only if needed, because there may be thousands of leases
            self._leases = sorted(self._ledger.leases.values(), key=lambda lease: lease.requested_s)
            self._requested_s = [lease.requested_s for lease in self._leases]
        first = bisect_right(self._requested_s, time_s)
        if first not in self._ledgers:
            self._ledgers[first] = Ledger(self._leases[first:])
        return self._ledgers[first]


class _OwnLeases:
    """The leases of each owner but root, who takes leases for all users, as a ledger for each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._leases: dict[Owner, list[Lease]] = {}
        self._ledgers: dict[Owner, Ledger] = {}

    def of(self, owner: Owner) -> Ledger:
        if not self._ledgers:  # made only if needed, as in `_LaterLeases`
            for lease in self._ledger.leases.values():
                if lease.holder.uid != 0:
                    self._leases.setdefault(lease.holder.owner, []).append(lease)
        if owner not in self._ledgers:
            self._ledgers[owner] = Ledger(self._leases.get(owner, ()))
        return self._ledgers[owner]


def _fits_beside(leases: Ledger, selection: Selection) -> bool:
    """Return whether the request could be granted if these were the only leases."""
    return bool(choose_devices(match_now(selection, leases)))
