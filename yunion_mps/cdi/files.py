"""The files that engines read: written whole and then renamed, and removed by name."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

#: The devices, and with a lease's id in between, what a lease is as a device.
DEVICES = "yunion-mps.json"
_LEASE, _END = "yunion-mps-lease-", ".json"
#: The end of a name while its file is written; engines read `.json` and `.yaml` alone.
_UNFINISHED = ".new"


def lease_file(lease_id: str) -> str:
    """The name of the lease's file."""
    return f"{_LEASE}{lease_id}{_END}"


def write(directory: str, name: str, spec: Mapping[str, Any]) -> None:
    """Have this specification in the directory, which is made where it is missing; raises OSError."""
    text = json.dumps(spec, separators=(",", ":"))
    os.makedirs(directory, mode=0o755, exist_ok=True)
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path + _UNFINISHED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)  # for engines of every user, whatever our umask is
            file.write(text)
        os.replace(path + _UNFINISHED, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + _UNFINISHED)
        raise


def remove(directory: str, name: str) -> None:
    """Have it there no more; that it cannot be removed is told to nobody, for the hook refuses its device."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, name))


def ours(directory: str) -> Iterator[str]:
    """The names of our files in the directory, the unfinished ones among them."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.removesuffix(_UNFINISHED) == DEVICES or name.startswith(_LEASE):
                yield name
