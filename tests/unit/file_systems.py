"""File systems as other users leave them: one that blocks every call, and one without space."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

#: Without its descriptor, all calls to a hung file system fail, so that a test that blocks ends.
_RESCUE_S = 30.0
_LAZILY = 2


@contextmanager
def hung_mount(path: Path, uid: int) -> Iterator[None]:
    """Mount a file system there as fusermount does for a user; every call to it blocks."""
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        try:
            device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            pytest.skip("no /dev/fuse")
        rescue = threading.Timer(_RESCUE_S, os.close, [device])
        rescue.start()
        stack.callback(os.close, device)
        stack.callback(rescue.cancel)
        options = f"fd={device},rootmode=40000,user_id={uid},group_id={uid},allow_other"
        if libc.mount(b"theirs", os.fsencode(path), b"fuse.theirs", 6, options.encode()):
            pytest.skip("no file system can be mounted here")
        stack.callback(libc.umount2, os.fsencode(path), _LAZILY)
        yield


@contextmanager
def file_system_of(path: Path, most_files: int, size: str = "1m") -> Iterator[None]:
    """Mount a file system like that of /tmp, which can hold only so many files; 0 is no limit."""
    options = f"size={size},nr_inodes={most_files},mode=1777"
    mount = ["mount", "-t", "tmpfs", "-o", options, "small", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path) -> None:
    """Create files until the file system can hold no more."""
    for number in range(os.statvfs(path).f_ffree):
        (path / str(number)).touch()
