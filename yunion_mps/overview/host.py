"""The host at one moment: the daemon's answers, what follows from them, and the web page's contents. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.overview.problems import folded, problems_of, with_hints
from yunion_mps.service.holdings import (
    ID_LENGTH,
    Holding,
    holdings,
    in_container,
    is_memory_unknown,
    memory_by_gpu,
)

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, QueuedRequest, Status, StatusProblem

Json = dict[str, Any]

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
    """The answers, and who has what according to them; the MiB that processes use are by GPU address."""

    answers: Answers
    holdings: list[Holding]
    problems: list[StatusProblem]
    memory_by_gpu: dict[str, int]

    @classmethod
    def of(cls, answers: Answers) -> HostOverview:
        clients = answers.clients["clients"]
        held = holdings(answers.devices, answers.leases, clients)
        return cls(answers, held, problems_of(answers.status), memory_by_gpu(clients))


def page(host: HostOverview) -> Json:
    """Return the contents of the web page, in a form that stays small with thousands of devices.

    A part of a GPU has no fields for unknown values.
    """
    answers, status = host.answers, host.answers.status
    return {
        "state": status["state"],
        "version": status["version"],
        "started": status["started"],
        "driver": status["driver"],
        "devices": status["devices"],
        "leases": len(answers.leases),
        "clients": len(answers.clients["clients"]),
        "problems": [
            {"title": problem.title, "text": problem.text, "hint": hint}
            for problem, hint in with_hints(folded(host.problems))
        ],
        "wrong": len(host.problems),
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
        "state": holding.state,
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


def _cut(command: str) -> str:
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 1]}…"
