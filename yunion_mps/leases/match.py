"""What of the candidates fits a request, and what holds it: computed once, and handed on.

A `Selection` is what could satisfy the request, free or not; it stays the same as long as the candidates do.
A `Match` is a selection at one moment, with what leases, served users and earlier requests leave of it. The
choice and the reservation (`placement`), the reason why a request waits and the error of one that never fits
(`refusals`) are made of these alone. No I/O, no waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.models import Device, Pool
from yunion_mps.core.reasons import OTHER_USER, Reason
from yunion_mps.leases.ledger import (
    Amounts,
    Ledger,
    group_by_gpu,
    groups_across,
    needs_mib,
    of_different_gpus,
)
from yunion_mps.leases.request import (
    Candidate,
    Candidates,
    LeaseRequest,
    PoolCandidate,
    devices_of_candidates,
)
from yunion_mps.planning.division import units_for


class Reservation(NamedTuple):
    """What is free, but reserved for earlier requests."""

    #: Ids of devices.
    devices: set[str]
    #: Memory by GPU UUID: of pools, and of the devices.
    memory_mib: Counter[str]
    #: Tenths of a percent of the SM threads, of pools that count them, by GPU UUID.
    thread_tenths: Counter[str]
    #: How many clients of pools, by GPU UUID.
    clients: Counter[str]
    #: The users (uids) whom control daemons serve next, one after the other, by domain.
    users: dict[str, tuple[int, ...]]

    def add(self, other: Reservation) -> None:
        """Reserve what `other` has, too."""
        self.devices.update(other.devices)
        self.memory_mib.update(other.memory_mib)
        self.thread_tenths.update(other.thread_tenths)
        self.clients.update(other.clients)
        for name, uids in other.users.items():
            self.users[name] = self.users.get(name, ()) + uids

    def of_pool(self, pool: Pool) -> Amounts:
        """Return what is reserved of the pool."""
        return Amounts(
            memory_mib=self.memory_mib[pool.gpu_uuid],
            thread_tenths=self.thread_tenths[pool.gpu_uuid],
            clients=self.clients[pool.gpu_uuid],
        )


def no_reservation() -> Reservation:
    """Return an empty reservation."""
    return Reservation(
        devices=set(), memory_mib=Counter(), thread_tenths=Counter(), clients=Counter(), users={}
    )


NO_RESERVATION = no_reservation()


class Selection(NamedTuple):
    """What could satisfy a request if everything were free and served."""

    request: LeaseRequest
    #: What it was selected from.
    candidates: Candidates
    #: The devices that fit; if the request is for memory or several devices, the smallest first. If it is for
    #: several devices of one GPU, GPUs whose devices can never be combined are left out.
    devices: Sequence[Candidate]
    #: The pools that a request for memory can get it from.
    pools: Sequence[PoolCandidate]
    #: If the request is for several devices, the smallest ones that it could get: of each GPU with enough,
    #: or, on different GPUs, of each kind. Those that can never be combined are among them.
    groups: Sequence[Sequence[Device]]

    @property
    def gpus(self) -> int:
        """On how many GPUs the devices are to be."""
        return self.request.number if self.request.across else 1

    @property
    def devices_each(self) -> int:
        """How many devices each of these GPUs is to have."""
        return 1 if self.request.across else self.request.number

    def needs_of(self, pool: Pool) -> Amounts:
        """Return what the devices that one GPU is to have take of its pool.

        They take no threads if these follow the memory and are not counted.
        """
        number = self.devices_each
        client_mib = units_for(pool, self.request.memory_mib) * pool.unit_mib + pool.reserve_mib
        percentage = 0
        if pool.thread_percentage:
            percentage = self.request.thread_percentage or pool.thread_percentage
        return Amounts(memory_mib=number * client_mib, thread_tenths=number * 10 * percentage, clients=number)


class PoolRoom(NamedTuple):
    """What a pool that is served has left for a request."""

    candidate: PoolCandidate
    #: The units of each device.
    units: int
    #: How much memory one more client could get.
    left_mib: int
    #: What more clients could get together.
    left: Amounts
    #: What the devices that one GPU is to have take.
    needed: Amounts
    #: What is reserved for earlier requests.
    reserved: Amounts

    @property
    def is_enough(self) -> bool:
        return self.left.covers(self.needed)


class Match(NamedTuple):
    """A selection at one moment: what of it is free for the request in its turn."""

    selection: Selection
    #: The leases, which hold what is not free.
    ledger: Ledger
    #: The user who is to be served; None if that is not known.
    uid: int | None
    #: What is kept for earlier requests.
    reserved: Reservation
    #: The names of the domains whose devices this user cannot have now.
    withheld: set[str]
    #: The devices that can be leased together, by GPU UUID.
    free: Mapping[str, Sequence[Device]]
    #: What the pools have left, those that are served.
    rooms: Sequence[PoolRoom]


class Unserved(NamedTuple):
    """A device or a pool that fits, but is not served, or not for this user."""

    reason: Reason
    #: The address of its GPU.
    gpu: str
    #: The name of its domain.
    domain: str


class Held(NamedTuple):
    """By what a match is held, as far as it is not free."""

    #: How many devices are leased, of those that only a lease keeps from the user.
    leased: int
    #: How many devices are pending, and why, for each GPU.
    pending: Sequence[tuple[int, Reason]]
    #: How many devices are kept for earlier requests.
    reserved: int
    #: What is not served, or not for this user.
    unserved: Sequence[Unserved]


def select(request: LeaseRequest, candidates: Candidates) -> Selection:
    """Return what of the candidates could satisfy the request if everything were free and served."""
    devices = candidates.suitable(request)
    groups: list[Sequence[Device]] = []
    if request.number > 1:
        groups = _smallest_groups(request, devices_of_candidates(devices))
    if groups and not request.across:
        uncombinable: set[str] = set()
        for group in groups:
            if candidates.why_not_combinable(group):
                uncombinable.add(group[0].gpu_uuid)
        devices = [candidate for candidate in devices if candidate.device.gpu_uuid not in uncombinable]
    if request.memory_mib or (request.number > 1 and not request.across):
        devices.sort(key=lambda candidate: needs_mib(candidate.device))
    pools = candidates.matching_pools(request)
    return Selection(request=request, candidates=candidates, devices=devices, pools=pools, groups=groups)


def _smallest_groups(request: LeaseRequest, devices: Sequence[Device]) -> list[Sequence[Device]]:
    """Return the smallest groups of devices: of each GPU with enough, or, across GPUs, of each kind.

    Across GPUs, the first group has devices of all kinds, because its error says that kinds do not mix.
    """
    of_gpus = [sorted(of_gpu, key=needs_mib) for of_gpu in group_by_gpu(devices).values()]
    groups: list[Sequence[Device]] = []
    if request.across and of_gpus:
        smallest = [of_gpu[0] for of_gpu in of_gpus]
        groups.append(of_different_gpus(smallest)[: request.number])
        of_gpus = groups_across(smallest)
    for alike in of_gpus:
        if len(alike) >= request.number:
            groups.append(alike[: request.number])
    return groups


def match_now(
    selection: Selection,
    ledger: Ledger,
    reserved: Reservation = NO_RESERVATION,
    uid: int | None = None,
) -> Match:
    """Return what of the selection is free beside the leases and reservations, for the user `uid`.

    reserved: what requests that are earlier in the queue will need
    """
    withheld = selection.candidates.domains_withheld(uid, reserved.users)
    served: list[Device] = []
    for candidate in selection.devices:
        if not candidate.reason and candidate.device.domain not in withheld:
            served.append(candidate.device)
    pools: list[PoolCandidate] = []
    for pool in selection.pools:
        if not pool.reason and pool.pool.domain not in withheld:
            pools.append(pool)
    return Match(
        selection=selection,
        ledger=ledger,
        uid=uid,
        reserved=reserved,
        withheld=withheld,
        free=ledger.free_by_gpu(served, reserved.devices, reserved.memory_mib),
        rooms=_rooms(selection, pools, ledger, reserved),
    )


def match_if_unused(selection: Selection) -> Match:
    """Return the match if everything were free and served."""
    unleased = Ledger()
    return Match(
        selection=selection,
        ledger=unleased,
        uid=None,
        reserved=NO_RESERVATION,
        withheld=set(),
        free=group_by_gpu(devices_of_candidates(selection.devices)),
        rooms=_rooms(selection, selection.pools, unleased, NO_RESERVATION),
    )


def _rooms(
    selection: Selection, pools: Iterable[PoolCandidate], ledger: Ledger, reserved: Reservation
) -> list[PoolRoom]:
    rooms: list[PoolRoom] = []
    for candidate in pools:
        pool = candidate.pool
        reserved_amounts = reserved.of_pool(pool)
        left = ledger.left_of(pool).without(reserved_amounts)
        room = PoolRoom(
            candidate=candidate,
            units=units_for(pool, selection.request.memory_mib),
            left_mib=ledger.free_mib(pool, reserved_amounts),
            left=left,
            needed=selection.needs_of(pool),
            reserved=reserved_amounts,
        )
        rooms.append(room)
    return rooms


def count_held(match: Match) -> Held:
    """Return by what the match is held. Only the reason why a request waits needs it: the choice does not."""
    unserved: list[Unserved] = []
    leasable: set[str] = set()
    ids: set[str] = set()
    why_withheld = _why_withheld(match)
    for candidate in match.selection.devices:
        device = candidate.device
        ids.add(device.id)
        reason = candidate.reason or why_withheld.get(device.domain)
        if reason:
            unserved.append(Unserved(reason, device.gpu_address, device.domain))
        if not reason or reason.code == OTHER_USER:
            leasable.add(device.id)
    for pool in match.selection.pools:
        reason = pool.reason or why_withheld.get(pool.pool.domain)
        if reason:
            unserved.append(Unserved(reason, pool.gpu, pool.pool.domain))
    leased = leasable.intersection(match.ledger.lease_of)
    pending: list[tuple[int, Reason]] = []
    for wait in match.ledger.lease_waits(devices_of_candidates(match.selection.candidates.devices)).values():
        waiting = leasable & wait.pending
        if waiting:
            leased -= waiting
            pending.append((len(waiting), wait.reason))
    return Held(
        leased=len(leased),
        pending=pending,
        reserved=len(match.reserved.devices & ids),
        unserved=unserved,
    )


def _why_withheld(match: Match) -> dict[str, Reason]:
    """Return why the user cannot have the devices of domains now, by their names."""
    if match.uid is None:
        return {}
    candidates = match.selection.candidates
    why: dict[str, Reason] = {}
    for name in match.withheld:
        why[name] = candidates.why_withheld(name, match.uid, match.reserved.users)
    return why
