"""Whose memory is whose device's: what each look at the GPUs adds to the use of the last hour."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Optional

from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Gpu
from yunion_mps.planning import DEVICE_VARIABLE
from yunion_mps.process import environment_of
from yunion_mps.supervisor import Supervisor
from yunion_mps.usage import Usage

#: So long are the names of all devices that a lease may have, at most.
_LONGEST = 4096

Processes = Mapping[str, Mapping[int, Optional[int]]]


class Sampling:
    """Knows of every process that runs which devices it names, so that its environment is read once."""

    def __init__(self, supervisor: Supervisor, ledger: Ledger, usage: Usage) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._usage = usage
        self._names: dict[tuple[int, int], str] = {}

    def note(self, processes: Processes, now_s: float) -> None:
        """Take note of what processes have of the GPUs (by UUID: PID and MiB); `supervisor` has, before."""
        jobs = self._supervisor.jobs
        known = self._names
        self._names = {job: known[job] if job in known else _devices_named(job[0]) for job in jobs.items()}
        snapshot, leases = self._supervisor.snapshot(), self._ledger.leases.values()
        there = {device.addr for device in snapshot.plan.devices}
        there |= {device.addr for lease in leases for device in lease.devices}
        named = {pid: _known(names, there) for (pid, _), names in self._names.items() if names}
        for lease in leases:
            pid = lease.holder.pid
            if pid is not None and pid in jobs:
                named.setdefault(pid, [device.addr for device in lease.devices])
        self._usage.note(now_s, used_by_address(processes, snapshot.inventory.gpus, jobs, named))


def used_by_address(
    processes: Processes, gpus: Iterable[Gpu], jobs: Collection[int], devices: Mapping[int, Iterable[str]]
) -> dict[str, int]:
    """The MiB that the jobs have of each GPU, and of each device as they name them (by PID).

    What counts against several devices of a GPU as one budget is told of the first of them.
    """
    used: dict[str, int] = {}
    for gpu in gpus:
        for pid, mib in processes.get(gpu.uuid or "", {}).items():
            if pid not in jobs or not mib:
                continue
            used[gpu.address] = used.get(gpu.address, 0) + mib
            own = (one.strip() for one in devices.get(pid, ()))
            device = next((one for one in own if one.rpartition("-")[0] == gpu.address), None)
            if device:
                used[device] = used.get(device, 0) + mib
    return used


def _devices_named(pid: int) -> str:
    """What its environment says, which is whatever its user likes: no more of it is kept than makes sense."""
    return environment_of(pid).get(DEVICE_VARIABLE, "")[:_LONGEST]


def _known(names: str, there: Collection[str]) -> list[str]:
    return [name for name in map(str.strip, names.split(",")) if name in there]
