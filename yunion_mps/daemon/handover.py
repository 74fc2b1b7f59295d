"""From one program to the next in the same process: what a re-exec hands over, so that nothing is let go."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from typing import NamedTuple

from yunion_mps.daemon.signals import ALL
from yunion_mps.host.processes import reap_forgotten

_VARIABLE = "YUNION_MPS_HANDOVER"


class Handover(NamedTuple):
    """Descriptors of the listening socket and of the lock, and the daemon's first start (s since 1970)."""

    listener: int
    lock: int
    started_s: float


def received() -> Handover | None:
    """What the program before us handed over, None where we were started anew."""
    text = os.environ.pop(_VARIABLE, "")
    if not text:
        return None
    try:
        pid, *fields = json.loads(text)
        if pid != os.getpid():
            return None
        handover = Handover(int(fields[0]), int(fields[1]), float(fields[2]))
        for descriptor in handover[:2]:
            _hold(descriptor)
    except (ValueError, TypeError, IndexError, OSError):
        return None
    reap_forgotten()
    return handover


def become_anew(handover: Handover) -> None:
    """Run the program anew in this process; raises OSError, with nothing changed, where that fails."""
    for descriptor in handover[:2]:
        _let_through(descriptor)
    command = program()
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        value = json.dumps([os.getpid(), *handover])
        os.execve(command[0], [*command, *sys.argv[1:]], {**os.environ, _VARIABLE: value})  # noqa: S606 - no shell is the point
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)
        for descriptor in handover[:2]:
            _hold(descriptor)


def _hold(descriptor: int) -> None:
    """Keep the descriptor from every program that is started, as all others are."""
    fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def _let_through(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)


def program() -> list[str]:
    """What starts the daemon's program: the file that was started, or its module where that was none."""
    file = os.path.abspath(sys.argv[0])
    if os.access(file, os.X_OK) and not file.endswith(".py"):
        return [file]
    return [sys.executable, "-m", "yunion_mps.daemon"]
