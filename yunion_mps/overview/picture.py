"""All that the web page shows of a moment, as small as thousands of devices ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from yunion_mps.overview.findings import everything, folded, overall_state
from yunion_mps.overview.uses import Clients, Holding, Process, holdings, memory_by_gpu

Json = dict[str, Any]

#: What a part of a GPU is at.
FREE, NO_ROOM, UNAVAILABLE, IDLE, IN_USE = "free", "no room", "unavailable", "idle", "in use"
OVER, PAST_MPS, NO_DEVICE = "over budget", "past MPS", "no device"

_ID_LENGTH = 8
_COMMAND_LENGTH = 200


class Told(NamedTuple):
    """The daemon's answers of one moment."""

    status: Json
    gpus: Sequence[Json]
    devices: Sequence[Json]
    leases: Sequence[Json]
    waiting: Sequence[Json]
    clients: Clients


def picture(told: Told) -> Json:
    """What is to be seen: what is wrong first, the GPUs, and every part of them with who has it.

    What a part has nothing of is left out.
    """
    clients = told.clients.clients
    found = holdings(told.devices, told.leases, clients)
    wrong = everything(told.status, told.gpus, told.leases, found, told.clients)
    in_use = sum(len(one.devices) for one in found if one.in_use)
    free = sum(one.is_spare for one in found)
    used = memory_by_gpu(clients)
    return {
        "state": overall_state(told.status, wrong),
        "version": told.status["version"],
        "started": told.status["started"],
        "driver": told.status["driver"],
        "devices": {**told.status["devices"], "used": in_use, "free": free},
        "leases": len(told.leases),
        "clients": len(clients),
        "findings": [one._asdict() for one in folded(wrong)],
        "wrong": len(wrong),
        "troubles": list(told.clients.troubles),
        "gpus": [_gpu(gpu, used.get(gpu["addr"], 0)) for gpu in told.gpus],
        "parts": [_part(one) for one in found],
        "waiting": [_waiter(one) for one in told.waiting],
    }


def _gpu(gpu: Json, used_mib: int) -> Json:
    shown = ("addr", "name", "state", "reason", "memory_total", "memory_free", "budget_enforced")
    return {**{field: gpu[field] for field in shown}, "memory_used": used_mib}


def _part(one: Holding) -> Json:
    part: Json = {
        "gpu": one.gpu,
        "devices": list(one.devices),
        "state": _state(one),
        "budget": one.budget_mib,
    }
    if not one.in_use:
        return part
    part.update(used=one.used_mib, user=one.user, since=one.since_s, threads=one.threads)
    if not one.available and one.devices:
        part["unavailable"] = True
    if one.lease:
        part.update(
            lease=one.lease["id"][:_ID_LENGTH],
            name=one.lease["name"],
            command=_cut(one.lease["command"]),
        )
    containers = [process.container for process in one.processes]
    containers += [one.lease["container"]] if one.lease else []
    part["container"] = next(filter(None, containers), None)
    part["processes"] = [_process(process) for process in one.processes]
    return {field: value for field, value in part.items() if value is not None}


def _waiter(one: Json) -> Json:
    shown = {field: one[field] for field in ("user", "wants", "since")}
    return {**shown, "command": _cut(one["command"])}


def _process(process: Process) -> Json:
    return {
        "pid": process.pid,
        "user": process.user,
        "command": _cut(process.command),
        "memory": process.memory_mib,
    }


def _state(one: Holding) -> str:
    if one.past_mps:
        return PAST_MPS
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
