"""The allocator, which chooses devices for a request from those that can be leased now.

If a GPU's memory is handed out in units, it creates a device of the requested size. No I/O, no waiting.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from yunion_mps.core import reasons
from yunion_mps.core.enums import SPREAD
from yunion_mps.core.errors import HostError, InfeasibleError, NothingFreeError
from yunion_mps.core.models import Device
from yunion_mps.core.reasons import (
    BUDGET_NOT_ENFORCED,
    NO_REASON,
    NOTHING_FREE,
    OTHER_USER,
    SERVER_START_FAILED,
    TEMPORARY,
    Reason,
    hint_of,
)
from yunion_mps.core.text import count, gpus_that_are
from yunion_mps.leases.ledger import Ledger, group_by_gpu, of_different_gpus
from yunion_mps.leases.placement import largest_group_across, matching_devices, place, smallest_groups
from yunion_mps.leases.request import (
    Candidate,
    Candidates,
    LeaseRequest,
    PoolCandidate,
    devices_of_candidates,
)
from yunion_mps.planning.division import thread_tenths, units_for

#: The most GPUs, and the most reasons, that an error names.
_MAX_NAMED = 4


class Reservation(NamedTuple):
    """What is free, but reserved for earlier requests."""

    #: Ids of devices.
    devices: set[str]
    #: Memory of pools, by GPU UUID.
    memory_mib: Counter[str]
    #: Tenths of a percent of the SM threads, of pools that count them, by GPU UUID.
    thread_tenths: Counter[str]
    #: The users (uids) whom control daemons serve next, by domain.
    users: dict[str, int]

    def add(self, other: Reservation) -> None:
        """Reserve what `other` has, too."""
        self.devices.update(other.devices)
        self.memory_mib.update(other.memory_mib)
        self.thread_tenths.update(other.thread_tenths)
        self.users.update(other.users)


class _Unavailable(NamedTuple):
    """Why a device or a pool is unavailable, the address of its GPU, and the name of its domain."""

    reason: Reason
    gpu: str
    domain: str


class _Refusal(NamedTuple):
    """Why a request gets nothing now, as a NothingFreeError says it."""

    message: str
    hint: str
    code: str


class _PoolFit(NamedTuple):
    """A pool that has room for a request."""

    candidate: PoolCandidate
    #: The units of each device.
    units: int
    #: How much memory one more client could get.
    left_mib: int


def no_reservation() -> Reservation:
    """Return an empty reservation."""
    return Reservation(devices=set(), memory_mib=Counter(), thread_tenths=Counter(), users={})


NO_RESERVATION = no_reservation()


def refuse_infeasible(request: LeaseRequest, candidates: Candidates) -> None:
    """Raise InfeasibleError if the request could not be satisfied if everything were free and served.

    That includes devices that cannot be combined into one budget, or that are reserved. Raises HostError if
    only GPUs without enforced budgets could satisfy it.
    """
    try:
        _refuse_unsuitable(request, candidates)
    except (InfeasibleError, HostError) as refusal:
        try:
            _refuse_unsuitable(request, candidates._replace(reserved={}))
        except HostError as error:
            if error.code == BUDGET_NOT_ENFORCED:  # if those GPUs are reserved, allow_unlimited does not help
                refuse_infeasible(request._replace(allow_unlimited=True), candidates)
            raise
        if refusal.code == BUDGET_NOT_ENFORCED:  # GPUs that are not reserved could satisfy it
            raise
        uses = ", ".join(sorted(set(candidates.reserved.values())))
        what = f"{request} cannot be allocated: reserved for {uses}"
        raise InfeasibleError(what, hint_of(reasons.RESERVED), reasons.RESERVED) from None


def _refuse_unsuitable(request: LeaseRequest, candidates: Candidates) -> None:
    pools = candidates.matching_pools(request)
    served_pools = [pool._replace(reason=NO_REASON) for pool in pools]
    if Allocator(Ledger()).from_pools(request, served_pools, candidates):
        return
    try:
        _refuse_uncombinable(request, candidates)
    except InfeasibleError:
        if not request.allow_unlimited:
            with contextlib.suppress(InfeasibleError):
                _refuse_enforced(request, candidates)
        raise
    matching = matching_devices(request, candidates)
    possible_devices = devices_of_candidates(matching)
    by_gpu = group_by_gpu(possible_devices)
    if len(matching) >= len(request.devices) and place(request, by_gpu, candidates):
        return
    if len(matching) < request.number and candidates.waiting_for(request):
        return
    if not request.allow_unlimited:
        _refuse_enforced(request, candidates)
    number = len(matching)
    places = _describe_places(possible_devices, across=request.across)
    there = f"{count(number, 'such device')} on {places}" if number else "no such devices"
    hint = "see: yunion-mps list" if candidates.devices else "see why: yunion-mps status"
    if not by_gpu and candidates.usable_pools(request):
        hint = "request an amount of memory instead of devices, such as 2 GiB"
    if request.memory_mib:
        sizes = [_describe_maximum(candidate) for candidate in pools]
        there = ", ".join(sizes) or "neither a GPU whose memory is leased in units nor a slice of that size"
        hint = _hint_for_memory(request, candidates, pools)
    raise InfeasibleError(f"{request} can never be allocated: the host has {there}", hint)


def _refuse_enforced(request: LeaseRequest, candidates: Candidates) -> NoReturn:
    """Refuse a request that GPUs with enforced budgets cannot satisfy.

    Raises HostError if those without could, InfeasibleError if not even they could.
    """
    anywhere = request._replace(allow_unlimited=True)
    _refuse_unsuitable(anywhere, candidates)
    hint = "to use it anyway, set allow_unlimited"
    raise HostError(_describe_unenforced(anywhere, candidates), hint, BUDGET_NOT_ENFORCED)


def _describe_places(devices: Sequence[Device], *, across: bool) -> str:
    """Return the number of GPUs of the devices.

    Each MIG instance counts by itself unless different GPUs are requested.
    """
    if across:
        return count(len(of_different_gpus(devices)), "GPU")
    gpus: set[str] = set()
    instances: set[str] = set()
    for device in devices:
        if device.is_on_instance:
            instances.add(device.gpu_uuid)
        else:
            gpus.add(device.gpu_uuid)
    parts = []
    if gpus:
        parts.append(count(len(gpus), "GPU"))
    if instances:
        parts.append(count(len(instances), "MIG instance"))
    return " and ".join(parts)


def _describe_maximum(candidate: PoolCandidate) -> str:
    pool = candidate.pool
    threads = f" and {thread_tenths(pool) / 10:g} % of the threads" if pool.thread_percentage else ""
    return f"at most {pool.memory_mib} MiB{threads} of GPU {candidate.gpu}"


def _hint_for_memory(request: LeaseRequest, candidates: Candidates, pools: Sequence[PoolCandidate]) -> str:
    """Say what would satisfy an infeasible request for memory: equal devices, or another configuration."""
    divide = "divide a GPU by memory_unit or slices: man yunion-mps-host_container_device.yml"
    if request.thread_percentage and not pools and candidates.usable_pools(request):
        return "omit the percentage, or add thread_percentage to the entry of the GPU that has memory_unit"
    fits = list(filter(request.matches, devices_of_candidates(candidates.devices)))
    if len(fits) >= request.number:
        least = min(fits, key=lambda device: (not device.budget_enforced, device.memory_limit_mib or 0))
        example = f"{least.addr} with {least.memory_limit_mib} MiB"
        return f"request a device without an amount of memory, such as {example}; or {divide}"
    if any(candidate.pool.thread_percentage for candidate in pools):
        return "request less memory, or a lower percentage"
    return "request less memory" if pools else divide


def _refuse_uncombinable(request: LeaseRequest, candidates: Candidates) -> None:
    """Raise InfeasibleError if the devices that could satisfy the request can never be combined."""
    groups: Iterable[tuple[Device, ...]] = smallest_groups(request, candidates)
    if request.devices:
        named = tuple(filter(request.matches, devices_of_candidates(candidates.devices)))
        groups = [named] if named else []
    refusal = None
    for group in groups:
        try:
            candidates.environment(request, group)
        except InfeasibleError as error:
            refusal = error
        else:
            return
    if refusal:
        raise refusal


def satisfying_domains(request: LeaseRequest, candidates: Candidates) -> set[str]:
    """Return the names of the domains that could satisfy the request now if nothing of them were leased."""
    devices: dict[str, list[Candidate]] = {}
    pools: dict[str, list[PoolCandidate]] = {}
    for candidate in candidates.devices:
        devices.setdefault(candidate.device.domain, []).append(candidate)
    for pool in candidates.pools:
        pools.setdefault(pool.pool.domain, []).append(pool)
    unleased = Allocator(Ledger())
    satisfying: set[str] = set()
    for name in {*devices, *pools}:
        of_domain = candidates._replace(devices=devices.get(name, []), pools=pools.get(name, []))
        with contextlib.suppress(NothingFreeError):
            unleased.choose(request, of_domain)
            satisfying.add(name)
    return satisfying


class Allocator:
    """Chooses devices for requests, given the leases of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def choose(
        self,
        request: LeaseRequest,
        candidates: Candidates,
        reserved: Reservation = NO_RESERVATION,
    ) -> tuple[Device, ...]:
        """Return the devices that satisfy the request now.

        Raises NothingFreeError with the reason if there are none.
        """
        created = self.from_pools(request, candidates.matching_pools(request), candidates, reserved)
        if created:
            return created
        matching = matching_devices(request, candidates)
        by_gpu = self._free_by_gpu(matching, reserved)
        if request.devices:
            free = _flat(by_gpu.values())
            placed = tuple(free) if len(free) == len(matching) else ()
        else:
            used = self.ledger.used_shares(devices_of_candidates(candidates.devices))
            placed = place(request, by_gpu, candidates, used)
        if placed:
            return placed
        refusal = self._why_not(request, candidates, matching, by_gpu, reserved)
        raise NothingFreeError(refusal.message, refusal.hint, refusal.code)

    def reserve(
        self, request: LeaseRequest, candidates: Candidates, reserved: Reservation = NO_RESERVATION
    ) -> Reservation:
        """Return the free devices or memory to reserve for a request that does not fit yet."""
        if request.memory_mib:
            return self._reserve_memory(request, candidates, reserved)
        by_gpu = self._free_by_gpu(matching_devices(request, candidates), reserved)
        most_first = sorted(by_gpu.values(), key=len, reverse=True)
        if request.devices:
            devices = _flat(most_first)
        elif request.across:
            devices = largest_group_across(request, candidates, most_first)
        else:
            devices = most_first[0][: request.number] if most_first else []
        return no_reservation()._replace(devices={device.id for device in devices})

    def _reserve_memory(
        self, request: LeaseRequest, candidates: Candidates, reserved: Reservation
    ) -> Reservation:
        """Return what the pools that come closest have of the memory and threads, if memory is left."""
        gpus = request.number if request.across else 1
        devices_each = 1 if request.across else request.number
        needed_mib = devices_each * request.memory_mib
        closest = []
        for candidate in candidates.matching_pools(request):
            free_mib = 0 if candidate.reason else self._left_mib(candidate, reserved)
            if free_mib <= 0:
                continue
            needed_tenths = devices_each * _needs_tenths(request, candidate)
            free_tenths = min(needed_tenths, self._left_tenths(candidate, reserved))
            missing = max(0, 1 - free_mib / needed_mib)
            if needed_tenths:
                missing += 1 - free_tenths / needed_tenths
            closest.append((missing, -free_mib, candidate.pool.gpu_uuid, free_tenths))
        reservation = no_reservation()
        for _, negative_mib, gpu, free_tenths in sorted(closest)[:gpus]:
            reservation.memory_mib[gpu] = min(-negative_mib, needed_mib)
            reservation.thread_tenths[gpu] = free_tenths
        return reservation

    def from_pools(
        self,
        request: LeaseRequest,
        pools: Sequence[PoolCandidate],
        candidates: Candidates,
        reserved: Reservation = NO_RESERVATION,
    ) -> tuple[Device, ...]:
        """Return devices of the requested memory, none if there is not enough.

        Binpack prefers the pools that have the least left. GPUs that enforce budgets are preferred to those
        that do not.
        """
        gpus = request.number if request.across else 1
        devices_each = 1 if request.across else request.number
        fits = self._fitting_pools(request, pools, devices_each, reserved)
        if len(fits) < gpus:
            return ()
        sign = -1 if request.placement == SPREAD else 1
        unenforced = candidates.unenforced
        fits.sort(key=lambda fit: (fit.candidate.pool.gpu_uuid in unenforced, sign * fit.left_mib))
        devices: list[Device] = []
        for fit in fits[:gpus]:
            devices += self._create_devices(fit.candidate, fit.units, devices_each)
        if not request.thread_percentage:
            return tuple(devices)
        percentage = float(request.thread_percentage)
        return tuple(device._replace(thread_percentage=percentage) for device in devices)

    def _fitting_pools(
        self,
        request: LeaseRequest,
        pools: Iterable[PoolCandidate],
        devices_each: int,
        reserved: Reservation,
    ) -> list[_PoolFit]:
        """Return the pools, among those that serve, that have room for so many devices each."""
        fits: list[_PoolFit] = []
        for candidate in pools:
            units = units_for(candidate.pool, request.memory_mib)
            mib = units * candidate.pool.unit_mib
            others_mib = (devices_each - 1) * (mib + candidate.pool.reserve_mib)
            tenths = devices_each * _needs_tenths(request, candidate)
            if candidate.reason or tenths > self._left_tenths(candidate, reserved):
                continue
            if mib <= self._left_mib(candidate, reserved, others_mib, devices_each - 1):
                fits.append(_PoolFit(candidate, units, self._left_mib(candidate, reserved)))
        return fits

    def _create_devices(self, candidate: PoolCandidate, units: int, number: int) -> list[Device]:
        """Return `number` devices of the pool, in slots that no lease has."""
        devices: list[Device] = []
        slot = 0
        while len(devices) < number:
            device = candidate.make(units, slot)
            if device.id not in self.ledger.lease_of:
                devices.append(device)
            slot += 1
        return devices

    def _left_mib(
        self, candidate: PoolCandidate, reserved: Reservation, others_mib: int = 0, others: int = 0
    ) -> int:
        reserved_mib = reserved.memory_mib[candidate.pool.gpu_uuid] + others_mib
        return self.ledger.free_mib(candidate.pool, reserved_mib, others)

    def _left_tenths(self, candidate: PoolCandidate, reserved: Reservation) -> int:
        pool = candidate.pool
        return self.ledger.free_tenths(pool, reserved.thread_tenths[pool.gpu_uuid])

    def _free_by_gpu(self, matching: Iterable[Candidate], reserved: Reservation) -> dict[str, list[Device]]:
        served = [candidate.device for candidate in matching if not candidate.reason]
        return self.ledger.free_by_gpu(served, reserved.devices)

    def _describe_left(self, candidate: PoolCandidate, reserved: Reservation) -> str:
        text = f"{self._left_mib(candidate, reserved)} MiB"
        if candidate.pool.thread_percentage:
            text += f" and {self._left_tenths(candidate, reserved) / 10:g} % of the threads"
        return f"{text} free on GPU {candidate.gpu}"

    def _why_not(
        self,
        request: LeaseRequest,
        candidates: Candidates,
        matching: Sequence[Candidate],
        by_gpu: Mapping[str, Sequence[Device]],
        reserved: Reservation,
    ) -> _Refusal:
        """Return why the request gets nothing now."""
        pools = candidates.matching_pools(request)
        if not matching and not pools:
            return _nothing_matches(request, candidates)
        unavailable = _unavailable(matching, pools)
        parts = [self._describe_left(pool, reserved) for pool in pools if not pool.reason]
        parts += self._describe_leased(candidates, matching)
        ids = {candidate.device.id for candidate in matching}
        if reserved.devices & ids:
            parts.append(f"{len(reserved.devices & ids)} reserved for earlier requests")
        if by_gpu:
            numbers = [len(devices) for devices in by_gpu.values()]
            parts.append(f"{sum(numbers)} free, at most {max(numbers)} on one GPU")
        parts += _describe_unavailable(unavailable)
        message = f"{request} cannot be allocated now: {'; '.join(parts)}"
        if len(unavailable) < len(matching) + len(pools):
            return _Refusal(message, "see who holds the devices: yunion-mps who", NOTHING_FREE)
        code = _common_code({item.reason.code for item in unavailable})
        if code == NOTHING_FREE:
            return _Refusal(message, "see: yunion-mps status", code)
        first = next(item for item in unavailable if item.reason.code == code)
        domain = candidates.domains.get(first.domain)
        log_directory = domain.log_directory if domain else ""
        return _Refusal(message, hint_of(code, gpu=first.gpu, log_directory=log_directory), code)

    def _describe_leased(self, candidates: Candidates, matching: Iterable[Candidate]) -> list[str]:
        """Return how many of the matching devices are leased or pending."""
        ids: set[str] = set()
        able: set[str] = set()
        for candidate in matching:
            ids.add(candidate.device.id)
            if not candidate.reason or candidate.reason.code == OTHER_USER:
                able.add(candidate.device.id)
        used = able.intersection(self.ledger.lease_of)
        pending_parts: list[str] = []
        for wait in self.ledger.lease_waits(devices_of_candidates(candidates.devices)).values():
            pending = able & wait.pending
            if pending:
                used -= pending
                pending_parts.append(f"{len(pending)} pending ({wait.reason})")
        parts = [f"{len(used)} of {len(ids)} leased"] if used else []
        return parts + pending_parts[:_MAX_NAMED]


def _flat(groups: Iterable[Sequence[Device]]) -> list[Device]:
    devices: list[Device] = []
    for group in groups:
        devices += group
    return devices


def _nothing_matches(request: LeaseRequest, candidates: Candidates) -> _Refusal:
    """Return why nothing that exists now matches the request."""
    waiting = candidates.waiting_for(request)
    if waiting is None:
        what = f"{request} cannot be allocated: no such device exists"
        return _Refusal(what, "see: yunion-mps list", NOTHING_FREE)
    reason = waiting.reason
    named = f"GPU {waiting.gpu}: {reason}" if waiting.gpu else reason
    what = f"{request} cannot be allocated now: {named}"
    return _Refusal(what, hint_of(reason.code, gpu=waiting.gpu), reason.code)


def _unavailable(devices: Iterable[Candidate], pools: Iterable[PoolCandidate]) -> list[_Unavailable]:
    """Return those that are not served, and why."""
    unavailable: list[_Unavailable] = []
    for candidate in devices:
        if candidate.reason:
            device = candidate.device
            unavailable.append(_Unavailable(candidate.reason, device.gpu_address, device.domain))
    for pool in pools:
        if pool.reason:
            unavailable.append(_Unavailable(pool.reason, pool.gpu, pool.pool.domain))
    return unavailable


def _describe_unavailable(unavailable: Sequence[_Unavailable]) -> list[str]:
    """Return the most frequent reasons, each with its GPUs."""
    parts: list[str] = []
    for reason, number in Counter(item.reason for item in unavailable).most_common(_MAX_NAMED):
        gpus = list(dict.fromkeys(item.gpu for item in unavailable if item.reason == reason))
        where = f"GPU {', '.join(gpus[:_MAX_NAMED])}"
        if len(gpus) > _MAX_NAMED:
            where += f" and {len(gpus) - _MAX_NAMED} more"
        where += f": {reason}"
        parts.append(where if reason.code == OTHER_USER else f"{number} unavailable ({where})")
    return parts


def _common_code(codes: set[str]) -> str:
    """Return the code of a refusal if all devices are unavailable for reasons with these codes.

    If some serve another user and servers of the others do not start, the request most likely waits for the
    user.
    """
    if len(codes) == 1 and not codes & TEMPORARY:
        return next(iter(codes))
    if codes == {OTHER_USER, SERVER_START_FAILED}:
        return OTHER_USER
    return NOTHING_FREE


def _needs_tenths(request: LeaseRequest, candidate: PoolCandidate) -> int:
    """Return what a device of the pool takes of its threads, in tenths of a percent.

    0 if they follow the memory and are not counted.
    """
    default = candidate.pool.thread_percentage
    return 10 * (request.thread_percentage or default) if default else 0


def _describe_unenforced(request: LeaseRequest, candidates: Candidates) -> str:
    uuids = set(group_by_gpu(devices_of_candidates(matching_devices(request, candidates))))
    uuids.update(candidate.pool.gpu_uuid for candidate in candidates.usable_pools(request))
    by_cause: dict[str, list[str]] = {}
    for uuid, unenforced in candidates.unenforced.items():
        if uuid in uuids:
            by_cause.setdefault(unenforced.why, []).append(unenforced.gpu)
    which = " and ".join(gpus_that_are(why, names) for why, names in by_cause.items())
    return f"no budget is enforced on {which}: a command could use all of the memory"
