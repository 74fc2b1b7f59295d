"""What processes use, laid to the devices that they have: for the metrics and the last hour alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Budget(NamedTuple):
    """A device's GPU (its UUID), and how many MiB of it the device's clients may use together."""

    gpu_uuid: str
    memory_mib: int


class Used(NamedTuple):
    """The use of one device, and by how many processes."""

    mib: int
    clients: int


def used_by_device(
    memory: Mapping[str, Mapping[int, int | None]],
    devices: Mapping[int, tuple[str, ...]],
    budgets: Mapping[str, Budget],
) -> dict[str, Used]:
    """The use of each device (by address) that a process has; `memory` is in MiB by GPU UUID and PID.

    `devices` are the addresses that a process (PID) has; those that `budgets` does not know are passed over.
    What processes with the same devices of a GPU have fills the first of these first, and what is over is
    laid to the last: they are one budget.
    """
    clients: Counter[str] = Counter()
    together: Counter[tuple[str, ...]] = Counter()
    for uuid, processes in memory.items():
        for pid, mib in processes.items():
            own = tuple(name for name in devices.get(pid, ()) if name in budgets)
            here = tuple(name for name in own if budgets[name].gpu_uuid == uuid)
            together[here] += mib or 0
            clients.update(here)
    used: Counter[str] = Counter()
    for names, mib in together.items():
        for name, part_mib in _filled(names, mib, budgets):
            used[name] += part_mib
    return {name: Used(used[name], count) for name, count in clients.items()}


def _filled(names: tuple[str, ...], mib: int, budgets: Mapping[str, Budget]) -> Iterator[tuple[str, int]]:
    left_mib = mib
    for name in names:
        part_mib = left_mib if name == names[-1] else min(left_mib, budgets[name].memory_mib)
        yield name, part_mib
        left_mib -= part_mib
