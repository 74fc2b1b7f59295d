"""What people and their programs do to a host, its disks and the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shlex
import shutil
import struct
import subprocess
import threading
from pathlib import Path

from faults.scene import Scene, until
from simhost.host import Closes
from simhost.install import LIBRARY, compiled

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _WALL = 0x4206, 0x4207, 0x40000000

_FAILING = """\
#!/bin/sh
if [ "$1" = -f ] && [ -e {fails} ]; then
    [ -e {always} ] || rm {fails}
    echo "libcuda.so.1: cannot open shared object file"
    exit 3
fi
exec {program} "$@"
"""


class FailingProgram:
    """A script in the place of NVIDIA's program, that ends at once for as long as it is told to."""

    def __init__(self, scene: Scene) -> None:
        program = scene.control_program
        original = program.with_name("original")
        self._fails, self._always = program.with_name("fails"), program.with_name("always")
        program.rename(original)
        words = {"fails": self._fails, "always": self._always, "program": original}
        script = program.with_name("script")
        script.write_text(_FAILING.format(**{name: shlex.quote(str(path)) for name, path in words.items()}))
        script.chmod(0o755)
        script.replace(program)

    def fails(self, *, once: bool) -> None:
        """Fail at the next start, or at every one."""
        if not once:
            self._always.touch()
        self._fails.touch()

    def works(self) -> None:
        self._fails.unlink()


class Tracer:
    """A debugger that holds a process, which then heeds SIGKILL alone; on a thread, as ptrace(2) asks."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._attached = threading.Event()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def attach(self) -> None:
        self._thread.start()
        assert self._attached.wait(60)

    def close(self) -> None:
        self._released.set()
        self._thread.join()

    def _hold(self) -> None:
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        assert ptrace(_PTRACE_SEIZE, self._pid, None, None) == 0, os.strerror(ctypes.get_errno())
        assert ptrace(_PTRACE_INTERRUPT, self._pid, None, None) == 0
        os.waitpid(self._pid, _WALL)
        self._attached.set()
        self._released.wait()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, _WALL)


def await_events(scene: Scene) -> None:
    """Wait until the driver's events are received: Xid 13 is a job's own fault, and harms nothing."""

    def reported() -> bool:
        scene.host.gpus[0].xid(13)
        return any("Xid 13" in event["what"] for event in scene.events())

    until(reported, "the driver's events", scene.trouble, pause_s=0.05)


def hang(scene: Scene, call: str) -> None:
    """Let NVML hang in one call, for 30 s, and wait until the daemon has made it."""
    await_events(scene)
    scene.host.fail(call, "success", times=1, delay_ms=30_000)
    scene.host.gpus[0].xid(13)  # so that the GPUs are looked at now
    until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)


_SIZE_KIB = 512


class FullDisk(Closes):
    """A tmpfs for each directory, that can be filled; a context manager, for before the daemon's start.

    It is mounted in a mount namespace of its own (unshare(1), nsenter(1)), which a process of ours holds: no
    other sees it, and it is gone with them. The test reaches it through /proc/PID/root of the holder.
    """

    def __init__(self, scene: Scene, *directories: str) -> None:
        places = [scene.host.root / directory for directory in directories]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        mounts = [
            f"mount -t tmpfs -o size={_SIZE_KIB}k,mode=755 faults {shlex.quote(str(p))}" for p in places
        ]
        script = " && ".join([*mounts, "echo mounted", "exec sleep infinity"])
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n", "root may mount in a namespace of its own"
        space = f"/proc/{self._holder.pid}"
        self._inside = [Path(f"{space}/root{place}") for place in places]
        scene.daemon.namespace = f"{space}/root"
        program = shutil.which("yunion-mps-daemon", path=scene.daemon.env["PATH"])
        wrapper = scene.stand_ins.folder / "yunion-mps-daemon"
        wrapper.write_text(f'#!/bin/sh\nexec nsenter --mount={space}/ns/mnt {program} "$@"\n')
        wrapper.chmod(0o755)

    def fill(self) -> None:
        for place in self._inside:
            with (place / "filling").open("wb", buffering=0) as file:
                size = 65536
                while size:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        size //= 2

    def make_room(self) -> None:
        for place in self._inside:
            (place / "filling").unlink()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


_SOURCE = Path(__file__).with_name("levers.c")
_PAGE = struct.Struct("=QQqq")


class Levers:
    """The page that a daemon started with `environment` shares with the test."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "levers"
        self._path.write_bytes(bytes(_PAGE.size))
        with self._path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    @property
    def environment(self) -> dict[str, str]:
        """What to start the daemon with; the levers then are that daemon's."""
        self._page[:] = bytes(_PAGE.size)
        return {"LD_PRELOAD": str(compiled("levers", [_SOURCE], LIBRARY)), "LEVERS": str(self._path)}

    @property
    def steps(self) -> int:
        """How often it has changed something outside itself."""
        return int(_PAGE.unpack(self._page[:])[0])

    def kill_before(self, step: int) -> None:
        """End it by SIGKILL just before its step of that number."""
        self._page[8:16] = struct.pack("=Q", step)

    def set_clock(self, offset_s: int) -> None:
        """Shift its wall clock against the host's."""
        self._page[16:24] = struct.pack("=q", offset_s)

    def close(self) -> None:
        self._page.close()
