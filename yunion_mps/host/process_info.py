"""Users and states of processes, by psutil. What it does not tell rightly, or too slowly, is in `proc`.

For a process that has ended, or if no descriptor is left to ask the kernel, the answer is None or False.
"""

from __future__ import annotations

import psutil

from yunion_mps.host.proc import process_name, user_name


def uid_of(pid: int) -> int | None:
    """Return the effective user id.

    The owner of /proc/PID is no substitute: it is root if the process is not dumpable (proc(5)).
    """
    try:
        return psutil.Process(pid).uids().effective
    except (psutil.Error, OSError, ValueError):  # ValueError: a negative PID
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError, ValueError):
        return False


def describe_process(pid: int) -> str:
    """Return for example `PID 4711 (python3, alice)`, without what is no longer known."""
    uid = uid_of(pid)
    details = [process_name(pid), "" if uid is None else user_name(uid)]
    return f"PID {pid} ({', '.join(filter(None, details))})"
