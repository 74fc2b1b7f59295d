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
    from yunion_mps.core.paths import Paths
    from yunion_mps.host.systemd import Notifier
    from yunion_mps.http.listener import Listener
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
        """Return a descriptor that becomes readable with a signal; `clear` makes it wait for the next one."""
        return self._wake

    def clear(self) -> None:
        """Empty the descriptor; what was requested is not forgotten."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def take_reload(self) -> bool:
        """Return whether a reload was requested since the last call."""
        is_requested = self._reload
        self._reload = False
        return is_requested

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
    notifier: Notifier
    signals: Signals
    #: The daemon's first start, in s since 1970.
    started_s: float


class ReexecState(NamedTuple):
    """What the program hands over to the one that it executes in its place."""

    #: The descriptor of the listening socket.
    listener: int
    #: The descriptor that holds the lock.
    lock: int
    #: The daemon's first start, in s since 1970.
    started_s: float

    def set_close_on_exec(self, *, is_set: bool) -> None:
        """Set whether the descriptors end with this program.

        Raises OSError if one of them is not open.
        """
        flag = fcntl.FD_CLOEXEC if is_set else 0
        fcntl.fcntl(self.listener, fcntl.F_SETFD, flag)
        fcntl.fcntl(self.lock, fcntl.F_SETFD, flag)


#: The members of the state in the environment of earlier versions, which had a list, by position.
_POSITIONS = ("pid", "listener", "lock", "started_s")


def inherited_state() -> ReexecState | None:
    """Return the state that the previous program handed over; None if this is not a re-exec."""
    text = os.environ.pop(_VARIABLE, "")
    if not text:
        return None
    try:
        members = json.loads(text)
        if isinstance(members, list):
            members = dict(zip(_POSITIONS, members))
        if members["pid"] != os.getpid():
            return None
        state = ReexecState(
            listener=int(members["listener"]),
            lock=int(members["lock"]),
            started_s=float(members["started_s"]),
        )
        state.set_close_on_exec(is_set=True)
    except (ValueError, TypeError, LookupError, OSError):
        return None
    reap_inherited_children()
    return state


def reexec_program(state: ReexecState) -> None:
    """Run the program again in this process.

    Raises OSError, with nothing changed, if that fails.
    """
    state.set_close_on_exec(is_set=False)
    command = program()
    environment = {**os.environ, _VARIABLE: json.dumps({"pid": os.getpid(), **state._asdict()})}
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        os.execve(command[0], [*command, *sys.argv[1:]], environment)  # noqa: S606 - no shell is the point
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        state.set_close_on_exec(is_set=True)


def program() -> list[str]:
    """Return the command of the daemon: the file that was started, or the module if it was run with -m."""
    file = os.path.abspath(sys.argv[0])
    if os.access(file, os.X_OK) and not file.endswith(".py"):
        return [file]
    return [sys.executable, "-m", "yunion_mps.daemon"]
