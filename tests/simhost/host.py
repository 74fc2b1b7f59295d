"""A simulated host and its GPUs as tests use them: made, changed while programs run, and removed whole."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from . import layout
from .catalog import COMPUTE_MODES, ERRORS, XID_FELL_OFF_THE_BUS
from .description import REFERENCE, Description, GpuDescription, HostDescription, parse_description
from .environment import host_environment
from .install import built_library, install, library_path
from .state import PROCESS_TYPES, StateError, StateFile
from .tree import device_file, plug_in, unplug, write_tree

#: How `divide` leaves a GPU's memory open, to be leased in units.
IN_UNITS = "virtual_number: 0\n  memory_unit: 1GiB"

_Self = TypeVar("_Self", bound="Closes")  # typing.Self is not in Python 3.9


class Closes:
    """A context manager that is itself, and ends with `close`."""

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class SimHost(Closes):
    """One host: its root, its environment, its GPUs in NVML's order (that of PCI addresses)."""

    def __init__(
        self, root: Path, description: HostDescription, state: StateFile, *, temporary: bool
    ) -> None:
        self.root = root
        self.description = description
        self.env = host_environment(root)
        self._state = state
        self._temporary = temporary
        self.gpus = [SimGpu(slot, gpu, state, root) for slot, gpu in enumerate(description.gpus)]

    @classmethod
    def create(cls, description: Description | None = None, root: Path | None = None) -> SimHost:
        """Make a host; the reference case without a description, a short root of its own without `root`.

        A named root is kept at the end, and one that holds a host is taken up with its state and all edits.
        Raises DescriptionError for a bad description, StateError for a root that holds something else.
        """
        if root is not None and (root / "lib/simhost.json").exists():
            return cls._reopen(root.absolute(), description)
        raw = REFERENCE if description is None else description
        host = parse_description(raw)
        library = built_library()
        place = _new_root() if root is None else root.absolute()
        try:
            place.mkdir(parents=True, exist_ok=True)
            if root is None:
                place.chmod(0o755)  # programs of other users look in too
            write_tree(place, host)
            install(place, library)
            state = StateFile.create(place / "lib/simhost.state", host)
            (place / "lib/simhost.json").write_text(json.dumps(raw))
        except BaseException:
            if root is None:
                shutil.rmtree(place, ignore_errors=True)
            raise
        made = cls(place, host, state, temporary=root is None)
        for gpu in made.gpus:
            for process in gpu.description.processes:
                gpu.add_process(**process)
        return made

    @classmethod
    def attach(cls, root: Path) -> SimHost:
        """Take part in a host that is there, and leave it there; raises StateError where there is none."""
        try:
            raw = json.loads((root / "lib/simhost.json").read_text())
        except OSError as error:
            raise StateError(f"{root}: no simulated host here ({error.strerror})") from error
        return cls(root, parse_description(raw), StateFile(root / "lib/simhost.state"), temporary=False)

    @classmethod
    def _reopen(cls, root: Path, description: Description | None) -> SimHost:
        host = cls.attach(root)
        if description is not None and parse_description(description) != host.description:
            raise StateError(
                f"{root}: has a host with another description: remove it, or omit the description"
            )
        install(root, built_library())
        return host

    def close(self) -> None:
        """Remove the root where it was made for this host alone."""
        if self._temporary:
            shutil.rmtree(self.root, ignore_errors=True)

    def divide(self, *numbers: object) -> None:
        """Write the device file: the first GPUs into so many devices each, the others not at all.

        Or as IN_UNITS and other texts say: see tree.device_file.
        """
        divided = zip((gpu.uuid for gpu in self.gpus), numbers)
        (self.root / "etc/yunion/host_container_device.yml").write_text(device_file(divided))

    def fail(
        self, call: str, error: str, *, gpu: int | None = None, times: int | None = None, delay_ms: int = 0
    ) -> None:
        """Let an NVML call (any version; `*` and `?` as in file names) fail with an error of catalog.ERRORS.

        `times=None`: until cleared. `delay_ms` passes first, less if the rule is cleared meanwhile; the
        error "success" only takes that time. With `gpu`, a slot, calls that concern no GPU go on.
        """
        self._state.add_failure(call, error, gpu, times, delay_ms)

    def show(self) -> dict[str, Any]:
        return {"failures": self._state.failures(), "gpus": [gpu.show() for gpu in self.gpus]}

    def clear(self) -> None:
        """Take back all failures; calls that hang in them go on."""
        self._state.clear_failures()

    def hide_library(self) -> None:
        """Take the library away: programs started from now on find no driver."""
        with contextlib.suppress(FileNotFoundError):
            self.library.rename(self._hidden_library)

    def show_library(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._hidden_library.rename(self.library)

    @property
    def library(self) -> Path:
        return library_path(self.root)

    @property
    def _hidden_library(self) -> Path:
        return self.library.with_name(f"hidden-{self.library.name}")

    def run(self, command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the host: subprocess.run in its environment, output captured, 2 min at most."""
        settings = {"capture_output": True, "text": True, "env": self.env, "timeout": 120, **options}
        return subprocess.run(self._argv(command), **settings)

    def popen(self, command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host: subprocess.Popen in its environment, with text pipes."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        settings = {**pipes, "text": True, "env": self.env, **options}
        return subprocess.Popen(self._argv(command), **settings)

    def _argv(self, command: Sequence[object]) -> list[str]:
        words = [str(word) for word in command]
        # Not by execvp, which would look in the PATH of the outer host.
        return [shutil.which(words[0], path=self.env["PATH"]) or words[0], *words[1:]]

    @contextlib.contextmanager
    def pynvml(self) -> Iterator[ModuleType]:
        """Let pynvml in this very process speak to this host; the module is as before at the end."""
        import pynvml

        before = pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache)
        pynvml.nvmlLib = ctypes.CDLL(str(self.library))
        pynvml._nvmlGetFunctionPointer_cache.clear()
        try:
            yield pynvml
        finally:
            pynvml.nvmlLib, cache = before
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlGetFunctionPointer_cache.update(cache)


def _new_root() -> Path:
    """Make a short folder, as the paths of the Unix sockets under it end at 107 bytes.

    In memory where it may hold programs: 64 GPUs are 1200 files, which take a second on some disks.
    """
    memory = "/dev/shm"
    usable = os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    return Path(tempfile.mkdtemp(prefix="sim.", dir=memory if usable else "/tmp"))


class SimGpu:
    """A GPU by its slot: its NVML index as long as no GPU before it is removed."""

    def __init__(self, slot: int, description: GpuDescription, state: StateFile, root: Path) -> None:
        self.slot = slot
        self.description = description
        self._file = state
        self._root = root

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
        if not self._slot.mig_capable:
            raise ValueError(f"a {self.description.name} has no MIG mode")
        with self._file.changing():
            self._slot.mig_current = self._slot.mig_pending = on

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
        with self._file.changing():
            self._slot.present = 0
        unplug(self._root, self.description)

    def restore(self) -> None:
        """Bring a lost or removed GPU back; a removed one is found by the next nvmlInit."""
        if not self._slot.present:
            plug_in(self._root, self.description)
        with self._file.changing():
            self._slot.lost = 0
            self._slot.present = 1

    def replace(self, uuid: str) -> None:
        """Put another GPU of the same model in its place; not while a daemon runs."""
        self.description = self.description._replace(uuid=uuid)
        with self._file.changing():
            self._slot.uuid = uuid.encode()

    def add_process(self, pid: int, used_mib: int | None, kind: str = "C", sm: int | None = None, on: tuple[int, int] | None = None) -> None:
        """Put a process on the GPU, or change it; `kind` as in nvidia-smi: C or M+C; `sm` in percent."""
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
            for p in slot.processes
            if p.pid
        ]
        return {
            "name": self.description.name,
            "uuid": self.uuid,
            "pci": self.description.address,
            "compute_mode": self.compute_mode,
            "mig": self.mig,
            "lost": bool(slot.lost),
            "present": bool(slot.present),
            "processes": processes,
        }

    @property
    def _slot(self) -> layout.Gpu:
        slot: layout.Gpu = self._file.state.gpus[self.slot]
        return slot
