"""The processes of a run: whose they are, what they do, and that none is left at its end.

Ours is what descends from this run, or was started in an environment that names the run's own directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def become_subreaper() -> None:
    """Ask the kernel to give orphans among our descendants to this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Let go of orphans that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Stat(NamedTuple):
    """A process that exists."""

    parent: int
    state: str
    uid: int


def stat_of(pid: int) -> Stat | None:
    """What /proc says of it; None where it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().decode(errors="replace").rpartition(")")[2].split()
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return None if words[0] in "ZX" else Stat(int(words[1]), words[0], uid)


def name_of(pid: int) -> str:
    """What the kernel calls the process; empty where it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def of_run(directory: str) -> list[int]:
    """The live processes of this run but this one and its parents; `directory` is the run's own."""
    parents = {pid: stat.parent for pid in all_pids() if (stat := stat_of(pid))}
    above = {os.getpid()}
    pid = os.getpid()
    while (pid := parents.get(pid, 0)) > 0:
        above.add(pid)
    return [
        pid
        for pid in parents
        if pid not in above and (_descends(pid, os.getpid(), parents) or names(pid, directory))
    ]


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    for _ in range(100):
        pid = parents.get(pid, 0)
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
    return False


def names(pid: int, directory: str) -> bool:
    """Whether the environment that the process was started with names the directory."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return directory.encode() in file.read()
    except OSError:
        return False


def end_all(directory: str, patience_s: float = 6.0) -> list[str]:
    """End what is left of the run, and say in words what had to be killed or would not end."""
    left = of_run(directory)
    said = [f"{name_of(pid)} (PID {pid}) was left and ended" for pid in left]
    for number, share in ((signal.SIGCONT, 0.0), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.7)):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        end_s = time.monotonic() + share * patience_s
        while left and time.monotonic() < end_s:
            reap()
            left = of_run(directory)
            time.sleep(0.02)
    return said + [f"{name_of(pid)} (PID {pid}) did not end on SIGKILL" for pid in left]
