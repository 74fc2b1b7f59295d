"""What the kernel's log says of XIDs: it alone names the process that was at work when one came."""

from __future__ import annotations

import os
import re

from yunion_mps.inventory.pci import normal_address
from yunion_mps.paths import Paths

#: `NVRM: Xid (PCI:0000:c6:00): 31, pid=1234, name=python, ...`; the PID may be quoted or unknown.
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), pid='?(\d+)")
#: The kernel keeps a ring of records, each read by itself (dmesg(1)); more than this is not looked at.
_MOST_RECORDS = 20_000


def processes_of_xids(paths: Paths) -> list[tuple[str, int, int]]:
    """(PCI address, XID, PID) of each XID in the kernel's log that names a process, the oldest first.

    Empty where the log cannot be read, as in a container.
    """
    found = []
    for record in records(paths.kernel_log) or []:
        for bus, xid, pid in _XID.findall(record):
            address = normal_address(bus.decode() if bus.count(b".") else f"{bus.decode()}.0")
            if address:
                found.append((address, int(xid), int(pid)))
    return found


def records(path: str) -> list[bytes] | None:
    """The log's records, the oldest first; None where it cannot be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found: list[bytes] = []
    try:
        while len(found) < _MOST_RECORDS:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # it was overwritten while we read: the next one is there
                continue
            except OSError:
                break
            if not record:
                break
            found.append(record)
    finally:
        os.close(log)
    return found
