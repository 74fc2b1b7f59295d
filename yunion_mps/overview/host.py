"""The host at one moment: the daemon's answers, what follows from them, and the web page's contents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.enums import PENDING, UNAVAILABLE
from yunion_mps.overview.findings import PROBLEM, HostFinding, all_findings, folded, with_hints
from yunion_mps.overview.holdings import (
    ID_LENGTH,
    Holding,
    holdings,
    in_container,
    is_memory_unknown,
    memory_by_gpu,
)

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
    status: Status
    gpus: Sequence[Gpu]
    devices: Sequence[Device]
    leases: Sequence[LeaseRecord]
    waiting: Sequence[QueuedRequest]
    clients: ClientList


class HostOverview(NamedTuple):
    """What follows from the answers; `state` is the daemon's, or `degraded` if it is ready with a problem."""

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
        has_problem = any(finding.kind == PROBLEM for finding in wrong)
        state = "degraded" if has_problem and status["state"] == "ready" else str(status["state"])
        return cls(answers, found, wrong, state, memory_by_gpu(clients))

    @property
    def devices(self) -> dict[str, int]:
        """The daemon's counts, but used and free as the holdings are, whose clients may be newer."""
        in_use = sum(len(holding.devices) for holding in self.holdings if holding.in_use)
        free = sum(holding.is_spare for holding in self.holdings)
        counts: Mapping[str, Any] = self.answers.status["devices"]
        return {**counts, "used": in_use, "free": free}


def page(host: HostOverview) -> Json:
    """Return the contents of the web page, in a form that stays small with thousands of devices.

    A part of a GPU has no fields for unknown values.
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
            {"kind": finding.kind, "what": finding.what, "hint": hint}
            for finding, hint in with_hints(folded(host.findings))
        ],
        "wrong": len(host.findings),
        "errors": answers.clients["errors"],
        "gpus": [_gpu(gpu, host.memory_by_gpu.get(gpu["addr"], 0)) for gpu in answers.gpus],
        "parts": [_part(holding) for holding in host.holdings],
        "waiting": [
            {
                **{field: request[field] for field in ("user", "wants", "since")},
                "command": _cut(
                    in_container(request["name"] or request["container"], request["command"] or "")
                ),
            }
            for request in answers.waiting[:_MAX_WAITING]
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
    known_mib = None if is_memory_unknown(gpu) else used_mib
    return {**{field: shown[field] for field in names}, "name": name, "memory_used_mib": known_mib}


def _part(holding: Holding) -> Json:
    part: Json = {
        "gpu": holding.gpu,
        "devices": list(holding.devices),
        "state": state_of(holding),
        "budget": holding.budget_mib,
    }
    if not holding.in_use:
        return part
    part.update(
        used=holding.known_mib,
        peak=holding.peak_mib,
        sm=holding.sm,
        user=holding.user,
        since=holding.since,
        threads=holding.threads,
    )
    if not holding.available and holding.devices:
        part["unavailable"] = True
    if holding.lease:
        part["lease"] = holding.lease["id"][:ID_LENGTH]
    part["command"] = _cut(holding.label)
    part["pids"] = [process.pid for process in holding.holders if process.pid is not None]
    return {field: value for field, value in part.items() if value is not None}


def state_of(holding: Holding) -> str:
    if holding.outside_mps:
        return OUTSIDE_MPS
    if not holding.devices:
        return NO_DEVICE
    if holding.over_mib:
        return OVER
    if holding.in_use:
        return IN_USE if holding.processes else IDLE
    return FREE if holding.free else NO_ROOM if holding.pending else UNAVAILABLE


def lease_states(held: Iterable[Holding]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for one in held:
        if one.lease:
            states = {state_of(one)} if one.available else {UNAVAILABLE}
            found.setdefault(one.lease["id"], set()).update(states, {PENDING} if one.pending else ())
    return {lease: min(states, key=_LEASE_STATES.index) for lease, states in found.items()}


def _cut(command: str) -> str:
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 1]}…"
