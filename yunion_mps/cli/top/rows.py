"""The data of a frame of `top`, made from the daemon's answers: a row for each GPU and device. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.addresses import physical_gpu
from yunion_mps.enums import FREE, RESERVED, UNAVAILABLE
from yunion_mps.overview import (
    HostAnswers,
    HostOverview,
    ShownProblem,
    fold_problems,
    notable_way,
    short_name,
)
from yunion_mps.service.holdings import Holding, ProcessUse, distribute, is_memory_unknown
from yunion_mps.units import seconds

if TYPE_CHECKING:
    from yunion_mps.answers import Event, Gpu

#: Marks after an address: over budget or outside MPS, and used without a device.
TROUBLED, WITHOUT_DEVICE = "!", "?"

ORDERS = ("busiest", "device", "user", "longest")


class Poll(NamedTuple):
    """The daemon's answers at `taken_s` (s since 1970).

    GPUs and devices are from `devices_s` (monotonic clock), and are queried again once `seen` changes.
    """

    taken_s: float
    answers: HostAnswers
    events: list[Event]
    seen: tuple[object, ...]
    devices_s: float


class Row(NamedTuple):
    """A GPU, a device, or use without a device; memory is in MiB.

    For a GPU, `user` says how many of its devices are in use, and `pid` is the number of processes. `busy` is
    the utilization in %; for a device, of the SMs. Only a device has a peak, only a GPU a temperature and a
    power draw.
    """

    address: str
    used_mib: int | None
    of_mib: int | None
    user: str
    pid: int | None
    command: str
    mark: str = ""
    threads: float | None = None
    since_s: float | None = None
    in_use: bool = True
    is_bad: bool = False
    busy: int | None = None
    peak_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None

    @property
    def share(self) -> float:
        return self.used_mib / self.of_mib if self.used_mib and self.of_mib else 0.0


class Scene(NamedTuple):
    host: HostOverview
    events: list[Event]
    problems: list[ShownProblem]
    gpus: list[Row]
    devices: list[Row]


def scene(poll: Poll) -> Scene:
    host = HostOverview.of(poll.answers)
    answers = host.answers
    budgets = {device["addr"]: device["memory_mib"] for device in answers.devices}
    for lease in answers.leases:  # a leased device of a pool is not listed
        budgets.update({budget["addr"]: budget["memory_mib"] for budget in lease["budgets"]})
    devices = [row for holding in host.holdings for row in _device_rows(holding, budgets)]
    devices += [_pool_row(gpu) for gpu in answers.gpus if gpu["memory_free_mib"] is not None]
    return Scene(host, poll.events, fold_problems(host.problems, 2), _gpu_rows(host), devices)


def sort_devices(rows: Iterable[Row], order: str) -> list[Row]:
    """Sort rows by one of `ORDERS`; rows in use come first, except for `device`."""
    if order == "busiest":
        return sorted(rows, key=lambda row: (row.mark == "", -row.share, not row.in_use))
    if order == "user":
        return sorted(rows, key=lambda row: (not row.in_use, row.user))
    if order == "longest":
        return sorted(rows, key=lambda row: (row.since_s is None, row.since_s or 0.0))
    return list(rows)


def sort_gpus(rows: Iterable[Row], order: str) -> list[Row]:
    """Sort rows by the share of memory used, or not at all."""
    return sorted(rows, key=lambda row: -row.share) if order == "busiest" else list(rows)


def _gpu_rows(host: HostOverview) -> list[Row]:
    devices: Counter[str] = Counter()
    in_use: Counter[str] = Counter()
    processes: Counter[str] = Counter()
    for holding in host.holdings:
        for address in {holding.gpu, physical_gpu(holding.gpu)}:
            devices[address] += len(holding.devices)
            in_use[address] += len(holding.devices) * holding.in_use
            processes[address] += len(holding.processes)
    return [
        Row(
            address,
            None if is_memory_unknown(gpu) else host.memory_by_gpu.get(address, 0),
            gpu["memory_mib"],
            f"{in_use[address]} of {devices[address]}",
            processes[address],
            gpu["reason"] or _model(gpu),
            in_use=gpu["memory_mib"] is not None or not gpu["reason"],  # unknown for a lost GPU
            is_bad=bool(gpu["reason"]),
            busy=gpu["utilization"],
            temperature_c=gpu["temperature_c"],
            power_w=gpu["power_w"],
        )
        for gpu in host.answers.gpus
        for address in [gpu["addr"]]
    ]


def _pool_row(gpu: Gpu) -> Row:
    """Return a row for the free memory of a pool, which becomes a device once it is leased."""
    left_mib = gpu["memory_free_mib"]
    free = RESERVED if gpu["reserved_for"] else FREE
    user = free if left_mib else UNAVAILABLE if gpu["reason"] else "none"
    return Row(f"{gpu['addr']}-m*", 0, left_mib, user, None, "pool", in_use=False)


def _device_rows(holding: Holding, budgets: dict[str, int | None]) -> list[Row]:
    mark = TROUBLED if holding.outside_mps or holding.over_mib else "" if holding.devices else WITHOUT_DEVICE
    first = max(holding.holders, key=lambda process: process.memory_mib or 0, default=None)
    more = len(holding.processes) - 1
    row = Row(
        holding.named or holding.gpu,
        holding.known_mib,
        holding.budget_mib,
        holding.user if holding.in_use else holding.state,
        first.pid if first else None,
        _command(holding, first) + (f" (+{more})" if more > 0 else ""),
        mark,
        holding.threads,
        None if holding.since is None else seconds(holding.since),
        holding.in_use,
        mark == TROUBLED,
        holding.sm,
        holding.peak_mib,
    )
    if len(holding.devices) < 2:
        return [row]
    leased = holding.lease["budgets"] if holding.lease else ()
    peaks = {device["addr"]: device["memory_peak_mib"] for device in leased}
    return [
        row._replace(
            address=address,
            used_mib=None if row.used_mib is None else part,
            of_mib=budgets.get(address),
            peak_mib=peaks.get(address),
        )
        for address, part in distribute(holding.devices, holding.used_mib, budgets)
    ]


def _command(holding: Holding, first: ProcessUse | None) -> str:
    return first.shown if first else holding.restriction


def _model(gpu: Gpu) -> str:
    """Its name, and how it is shared if that is not the usual way."""
    return ", ".join(filter(None, (short_name(gpu), notable_way(gpu))))
