"""Atomic writes, reads that tolerate a missing file, and the lock that allows only one daemon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

from yunion_mps.errors import HostError, NotAllowedError
from yunion_mps.host.proc import started_ticks
from yunion_mps.paths import Paths

#: Identifies a version of a file: its inode, size and modification time in ns.
FileVersion = tuple[int, int, int]

#: Suffix of a file while it is being written.
UNFINISHED = ".new"
_MODE = 0o644


def write_atomically(
    path: str,
    text: str | bytes,
    *,
    directory_mode: int = 0o755,
    dir_fd: int | None = None,
    hidden: bool = False,
) -> FileVersion:
    """Write the file, readable for all, so that readers never see part of it; raises OSError.

    A failed write leaves nothing behind. Missing directories are created, unless `dir_fd` is given, to which
    `path` is then relative. The directory may belong to another user: links in it are not followed, and the
    remains of an interrupted write are removed first. The mode does not depend on the umask. The name of the
    unfinished file begins with a dot if it is to be `hidden` from programs that read the whole directory.
    """
    if dir_fd is None:
        os.makedirs(os.path.dirname(path) or ".", mode=directory_mode, exist_ok=True)
    directory, name = os.path.split(path)
    new = os.path.join(directory, f"{'.' if hidden else ''}{name}{UNFINISHED}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=dir_fd)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, _MODE)
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            info = os.fstat(descriptor)
        os.replace(new, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=dir_fd)
        raise
    return _version(info)


def version_of(path: str, *, follow_symlinks: bool = True) -> FileVersion | None:
    try:
        return _version(os.stat(path, follow_symlinks=follow_symlinks))
    except OSError:
        return None


def _version(info: os.stat_result) -> FileVersion:
    return info.st_ino, info.st_size, info.st_mtime_ns


def read_text(path: str, max_bytes: int = 16 << 20) -> str:
    """Return the beginning of a file, or "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""


#: How long the last child of an ended daemon may take to reach exec.
_EXEC_TIMEOUT_S = 2.0


def take_lock(paths: Paths) -> int:
    """Take the lock and return the descriptor that holds it; raises HostError naming the other daemon.

    If a daemon was killed while it started a program, that child holds the lock until it reaches exec
    (execve(2), FD_CLOEXEC); this function waits for that.
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
