"""Re-exec: the program is run again in the same process, and gets the socket and the lock."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from typing import NamedTuple

from yunion_mps.daemon.signals import ALL
from yunion_mps.host.processes import reap_forgotten

_VARIABLE = "YUNION_MPS_REEXEC"


class ReexecState(NamedTuple):
    """Descriptors of the listening socket and of the lock, and the daemon's first start (s since 1970)."""

    listener: int
    lock: int
    started_s: float


def inherited() -> ReexecState | None:
    """What the program before handed over; None if this is not a re-exec."""
    text = os.environ.pop(_VARIABLE, "")
    if not text:
        return None
    try:
        pid, *fields = json.loads(text)
        if pid != os.getpid():
            return None
        state = ReexecState(int(fields[0]), int(fields[1]), float(fields[2]))
        for descriptor in state[:2]:
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    except (ValueError, TypeError, IndexError, OSError):
        return None
    reap_forgotten()
    return state


def reexec(state: ReexecState) -> None:
    """Run the program again in this process; raises OSError, with nothing changed, if that fails."""
    for descriptor in state[:2]:
        fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)
    command = program()
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        value = json.dumps([os.getpid(), *state])
        os.execve(command[0], [*command, *sys.argv[1:]], {**os.environ, _VARIABLE: value})  # noqa: S606 - no shell is the point
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)
        for descriptor in state[:2]:
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def program() -> list[str]:
    """The command of the daemon: the file that was started, or its module if that was none."""
    file = os.path.abspath(sys.argv[0])
    if os.access(file, os.X_OK) and not file.endswith(".py"):
        return [file]
    return [sys.executable, "-m", "yunion_mps.daemon"]
