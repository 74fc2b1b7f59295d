"""The lock that allows only one daemon on a host."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from yunion_mps.core.errors import HostError, NotAllowedError
from yunion_mps.core.paths import Paths
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import started_ticks

#: How long the last child of an ended daemon may take to reach exec.
_EXEC_TIMEOUT_S = 2.0


def take_lock(paths: Paths) -> int:
    """Take the lock and return the descriptor that holds it.

    If a daemon was killed while it started a program, that child holds the lock until it reaches exec
    (execve(2), FD_CLOEXEC); this function waits for that.

    Raises HostError that names the other daemon if one has the lock, or if its file cannot be used.
    """
    descriptor = _open(paths)
    end_s = time.monotonic() + _EXEC_TIMEOUT_S
    while not _try_lock(descriptor):
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


def holder_of_lock(paths: Paths) -> int | None:
    """Return the PID of the running daemon; None if there is none. Any user may ask.

    The kernel's list is read (proc(5), /proc/locks), because a lock taken to try would refuse a daemon that
    starts.
    """
    try:
        info = os.stat(paths.lock)
    except OSError:
        return None
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in read_text("/proc/locks").splitlines():
        fields = line.split()
        if file in fields and "FLOCK" in fields:
            pid = fields[fields.index(file) - 1]
            return int(pid) if pid.isdigit() else None
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(paths: Paths) -> int:
    """Open the file so that only we can: any process that can open it could keep us from starting."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        os.makedirs(paths.run_directory, mode=0o755, exist_ok=True)
        descriptor = os.open(paths.lock, flags, 0o600)
    except OSError as error:
        message = f"{paths.lock} cannot be opened: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM):
            raise NotAllowedError(message, "run as root") from None
        raise HostError(message, f"check it: ls -ld {paths.lock}") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        hint = f"check it (ls -l {paths.lock}), and remove it"
        raise HostError(f"{paths.lock} was not created by yunion-mps", hint)
    os.fchmod(descriptor, 0o600)  # an earlier version may have left it open to others
    return descriptor
