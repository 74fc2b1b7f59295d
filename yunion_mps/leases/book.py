"""Leases in the state file: what a daemon has given away, the next one knows.

A copy of each lies in the run directory, a file a lease, for when the state file was damaged and begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from yunion_mps.host.files import UNFINISHED, write_atomically
from yunion_mps.host.store import Store
from yunion_mps.models import Device, Holder, Lease

#: The kinds of what a device begins with.
_DEVICE = (str, str, str, int, int, int)


def _wall_clock_ahead_s() -> float:
    return time.time() - time.monotonic()


class Book:
    """The leases of one state file; everything here raises HostError where that cannot be used."""

    def __init__(self, store: Store, copies: str, ahead_s: Callable[[], float] = _wall_clock_ahead_s) -> None:
        """`copies` is the directory of the copies; `ahead_s` is the wall clock minus the monotonic one."""
        self._store = store
        self._ahead_s = ahead_s
        self._copies = copies
        self._set_aside = ""
        self._ended: set[str] = set()
        self._mend()

    def write(self, lease: Lease) -> None:
        """Keep a lease, in the place of what was kept of it."""
        self._strike_ended()  # else a device would be in two leases for the next daemon
        text = _text(lease, self._store.boot_id, self._ahead_s())
        self._insert(lease.id, text)
        self._copy(lease.id, text)
        self._mend()

    def strike(self, lease_id: str) -> None:
        """Forget a lease; where that fails now, it is done before another is kept."""
        self._ended.add(lease_id)
        with contextlib.suppress(OSError):
            os.unlink(self._path(lease_id))
        self._strike_ended()
        self._mend()

    def read(self) -> list[Lease]:
        """All that are kept; what nobody can understand, such as another release's, is passed over.

        Processes end with the boot, and their numbers are given anew: their leases are of this one. So is the
        monotonic clock: a lease of an earlier boot expires by the wall clock.
        """
        rows = self._store.read("SELECT value FROM lease ORDER BY rowid")
        boot_id, ahead_s = self._store.boot_id, self._ahead_s()
        return [lease for row in rows if (lease := _lease(row[0], boot_id, ahead_s))]

    def _strike_ended(self) -> None:
        if self._ended:
            self._store.write("DELETE FROM lease WHERE id = ?", [(one,) for one in sorted(self._ended)])
            self._ended.clear()

    def _insert(self, lease_id: str, text: str) -> None:
        self._store.write("INSERT OR REPLACE INTO lease VALUES (?, ?)", [(lease_id, text)])

    def _mend(self) -> None:
        """Where the file was begun anew, give it the leases of which there is a copy."""
        if self._store.set_aside == self._set_aside:
            return
        self._set_aside = self._store.set_aside
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._copies)):
                if name.endswith(UNFINISHED):
                    continue
                with (
                    contextlib.suppress(OSError, UnicodeError),
                    open(self._path(name), encoding="utf-8") as file,
                ):
                    self._insert(name, file.read())

    def _copy(self, lease_id: str, text: str) -> None:
        """That a copy cannot be written is no reason to refuse the lease."""
        with contextlib.suppress(OSError):
            write_atomically(self._path(lease_id), text, directory_mode=0o700)

    def _path(self, lease_id: str) -> str:
        return os.path.join(self._copies, lease_id)


def _text(lease: Lease, boot_id: str, ahead_s: float) -> str:
    devices = [device._asdict() for device in lease.devices]
    value = {**lease._asdict(), "devices": devices, "holder": lease.holder._asdict(), "boot": boot_id}
    if lease.ends_s is not None:
        value["expires_s"] = lease.ends_s + ahead_s
    return json.dumps(value, separators=(",", ":"))


def _lease(text: str, boot_id: str, ahead_s: float) -> Lease | None:
    try:
        value: dict[str, Any] = json.loads(text)
        is_of_this_boot = value.pop("boot") == boot_id
        expires_s = value.pop("expires_s", None)
        if expires_s is not None and not is_of_this_boot:
            value["ends_s"] = expires_s - ahead_s
        value["devices"] = tuple(Device(**device) for device in value["devices"])
        value["holder"] = Holder(**value["holder"])
        lease = Lease(**value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not _is_whole(lease):
        return None
    return lease if is_of_this_boot or lease.holder.binding == "name" else None


def _is_whole(lease: Lease) -> bool:
    """Whether everything in it is of its kind: what is not would end the daemon later, at each start."""
    holder = lease.holder
    process = [one for one in (holder.pid, holder.started) if one is not None]
    kinds: list[tuple[object, type | tuple[type, ...]]] = [
        *((one, str) for one in (lease.id, lease.idempotency_key)),
        *((one, str) for one in (holder.binding, holder.name, holder.unit, holder.command)),
        *((one, int) for one in (holder.uid, *process)),
        *((one, (int, float)) for one in (lease.since_s, holder.ttl_s, lease.ends_s or 0.0)),
        *((one, str) for pair in dict(lease.environment).items() for one in pair),
    ]
    for device in lease.devices:
        kinds += zip(device, _DEVICE)
        kinds += [(device.thread_percentage, (int, float)), (device.domain, str), (device.reserve_mib, int)]
    return bool(lease.devices) and all(isinstance(one, kind) for one, kind in kinds)
