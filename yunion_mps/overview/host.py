"""The host at one moment: the daemon's answers, what follows from them, and what the web page shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.overview.findings import PROBLEM, HostFinding, all_findings, folded
from yunion_mps.overview.holdings import ID_LENGTH, Holding, ProcessUse, holdings, memory_by_gpu

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, QueuedRequest, Status

Json = dict[str, Any]

#: The states of a part of a GPU.
FREE, NO_ROOM, UNAVAILABLE, IDLE, IN_USE = "free", "no room", "unavailable", "idle", "in use"
OVER, OUTSIDE_MPS, NO_DEVICE = "over budget", "outside MPS", "no device"

_COMMAND_LENGTH = 200


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
        wrong = all_findings(status, answers.gpus, answers.leases, found, answers.clients)
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
        "findings": [one._asdict() for one in folded(host.findings)],
        "wrong": len(host.findings),
        "errors": answers.clients["errors"],
        "gpus": [_gpu(gpu, host.memory_by_gpu.get(gpu["addr"], 0)) for gpu in answers.gpus],
        "parts": [_part(one) for one in host.holdings],
        "waiting": [
            {**{field: one[field] for field in ("user", "wants", "since")}, "command": _cut(one["command"])}
            for one in answers.waiting
        ],
    }


def _gpu(gpu: Gpu, used_mib: int) -> Json:
    names = (
        "addr", "name", "state", "reason", "memory_total", "memory_free", "budget_enforced",
        "utilization", "temperature_c", "power_w", "power_limit_w",
    )  # fmt: skip
    shown: Mapping[str, object] = gpu
    return {**{name: shown[name] for name in names}, "memory_used": used_mib}


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
    containers = [process.container for process in one.processes]
    if one.lease:
        part.update(lease=one.lease["id"][:ID_LENGTH], name=one.lease["name"])
        part["command"] = _cut(one.lease["command"])
        containers.append(one.lease["container"])
    part["container"] = next(filter(None, containers), None)
    part["processes"] = [_process(process) for process in one.processes]
    return {field: value for field, value in part.items() if value is not None}


def _process(process: ProcessUse) -> Json:
    return {
        "pid": process.pid,
        "user": process.user,
        "command": _cut(process.command),
        "memory": process.memory_mib,
    }


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


def _cut(command: str | None) -> str | None:
    if command is None or len(command) <= _COMMAND_LENGTH:
        return command
    return f"{command[: _COMMAND_LENGTH - 1]}…"
