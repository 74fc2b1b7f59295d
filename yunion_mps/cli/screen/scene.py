"""What a live view shows, made once from the daemon's answers. Pure: it asks nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.cli.screen.asking import Answers
from yunion_mps.overview.findings import Finding, everything, folded
from yunion_mps.overview.uses import Clients, Holding, Json, filled, holdings, in_container, memory_by_gpu

#: Why a row needs somebody's eye.
TROUBLED, WITHOUT_DEVICE = "!", "?"

#: In the place of a user: it can be had; leases from before a reload have its memory; it is not served.
FREE, NO_ROOM, UNAVAILABLE = "free", "no room", "unavailable"
ALL_GIVEN = "none"

ORDERS = ("busiest", "device", "user", "longest")


class GpuRow(NamedTuple):
    """A GPU: what its processes have of its memory (in MiB), and its devices."""

    address: str
    name: str
    used_mib: int
    total_mib: int | None
    devices: int
    in_use: int
    processes: int
    reason: str

    @property
    def share(self) -> float:
        """What is used of its memory, from 0 to 1."""
        return self.used_mib / self.total_mib if self.total_mib else 0.0


class DeviceRow(NamedTuple):
    """A device, or what is used without one: its budget and what is used of it, in MiB."""

    address: str
    mark: str
    used_mib: int
    budget_mib: int | None
    threads: float | None
    user: str
    pid: int | None
    command: str
    since_s: float | None
    in_use: bool

    @property
    def share(self) -> float:
        """What is used of its budget: 1 is all of it."""
        return self.used_mib / self.budget_mib if self.budget_mib else 0.0


class Scene(NamedTuple):
    """All that there is to see.

    `free` are the devices that somebody could have, `free_mib` what is left of memory that is handed out in
    units, None where none is.
    """

    answers: Answers
    findings: list[Finding]
    gpus: list[GpuRow]
    devices: list[DeviceRow]
    processes: int
    free: int
    free_mib: int | None

    @property
    def in_use(self) -> int:
        """The devices that somebody has."""
        return sum(row.in_use for row in self.gpus)


def scene(answers: Answers, clients: Clients) -> Scene:
    """What there is to see by the daemon's answers."""
    found = holdings(answers.devices, answers.leases, clients.clients)
    wrong = everything(answers.status, answers.gpus, answers.leases, found, clients)
    budgets = {device["addr"]: device["mps_memory_limit"] for device in answers.devices}
    for lease in answers.leases:  # a device that was made of a pool for its lease is not listed
        budgets.update(zip(lease["devices"], lease["memory"]))
    in_units = [gpu for gpu in answers.gpus if gpu["memory_free"] is not None]
    return Scene(
        answers,
        folded(wrong, 2),
        _gpu_rows(answers, found, clients.clients),
        [row for holding in found for row in _device_rows(holding, budgets)]
        + [_row_in_units(gpu) for gpu in in_units],
        len(clients.clients),
        sum(holding.is_spare for holding in found),
        sum(gpu["memory_free"] for gpu in in_units) if in_units else None,
    )


def sorted_devices(rows: Iterable[DeviceRow], order: str) -> list[DeviceRow]:
    """The rows in one of `ORDERS`; what is used comes before what is free, but for `device`."""
    if order == "busiest":
        return sorted(rows, key=lambda row: (row.mark == "", -row.share, not row.in_use))
    if order == "user":
        return sorted(rows, key=lambda row: (not row.in_use, row.user))
    if order == "longest":
        return sorted(rows, key=lambda row: (row.since_s is None, row.since_s or 0.0))
    return list(rows)


def sorted_gpus(rows: Iterable[GpuRow], order: str) -> list[GpuRow]:
    """The rows, those with the most used memory first where that is the order."""
    return sorted(rows, key=lambda row: -row.share) if order == "busiest" else list(rows)


def _gpu_rows(answers: Answers, found: Iterable[Holding], clients: Iterable[Json]) -> list[GpuRow]:
    devices: dict[str, int] = {}
    in_use: dict[str, int] = {}
    processes: dict[str, int] = {}
    for holding in found:
        devices[holding.gpu] = devices.get(holding.gpu, 0) + len(holding.devices)
        in_use[holding.gpu] = in_use.get(holding.gpu, 0) + len(holding.devices) * holding.in_use
        processes[holding.gpu] = processes.get(holding.gpu, 0) + len(holding.processes)
    used = memory_by_gpu(clients)
    return [
        GpuRow(
            gpu["addr"],
            (gpu["name"] or "").removeprefix("NVIDIA "),
            used.get(gpu["addr"], 0),
            gpu["memory_total"],
            devices.get(gpu["addr"], 0),
            in_use.get(gpu["addr"], 0),
            processes.get(gpu["addr"], 0),
            gpu["reason"],
        )
        for gpu in answers.gpus
    ]


def _row_in_units(gpu: Json) -> DeviceRow:
    """What is left of a GPU whose memory is handed out in units: it becomes a device once somebody asks."""
    left_mib = gpu["memory_free"]
    user = FREE if left_mib else UNAVAILABLE if gpu["reason"] else ALL_GIVEN
    return DeviceRow(f"{gpu['addr']}-m*", "", 0, left_mib, None, user, None, "in units", None, in_use=False)


def _instead_of_a_user(holding: Holding) -> str:
    if holding.in_use:
        return ""
    return FREE if holding.free else NO_ROOM if holding.pending else UNAVAILABLE


def _device_rows(holding: Holding, budgets: dict[str, int]) -> list[DeviceRow]:
    mark = TROUBLED if holding.past_mps or holding.over_mib else "" if holding.devices else WITHOUT_DEVICE
    first = max(holding.processes, key=lambda one: one.memory_mib or 0, default=None)
    lease = holding.lease
    pid = first.pid if first else lease["pid"] if lease else None
    command = first.shown if first else _of_lease(lease) if lease else ""
    more = len(holding.processes) - 1
    command += f" (+{more})" if more > 0 else ""
    user = holding.user or _instead_of_a_user(holding)
    row = DeviceRow(
        holding.gpu, mark, holding.used_mib, None, holding.threads, user, pid, command, holding.since_s,
        holding.in_use,
    )  # fmt: skip
    if len(holding.devices) < 2:
        return [row._replace(address=holding.named or holding.gpu, budget_mib=holding.budget_mib)]
    return [
        row._replace(address=address, used_mib=part, budget_mib=budgets.get(address))
        for address, part in filled(holding, budgets)
    ]


def _of_lease(lease: Json) -> str:
    return in_container(lease["container"], lease["command"] or lease["name"] or "")
