"""What people and their programs do to a host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import threading

from faults.scene import Scene, until

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


def hear_events(scene: Scene) -> None:
    """Wait until the driver's events are heard: Xid 13 is a job's own fault, and harms nothing."""

    def heard() -> bool:
        scene.host.gpus[0].xid(13)
        return any("Xid 13" in event["what"] for event in scene.events())

    until(heard, "the driver's events", scene.trouble, pause_s=0.05)


def hang(scene: Scene, call: str) -> None:
    """Let NVML hang in one call, for 30 s, and wait until the daemon has made it."""
    hear_events(scene)
    scene.host.fail(call, "success", times=1, delay_ms=30_000)
    scene.host.gpus[0].xid(13)  # so that the GPUs are looked at now
    until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
