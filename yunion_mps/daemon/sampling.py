"""What each look at the GPUs adds to the use of the last hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Optional

from yunion_mps.models import Gpu
from yunion_mps.service.process_devices import ProcessDevices
from yunion_mps.service.usage import Usage, used_by_device
from yunion_mps.supervisor import Supervisor

Processes = Mapping[str, Mapping[int, Optional[int]]]


class Sampling:
    """Notes what jobs have, by GPU and by device."""

    def __init__(self, supervisor: Supervisor, devices: ProcessDevices, usage: Usage) -> None:
        self._supervisor = supervisor
        self._devices = devices
        self._usage = usage

    def note(self, processes: Processes, now_s: float) -> None:
        """Take note of what processes have of the GPUs (by UUID: PID and MiB); `supervisor` has, before."""
        jobs, known = self._supervisor.jobs, self._devices.known()
        of_jobs = {
            uuid: {pid: mib for pid, mib in those.items() if pid in jobs} for uuid, those in processes.items()
        }
        by_device = used_by_device(of_jobs, self._devices.of(jobs, known), known.budgets)
        gpus = self._supervisor.snapshot().inventory.gpus
        used_mib = {name: used.mib for name, used in by_device.items()}
        self._usage.note(now_s, {**used_by_gpu(of_jobs, gpus), **used_mib})


def used_by_gpu(processes: Processes, gpus: Iterable[Gpu]) -> dict[str, int]:
    """The MiB that the processes have of each GPU, by its address."""
    return {gpu.address: sum(mib or 0 for mib in processes.get(gpu.uuid or "", {}).values()) for gpu in gpus}
