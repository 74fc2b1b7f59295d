"""Why a request gets nothing: now, made of its match, or ever, made of its selection. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from yunion_mps.core import reasons
from yunion_mps.core.errors import HostError, InfeasibleError, NothingFreeError
from yunion_mps.core.reasons import (
    BUDGET_NOT_ENFORCED,
    NOTHING_FREE,
    OTHER_USER,
    SERVER_START_FAILED,
    TEMPORARY,
    hint_of,
)
from yunion_mps.core.text import count, gpus_that_are
from yunion_mps.leases.ledger import of_different_gpus
from yunion_mps.leases.match import Match, PoolRoom, Selection, Unserved, count_held, match_if_unused, select
from yunion_mps.leases.placement import choose_existing, choose_from_pools
from yunion_mps.leases.request import PoolCandidate, devices_of_candidates
from yunion_mps.planning.division import thread_tenths

#: The most GPUs, and the most reasons, that an error names.
_MAX_NAMED = 4

# -- not now


def why_waiting(match: Match) -> NothingFreeError:
    """Return why a request gets nothing of its match, as an error."""
    selection = match.selection
    if selection.is_empty:
        return _nothing_matches(selection)
    held = count_held(match)
    number_fitting = len(selection.devices)
    parts = [_describe_left(room) for room in match.rooms]
    if held.leased:
        parts.append(f"{held.leased} of {number_fitting} leased")
    for number, reason in held.pending[:_MAX_NAMED]:
        parts.append(f"{number} pending ({reason})")
    if held.reserved:
        parts.append(f"{held.reserved} reserved for earlier requests")
    if match.free:
        numbers = [len(devices) for devices in match.free.values()]
        parts.append(f"{sum(numbers)} free, at most {max(numbers)} on one GPU")
    parts += _describe_unserved(held.unserved)
    message = f"{selection.request} cannot be allocated now: {'; '.join(parts)}"
    if len(held.unserved) < number_fitting + len(selection.pools):
        return NothingFreeError(message, "see who holds the devices: yunion-mps who", NOTHING_FREE)
    code = _common_code({unserved.reason.code for unserved in held.unserved})
    if code == NOTHING_FREE:
        return NothingFreeError(message, "see: yunion-mps status", code)
    first = next(unserved for unserved in held.unserved if unserved.reason.code == code)
    domain = selection.candidates.domains.get(first.domain)
    log_directory = domain.log_directory if domain else ""
    return NothingFreeError(message, hint_of(code, gpu=first.gpu, log_directory=log_directory), code)


def _nothing_matches(selection: Selection) -> NothingFreeError:
    """Return why nothing that exists now fits the request."""
    request = selection.request
    waiting = selection.candidates.waiting_for(request)
    if waiting is None:
        message = f"{request} cannot be allocated: no such device exists"
        return NothingFreeError(message, "see: yunion-mps list", NOTHING_FREE)
    reason = waiting.reason
    named = f"GPU {waiting.gpu}: {reason}" if waiting.gpu else reason
    message = f"{request} cannot be allocated now: {named}"
    return NothingFreeError(message, hint_of(reason.code, gpu=waiting.gpu), reason.code)


def _describe_left(room: PoolRoom) -> str:
    text = f"{room.left_mib} MiB"
    if room.candidate.pool.thread_percentage:
        text += f" and {room.left.thread_tenths / 10:g} % of the threads"
    text += f" free on GPU {room.candidate.gpu}"
    if room.left_mib and room.left.clients < room.needed.clients:
        text += f" for {count(room.left.clients, 'client')}"
    if room.reserved.memory_mib:
        text += f" ({room.reserved.memory_mib} MiB reserved for earlier requests)"
    return text


def _describe_unserved(unserved: Sequence[Unserved]) -> list[str]:
    """Return the most frequent reasons, each with its GPUs."""
    parts: list[str] = []
    for reason, number in Counter(item.reason for item in unserved).most_common(_MAX_NAMED):
        gpus = list(dict.fromkeys(item.gpu for item in unserved if item.reason == reason))
        place = f"GPU {', '.join(gpus[:_MAX_NAMED])}"
        if len(gpus) > _MAX_NAMED:
            place += f" and {len(gpus) - _MAX_NAMED} more"
        place += f": {reason}"
        parts.append(place if reason.code == OTHER_USER else f"{number} unavailable ({place})")
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


# -- not ever


def refuse_infeasible(selection: Selection) -> None:
    """Raise InfeasibleError if the request could not be satisfied if everything were free and served.

    That includes devices that cannot be combined into one budget, or that are reserved. Raises HostError if
    only GPUs without enforced budgets could satisfy it.
    """
    refusal = _why_infeasible(selection)
    if refusal is None:
        return
    request = selection.request
    candidates = selection.candidates
    if_unreserved = _why_infeasible(select(request, candidates._replace(reserved={}), selection.divided))
    if if_unreserved and if_unreserved.code != BUDGET_NOT_ENFORCED:
        raise if_unreserved
    if refusal.code == BUDGET_NOT_ENFORCED:  # GPUs that are not reserved could satisfy it
        raise if_unreserved or refusal
    uses = ", ".join(sorted(set(candidates.reserved.values())))
    message = f"{request} cannot be allocated: reserved for {uses}"
    raise InfeasibleError(message, hint_of(reasons.RESERVED), reasons.RESERVED)


def _why_infeasible(selection: Selection) -> InfeasibleError | HostError | None:
    """Return why the request can never be satisfied; None if it can.

    A HostError says that only GPUs without enforced budgets could satisfy it.
    """
    if _is_feasible(selection):
        return None
    uncombinable = _why_uncombinable(selection)
    if selection.request.allow_unlimited:
        return uncombinable or _never(selection)
    anywhere = select(
        selection.request._replace(allow_unlimited=True), selection.candidates, selection.divided
    )
    if _is_feasible(anywhere):
        hint = "to use it anyway, set allow_unlimited"
        return HostError(_describe_unenforced(anywhere), hint, BUDGET_NOT_ENFORCED)
    return uncombinable or _why_uncombinable(anywhere) or _never(anywhere)


def _is_feasible(selection: Selection) -> bool:
    unused = match_if_unused(selection)
    if choose_from_pools(unused):
        return True
    if _why_uncombinable(selection):
        return False
    request = selection.request
    if len(selection.devices) >= len(request.devices) and choose_existing(unused):
        return True
    is_waiting = selection.candidates.waiting_for(request) is not None
    return is_waiting and len(selection.devices) < request.number


def _why_uncombinable(selection: Selection) -> InfeasibleError | None:
    """Return why the devices that fit the request can never be combined; None if some can."""
    request = selection.request
    candidates = selection.candidates
    groups = selection.groups
    if request.devices:
        named = list(filter(request.matches, devices_of_candidates(candidates.devices)))
        groups = [named] if named else []
    refusal = None
    for group in groups:
        try:
            candidates.environment(request, group)
        except InfeasibleError as error:
            refusal = error
        else:
            return None
    return refusal


def _never(selection: Selection) -> InfeasibleError:
    """Return the error that says what there is instead of what was requested."""
    request = selection.request
    number = len(selection.devices)
    existing = "no such devices"
    if number:
        existing = f"{count(number, 'such device')} on {_describe_places(selection)}"
    hint = "see: yunion-mps list" if selection.candidates.devices else "see why: yunion-mps status"
    if not number and selection.candidates.usable_pools(request):
        hint = "request an amount of memory instead of devices, such as 2 GiB"
    if request.memory_mib:
        sizes = [_describe_maximum(candidate) for candidate in selection.pools]
        existing = ", ".join(sizes)
        if not sizes:
            existing = "neither a GPU whose memory is leased in units nor a slice of that size"
        hint = _hint_for_memory(selection)
    return InfeasibleError(f"{request} can never be allocated: the host has {existing}", hint)


def _describe_places(selection: Selection) -> str:
    """Return the number of GPUs of the devices.

    Each MIG instance counts by itself unless different GPUs are requested.
    """
    devices = selection.devices
    if selection.request.across:
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


def _hint_for_memory(selection: Selection) -> str:
    """Say what would satisfy an infeasible request for memory: equal devices, or another configuration."""
    request = selection.request
    pools = selection.pools
    divide = "divide a GPU by memory_unit or slices: man yunion-mps-host_container_device.yml"
    if request.thread_percentage and not pools and selection.candidates.usable_pools(request):
        return "omit the percentage, or add thread_percentage to the entry of the GPU that has memory_unit"
    fits = list(filter(request.matches, devices_of_candidates(selection.candidates.devices)))
    if len(fits) >= request.number:
        least = min(fits, key=lambda device: (not device.budget_enforced, device.memory_limit_mib or 0))
        example = f"{least.addr} with {least.memory_limit_mib} MiB"
        return f"request a device without an amount of memory, such as {example}; or {divide}"
    if any(candidate.pool.thread_percentage for candidate in pools):
        return "request less memory, or a lower percentage"
    return "request less memory" if pools else divide


def _describe_unenforced(selection: Selection) -> str:
    uuids = {gpu.gpu_uuid for gpu in selection.gpus}
    for candidate in selection.candidates.usable_pools(selection.request):
        uuids.add(candidate.pool.gpu_uuid)
    by_cause: dict[str, list[str]] = {}
    for uuid, unenforced in selection.candidates.unenforced.items():
        if uuid in uuids:
            by_cause.setdefault(unenforced.why, []).append(unenforced.gpu)
    described_gpus = " and ".join(gpus_that_are(why, names) for why, names in by_cause.items())
    return f"no budget is enforced on {described_gpus}: a command could use all of the memory"
