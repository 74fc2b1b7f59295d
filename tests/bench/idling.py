"""What the daemon takes when nothing happens: memory, and processor time."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.running import PYTHON, running
from bench.values import Aim, BenchError, Line, Samples, Settings

#: What the smaller one of the peers takes, with four GPUs: the aim there.
PEER_MIB = 24

#: GPUs, and devices of each.
SIZES = ((1, 4), (4, 4), (64, 48))
MEMORY_FLOOR = "an idle python3 -I"
_CPUCLOCK_SCHED = 2  # the clock of all of a process's threads, as clock_getcpuclockid(3) makes it
#: What the daemon still does after an answer is over by then; nothing tells of its end.
_SETTLE_S = 1.0


def memory_lines(settings: Settings) -> Iterator[Line]:
    """RSS and PSS of daemons with few and with many devices, after they have answered once."""
    del settings
    for gpus, virtual_number in SIZES:
        with running(gpus, virtual_number) as daemon, _idle_python() as floor_pid:
            daemon.answered_ms()
            time.sleep(_SETTLE_S)
            for kind in ("Rss", "Pss"):
                what = (
                    f"{kind.upper()}, {gpus} GPU{'s' if gpus > 1 else ''}, {gpus * virtual_number:,} devices"
                )
                measured = Samples((memory_mib(daemon.pid, kind),), "MiB")
                floor = Samples((memory_mib(floor_pid, kind),), "MiB")
                aim = Aim(PEER_MIB if gpus == 4 else 40, "MiB") if kind == "Rss" else None
                yield Line(what, measured, floor, MEMORY_FLOOR, aim)


def processor_lines(settings: Settings) -> Iterator[Line]:
    """Processor time of idle daemons, all watched in the same minute."""
    wait_s = settings.rounds(60, 10)
    with contextlib.ExitStack() as stack:
        daemons = {gpus: stack.enter_context(running(gpus, number)) for gpus, number in SIZES}
        for daemon in daemons.values():
            daemon.answered_ms()
        time.sleep(_SETTLE_S)
        before = {gpus: _processor_s(daemon.pid) for gpus, daemon in daemons.items()}
        time.sleep(wait_s)
        taken = {gpus: _processor_s(daemon.pid) - before[gpus] for gpus, daemon in daemons.items()}
    for gpus, taken_s in taken.items():
        what = f"idle for {wait_s} s, {gpus} GPU{'s' if gpus > 1 else ''}"
        share = Samples((taken_s / wait_s * 100,), "%")
        yield Line(what, share, None, "one core", Aim(0.1, "%"))


def memory_mib(pid: int, kind: str) -> float:
    """What a process has in memory by /proc/PID/smaps_rollup: its `Rss` or `Pss`."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"the kernel does not tell the {kind} of process {pid}")


def _processor_s(pid: int) -> float:
    """Processor time of a process in seconds, also of its threads that have ended.

    What /proc/PID/stat has in steps of 10 ms, this clock has in nanoseconds.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@contextlib.contextmanager
def _idle_python() -> Iterator[int]:
    waiting = [PYTHON, "-I", "-c", "print(flush=True); input()"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield process.pid
        finally:
            process.kill()
