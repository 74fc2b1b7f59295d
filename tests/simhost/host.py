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
from .bus import Bus
from .description import REFERENCE, Description, HostDescription, parse_description
from .environment import host_environment
from .gpu import MigDevice, SimGpu
from .install import built_library, hidden_library_path, install, library_path
from .state import StateError, StateFile
from .tree import device_file, write_tree

#: How `divide` leaves a GPU's memory open, to be leased in units.
IN_UNITS = "virtual_number: 0; memory_unit: 1GiB"
#: How it has a GPU time-sliced.
SHARED = "type: NVIDIA_GPU_SHARE; virtual_number: 3"
#: How it has three GPUs shared through MPS, time-sliced, and split into MIG instances.
EACH_KIND = (2, SHARED, "mig: [3g.40gb, 1g.10gb]")

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
        self._bus = Bus(root, description, state)
        self.gpus = [SimGpu(slot, self._bus, state, root) for slot in range(len(description.gpus))]

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
            install(place, library, host.driver_version)
            state = StateFile.create(place / "lib/simhost.state", host)
            Bus(place, host, state).start()
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
        install(root, built_library(), host.library_version)
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
        self,
        call: str,
        error: str,
        *,
        gpu: int | None = None,
        times: int | None = None,
        delay_ms: int = 0,
        skip: int = 0,
        one_version: bool = False,
    ) -> None:
        """Let an NVML call (any version; `*` and `?` as in file names) fail with an error of catalog.ERRORS.

        `times=None`: until cleared. `delay_ms` passes first, less if the rule is cleared meanwhile; the
        error "success" only takes that time, and has a lost GPU answer. With `gpu`, a slot, calls that
        concern no GPU go on. The first `skip` calls are let through. With `one_version`, other versions of
        the call go on.
        """
        self._state.add_failure(call, error, gpu, times, delay_ms, skip, one_version=one_version)

    def show(self) -> dict[str, Any]:
        state = self._state.state
        return {
            "driver": {
                "version": state.driver_version.decode(),
                "library": self.library_version,
                "loaded": bool(state.driver_loaded),
                "drm": bool(state.drm_loaded),
            },
            "failures": self._state.failures(),
            "gpus": [gpu.show() for gpu in self.gpus],
        }

    def clear(self) -> None:
        """Take back all failures; calls that hang in them go on."""
        self._state.clear_failures()

    def reboot(self) -> None:
        """Do to the GPUs what a reboot does: apply pending MIG modes, end instances, forget policies."""
        for gpu in self.gpus:
            gpu.forget()

    def renumber(self) -> None:
        """Number the render nodes as a boot may: from 128, in the order of the addresses of all devices."""
        self._bus.renumber()

    def set_drm(self, *, loaded: bool) -> None:
        """Load or unload nvidia-drm, which makes the render nodes of NVIDIA's GPUs."""
        self._bus.set_drm(loaded=loaded)

    def load_driver(self) -> None:
        """Load NVIDIA's kernel module; raises StateError where no GPU is for it."""
        self._bus.load_driver()

    def unload_driver(self) -> None:
        """Unload NVIDIA's kernel module, even if programs use it, which a real one refuses."""
        for gpu in self.gpus:
            gpu.forget()
        self._bus.unload_driver()

    def update_library(self, version: str) -> None:
        """Install NVIDIA's library of another version: processes that have the old one keep it."""
        if len(version) >= layout.State.library_version.size:
            raise StateError(f"the version is too long: {version}")
        install(self.root, built_library(), version)
        with self._state.changing() as state:
            state.library_version = version.encode()

    def update_driver(self, version: str) -> None:
        """Install NVIDIA's library and kernel module of another version, and load that module instead."""
        is_loaded = bool(self._state.state.driver_loaded)
        if is_loaded:
            self.unload_driver()
        self.update_library(version)
        with self._state.changing() as state:
            state.driver_version = version.encode()
        if is_loaded:
            self.load_driver()

    def create_mig_devices(self, gpu: int, *profiles: str) -> list[MigDevice]:
        """Create GPU instances with a compute instance each, as an operator does; return all of the GPU."""
        self.run(["nvidia-smi", "mig", "-i", gpu, "-cgi", ",".join(profiles), "-C"], check=True)
        return self.gpus[gpu].mig_devices()

    def hide_library(self) -> None:
        """Take the library away: programs started from now on find no driver."""
        with contextlib.suppress(FileNotFoundError):
            self.library.rename(self._hidden_library)

    def show_library(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._hidden_library.rename(self.library)

    @property
    def library_version(self) -> str:
        version: bytes = self._state.state.library_version
        return version.decode()

    @property
    def library(self) -> Path:
        return library_path(self.root)

    @property
    def _hidden_library(self) -> Path:
        return hidden_library_path(self.root)

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
