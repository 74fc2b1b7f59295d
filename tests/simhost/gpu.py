"""A GPU of a simulated host as tests use it: looked at and changed while programs run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from . import layout
from .bus import Bus
from .catalog import COMPUTE_MODES, ERRORS, XID_FELL_OFF_THE_BUS
from .description import GpuDescription
from .install import found_library
from .mig import TIME_SLICES
from .state import PROCESS_TYPES, StateFile


class MigDevice(NamedTuple):
    """A compute instance."""

    gpu_instance: int
    compute_instance: int
    profile: str  # of its GPU instance, e.g. 1g.10gb
    uuid: str


class SimGpu:
    """A GPU by its slot: its NVML index as long as all GPUs are where the description has them."""

    def __init__(self, slot: int, bus: Bus, state: StateFile, root: Path) -> None:
        self.slot = slot
        self._bus = bus
        self._file = state
        self._root = root

    @property
    def description(self) -> GpuDescription:
        """The GPU with its UUID, address and render node of now."""
        return self._bus.gpu(self.slot)

    @property
    def uuid(self) -> str:
        """The UUID, e.g. GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400."""
        return self.description.uuid

    @property
    def compute_mode(self) -> str:
        """The compute mode now: default, prohibited or exclusive_process."""
        return next(name for name, mode in COMPUTE_MODES.items() if mode == self._slot.compute_mode)

    @compute_mode.setter
    def compute_mode(self, name: str) -> None:
        with self._file.changing():
            self._slot.compute_mode = COMPUTE_MODES[name]

    @property
    def mig(self) -> bool:
        return bool(self._slot.mig_current)

    @mig.setter
    def mig(self, on: bool) -> None:
        """Switch MIG mode at once, even if the GPU is in use; ends its instances."""
        if not self._slot.mig_capable:
            raise ValueError(f"a {self.description.name} has no MIG mode")
        self.end_instances()
        with self._file.changing():
            self._slot.mig_current = self._slot.mig_pending = on
            self._slot.compute_mode = COMPUTE_MODES["default"]

    @property
    def mig_pending(self) -> bool:
        return bool(self._slot.mig_pending)

    def mig_devices(self) -> list[MigDevice]:
        """Return the MIG devices in the order of their indices."""
        return sorted(
            MigDevice(
                gpu.id, compute.id, self._slot.profiles[gpu.profile].name.decode(), compute.uuid.decode()
            )
            for gpu in self._slot.instances
            if gpu.serial
            for compute in gpu.computes
            if compute.serial
        )

    @property
    def has_empty_instance(self) -> bool:
        """Whether a GPU instance has no compute instance."""
        instances = [gpu for gpu in self._slot.instances if gpu.serial]
        return any(not any(compute.serial for compute in gpu.computes) for gpu in instances)

    def end_instances(self, gpu_instance: int = layout.UNSET) -> None:
        """End a GPU instance, or all, even in use, with its compute instances and clients."""
        self._library.simhost_end_instances(self.slot, gpu_instance)

    @property
    def time_slice(self) -> str:
        """The compute policy, as nvidia-smi compute-policy sets it."""
        return TIME_SLICES[self._slot.time_slice]

    @time_slice.setter
    def time_slice(self, name: str) -> None:
        with self._file.changing():
            self._slot.time_slice = TIME_SLICES.index(name)

    def require_reset(self) -> None:
        """Let the driver create no instance and change no MIG mode before a reset."""
        with self._file.changing():
            self._slot.reset_required = 1

    def reset(self) -> None:
        """Reset the GPU: clients, instances and the compute mode end, and a pending MIG mode is applied."""
        self._library.simhost_reset(self.slot)

    def lose(self, *, lookup: str = "gpu_is_lost", xid: int | None = XID_FELL_OFF_THE_BUS) -> None:
        """Lose the GPU: every call on its handle gives GPU_IS_LOST, and an Xid is reported.

        `lookup` is what looking up its handle gives; "success" for a driver that notices only later.
        """
        with self._file.changing():
            self._slot.lost_lookup = ERRORS[lookup]
            self._slot.lost = 1
        if xid is not None:
            self._file.add_event(self.slot, xid)

    def remove(self) -> None:
        """Take the GPU off the bus: also its files go, and the next nvmlInit does not count it."""
        self.end_instances()
        if self._slot.on_bus:
            self._bus.remove(self.slot)

    def restore(self) -> None:
        """Bring back a GPU that is lost, removed, without a driver or another driver's, as after a reset.

        All but a lost one are found by the next first nvmlInit only; processes that had the GPU before have
        lost it until then.
        """
        self.end_instances()
        with self._file.changing():
            self._slot.lost = 0
        self._bus.restore(self.slot)

    def bind(self, driver: str) -> None:
        """Give the GPU to another driver of the kernel, such as vfio-pci, to "nvidia", or to none ("").

        It stays on the bus, and loses what only NVIDIA's driver gives it: its place in NVML, and its nodes.
        """
        self.end_instances()
        self._bus.bind(self.slot, driver)

    def replace(self, uuid: str | None = None) -> None:
        """Put another card of the same model into its slot, as with the power off."""
        self.forget()
        self._bus.exchange(self.slot, uuid)

    def move(self, address: str) -> None:
        """Put the card into another slot, as with the power off."""
        self.forget()
        self._bus.move(self.slot, address)

    def forget(self) -> None:
        """Lose all that does not survive that the driver is unloaded, or the power is off."""
        self.reset()
        self.time_slice = "default"

    def add_process(
        self,
        pid: int,
        used_mib: int | None,
        kind: str = "C",
        sm: int | None = None,
        on: tuple[int, int] | None = None,
    ) -> None:
        """Put a process on the GPU, or change it; `kind` as in nvidia-smi: C or M+C; `sm` in percent.

        In MIG mode it is `on` the compute instance with these two ids.
        """
        self._file.add_process(self.slot, pid, used_mib, kind, sm, on)

    def load(
        self, utilization: int | None, temperature_c: int | None = None, power_w: float | None = None
    ) -> None:
        """Set what NVML measures; a `utilization` of None is that of the processes, other Nones stay."""
        with self._file.changing():
            self._slot.utilization = layout.UNSET if utilization is None else utilization
            if temperature_c is not None:
                self._slot.temperature_c = temperature_c
            if power_w is not None:
                self._slot.power_mw = int(power_w * 1000)

    def remove_process(self, pid: int) -> bool:
        return self._file.remove_process(self.slot, pid)

    def xid(self, code: int) -> None:
        self._file.add_event(self.slot, code)

    def show(self) -> dict[str, Any]:
        """Return what can change of the GPU as it is now, for people and programs."""
        slot = self._slot
        types = {number: name for name, number in PROCESS_TYPES.items()}
        processes = [
            {
                "pid": p.pid,
                "used_mib": None if p.used_mib == layout.UNKNOWN_MIB else p.used_mib,
                "type": types[p.type],
            }
            | ({} if p.gpu_instance == layout.UNSET else {"on": [p.gpu_instance, p.compute_instance]})
            for p in slot.processes
            if p.pid
        ]
        return {
            "name": self.description.name,
            "uuid": self.uuid,
            "pci": self.description.address,
            "compute_mode": self.compute_mode,
            "mig": self.mig,
            "mig_pending": self.mig_pending,
            "mig_devices": [device._asdict() for device in self.mig_devices()],
            "time_slice": self.time_slice,
            "reset_required": bool(slot.reset_required),
            "lost": bool(slot.lost),
            "present": bool(slot.on_bus),
            "driver": slot.driver.decode() or None,
            "render": self.description.render,
            "processes": processes,
        }

    @property
    def _slot(self) -> layout.Gpu:
        slot: layout.Gpu = self._file.state.gpus[self.slot]
        return slot

    @property
    def _library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(found_library(self._root)))
