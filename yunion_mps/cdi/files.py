"""The files that engines read: written whole and then renamed, and removed by name."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from yunion_mps.host.files import UNFINISHED, write_atomically

#: The devices, and with a lease's id in between, what a lease is as a device.
DEVICES = "yunion-mps.json"
_LEASE, _END = "yunion-mps-lease-", ".json"


def lease_file(lease_id: str) -> str:
    """The name of the lease's file."""
    return f"{_LEASE}{lease_id}{_END}"


#: What tells whether a file is still as it was written: inode, size, and time of the last change in ns.
Mark = tuple[int, int, int]


def write(directory: str, name: str, spec: Mapping[str, Any]) -> Mark:
    """Have this specification in the directory, which is made where it is missing; raises OSError."""
    text = json.dumps(spec, separators=(",", ":"))
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - for engines of every user, whatever our umask is
    return _mark_of(write_atomically(os.path.join(directory, name), text))


def mark(directory: str, name: str) -> Mark | None:
    """What is there by this name, None where nothing is."""
    try:
        return _mark_of(os.lstat(os.path.join(directory, name)))
    except OSError:
        return None


def _mark_of(about: os.stat_result) -> Mark:
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def remove(directory: str, name: str) -> None:
    """Have it there no more; that it cannot be removed is told to nobody, for the hook refuses its device."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, name))


def ours(directory: str) -> Iterator[str]:
    """The names of our files in the directory, the unfinished ones among them."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.removesuffix(UNFINISHED) == DEVICES or name.startswith(_LEASE):
                yield name
