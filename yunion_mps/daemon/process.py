"""The daemon's process: its signals, the parts that its start makes, and the re-exec."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.host.processes import reap_inherited_children

if TYPE_CHECKING:
    from yunion_mps.host.systemd import Notifier
    from yunion_mps.http.listener import Listener
    from yunion_mps.paths import Paths
    from yunion_mps.service.queries import Queries
    from yunion_mps.supervisor import Supervisor

_STOP = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP, signal.SIGHUP)
_VARIABLE = "YUNION_MPS_REEXEC"


class Signals:
    """SIGTERM and SIGINT ask for a stop, SIGHUP for a reload."""

    def __init__(self) -> None:
        #: The name of the signal that requested a stop, empty before that.
        self.stop = ""
        self._reload = False
        self._wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _STOP:
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGHUP, self._request_reload)
        # A re-exec has blocked them, so that none is lost or ends the process in between.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def fileno(self) -> int:
        """A descriptor that becomes readable with a signal; `clear` makes it wait for the next one."""
        return self._wake

    def clear(self) -> None:
        """Empty the descriptor; what was requested is not forgotten."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def take_reload(self) -> bool:
        requested, self._reload = self._reload, False
        return requested

    def close(self) -> None:
        """Go back to the system's own handling."""
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._write)

    def _request_stop(self, number: int, _: object) -> None:
        self.stop = signal.Signals(number).name

    def _request_reload(self, number: int, _: object) -> None:
        del number
        self._reload = True


class DaemonParts(NamedTuple):
    """What the start of the daemon makes, and the event loop works with."""

    paths: Paths
    listener: Listener
    supervisor: Supervisor
    queries: Queries
    notifier: Notifier
    signals: Signals


class ReexecState(NamedTuple):
    """The descriptors of the listening socket and the lock, and the daemon's first start (s since 1970)."""

    listener: int
    lock: int
    started_s: float


def inherited_state() -> ReexecState | None:
    """The state that the previous program handed over; None if this is not a re-exec."""
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
    reap_inherited_children()
    return state


def reexec(state: ReexecState) -> None:
    """Run the program again in this process; raises OSError, with nothing changed, if that fails."""
    for descriptor in state[:2]:
        fcntl.fcntl(descriptor, fcntl.F_SETFD, 0)
    command = program()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        value = json.dumps([os.getpid(), *state])
        os.execve(command[0], [*command, *sys.argv[1:]], {**os.environ, _VARIABLE: value})  # noqa: S606 - no shell is the point
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for descriptor in state[:2]:
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def program() -> list[str]:
    """The command of the daemon: the file that was started, or the module if it was run with -m."""
    file = os.path.abspath(sys.argv[0])
    if os.access(file, os.X_OK) and not file.endswith(".py"):
        return [file]
    return [sys.executable, "-m", "yunion_mps.daemon"]
