"""What people and their programs do to a host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator

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


def signal_and_wait(pid: int, number: int) -> None:
    """SIGSTOP, and wait until it has stopped."""
    os.kill(pid, number)

    def has_stopped() -> bool:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"

    until(has_stopped, "its stop")


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


@contextlib.contextmanager
def open_front_end(scene: Scene) -> Iterator[None]:
    """NVIDIA's front-end as somebody has it open in a terminal: the control daemon serves it alone."""
    log = scene.host.root / "tmp/nvidia-mps/log/control.log"
    before = log.read_text().count("NEW UI")
    env = {**scene.host.env, "CUDA_MPS_PIPE_DIRECTORY": str(scene.pipe_directory)}
    front_end = subprocess.Popen(
        [str(scene.control_program)], env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
    )
    assert front_end.stdin is not None
    try:
        until(lambda: log.read_text().count("NEW UI") > before, "its connection")
        yield
    finally:
        front_end.stdin.close()
        front_end.wait()


def hear_events(scene: Scene) -> None:
    """Wait until the driver's events are heard: XID 13 is a job's own fault, and harms nothing."""

    def heard() -> bool:
        scene.host.gpus[0].xid(13)
        return any("XID 13" in event["what"] for event in scene.events())

    until(heard, "the driver's events", scene.trouble, pause_s=0.05)


def hang(scene: Scene, call: str) -> None:
    """Let NVML hang in one call, for 30 s, and wait until the daemon has made it."""
    hear_events(scene)
    scene.host.fail(call, "success", times=1, delay_ms=30_000)
    scene.host.gpus[0].xid(13)  # so that the GPUs are looked at now
    until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
