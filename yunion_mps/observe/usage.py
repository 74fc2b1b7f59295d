"""How much of the GPUs and devices jobs use, now and at most in each minute of the last hour.

The last hour is kept in memory only, so it is lost in a restart or re-exec of the daemon.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.models import Device, Plan
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import variable_of
from yunion_mps.inventory.nvml import GpuLoad, Load
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.memory_peaks import MemoryPeaks
from yunion_mps.observe.holdings import distribute
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.fleet import Processes

if TYPE_CHECKING:
    from yunion_mps import answers

#: How many minutes are kept, including the current one.
MINUTES = 60
STEP_S = 60

#: How much is read of the variable that names a process's devices: enough for all devices of a lease.
_MAX_NAMES = 4096


class LatestPoll(NamedTuple):
    """The results of the last poll."""

    #: The load of GPUs and processes.
    load: Load = Load()
    #: The use of the devices that a process has, by address.
    devices: Mapping[str, DeviceUsage] = {}

    def sm_of(self, address: str) -> int | None:
        """Return the SM utilization of a device in %; None if it is unknown."""
        return self.devices[address].sm if address in self.devices else None


class _Series(NamedTuple):
    """An hour of a GPU or device, in slots of one minute."""

    #: The memory in MiB.
    mib: array[int]
    #: The utilization in % plus 1; 0 if it is unknown.
    busy: bytearray


class UsageHistory:
    """The maximum of all polls in each minute; a GPU or device without use takes no space."""

    def __init__(self) -> None:
        self.latest = LatestPoll()
        self._minute = 0
        self._polled = bytearray(MINUTES)
        self._series: dict[str, _Series] = {}

    def record(self, now_s: float, used: Mapping[str, tuple[int, int | None]]) -> None:
        """Record a poll at `now_s` (monotonic).

        `used` is the use of GPUs and devices by address, complete: in MiB, and in percent of the time, None
        if that is unknown.
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
            busy = 0 if percent is None else percent + 1
            series.busy[slot] = max(series.busy[slot], busy)

    def last_hour(self, now_s: float, wall_s: float, gpu: str | None, *, devices: bool) -> answers.UsageJson:
        """Return the last hour of all GPUs, or of the one with the address `gpu`.

        `now_s` is the time (monotonic), and `wall_s` the same in s since 1970. With `devices`, the answer has
        the devices, too. A minute without a poll is None.
        """
        self._advance(int(now_s) // STEP_S)
        first = self._minute - MINUTES + 1
        gpu_rows: list[answers.MinuteUseJson] = []
        device_rows: list[answers.MinuteUseJson] = []
        for address, series in self._series.items():
            device_of = gpu_of(address)
            if gpu not in (None, address, device_of):
                continue
            row = self._row(address, series)
            if device_of in ("", address):
                gpu_rows.append(row)
            if device_of and devices:  # a MIG instance can be both
                device_rows.append(row)
        return {
            "begin": rfc3339(wall_s - now_s + first * STEP_S),
            "step_s": STEP_S,
            "polled": [bool(self._polled[slot]) for slot in self._slots()],
            "gpus": gpu_rows,
            "devices": device_rows,
        }

    def _slots(self) -> list[int]:
        """Return the slots of the last hour's minutes, the oldest first."""
        return [minute % MINUTES for minute in range(self._minute - MINUTES + 1, self._minute + 1)]

    def _row(self, address: str, series: _Series) -> answers.MinuteUseJson:
        used_mib: list[int | None] = []
        utilization: list[int | None] = []
        for slot in self._slots():
            used_mib.append(series.mib[slot] if self._polled[slot] else None)
            utilization.append(series.busy[slot] - 1 if series.busy[slot] else None)
        return {"addr": address, "memory_used_mib": used_mib, "utilization": utilization}

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
                series.mib[slot] = 0
                series.busy[slot] = 0
            if not any(series.mib) and not any(series.busy):
                del self._series[address]


class Budget(NamedTuple):
    """What the clients of a device share."""

    #: The UUID of the device's GPU.
    gpu_uuid: str
    #: How much of the GPU's memory; None if that is unknown.
    memory_mib: int | None


class DeviceUsage(NamedTuple):
    """The use of one device."""

    #: The memory that its clients use, in MiB.
    mib: int
    #: The number of its clients.
    clients: int
    #: The percentage of time in which kernels of its clients ran; None if the driver reported none.
    sm: int | None = None


class KnownDevices(NamedTuple):
    """The devices of the plan and of the leases."""

    #: By address.
    budgets: Mapping[str, Budget]
    #: The addresses of each holder's devices, by PID.
    given: Mapping[int, tuple[str, ...]]


class ProcessDevices:
    """Maps processes to devices: those that the environment names, or otherwise those of the leases.

    The environment of each process is read once. Metrics and the last hour share this mapping, so that both
    attribute memory to the same devices.
    """

    def __init__(self, supervisor: Supervisor, ledger: Ledger) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        #: The variable that names a process's devices, by PID and start.
        self._named: dict[tuple[int, int], str] = {}
        #: The plan whose devices have `_planned_budgets`.
        self._plan = Plan("")
        self._planned_budgets: Mapping[str, Budget] = {}

    def known(self) -> KnownDevices:
        """Return the devices that are known now.

        Call it on the event loop, where leases and the plan change.
        """
        plan = self._supervisor.snapshot().plan
        if plan is not self._plan:
            self._plan = plan
            self._planned_budgets = {device.addr: _budget_of(device) for device in plan.devices}
        budgets = dict(self._planned_budgets)
        devices_of_holder: dict[int, tuple[str, ...]] = {}
        for lease in self._ledger.leases.values():
            pid = lease.holder.pid
            for device in lease.devices:
                budgets[device.addr] = _budget_of(device)
                if pid is not None:
                    devices_of_holder[pid] = (*devices_of_holder.get(pid, ()), device.addr)
        return KnownDevices(budgets, devices_of_holder)

    def of(self, started: Mapping[int, int], known: KnownDevices) -> dict[int, tuple[str, ...]]:
        """Return the addresses of the known devices of each process; thread-safe.

        `started` are the processes by PID, with their start in clock ticks. All others are forgotten.
        """
        before = self._named
        named: dict[tuple[int, int], str] = {}
        devices: dict[int, tuple[str, ...]] = {}
        for pid, ticks in started.items():
            process = (pid, ticks)
            names = before[process] if process in before else _read_names(pid)
            # Unreadable environments, such as those of starting programs, are read again at the next poll.
            if names is not None:
                named[process] = names
            devices[pid] = _known(names, known) or known.given.get(pid, ())
        # Replaced as a whole: if two threads call this at once, some environments are read twice.
        self._named = named
        return devices


def _budget_of(device: Device) -> Budget:
    return Budget(device.gpu_uuid, device.memory_limit_mib)


def _read_names(pid: int) -> str | None:
    """Return the variable in its environment, cut to a length, because a user can set it to anything."""
    names = variable_of(pid, DEVICE_VARIABLE)
    return None if names is None else names[:_MAX_NAMES]


def _known(variable: str | None, known: KnownDevices) -> tuple[str, ...]:
    """Return the known devices that the variable names, each once."""
    names = dict.fromkeys(name.strip() for name in (variable or "").split(","))
    return tuple(name for name in names if name in known.budgets)


def usage_by_device(
    memory: Processes,
    devices: Mapping[int, tuple[str, ...]],
    budgets: Mapping[str, Budget],
    sm: Mapping[str, Mapping[int, int]] = {},
) -> dict[str, DeviceUsage]:
    """Return the use of each device (by address) that a process has; pure.

    `memory` is the use of each GPU (UUID) in MiB, by PID; None if it is unknown.
    `devices` are the addresses by PID; those without a budget are ignored. Processes with the same devices of
    a GPU share one budget: their memory fills these devices in order, and any excess counts for the last.
    `sm` is the SM utilization in %, by GPU UUID and PID, which counts for each of the devices.
    """
    clients: Counter[str] = Counter()
    #: The memory of the processes that have the same devices of a GPU.
    together_mib: Counter[tuple[str, ...]] = Counter()
    busy: Counter[str] = Counter()
    for uuid, processes in memory.items():
        percentages = sm.get(uuid, {})
        for pid, mib in processes.items():
            addresses = _on_gpu(uuid, devices.get(pid, ()), budgets)
            together_mib[addresses] += mib or 0
            clients.update(addresses)
            if pid in percentages:
                busy.update(dict.fromkeys(addresses, percentages[pid]))
    used_mib: Counter[str] = Counter()
    for addresses, mib in together_mib.items():
        budgets_mib = {address: budgets[address].memory_mib for address in addresses}
        for address, part_mib in distribute(addresses, mib, budgets_mib):
            used_mib[address] += part_mib
    used: dict[str, DeviceUsage] = {}
    for address, count in clients.items():
        percent = min(busy[address], 100) if address in busy else None
        used[address] = DeviceUsage(used_mib[address], count, percent)
    return used


def _on_gpu(uuid: str, addresses: Iterable[str], budgets: Mapping[str, Budget]) -> tuple[str, ...]:
    """Return those of the devices that are on the GPU."""
    on_gpu: list[str] = []
    for address in addresses:
        budget = budgets.get(address)
        if budget is not None and budget.gpu_uuid == uuid:
            on_gpu.append(address)
    return tuple(on_gpu)


class UsageSampler:
    """Records the use of each poll: in the last hour and in the leases' peaks. The monitor calls it."""

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
            of_jobs = _only(jobs, processes)
            devices = self._devices.of(jobs, known)
            by_device = usage_by_device(of_jobs, devices, known.budgets, load.processes)
        gpus = self._supervisor.snapshot().inventory.gpus
        used: dict[str, tuple[int, int | None]] = {}
        device_mib: dict[str, int] = {}
        for address, usage in by_device.items():
            used[address] = usage.mib, usage.sm
            device_mib[address] = usage.mib
        used_mib: Counter[str | None] = Counter()
        for gpu in gpus:
            for mib in of_jobs.get(gpu.uuid or "", {}).values():
                used_mib[gpu.uuid] += mib or 0
                used_mib[gpu.parent] += mib or 0
        for gpu in gpus:
            used[gpu.address] = used_mib[gpu.uuid], load.gpus.get(gpu.uuid or "", GpuLoad()).utilization
        self._history.latest = LatestPoll(load, by_device)
        self._history.record(now_s, used)
        self._peaks.note(device_mib)


def _only(jobs: Container[int], processes: Processes) -> Processes:
    """Return those of the processes that are jobs (PIDs)."""
    of_jobs: dict[str, Mapping[int, int | None]] = {}
    for uuid, by_pid in processes.items():
        of_jobs[uuid] = {pid: mib for pid, mib in by_pid.items() if pid in jobs}
    return of_jobs
