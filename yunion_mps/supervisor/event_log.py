"""The event log: every change on the host, with its time, cause and consequence.

An event is written to a copy in the run directory first, then to the state file, so that neither a full disk
nor a damaged file loses it. Events that cannot be written immediately are written later, in order; nothing
waits for them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import HostError, LockedError
from yunion_mps.host.store import Store
from yunion_mps.models import Event

log = logging.getLogger(__name__)

#: How many events are kept, and for how long.
MAX_EVENTS = 10_000
OLDEST_EVENT_S = 30 * 86_400.0
_PRUNE_EVERY = 256
#: How often the daemon tries again to write what it could not, in s.
RETRY_S = 1.0
#: How many events are kept in memory while none can be written.
_MAX_UNWRITTEN = 1000
#: The size at which the copy is rotated; two files are kept, with about 2,000 events each.
_MAX_COPY_BYTES = 512 * 1024
#: A larger id is not ours, and would leave SQLite no room for later ids.
_MAX_EVENT_ID = 1 << 62
#: The columns of the table, by name, because a newer version's may have more.
_COLUMNS = "id, time_s, severity, kind, subject, what, cause, consequence, code"
_INSERT = f"INSERT OR IGNORE INTO event ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
#: How many fields a line of the copy has.
_FIELDS = 2 + len(Event._fields)


class EventRecord(NamedTuple):
    """A recorded event; ids increase and are never reused. `time_s` is in s since 1970."""

    id: int
    time_s: float
    event: Event


class EventLog:
    """Writes events to the state file, which `store` opens when the first event is recorded."""

    def __init__(
        self, store: Callable[[], Store], copy_file: str, changed: Callable[[], None] = lambda: None
    ) -> None:
        """`copy_file` is the path of the copy; `changed` is called when `write_error` changes."""
        self._store = store
        self._copy = EventCopy(copy_file)
        self._changed = changed
        self._last_id: int | None = None
        # Events without an id, because the next id is unknown until the state file has been read.
        self._without_id: deque[tuple[float, Event]] = deque(maxlen=_MAX_UNWRITTEN)
        self._unwritten: deque[EventRecord] = deque(maxlen=_MAX_UNWRITTEN)
        self._set_aside = ""
        #: Why events cannot be written; empty if they can.
        self.write_error = ""
        self.counts: Counter[tuple[str, str]] = Counter()
        self._listeners: list[Callable[[], None]] = []
        self._retry_at_s = 0.0
        #: Called when an event could not be written, so that `tick` is called soon.
        self.not_written: Callable[[], None] = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever events have been written."""
        self._listeners.append(listener)

    def record(self, event: Event) -> None:
        """Record the event with the current time; call it on the event loop's thread."""
        self._without_id.append((time.time(), event))
        self.counts[event.kind, event.severity] += 1
        self.flush()
        if self._has_more:
            self.not_written()

    @property
    def _has_more(self) -> bool:
        return bool(self._without_id or self._unwritten)

    def tick(self, now_s: float) -> float | None:
        """Try to write what could not be written; return when to call this again, None if all is written."""
        if self._has_more and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + RETRY_S
            self.flush()
        return self._retry_at_s if self._has_more else None

    def flush(self) -> None:
        """Write events that could not be written before."""
        if not self._has_more:
            return
        try:
            self._assign_ids()
            store = self._store()
            EventTable(store).add(list(self._unwritten))
        except HostError as error:
            if not (isinstance(error, LockedError) and error.is_brief):
                self._note_write_error(error.message)
            return
        self._unwritten.clear()
        self._note_write_error("")
        if store.set_aside != self._set_aside:
            self._set_aside = store.set_aside
            self._refill(store)
        for listener in self._listeners:
            listener()

    def last_id(self) -> int:
        """Return the id of the newest event, 0 if there is none; raises HostError.

        The first call includes events that an earlier daemon could not write.
        """
        if self._last_id is None:
            written = EventTable(self._store()).last_id()
            missing = [record for record in self._copy.read() if record.id > written]
            self._unwritten += missing
            self._last_id = missing[-1].id if missing else written
        return self._last_id

    def after(self, last: int, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the oldest `limit` events with an id above `last`; raises HostError."""
        self.last_id()
        written = EventTable(self._store()).after(last, limit, kind)
        return [*written, *self._not_written_since(last, 0.0, kind)][:limit]

    def newest(self, since_s: float, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the newest `limit` events since `since_s` (s since 1970), oldest first; raises HostError."""
        self.last_id()
        written = EventTable(self._store()).newest(since_s, limit, kind)
        return [*written, *self._not_written_since(0, since_s, kind)][-limit:]

    def not_recorded(self, kind: str, since_s: Mapping[str, float]) -> set[str]:
        """Return the subjects without an event since their time, if events of that age are still kept.

        Such an event was lost: the daemon was killed before it could record it. Empty if events cannot be
        read.
        """
        try:
            self.last_id()
            oldest_s, newest_s = EventTable(self._store()).times(kind)
        except HostError:
            return set()
        newest_s.update(
            (record.event.subject, record.time_s) for record in self._unwritten if record.event.kind == kind
        )
        kept = {name: time_s for name, time_s in since_s.items() if time_s >= oldest_s}
        return {name for name, time_s in kept.items() if time_s > newest_s.get(name, 0.0)}

    def _not_written_since(self, last: int, since_s: float, kind: str) -> list[EventRecord]:
        return [
            record
            for record in self._unwritten
            if record.id > last and record.time_s >= since_s and kind in ("", record.event.kind)
        ]

    def _assign_ids(self) -> None:
        """Assign ids to new events and copy them; raises HostError if the next id is unknown."""
        first = self.last_id() + 1
        new = [EventRecord(number, *record) for number, record in enumerate(self._without_id, first)]
        self._without_id.clear()
        self._last_id = first + len(new) - 1
        self._unwritten += new
        self._copy.add(new)

    def _refill(self, store: Store) -> None:
        """Fill a state file that was damaged and created again with the events of the copy."""
        what = f"the state file could not be read and was set aside as {store.set_aside}"
        log.error("%s; it is rebuilt from copies", what)
        try:
            EventTable(store).add(self._copy.read())
        except HostError as error:
            self._note_write_error(error.message)
        consequence = "it was rebuilt from copies: the events since boot, and the original compute modes"
        code = reasons.STATE_FILE_DAMAGED
        self.record(Event("error", "daemon", "state file", what, "it is damaged", consequence, code))

    def _note_write_error(self, message: str) -> None:
        if message == self.write_error:
            return
        if message:
            log.error("events cannot be written to disk and are kept in %s: %s", self._copy.file, message)
        self.write_error = message
        self._changed()


class EventTable:
    """The events in a state file, bounded in number and age; every method raises HostError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, events: Sequence[EventRecord]) -> None:
        """Add all of the events or none; events already present are skipped."""
        if not events:
            return
        rows = [(record.id, record.time_s, *record.event) for record in events]
        self._store.write(_INSERT, rows)
        if events[0].id // _PRUNE_EVERY != (events[-1].id + 1) // _PRUNE_EVERY:
            self._prune()

    def last_id(self) -> int:
        """Return the highest id ever used, 0 if there is none."""
        rows = self._store.read("SELECT seq FROM sqlite_sequence WHERE name = 'event'")
        return int(rows[0][0]) if rows else 0

    def newest(self, since_s: float, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the newest `limit` events since `since_s`, oldest first."""
        query = f"""SELECT {_COLUMNS} FROM event WHERE time_s >= ? AND (? = '' OR kind = ?)
            ORDER BY id DESC LIMIT ?"""
        return [_record(row) for row in reversed(self._store.read(query, since_s, kind, kind, limit))]

    def after(self, last: int, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the oldest `limit` events with an id above `last`, oldest first."""
        query = f"SELECT {_COLUMNS} FROM event WHERE id > ? AND (? = '' OR kind = ?) ORDER BY id LIMIT ?"
        return [_record(row) for row in self._store.read(query, last, kind, kind, limit)]

    def times(self, kind: str) -> tuple[float, dict[str, float]]:
        """Return the time of the oldest event, and of the newest of this kind by subject, in s since 1970."""
        (oldest,) = self._store.read("SELECT COALESCE(MIN(time_s), 0) FROM event")
        query = "SELECT subject, MAX(time_s) FROM event WHERE kind = ? GROUP BY subject"
        return oldest[0], dict(self._store.read(query, kind))

    def _prune(self) -> None:
        """Delete old events, by number first, because a clock set ahead makes new events look old."""
        self._store.write("DELETE FROM event WHERE id <= ?", [(self.last_id() - MAX_EVENTS,)])
        self._store.write("DELETE FROM event WHERE time_s < ?", [(time.time() - OLDEST_EVENT_S,)])


def _record(row: Sequence[object]) -> EventRecord:
    number, time_s, *fields = row
    return EventRecord(int(str(number)), float(str(time_s)), Event(*map(str, fields)))


class EventCopy:
    """The copy of the events, one JSON line each; lines that cannot be written or read are skipped."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._older = f"{file}.old"

    def add(self, events: Iterable[EventRecord]) -> None:
        rows = ([record.id, record.time_s, *record.event] for record in events)
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.file), mode=0o755, exist_ok=True)
            file = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, lines.encode())
                is_large = os.fstat(file).st_size > _MAX_COPY_BYTES
            finally:
                os.close(file)
            if is_large:
                os.replace(self.file, self._older)

    def read(self) -> list[EventRecord]:
        records: dict[int, EventRecord] = {}
        for name in (self._older, self.file):
            with contextlib.suppress(OSError), open(name, encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                        number, time_s, *fields = json.loads(line)[:_FIELDS]
                        if 0 < int(number) < _MAX_EVENT_ID:
                            event = Event(*map(str, fields))
                            records[int(number)] = EventRecord(int(number), float(time_s), event)
        return [records[number] for number in sorted(records)]
