"""How much of the GPUs and devices jobs use, now and at most in each minute of the last hour.

The last hour is kept in memory only, so it is lost in a restart or re-exec of the daemon.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.addresses import gpu_of
from yunion_mps.host.proc import variable_of
from yunion_mps.inventory.nvml import GpuLoad, Load
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.memory_peaks import MemoryPeaks
from yunion_mps.models import Device, Plan
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.service.holdings import distribute
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.fleet import Processes
from yunion_mps.units import rfc3339

if TYPE_CHECKING:
    from yunion_mps import answers

#: How many minutes are kept, including the current one.
MINUTES = 60
STEP_S = 60

#: How much is read of the variable that names a process's devices: enough for all devices of a lease.
_MAX_NAMES = 4096


class LatestPoll(NamedTuple):
    """The results of the last poll: the load of GPUs and processes, and the use of devices, by address."""

    load: Load = Load()
    devices: Mapping[str, DeviceUsage] = {}

    def sm_of(self, address: str) -> int | None:
        """The SM utilization of a device in %; None if it is unknown."""
        return self.devices[address].sm if address in self.devices else None


class _Series(NamedTuple):
    """An hour of a GPU or device: memory in MiB, and utilization in % plus 1, 0 if unknown."""

    mib: array[int]
    busy: bytearray


class UsageHistory:
    """The maximum of all polls in each minute; a GPU or device without use takes no space."""

    def __init__(self) -> None:
        self.latest = LatestPoll()
        self._minute = 0
        self._polled = bytearray(MINUTES)
        self._series: dict[str, _Series] = {}

    def record(self, now_s: float, used: Mapping[str, tuple[int, int | None]]) -> None:
        """Record a poll at `now_s` (monotonic): the use of GPUs and devices by address, complete.

        It is in MiB and in percent of the time; the latter may be unknown.
        """
        self._advance(int(now_s) // STEP_S)
        slot = self._minute % MINUTES
        self._polled[slot] = 1
        for address, (mib, percent) in used.items():
            if not mib and not percent:
                continue
            if address not in self._series:
                self._series[address] = _Series(array("I", bytes(4 * MINUTES)), bytearray(MINUTES))
            series = self._series[address]
            series.mib[slot] = max(series.mib[slot], mib)
            series.busy[slot] = max(series.busy[slot], 0 if percent is None else percent + 1)

    def last_hour(self, now_s: float, wall_s: float, gpu: str | None, *, devices: bool) -> answers.Usage:
        """The last hour of all GPUs or of this one; `wall_s` is `now_s` in s since 1970.

        A minute without a poll is None.
        """
        self._advance(int(now_s) // STEP_S)
        first = self._minute - MINUTES + 1
        slots = [minute % MINUTES for minute in range(first, self._minute + 1)]
        rows: dict[bool, list[answers.MinuteUse]] = {True: [], False: []}
        for address, series in self._series.items():
            device_of = gpu_of(address)
            if gpu not in (None, address, device_of):
                continue
            row: answers.MinuteUse = {
                "addr": address,
                "memory_used_mib": [series.mib[slot] if self._polled[slot] else None for slot in slots],
                "utilization": [series.busy[slot] - 1 if series.busy[slot] else None for slot in slots],
            }
            if device_of in ("", address):
                rows[False].append(row)
            if device_of and devices:  # a MIG instance can be both
                rows[True].append(row)
        return {
            "begin": rfc3339(wall_s - now_s + first * STEP_S),
            "step_s": STEP_S,
            "polled": [bool(self._polled[slot]) for slot in slots],
            "gpus": rows[False],
            "devices": rows[True],
        }

    def _advance(self, minute: int) -> None:
        """Forget the minutes that are more than an hour ago, and series without use since."""
        past = min(minute - self._minute, MINUTES)
        if past <= 0:
            return
        slots = [past_minute % MINUTES for past_minute in range(minute - past + 1, minute + 1)]
        self._minute = minute
        for slot in slots:
            self._polled[slot] = 0
        for address, series in list(self._series.items()):
            for slot in slots:
                series.mib[slot] = series.busy[slot] = 0
            if not any(series.mib) and not any(series.busy):
                del self._series[address]


class Budget(NamedTuple):
    """The UUID of a device's GPU, and how much of its memory (MiB) its clients share; None if unknown."""

    gpu_uuid: str
    memory_mib: int | None


class DeviceUsage(NamedTuple):
    """The memory use of one device, the number of its clients, and their SM utilization.

    The latter is the percentage of time in which their kernels ran; None if the driver reported none.
    """

    mib: int
    clients: int
    sm: int | None = None


class KnownDevices(NamedTuple):
    """The budgets of all devices, by address, and the addresses of each holder's devices, by PID."""

    budgets: Mapping[str, Budget]
    given: Mapping[int, tuple[str, ...]]


class ProcessDevices:
    """Maps processes to devices: those that the environment names, or otherwise those of the leases.

    The environment of each process is read once. Metrics and the last hour share this mapping, so that both
    attribute memory to the same devices.
    """

    def __init__(self, supervisor: Supervisor, ledger: Ledger) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._named: dict[tuple[int, int], str] = {}
        #: The plan, and the budgets of its devices.
        self._planned: tuple[Plan, Mapping[str, Budget]] = (Plan(""), {})

    def known(self) -> KnownDevices:
        """The devices that are known now; call it on the event loop, where leases and the plan change."""
        leases = self._ledger.leases.values()
        given: dict[int, tuple[str, ...]] = {}
        for lease in leases:
            if lease.holder.pid is not None:
                before = given.get(lease.holder.pid, ())
                given[lease.holder.pid] = (*before, *(device.addr for device in lease.devices))
        plan = self._supervisor.snapshot().plan
        if plan is not self._planned[0]:
            self._planned = plan, _budgets(plan.devices)
        made = _budgets(device for lease in leases for device in lease.devices)
        return KnownDevices({**self._planned[1], **made}, given)

    def of(self, started: Mapping[int, int], known: KnownDevices) -> dict[int, tuple[str, ...]]:
        """The addresses of the known devices of each process; thread-safe.

        `started` are the processes by PID, with their start in clock ticks. All others are forgotten.
        """
        before = self._named
        now = {key: before[key] if key in before else _read_names(key[0]) for key in started.items()}
        # Replaced as a whole: if two threads call this at once, some environments are read twice. Unreadable
        # environments, such as those of starting programs, are left out and read again at the next poll.
        self._named = {key: names for key, names in now.items() if names is not None}
        return {pid: _known(names, known) or known.given.get(pid, ()) for (pid, _), names in now.items()}


def _budgets(devices: Iterable[Device]) -> dict[str, Budget]:
    return {device.addr: Budget(device.gpu_uuid, device.memory_limit_mib) for device in devices}


def _read_names(pid: int) -> str | None:
    """The variable in its environment, cut to a length, because a user can set it to anything."""
    names = variable_of(pid, DEVICE_VARIABLE)
    return None if names is None else names[:_MAX_NAMES]


def _known(variable: str | None, known: KnownDevices) -> tuple[str, ...]:
    addresses = dict.fromkeys(name.strip() for name in (variable or "").split(","))  # without duplicates
    return tuple(name for name in addresses if name in known.budgets)


def usage_by_device(
    memory: Processes,
    devices: Mapping[int, tuple[str, ...]],
    budgets: Mapping[str, Budget],
    sm: Mapping[str, Mapping[int, int]] = {},
) -> dict[str, DeviceUsage]:
    """The use of each device (by address) that a process has; pure.

    `devices` are the addresses by PID; those without a budget are ignored. Processes with the same devices of
    a GPU share one budget: their memory fills these devices in order, and any excess counts for the last. The
    SM utilization (`sm`, by GPU UUID and PID) counts for each of them.
    """
    clients: Counter[str] = Counter()
    together: Counter[tuple[str, ...]] = Counter()
    busy: Counter[str] = Counter()
    for uuid, processes in memory.items():
        for pid, mib in processes.items():
            addresses = tuple(name for name in devices.get(pid, ()) if name in budgets)
            here = tuple(name for name in addresses if budgets[name].gpu_uuid == uuid)
            together[here] += mib or 0
            clients.update(here)
            if (percent := sm.get(uuid, {}).get(pid)) is not None:
                busy.update(dict.fromkeys(here, percent))
    used: Counter[str] = Counter()
    for names, mib in together.items():
        for name, part_mib in distribute(names, mib, {name: budgets[name].memory_mib for name in names}):
            used[name] += part_mib
    return {
        name: DeviceUsage(used[name], count, min(busy[name], 100) if name in busy else None)
        for name, count in clients.items()
    }


class UsageSampler:
    def __init__(
        self, supervisor: Supervisor, devices: ProcessDevices, history: UsageHistory, peaks: MemoryPeaks
    ) -> None:
        self._supervisor = supervisor
        self._devices = devices
        self._history = history
        self._peaks = peaks

    def forget(self) -> None:
        """Forget the last poll, because the GPUs cannot be polled now."""
        self._history.latest = LatestPoll()

    def record(self, processes: Processes, load: Load, now_s: float) -> None:
        """Record how jobs use GPUs and devices; the supervisor must know the processes already."""
        jobs = self._supervisor.jobs.started
        by_device: Mapping[str, DeviceUsage] = {}
        of_jobs: Processes = {}
        if jobs:
            known = self._devices.known()
            of_jobs = {
                uuid: {pid: mib for pid, mib in by_pid.items() if pid in jobs}
                for uuid, by_pid in processes.items()
            }
            devices = self._devices.of(jobs, known)
            by_device = usage_by_device(of_jobs, devices, known.budgets, load.processes)
        gpus = self._supervisor.snapshot().inventory.gpus
        used = {name: (usage.mib, usage.sm) for name, usage in by_device.items()}
        used_mib: Counter[str | None] = Counter()
        for gpu in gpus:
            mib = sum(mib or 0 for mib in of_jobs.get(gpu.uuid or "", {}).values())
            used_mib.update({gpu.uuid: mib, gpu.parent: mib})
        for gpu in gpus:
            used[gpu.address] = used_mib[gpu.uuid], load.gpus.get(gpu.uuid or "", GpuLoad()).utilization
        self._history.latest = LatestPoll(load, by_device)
        self._history.record(now_s, used)
        self._peaks.note({name: usage.mib for name, usage in by_device.items()})
