"""What was used of GPUs and devices in the last hour: a number a minute of each, in memory. Pure.

It begins anew with the daemon's program, also with a re-exec: an hour is not worth a file.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: How many minutes are kept, the present one among them.
MINUTES = 60
STEP_S = 60

Json = dict[str, Any]


class Usage:
    """For each minute, the most memory (MiB) that a look in it has found; what used nothing takes no room."""

    def __init__(self) -> None:
        self._minute = 0
        self._looked = bytearray(MINUTES)
        self._series: dict[str, array[int]] = {}

    def note(self, now_s: float, used_mib: Mapping[str, int]) -> None:
        """A look at `now_s` (monotonic) found this of each GPU and device (by address); of others nothing."""
        self._go_on_to(int(now_s) // STEP_S)
        place = self._minute % MINUTES
        self._looked[place] = 1
        for address, mib in used_mib.items():
            if not mib:
                continue
            if address not in self._series:
                self._series[address] = array("I", bytes(4 * MINUTES))
            series = self._series[address]
            series[place] = max(series[place], mib)

    def answer(self, now_s: float, wall_s: float, gpu: str | None, *, devices: bool) -> Json:
        """The hour up to now, of all GPUs or of this one; `wall_s` is what `now_s` is in s since 1970.

        A minute in which nobody looked is None.
        """
        self._go_on_to(int(now_s) // STEP_S)
        first = self._minute - MINUTES + 1
        found: dict[bool, list[Json]] = {True: [], False: []}
        for address, series in self._series.items():
            device_of = address.rpartition("-")[0]
            if (device_of and not devices) or gpu not in (None, address, device_of):
                continue
            places = (minute % MINUTES for minute in range(first, self._minute + 1))
            used = [series[place] if self._looked[place] else None for place in places]
            found[bool(device_of)].append({"addr": address, "memory_used": used})
        looked = [bool(self._looked[minute % MINUTES]) for minute in range(first, self._minute + 1)]
        begin_s = wall_s - now_s + first * STEP_S
        return {
            "begin": begin_s, "step": STEP_S, "looked": looked, "gpus": found[False], "devices": found[True],
        }  # fmt: skip

    def _go_on_to(self, minute: int) -> None:
        """Forget the minutes that are more than an hour ago by now, and what has used nothing since."""
        past = min(minute - self._minute, MINUTES)
        if past <= 0:
            return
        places = [one % MINUTES for one in range(minute - past + 1, minute + 1)]
        self._minute = minute
        for place in places:
            self._looked[place] = 0
        for address, series in list(self._series.items()):
            for place in places:
                series[place] = 0
            if not any(series):
                del self._series[address]


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
