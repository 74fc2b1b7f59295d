"""The host at one moment: the daemon's answers, what follows from them, and what the web page shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.enums import PENDING, UNAVAILABLE
from yunion_mps.overview.findings import PROBLEM, HostFinding, all_findings, folded, with_hints
from yunion_mps.overview.holdings import ID_LENGTH, Holding, holdings, in_container, memory_by_gpu

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, QueuedRequest, Status

Json = dict[str, Any]

#: The states of a part of a GPU.
FREE, NO_ROOM, IDLE, IN_USE = "free", "no room", "idle", "in use"
OVER, OUTSIDE_MPS, NO_DEVICE = "over budget", "outside MPS", "no device"
#: The states of a lease. It has the first of those that its devices have.
_LEASE_STATES = (UNAVAILABLE, OVER, PENDING, IN_USE, IDLE)

_COMMAND_LENGTH = 200
_MAX_WAITING = 5


class Answers(NamedTuple):
    """The daemon's answers of one moment."""

    status: Status
    gpus: Sequence[Gpu]
    devices: Sequence[Device]
    leases: Sequence[LeaseRecord]
    waiting: Sequence[QueuedRequest]
    clients: ClientList


class HostOverview(NamedTuple):
    """What follows from the answers; `state` is the daemon's, but `degraded` if `ready` despite a problem."""

    answers: Answers
    holdings: list[Holding]
    findings: list[HostFinding]
    state: str
    memory_by_gpu: dict[str, int]

    @classmethod
    def of(cls, answers: Answers) -> HostOverview:
        status, clients = answers.status, answers.clients["clients"]
        found = holdings(answers.devices, answers.leases, clients)
        wrong = all_findings(status, answers.gpus, answers.devices, answers.leases, found, answers.clients)
        has_problem = any(one.kind == PROBLEM for one in wrong)
        state = "degraded" if has_problem and status["state"] == "ready" else str(status["state"])
        return cls(answers, found, wrong, state, memory_by_gpu(clients))

    @property
    def devices(self) -> dict[str, int]:
        """The numbers of devices, those in use and those that are free among them."""
        in_use = sum(len(one.devices) for one in self.holdings if one.in_use)
        free = sum(one.is_spare for one in self.holdings)
        counts: Mapping[str, Any] = self.answers.status["devices"]
        return {**counts, "used": in_use, "free": free}


def page(host: HostOverview) -> Json:
    """What the web page shows, as small as thousands of devices require.

    What is wrong comes first, then the GPUs and every part of them with its holder; a part has no fields for
    what is not known of it.
    """
    answers = host.answers
    return {
        "state": host.state,
        "version": answers.status["version"],
        "started": answers.status["started"],
        "driver": answers.status["driver"],
        "devices": host.devices,
        "leases": len(answers.leases),
        "clients": len(answers.clients["clients"]),
        "findings": [
            {"kind": one.kind, "what": one.what, "hint": hint}
            for one, hint in with_hints(folded(host.findings))
        ],
        "wrong": len(host.findings),
        "errors": answers.clients["errors"],
        "gpus": [_gpu(gpu, host.memory_by_gpu.get(gpu["addr"], 0)) for gpu in answers.gpus],
        "parts": [_part(one) for one in host.holdings],
        "waiting": [
            {
                **{field: one[field] for field in ("user", "wants", "since")},
                "command": _cut(in_container(one["name"] or one["container"], one["command"] or "")),
            }
            for one in answers.waiting[:_MAX_WAITING]
        ],
        "queued": len(answers.waiting),
    }


def _gpu(gpu: Gpu, used_mib: int) -> Json:
    names = (
        "addr", "state", "reason", "memory_mib", "memory_free_mib", "budget_enforced",
        "utilization", "temperature_c", "power_w", "power_limit_w",
    )  # fmt: skip
    shown: Mapping[str, object] = gpu
    name = (gpu["name"] or "").removeprefix("NVIDIA ")
    return {**{field: shown[field] for field in names}, "name": name, "memory_used_mib": used_mib}


def _part(one: Holding) -> Json:
    part: Json = {
        "gpu": one.gpu,
        "devices": list(one.devices),
        "state": state_of(one),
        "budget": one.budget_mib,
    }
    if not one.in_use:
        return part
    part.update(
        used=one.used_mib, peak=one.peak_mib, sm=one.sm, user=one.user, since=one.since, threads=one.threads
    )
    if not one.available and one.devices:
        part["unavailable"] = True
    if one.lease:
        part["lease"] = one.lease["id"][:ID_LENGTH]
    part["command"] = _cut(one.label)
    part["pids"] = [process.pid for process in one.holders if process.pid is not None]
    return {field: value for field, value in part.items() if value is not None}


def state_of(one: Holding) -> str:
    """One of the states above."""
    if one.outside_mps:
        return OUTSIDE_MPS
    if not one.devices:
        return NO_DEVICE
    if one.over_mib:
        return OVER
    if one.in_use:
        return IN_USE if one.processes else IDLE
    return FREE if one.free else NO_ROOM if one.pending else UNAVAILABLE


def lease_states(held: Iterable[Holding]) -> dict[str, str]:
    """The state of each lease, by its id."""
    found: dict[str, set[str]] = {}
    for one in held:
        if one.lease:
            states = {state_of(one)} if one.available else {UNAVAILABLE}
            found.setdefault(one.lease["id"], set()).update(states, {PENDING} if one.pending else ())
    return {lease: min(states, key=_LEASE_STATES.index) for lease, states in found.items()}


def _cut(command: str) -> str:
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 1]}…"
