"""Storage: leases, queue positions and memory peaks in the state file, for the next daemon."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps.enums import BINDINGS, SHARING
from yunion_mps.errors import HostError
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import QueuedRequest
from yunion_mps.models import Device, Holder, Lease

#: How long after the daemon's start a repeated request still gets its earlier position, in s.
REPEAT_TIMEOUT_S = 60.0
#: How long later requests wait for that: clients repeat a request every 0.2 s while the daemon is away.
PROMPT_REPEAT_TIMEOUT_S = 10.0
_INSERT_QUEUED = """INSERT OR IGNORE INTO queued_request
    (position, uid, idempotency_key, since_s, boot_id) VALUES (?, ?, ?, ?, ?)"""
_NUMBER = (int, float)
_NONE = type(None)
#: The types of what a row says of a lease, its holder and its devices. Members that are not listed are of
#: a newer version, and ignored.
_LEASE_TYPES: Mapping[str, tuple[type, ...]] = {
    "devices": (list,),
    "holder": (dict,),
    "since_s": _NUMBER,
    "environment": (dict,),
    "idempotency_key": (str,),
    "cdi": (bool,),
    "ends_s": (*_NUMBER, _NONE),
    "is_extended": (bool,),
    "request": (str,),
    "boot": (str,),
    "expires_s": (*_NUMBER, _NONE),
}
_HOLDER_TYPES: Mapping[str, tuple[type, ...]] = {
    "binding": (str,),
    "uid": (int,),
    "pid": (int, _NONE),
    "started": (int, _NONE),
    "name": (str,),
    "ttl_s": _NUMBER,
    "unit": (str,),
    "command": (str,),
    "job_uid": (int, _NONE),
    "is_attested": (bool,),
}
_DEVICE_TYPES: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "addr": (str,),
    "gpu_uuid": (str,),
    "slot": (int,),
    "memory_limit_mib": (int, _NONE),
    "memory_total_mib": (int, _NONE),
    "thread_percentage": _NUMBER,
    "budget_enforced": (bool,),
    "domain": (str,),
    "priority": (str,),
    "reserve_mib": (int,),
    "sharing": (str,),
}
#: The largest PID and user id that Linux has.
_MAX_PID, _MAX_UID = 4_194_304, 2**32 - 2
#: The possible values of numbers; of all others, those that SQLite and the kernel can have.
_ANY_NUMBER = (-(2**62), 2**62)
_RANGES: Mapping[str, tuple[float, float]] = {
    "pid": (1, _MAX_PID),
    "uid": (0, _MAX_UID),
    "job_uid": (0, _MAX_UID),
    "started": (0, 2**62),
    "slot": (0, 2**31),
    "memory_limit_mib": (0, 2**31),
    "memory_total_mib": (0, 2**31),
    "reserve_mib": (0, 2**31),
    "thread_percentage": (0, 100),
}
#: What a device has instead of values that cannot be read: as much of its GPU as there may be.
_UNKNOWN_BUDGET: Mapping[str, Any] = {
    "slot": 0,
    "memory_limit_mib": None,
    "memory_total_mib": None,
    "thread_percentage": 100.0,
    "budget_enforced": False,
    "domain": "",
}
#: What a lease is bound to if it ends with a process of its boot.
_PROCESS_BINDINGS = tuple(binding for binding in BINDINGS if binding != "name")
#: How much of a lease's id is in the name of a holder that cannot be read.
_ID_LENGTH = 8


def _wall_clock_ahead_s() -> float:
    return time.time() - time.monotonic()


class _Row(NamedTuple):
    """What a row says: the lease, None if it has ended with its boot or its devices are not known.

    `problem` is what of it cannot be read, empty if nothing. The holder of such a lease may still run, so
    the lease keeps its devices.
    """

    lease: Lease | None
    problem: str = ""


class LeaseStorage:
    """The leases in the state file; every method raises HostError if that cannot be used."""

    def __init__(self, store: Store, ahead_s: Callable[[], float] = _wall_clock_ahead_s) -> None:
        """`ahead_s` returns the wall clock minus the monotonic one, in s."""
        self._store = store
        self._ahead_s = ahead_s
        self._ended: set[str] = set()
        #: The leases, by id, whose stored versions are out of date.
        self._unwritten: dict[str, Lease] = {}
        #: By lease id, what of its row this version cannot read. Such a row is kept as it is, for the version
        #: that wrote it, until the lease is deleted.
        self.unreadable: dict[str, str] = {}

    def write(self, lease: Lease) -> None:
        """Store a lease, or replace its stored version, unless that is of another version."""
        self._delete_ended()  # otherwise the next daemon would find a device in two leases
        if lease.id in self.unreadable:
            return
        text = _text(lease, self._store.boot_id, self._ahead_s())
        self._store.record_lease(lease.id, text)
        self._unwritten.pop(lease.id, None)

    def replace(self, lease: Lease) -> bool:
        """Replace the stored version of a lease; if that fails, `flush` does it, and this returns False."""
        try:
            self.write(lease)
        except HostError:
            self._unwritten[lease.id] = lease
        return lease.id not in self._unwritten

    def flush(self) -> None:
        """Write and delete what could not be written or deleted before."""
        self._delete_ended()
        for lease in list(self._unwritten.values()):
            self.write(lease)

    def delete(self, lease_id: str) -> None:
        """Delete a lease; if that fails, it is deleted before the next one is stored."""
        self._ended.add(lease_id)
        self._unwritten.pop(lease_id, None)
        self.unreadable.pop(lease_id, None)
        self._delete_ended()

    def read(self) -> list[Lease]:
        """Read all leases whose devices are known, and note in `unreadable` what cannot be read.

        If only the devices of a row can be read, because a newer version wrote it or it is damaged, its lease
        ends with its process if that is known, or else by a release.

        PIDs are reused after a reboot, so a lease held by a process is valid only within its boot, like
        monotonic times: a lease from an earlier boot expires by the wall clock.
        """
        boot_id, ahead_s = self._store.boot_id, self._ahead_s()
        leases: list[Lease] = []
        self.unreadable.clear()
        for lease_id, text in self._store.read("SELECT id, value FROM lease ORDER BY rowid"):
            row = _read_row(lease_id, text, boot_id, ahead_s)
            if row.lease:
                leases.append(row.lease)
            if row.problem:
                self.unreadable[lease_id] = row.problem
        return leases

    def _delete_ended(self) -> None:
        if self._ended:
            self._store.forget_leases(sorted(self._ended))
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


def _read_row(lease_id: str, text: str, boot_id: str, ahead_s: float) -> _Row:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return _Row(None, _describe(["JSON"]))
    members, problems = _members(value, _LEASE_TYPES)
    holder, of_holder = _members(members.get("holder", {}), _HOLDER_TYPES)
    is_of_this_boot = "boot" not in members or members["boot"] == boot_id
    has_process = holder.get("binding") in _PROCESS_BINDINGS
    if has_process and not is_of_this_boot:
        return _Row(None)
    devices: list[Device] = []
    for one in members.get("devices", ()):
        device, of_device = _read_device(one)
        problems += of_device
        if device is None:
            return _Row(None, _describe(problems))
        devices.append(device)
    problems += of_holder
    problems += [name for name in ("boot", "since_s", "holder", "devices") if name not in members]
    problems += [name for name in ("binding", "uid") if name not in holder]
    if holder.get("binding") not in (None, *BINDINGS):
        problems.append(f"binding ({holder['binding']})")
    if not all(isinstance(one, str) for one in members.get("environment", {}).values()):
        problems.append("environment")
    if not devices:
        return _Row(None, _describe([*problems, "devices"]))
    if problems:
        found = _known_process(lease_id, holder) if has_process else _unknown_holder(lease_id, holder)
        since_s = members.get("since_s", 0.0)
        return _Row(Lease(lease_id, tuple(devices), found, since_s), _describe(problems))
    expires_s = members.pop("expires_s", None)
    del members["boot"]
    if not is_of_this_boot:
        holder = {**holder, "pid": None, "started": None}
        members["ends_s"] = members.get("ends_s") if expires_s is None else expires_s - ahead_s
    return _Row(Lease(lease_id, **{**members, "devices": tuple(devices), "holder": Holder(**holder)}))


def _describe(problems: Iterable[str]) -> str:
    return f"invalid or missing: {', '.join(dict.fromkeys(problems))}"


def _members(value: Any, types: Mapping[str, tuple[type, ...]]) -> tuple[dict[str, Any], list[str]]:
    """Return the members that have their types, and the names of those that have not.

    A wrong type would crash the daemon later, after every restart.
    """
    if not isinstance(value, dict):
        return {}, ["JSON object"]
    known = {name: value[name] for name in types if name in value}
    wrong = [name for name, member in known.items() if not _is_valid(name, member, types[name])]
    return {name: member for name, member in known.items() if name not in wrong}, wrong


def _is_valid(name: str, member: Any, types: tuple[type, ...]) -> bool:
    """Whether the member has one of its types and a possible value; in Python, true is a number, too."""
    if isinstance(member, bool):
        return bool in types
    if not isinstance(member, types):
        return False
    if isinstance(member, (int, float)):
        lowest, highest = _RANGES.get(name, _ANY_NUMBER)
        return lowest <= member <= highest
    return True


def _read_device(value: Any) -> tuple[Device | None, list[str]]:
    """Return the device, None if it cannot be identified, and what of it cannot be read."""
    members, problems = _members(value, _DEVICE_TYPES)
    if members.get("sharing", SHARING[0]) not in SHARING:
        problems.append(f"sharing ({members.pop('sharing')})")
    unknown = [name for name in ("id", "addr", "gpu_uuid") if name not in members]
    problems += unknown
    problems += [name for name in _UNKNOWN_BUDGET if name not in members]
    if unknown:
        return None, problems
    return Device(**{**_UNKNOWN_BUDGET, **members}), problems


def _known_process(lease_id: str, holder: Mapping[str, Any]) -> Holder:
    """The holder of which at least the process can be read, so that the lease ends with it."""
    pid, started = holder.get("pid"), holder.get("started")
    if pid is None or started is None:
        return _unknown_holder(lease_id, holder)
    return Holder("process", holder.get("uid", 0), pid, started)


def _unknown_holder(lease_id: str, holder: Mapping[str, Any]) -> Holder:
    """The holder of a lease that only a release by its user or root ends, because its end is not known."""
    return Holder("name", holder.get("uid", 0), name=f"unreadable-{lease_id[:_ID_LENGTH]}")


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
                self._store.write(_INSERT_QUEUED, [row])

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
            self._mib = {(row[0], row[1]): row[2] for row in rows if isinstance(row[2], int)}

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
                statement = "INSERT OR REPLACE INTO memory_peak (lease, device, mib) VALUES (?, ?, ?)"
                self._store.write(statement, rows)

    def of(self, lease_id: str, address: str) -> int | None:
        """The peak of a device of the lease; None if it was not used yet."""
        return self._mib.get((lease_id, address))

    def by_device(self) -> dict[str, int]:
        """The peaks of all leased devices, by address."""
        return {
            device: mib for (lease_id, device), mib in self._mib.items() if lease_id in self._ledger.leases
        }


def recorded_ledger(store: Store) -> Ledger:
    """The previous daemon's leases, except those whose process has ended; empty if they cannot be read.

    The status at READY is based on it, before the event loop watches the leases and reports problems.
    """
    ledger = Ledger()
    with contextlib.suppress(HostError):
        for lease in LeaseStorage(store).read():
            holder = lease.holder
            is_kept = holder.binding == "name" or holder.pid is None
            if is_kept or started_ticks(holder.pid or 0) == holder.started:
                with contextlib.suppress(AssertionError):
                    ledger.add(lease)
    return ledger
