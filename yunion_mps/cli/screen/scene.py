"""What a live view shows, made once from the daemon's answers. Pure: it asks nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.cli.screen.asking import Answers, Clients
from yunion_mps.cli.screen.findings import Finding, folded, of_status, of_uses, ranked
from yunion_mps.cli.screen.uses import Holding, Json, filled, holdings, memory_by_gpu

#: Why a row needs somebody's eye.
TROUBLED, WITHOUT_DEVICE = "!", "?"

#: In the place of a user.
FREE = "free"

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
    """All that there is to see."""

    answers: Answers
    findings: list[Finding]
    gpus: list[GpuRow]
    devices: list[DeviceRow]
    processes: int

    @property
    def free(self) -> int:
        """The devices that somebody could have."""
        return sum(row.user == FREE for row in self.devices)

    @property
    def in_use(self) -> int:
        """The devices that somebody has."""
        return sum(row.in_use for row in self.gpus)


def scene(answers: Answers, clients: Clients) -> Scene:
    """What there is to see by the daemon's answers."""
    found = holdings(answers.devices, answers.leases, clients.clients)
    wrong = ranked([*of_status(answers.status, answers.gpus), *of_uses(found, clients.servers)])
    budgets = {device["addr"]: device["mps_memory_limit"] for device in answers.devices}
    for lease in answers.leases:  # a device that was made of a pool for its lease is not listed
        budgets.update(zip(lease["devices"], lease["memory"]))
    return Scene(
        answers,
        folded(wrong, 2),
        _gpu_rows(answers, found, clients.clients),
        [row for holding in found for row in _device_rows(holding, budgets)],
        len(clients.clients),
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


def _device_rows(holding: Holding, budgets: dict[str, int]) -> list[DeviceRow]:
    mark = TROUBLED if holding.past_mps or holding.over_mib else "" if holding.devices else WITHOUT_DEVICE
    first = max(holding.processes, key=lambda one: one.memory_mib or 0, default=None)
    lease = holding.lease
    pid = first.pid if first else lease["pid"] if lease else None
    command = (first.command if first else lease["command"] or lease["name"] if lease else "") or ""
    more = len(holding.processes) - 1
    command += f" (+{more})" if more > 0 else ""
    user = holding.user or ("" if holding.in_use else FREE if holding.available else "unavailable")
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
