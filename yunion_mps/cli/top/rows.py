"""The data of a frame of `top`, made from the daemon's answers: a row for each GPU and device. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import FREE, RESERVED, UNAVAILABLE
from yunion_mps.core.units import seconds
from yunion_mps.observe.holdings import Holding, distribute, is_memory_unknown
from yunion_mps.views.overview import (
    HostAnswers,
    HostOverview,
    ShownProblem,
    fold_problems,
    notable_way,
    short_name,
)

if TYPE_CHECKING:
    from yunion_mps.answers import EventJson, GpuJson

#: Marks after an address: over budget or outside MPS, and used without a device.
TROUBLED = "!"
WITHOUT_DEVICE = "?"

ORDERS = ("busiest", "device", "user", "longest")


class Poll(NamedTuple):
    """The daemon's answers of about one time."""

    #: In s since 1970.
    taken_s: float
    answers: HostAnswers
    events: list[EventJson]
    #: Once this changes, GPUs and devices are queried again.
    seen: tuple[object, ...]
    #: When GPUs and devices were queried, on the monotonic clock.
    devices_s: float


class Row(NamedTuple):
    """A GPU, a device, or use without a device."""

    address: str
    used_mib: int | None
    of_mib: int | None
    #: Of a GPU: how many of its devices are in use.
    user: str
    #: Of a GPU: the number of processes.
    pid: int | None
    #: Of a GPU: its model.
    command: str
    #: TROUBLED or WITHOUT_DEVICE, empty if neither.
    mark: str = ""
    #: Of a device: its percentage of the SM threads.
    threads: float | None = None
    #: In s since 1970.
    since_s: float | None = None
    in_use: bool = True
    is_bad: bool = False
    #: The utilization in %; of a device, that of the SMs.
    busy: int | None = None
    #: Only of a device.
    peak_mib: int | None = None
    #: Only of a GPU.
    temperature_c: int | None = None
    #: Only of a GPU.
    power_w: float | None = None

    @property
    def share(self) -> float:
        return self.used_mib / self.of_mib if self.used_mib and self.of_mib else 0.0


class Scene(NamedTuple):
    """All that a frame may show, whatever its size."""

    host: HostOverview
    events: list[EventJson]
    problems: list[ShownProblem]
    gpus: list[Row]
    devices: list[Row]


def scene(poll: Poll) -> Scene:
    """Make the rows of all GPUs and devices from the answers."""
    host = HostOverview.of(poll.answers)
    answers = host.answers
    budgets = {device["addr"]: device["memory_mib"] for device in answers.devices}
    for lease in answers.leases:  # a leased device of a pool is not listed
        for budget in lease["budgets"]:
            budgets[budget["addr"]] = budget["memory_mib"]
    devices: list[Row] = []
    for holding in host.holdings:
        devices += _device_rows(holding, budgets)
    for gpu in answers.gpus:
        if gpu["memory_free_mib"] is not None:
            devices.append(_pool_row(gpu))
    return Scene(
        host=host,
        events=poll.events,
        problems=fold_problems(host.problems, 2),
        gpus=_gpu_rows(host),
        devices=devices,
    )


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
    if order == "busiest":
        return sorted(rows, key=lambda row: -row.share)
    return list(rows)


def _gpu_rows(host: HostOverview) -> list[Row]:
    devices: Counter[str] = Counter()
    in_use: Counter[str] = Counter()
    processes: Counter[str] = Counter()
    for holding in host.holdings:
        for address in {holding.gpu, physical_gpu(holding.gpu)}:
            devices[address] += len(holding.devices)
            if holding.in_use:
                in_use[address] += len(holding.devices)
            processes[address] += len(holding.processes)
    rows: list[Row] = []
    for gpu in host.answers.gpus:
        address = gpu["addr"]
        row = Row(
            address=address,
            used_mib=None if is_memory_unknown(gpu) else host.memory_by_gpu.get(address, 0),
            of_mib=gpu["memory_mib"],
            user=f"{in_use[address]} of {devices[address]}",
            pid=processes[address],
            command=gpu["reason"] or _model(gpu),
            in_use=gpu["memory_mib"] is not None or not gpu["reason"],  # unknown for a lost GPU
            is_bad=bool(gpu["reason"]),
            busy=gpu["utilization"],
            temperature_c=gpu["temperature_c"],
            power_w=gpu["power_w"],
        )
        rows.append(row)
    return rows


def _pool_row(gpu: GpuJson) -> Row:
    """Return a row for the free memory of a pool, which becomes a device once it is leased."""
    left_mib = gpu["memory_free_mib"]
    user = "none"
    if left_mib:
        user = RESERVED if gpu["reserved_for"] else FREE
    elif gpu["reason"]:
        user = UNAVAILABLE
    return Row(
        address=f"{gpu['addr']}-m*",
        used_mib=0,
        of_mib=left_mib,
        user=user,
        pid=None,
        command="pool",
        in_use=False,
    )


def _device_rows(holding: Holding, budgets: dict[str, int | None]) -> list[Row]:
    mark = _mark(holding)
    largest = max(holding.holders, key=lambda process: process.memory_mib or 0, default=None)
    command = largest.shown if largest else holding.restriction
    more = len(holding.processes) - 1
    if more > 0:
        command += f" (+{more})"
    row = Row(
        address=holding.named or holding.gpu,
        used_mib=holding.known_mib,
        of_mib=holding.budget_mib,
        user=holding.user if holding.in_use else holding.state,
        pid=largest.pid if largest else None,
        command=command,
        mark=mark,
        threads=holding.threads,
        since_s=None if holding.since is None else seconds(holding.since),
        in_use=holding.in_use,
        is_bad=mark == TROUBLED,
        busy=holding.sm,
        peak_mib=holding.peak_mib,
    )
    if len(holding.devices) < 2:
        return [row]
    leased = holding.lease["budgets"] if holding.lease else ()
    peaks = {device["addr"]: device["memory_peak_mib"] for device in leased}
    rows: list[Row] = []
    for address, part_mib in distribute(holding.devices, holding.used_mib, budgets):
        row_of_device = row._replace(
            address=address,
            used_mib=None if row.used_mib is None else part_mib,
            of_mib=budgets.get(address),
            peak_mib=peaks.get(address),
        )
        rows.append(row_of_device)
    return rows


def _mark(holding: Holding) -> str:
    if holding.outside_mps or holding.over_mib:
        return TROUBLED
    return "" if holding.devices else WITHOUT_DEVICE


def _model(gpu: GpuJson) -> str:
    """Return its name, and how it is shared if that is not the usual way."""
    return ", ".join(filter(None, (short_name(gpu), notable_way(gpu))))
