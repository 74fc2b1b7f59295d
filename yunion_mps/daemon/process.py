"""The daemon's process: the lock that ensures a single instance, its signals, and the re-exec."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
import time
from typing import NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.processes import reap_forgotten
from yunion_mps.paths import Paths

#: How long the last child of a daemon that has ended may take until exec.
_LOAD_TIMEOUT_S = 2.0
_STOP = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP, signal.SIGHUP)
_VARIABLE = "YUNION_MPS_REEXEC"


def take_lock(paths: Paths) -> int:
    """Return a descriptor that holds the lock while it is open; raises HostError naming the other daemon.

    If a daemon was killed while it started a program, that child holds the lock until exec (execve(2),
    FD_CLOEXEC), which this function waits for.
    """
    descriptor = _open(paths)
    end_s = time.monotonic() + _LOAD_TIMEOUT_S
    while not _locked(descriptor):
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        if pid.isdigit() and started_ticks(int(pid)) is None and time.monotonic() < end_s:
            time.sleep(0.001)
            continue
        os.close(descriptor)
        raise HostError(
            f"another yunion-mps-daemon is already running (PID {pid})",
            "check it: yunion-mps status; stop it: systemctl stop yunion-mps-daemon",
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(paths: Paths) -> int:
    """Open the file with access only for us: any process that can open it can keep us from starting."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        os.makedirs(paths.run_directory, mode=0o755, exist_ok=True)
        descriptor = os.open(paths.lock, flags, 0o600)
    except OSError as error:
        hint = f"run as root, and check it: ls -ld {paths.lock}"
        raise HostError(f"{paths.lock} cannot be opened: {error.strerror}", hint) from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        hint = f"check it (ls -l {paths.lock}), and remove it"
        raise HostError(f"{paths.lock} was not created by yunion-mps", hint)
    os.fchmod(descriptor, 0o600)  # an older one may be open to others
    return descriptor


class Signals:
    """SIGTERM and SIGINT ask for a stop, SIGHUP for a reload."""

    def __init__(self) -> None:
        #: The name of the signal that requested for a stop, empty before that.
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
        """Empty the descriptor; what was requested for is not forgotten."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def take_reload(self) -> bool:
        """Whether a reload was requested for since the last call."""
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
    reap_forgotten()
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
