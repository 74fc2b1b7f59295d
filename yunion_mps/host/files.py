"""Atomic writes, and reads that tolerate a missing file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import BinaryIO

#: Identifies a version of a file: its inode, size and modification time in ns.
FileVersion = tuple[int, int, int]

#: Suffix of a file while it is being written.
UNFINISHED = ".new"
_PIECE_BYTES = 1 << 13
_MODE = 0o644
_GROUP_MODE = 0o640
_OWNER_MODE = 0o600


def write_atomically(
    path: str,
    text: str | bytes,
    *,
    directory_mode: int = 0o755,
    dir_fd: int | None = None,
    hidden: bool = False,
    readable_by: int | None = None,
) -> FileVersion:
    """Write the file, readable for all, so that readers never see part of it; return its version.

    The directory may belong to another user: links in it are not followed, and the remains of an interrupted
    write are removed first. The mode does not depend on the umask.

    directory_mode: that of missing directories, which are created unless `dir_fd` is given.
    dir_fd: a descriptor of the directory to which `path` is relative.
    hidden: whether the name of the unfinished file begins with a dot, for programs that read all others.
    readable_by: a group's id; the file is never readable for others than its owner and this group.

    Raises OSError; a failed write leaves nothing behind.
    """
    if dir_fd is None:
        os.makedirs(os.path.dirname(path) or ".", mode=directory_mode, exist_ok=True)
    directory, name = os.path.split(path)
    unfinished = os.path.join(directory, f"{'.' if hidden else ''}{name}{UNFINISHED}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=dir_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    first_mode = _MODE if readable_by is None else _OWNER_MODE
    descriptor = os.open(unfinished, flags, first_mode, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:
            if readable_by is None:
                os.fchmod(descriptor, _MODE)
            else:
                os.fchown(descriptor, -1, readable_by)
                os.fchmod(descriptor, _GROUP_MODE)
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            info = os.fstat(descriptor)
        os.replace(unfinished, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=dir_fd)
        raise
    return _version(info)


def version_of(path: str, *, follow_symlinks: bool = True) -> FileVersion | None:
    """Return the version of a file; None if it is missing or cannot be seen."""
    try:
        return _version(os.stat(path, follow_symlinks=follow_symlinks))
    except OSError:
        return None


def _version(info: os.stat_result) -> FileVersion:
    return info.st_ino, info.st_size, info.st_mtime_ns


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError if that is impossible, also for a FIFO or device, which could block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(descriptor, "rb")


def read_text(path: str, max_bytes: int = 16 << 20) -> str:
    """Return the beginning of a regular file, or "" if it cannot be read.

    It is read in pieces, because Python allocates all of `max_bytes` to read them at once.
    """
    data = bytearray()
    try:
        with open_regular(path) as file:
            while len(data) < max_bytes and (piece := file.read(min(_PIECE_BYTES, max_bytes - len(data)))):
                data += piece
    except OSError:
        return ""
    return data.decode(errors="replace")
