"""The Python side of the shared state: one writer among others, under the C library's lock."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import layout
from .catalog import ERRORS, EVENT_XID, VENDOR
from .description import GpuDescription, HostDescription
from .mig import NEED_A_RESET, PROFILES

# As nvidia-smi's table has them: compute, a client of MPS.
PROCESS_TYPES = {"C": layout.PROCESS_COMPUTE, "M+C": layout.PROCESS_MPS}

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # linux: the number of futex(2)
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF


class StateError(RuntimeError):
    """The state file is not there, not ours, or has no room."""


class StateFile:
    """The mapped state file of one host. Reading a single number needs no lock; everything else does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size != layout.STATE_SIZE:
                    raise StateError(f"{path}: not the state of this version of simhost; use a new root")
                self._map = mmap.mmap(file.fileno(), layout.STATE_SIZE)
        except OSError as error:
            raise StateError(f"{path}: no simulated host here ({error.strerror})") from error
        self.state = layout.State.from_buffer(self._map)
        if (self.state.magic, self.state.version, self.state.size) != (
            layout.MAGIC, layout.VERSION, layout.STATE_SIZE,
        ):  # fmt: skip
            raise StateError(f"{path}: not the state of this version of simhost; use a new root")

    @classmethod
    def create(cls, path: Path, host: HostDescription) -> StateFile:
        """Write the state that a description asks for; anybody on the machine may map it."""
        state = layout.State(magic=layout.MAGIC, version=layout.VERSION, size=layout.STATE_SIZE)
        state.driver_version = state.library_version = host.driver_version.encode()
        state.driver_loaded, state.drm_loaded = host.driver_loaded, host.drm_loaded
        state.cuda_version = host.cuda_version[0] * 1000 + host.cuda_version[1] * 10
        state.gpu_count = len(host.gpus)
        for slot, gpu in enumerate(host.gpus):
            _fill(state.gpus[slot], gpu)
        for number, other in enumerate(host.others):
            state.others[number].render = layout.UNSET if other.render is None else other.render
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(bytes(state))
        temporary.chmod(0o666)
        temporary.replace(path)
        return cls(path)

    @contextlib.contextmanager
    def changing(self) -> Iterator[layout.State]:
        """Hold the writers' lock, then tell everybody who waits for a change. See lock_state in nvml.h."""
        with open(self.path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self.state
            self.state.changes = (self.state.changes + 1) & 0xFFFFFFFF
        self._wake()

    def _wake(self) -> None:
        number = _FUTEX_CALLS.get(platform.machine())
        if number is None:
            raise StateError(f"simhost does not know the system calls of a {platform.machine()}")
        word = ctypes.byref(self.state, layout.State.changes.offset)
        ctypes.CDLL(None).syscall(number, word, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def add_failure(
        self,
        call: str,
        error: str,
        gpu: int | None,
        times: int | None,
        delay_ms: int,
        skip: int,
        *,
        one_version: bool = False,
    ) -> None:
        """Add a rule, for all versions of the call or for one; the first that fits a call decides."""
        with self.changing() as state:
            free = next((slot for slot in state.failures if not slot.call), None)
            if free is None:
                raise StateError(f"no more than {layout.MAX_FAILURES} failures at once: clear some")
            state.last_failure_id += 1
            free.id = state.last_failure_id
            free.gpu = layout.ALL_GPUS if gpu is None else gpu
            free.error = ERRORS[error]
            free.times = layout.FOREVER if times is None else times
            free.delay_ms = delay_ms
            free.skip = skip
            free.call = (call if one_version else _unversioned(call)).encode()
            state.failure_count += 1

    def failures(self) -> list[dict[str, Any]]:
        names = {number: name for name, number in ERRORS.items()}
        return [
            {
                "call": slot.call.decode(),
                "error": names[slot.error],
                "gpu": None if slot.gpu == layout.ALL_GPUS else slot.gpu,
                "times": None if slot.times == layout.FOREVER else slot.times,
                "delay_ms": slot.delay_ms,
            }
            for slot in self.state.failures
            if slot.call
        ]

    def clear_failures(self) -> None:
        with self.changing() as state:
            for slot in state.failures:
                slot.call = b""
            state.failure_count = 0

    def add_process(
        self, gpu: int, pid: int, used_mib: int | None, kind: str, sm: int | None, on: tuple[int, int] | None
    ) -> None:
        """Put a process on a GPU, or `on` a GPU and compute instance of it; one that is there is changed."""
        with self.changing() as state:
            slots = state.gpus[gpu].processes
            slot = next((slot for slot in slots if slot.pid == pid), None) or next(
                (slot for slot in slots if not slot.pid), None
            )
            if slot is None:
                raise StateError(f"no more than {layout.MAX_PROCESSES} processes on a GPU")
            slot.type = PROCESS_TYPES[kind]
            slot.used_mib = layout.UNKNOWN_MIB if used_mib is None else used_mib
            slot.sm_percent = layout.UNSET if sm is None else sm
            slot.gpu_instance, slot.compute_instance = on or (layout.UNSET, layout.UNSET)
            slot.pid = pid

    def remove_process(self, gpu: int, pid: int) -> bool:
        with self.changing() as state:
            for slot in state.gpus[gpu].processes:
                if slot.pid == pid:
                    slot.pid = 0
                    return True
        return False

    def add_event(self, gpu: int, xid: int) -> None:
        with self.changing() as state:
            event = state.events[state.event_count % layout.MAX_EVENTS]
            event.type, event.data, event.gpu = EVENT_XID, xid, gpu
            state.event_count += 1


def _unversioned(call: str) -> str:
    base, separator, version = call.rpartition("_v")
    call = base if separator and version.isdigit() else call
    return "nvmlInit" if call == "nvmlInitWithFlags" else call


def _fill(slot: layout.Gpu, gpu: GpuDescription) -> None:
    kind = gpu.kind
    slot.uuid, slot.name = gpu.uuid.encode(), gpu.name.encode()
    slot.memory_mib = gpu.memory_mib
    slot.reserved_mib = gpu.memory_mib // 128  # made up, of the usual size
    slot.pci_domain, slot.pci_bus, slot.pci_device = gpu.pci
    slot.pci_device_id = kind.device << 16 | VENDOR
    slot.capability_major, slot.capability_minor = kind.capability
    slot.minor = gpu.minor
    slot.mig_capable = kind.mig
    slot.mig_current = slot.mig_pending = gpu.mig
    slot.mig_needs_reset = gpu.kind_name in NEED_A_RESET
    for place, profile in zip(slot.profiles, PROFILES.get(gpu.kind_name, ())):
        place.name, place.memory_mib = profile.name.encode(), int(profile.memory_gib * 1024)
        place.number, place.id, place.slices, place.count = profile[1:5]
        place.sm, (place.copy, place.decoders, place.jpeg, place.ofa) = profile.sm, profile.engines
        place.size, place.starts = profile.size, sum(1 << start for start in profile.starts)
    slot.compute_mode = gpu.compute_mode
    slot.render = layout.UNSET if gpu.render is None else gpu.render
    slot.lost, slot.lost_lookup = gpu.lost, ERRORS["gpu_is_lost"]
    slot.utilization = layout.UNSET
    slot.power_limit_mw = kind.power_limit_w * 1000
    slot.power_mw, slot.temperature_c = slot.power_limit_mw // 8, 32  # made up, as of an idle one
