"""Storage: leases, queue positions and memory peaks in the state file, for the next daemon.

The run directory has a copy of each lease, one file per lease; a damaged state file is rebuilt from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from yunion_mps.enums import SHARING
from yunion_mps.errors import HostError
from yunion_mps.host.files import write_atomically
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import QueuedRequest
from yunion_mps.models import Device, Holder, Lease

#: How long after the daemon's start a repeated request still gets its earlier position, in s.
REPEAT_TIMEOUT_S = 60.0
#: How long later requests wait for that: clients repeat a request every 0.2 s while the daemon is away.
PROMPT_REPEAT_TIMEOUT_S = 10.0
#: The types of a device's first fields; its memory follows, which may be unknown.
_DEVICE = (str, str, str, int)


def _wall_clock_ahead_s() -> float:
    return time.time() - time.monotonic()


class LeaseStorage:
    """The leases in the state file; every method raises HostError if that cannot be used."""

    def __init__(self, store: Store, copies: str, ahead_s: Callable[[], float] = _wall_clock_ahead_s) -> None:
        """`copies` is the directory of the copies; `ahead_s` is the wall clock minus the monotonic one."""
        self._store = store
        self._copies = copies
        self._ahead_s = ahead_s
        self._ended: set[str] = set()

    def write(self, lease: Lease) -> None:
        """Store a lease, or replace its stored version."""
        self._delete_ended()  # otherwise the next daemon would find a device in two leases
        text = _text(lease, self._store.boot_id, self._ahead_s())
        self._store.write("INSERT OR REPLACE INTO lease VALUES (?, ?)", [(lease.id, text)])
        with contextlib.suppress(OSError):  # the copy is only a backup
            write_atomically(os.path.join(self._copies, lease.id), text, directory_mode=0o700)

    def delete(self, lease_id: str) -> None:
        """Delete a lease; if that fails, it is deleted before the next one is stored."""
        self._ended.add(lease_id)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._copies, lease_id))
        self._delete_ended()

    def read(self) -> list[Lease]:
        """Read all leases; rows that cannot be parsed, such as another release's, are skipped.

        PIDs are reused after a reboot, so a lease held by a process is valid only within its boot, like
        monotonic times: a lease from an earlier boot expires by the wall clock.
        """
        rows = self._store.read("SELECT value FROM lease ORDER BY rowid")
        boot_id, ahead_s = self._store.boot_id, self._ahead_s()
        return [lease for row in rows if (lease := _lease(row[0], boot_id, ahead_s))]

    def _delete_ended(self) -> None:
        if self._ended:
            self._store.write("DELETE FROM lease WHERE id = ?", [(lease,) for lease in sorted(self._ended)])
            self._ended.clear()


def _text(lease: Lease, boot_id: str, ahead_s: float) -> str:
    devices = [device._asdict() for device in lease.devices]
    holder = lease.holder._asdict()
    if lease.holder.job_uid is None:
        del holder["job_uid"]  # earlier versions do not know it
    if not lease.holder.is_attested:
        del holder["is_attested"]
    value = {**lease._asdict(), "devices": devices, "holder": holder, "boot": boot_id}
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
    if not _is_valid(lease):
        return None
    if is_of_this_boot:
        return lease
    holder = lease.holder._replace(pid=None, started=None)
    return lease._replace(holder=holder) if holder.binding == "name" else None


def _is_valid(lease: Lease) -> bool:
    """Whether every field has its type: a wrong one would crash the daemon later, after every restart."""
    holder = lease.holder
    process = [value for value in (holder.pid, holder.started, holder.job_uid) if value is not None]
    types: list[tuple[object, type | tuple[type, ...]]] = [
        *((value, str) for value in (lease.id, lease.idempotency_key, lease.request)),
        *((value, str) for value in (holder.binding, holder.name, holder.unit, holder.command)),
        *((value, int) for value in (holder.uid, *process)),
        (holder.is_attested, bool),
        *((value, (int, float)) for value in (lease.since_s, holder.ttl_s, lease.ends_s or 0.0)),
        *((value, str) for pair in dict(lease.environment).items() for value in pair),
    ]
    for device in lease.devices:
        known = [mib for mib in (device.memory_limit_mib, device.memory_total_mib) if mib is not None]
        types += zip(device, _DEVICE)
        types += [(mib, int) for mib in known]
        types += [(device.thread_percentage, (int, float)), (device.domain, str), (device.reserve_mib, int)]
    if any(device.sharing not in SHARING for device in lease.devices):
        return False
    return bool(lease.devices) and all(isinstance(value, kind) for value, kind in types)


class QueuePositions:
    """The queue's positions across restarts: a row for each queued request that has an idempotency key.

    A request that is repeated after a restart gets the position of its row, so no client can claim an earlier
    one. A request waits even if its row cannot be written or deleted.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        #: Position and start time of requests that an earlier daemon had queued, until they are repeated.
        self._restored: dict[tuple[int, str], tuple[int, float]] = {}
        self._repeat_deadline_s = self._prompt_repeat_deadline_s = 0.0

    def restore(self, now_s: float) -> None:
        """Read the positions that an earlier daemon stored since the boot; `now_s` is monotonic."""
        self._repeat_deadline_s = now_s + REPEAT_TIMEOUT_S
        self._prompt_repeat_deadline_s = now_s + PROMPT_REPEAT_TIMEOUT_S
        boot_id = self._store.boot_id
        with contextlib.suppress(HostError):
            rows = self._store.read(
                "SELECT uid, idempotency_key, position, since_s, boot_id FROM queued_request"
            )
            self._restored = {(row[0], row[1]): (row[2], row[3]) for row in rows if row[4] == boot_id}
            self._last = max((row[2] for row in rows), default=0)
            self._store.write("DELETE FROM queued_request WHERE boot_id != ?", [(boot_id,)])

    def place(self, queued: QueuedRequest, wall_s: float, now_s: float) -> QueuedRequest:
        """The request with a position: the last, or, if it is repeated after a restart, its earlier one."""
        if now_s > self._repeat_deadline_s and self._restored:
            late, self._restored = self._restored, {}
            self._delete(late)
        place = self._restored.pop(queued.key, None) if queued.key else None
        if place is None:
            self._last += 1
            place = self._last, wall_s
        return queued._replace(position=place[0], since_s=place[1])

    def has_to_wait(self, queued: QueuedRequest, now_s: float) -> bool:
        """Whether an earlier request is still to be repeated after a restart, before this one's turn.

        Clients repeat theirs within a moment; those that have ended meanwhile do not.
        """
        if now_s >= self._prompt_repeat_deadline_s:
            return False
        return any(position < queued.position for position, _ in self._restored.values())

    def store(self, queued: QueuedRequest) -> None:
        if queued.key:
            row = (queued.position, *queued.key, queued.since_s, self._store.boot_id)
            with contextlib.suppress(HostError):  # the row of a repeated request is kept
                self._store.write("INSERT OR IGNORE INTO queued_request VALUES (?, ?, ?, ?, ?)", [row])

    def delete(self, queued: QueuedRequest) -> None:
        if queued.key:
            self._delete([queued.key])

    def _delete(self, keys: Iterable[tuple[int, str]]) -> None:
        statement = "DELETE FROM queued_request WHERE uid = ? AND idempotency_key = ?"
        with contextlib.suppress(HostError):
            self._store.write(statement, list(keys))


class MemoryPeaks:
    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store
        #: By lease id and device address.
        self._mib: dict[tuple[str, str], int] = {}

    def restore(self) -> None:
        """Continue with the previous daemon's peaks, or without them if they cannot be read."""
        with contextlib.suppress(HostError):
            rows = self._store.read("SELECT lease, device, mib FROM memory_peak")
            self._mib = {(row[0], row[1]): row[2] for row in rows}

    def note(self, used_mib: Mapping[str, int]) -> None:
        """Update the peaks from the current use of devices, by address; forget leases that have ended."""
        leases = self._ledger.leases
        ended = {lease_id for lease_id, _ in self._mib if lease_id not in leases}
        self._mib = {key: mib for key, mib in self._mib.items() if key[0] not in ended}
        risen = {
            (lease.id, device.addr): mib
            for lease in (leases.values() if used_mib else ())
            for device in lease.devices
            if (mib := used_mib.get(device.addr, 0)) > self._mib.get((lease.id, device.addr), 0)
        }
        self._mib.update(risen)
        with contextlib.suppress(HostError):  # the next daemon continues from what was stored last
            if ended:
                self._store.write(
                    "DELETE FROM memory_peak WHERE lease = ?", [(lease_id,) for lease_id in ended]
                )
            if risen:
                rows = [(*key, mib) for key, mib in risen.items()]
                self._store.write("INSERT OR REPLACE INTO memory_peak VALUES (?, ?, ?)", rows)

    def of(self, lease_id: str, address: str) -> int | None:
        """The peak of a device of the lease; None if it was not used yet."""
        return self._mib.get((lease_id, address))

    def by_device(self) -> dict[str, int]:
        """The peaks of all leased devices, by address."""
        return {
            device: mib for (lease_id, device), mib in self._mib.items() if lease_id in self._ledger.leases
        }


def recorded_ledger(store: Store, copies: str) -> Ledger:
    """The previous daemon's leases, except those whose process has ended; empty if they cannot be read.

    The status at READY is based on it, before the event loop watches the leases and reports problems.
    """
    ledger = Ledger()
    with contextlib.suppress(HostError, AssertionError):
        for lease in LeaseStorage(store, copies).read():
            holder = lease.holder
            is_kept = holder.binding == "name" or holder.pid is None
            if is_kept or started_ticks(holder.pid or 0) == holder.started:
                ledger.add(lease)
    return ledger
