"""What tests of directories share: another user, and all that can be changed of a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from yunion_mps.mps.directories import make_directory

#: nobody: a user who is neither root nor us.
STRANGER = 65534


def make(path: Path) -> Path:
    """Make it as the domain does, and close it."""
    os.close(make_directory(str(path)))
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything_below(path: Path) -> dict[str, tuple[object, ...]]:
    """Each name below with all that can be changed of it."""
    found: dict[str, tuple[object, ...]] = {}
    for inner in sorted(path.rglob("*")):
        info = inner.lstat()
        text = inner.read_bytes() if inner.is_file() and not inner.is_symlink() else b""
        found[str(inner)] = (info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_mtime_ns, text)
    return found
