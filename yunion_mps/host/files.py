"""Files: written in one step, so that a reader never finds a part of one, and read if that is possible."""

from __future__ import annotations

import contextlib
import os

#: Tells versions of a file apart: its inode, size and modification time in ns.
FileVersion = tuple[int, int, int]

#: The end of a file's name while it is written.
UNFINISHED = ".new"
_MODE = 0o644


def write_atomically(
    path: str,
    text: str | bytes,
    *,
    directory_mode: int = 0o755,
    dir_fd: int | None = None,
) -> FileVersion:
    """Write the file, readable for all; raises OSError, and then leaves nothing.

    A missing directory is made, unless `dir_fd` is given, which `path` is then relative to. The directory may
    be another user's: no link in it is followed, and what is left of an interrupted write is removed first.
    The mode does not depend on the umask.
    """
    if dir_fd is None:
        os.makedirs(os.path.dirname(path) or ".", mode=directory_mode, exist_ok=True)
    new = path + UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=dir_fd)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, _MODE)
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            about = os.fstat(descriptor)
        os.replace(new, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=dir_fd)
        raise
    return _version(about)


def version_of(path: str, *, follow_symlinks: bool = True) -> FileVersion | None:
    """The version of the file, None if it cannot be found."""
    try:
        return _version(os.stat(path, follow_symlinks=follow_symlinks))
    except OSError:
        return None


def _version(about: os.stat_result) -> FileVersion:
    return about.st_ino, about.st_size, about.st_mtime_ns


def read_text(path: str, most_bytes: int = 16 << 20) -> str:
    """The beginning of a file, empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""
