"""The event log: every change on the host, with its time, cause and consequence.

An event is written to a copy in the run directory first, then to the state file, so that neither a full disk
nor a damaged file loses it. Events that cannot be written immediately are written later, in order; nothing
waits for them.

Users can cause events at will: leases, processes that fail, connections to a control daemon. Such events
displace only their like, because the number of events is bounded for each kind and severity, and apart from
those that no user can cause. Frequent ones of one cause are counted in one row, whatever texts a user has
chosen (`Event.common`). A warning or an error that is counted takes an id, too, so that those who follow the
events hear of it. Nor do such events hide warnings and errors in a list of the newest events that is asked
for with those first (`event_rank`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from yunion_mps.core import reasons
from yunion_mps.core.enums import EVENT_KINDS, SEVERITIES
from yunion_mps.core.errors import HostError, LockedError
from yunion_mps.core.models import Event
from yunion_mps.core.text import without_pids
from yunion_mps.host.store import Store
from yunion_mps.supervisor.event_rank import OF_USERS, RANK, RECENT_S, is_of_users, rank_of

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How many events of each kind and severity are kept, of what users can cause and of what they cannot, and
#: for how long.
MAX_EVENTS = 5000
OLDEST_EVENT_S = 30 * 86_400.0
_PRUNE_EVERY = 256
#: How often the daemon tries again to write what it could not, in s.
RETRY_S = 1.0
#: So many events of one cause within `REPEAT_S` have rows of their own; the last of these counts further
#: ones.
MAX_REPEATS = 10
REPEAT_S = 3600.0
#: Of how many causes the latest events are remembered, to count further ones.
_MAX_CAUSES = 1000
#: How many events are kept in memory while none can be written.
_MAX_UNWRITTEN = 1000
#: The size at which the copy is rotated; two files are kept, with about 2,000 events each.
_MAX_COPY_BYTES = 512 * 1024
#: A larger id is not ours, and would leave SQLite no room for later ids.
_MAX_EVENT_ID = 1 << 62
#: The fields of an event that are stored (`Event.stored`).
_FIELDS = ("severity", "kind", "subject", "what", "cause", "consequence", "code")
#: The columns of the table, by name, because a newer version's may have more.
_COLUMNS = f"id, time_s, {', '.join(_FIELDS)}"
_INSERT = f"INSERT OR IGNORE INTO event ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT = f"SELECT {_COLUMNS}, count, last_s FROM event LEFT JOIN event_repeat ON event = id"
#: Which events are among the newest: with an id below one, since a time, and of a kind.
_NEWEST = "id < ? AND COALESCE(last_s, time_s) >= ? AND (? = '' OR kind = ?)"
#: What it means that the state file was rebuilt, with copies of its records and without.
REBUILT = (
    "it was rebuilt from copies: the events since boot, the leases, the original settings of GPUs, and which "
    "MIG instances the daemon created"
)
RECORDS_LOST = (
    "there were no copies of its records, so these are lost: leases by name, which MIG instances the daemon "
    "created, and the MIG layouts to restore"
)


class EventRecord(NamedTuple):
    """A recorded event; ids increase and are never reused. `time_s` is in s since 1970.

    `occurrences` is how many events of this cause it stands for, and `last_s` the time of the last one, None
    if there is only one. `repeat_id` is the id that the last one took if it is listed again because of that.
    """

    id: int
    time_s: float
    event: Event
    occurrences: int = 1
    last_s: float | None = None
    repeat_id: int | None = None

    @property
    def position(self) -> int:
        """The id to continue from after it."""
        return self.id if self.repeat_id is None else self.repeat_id

    def rank(self, recent_since_s: float) -> int:
        last_s = self.time_s if self.last_s is None else self.last_s
        return rank_of(self.event, last_s, recent_since_s)


class Repeat(NamedTuple):
    """Events of one cause that are counted in the row of the event with this `id`; `last_s` as above.

    is_severe: whether they are warnings or errors
    """

    id: int
    occurrences: int
    last_s: float
    is_severe: bool


class _Count(NamedTuple):
    """How often events of one cause were recorded."""

    #: Since when they are counted, in s since 1970.
    began_s: float
    number: int
    #: The id of the last event with a row of its own.
    row: int

    def is_recent(self, time_s: float) -> bool:
        """Whether an event at this time is counted with them."""
        return 0 <= time_s - self.began_s < REPEAT_S


class RepeatCounter:
    """Finds the row in which an event is counted, if there were many of its cause."""

    def __init__(self) -> None:
        self._causes: dict[Event, _Count] = {}

    def count(self, event: Event, time_s: float) -> Repeat | None:
        """Count an event; returns where, None if the event gets a row of its own."""
        cause = _cause_of(event)
        count = self._causes.get(cause)
        if count is None or not count.is_recent(time_s) or count.number < MAX_REPEATS:
            return None
        self._causes[cause] = count._replace(number=count.number + 1)
        occurrences = count.number + 2 - MAX_REPEATS
        return Repeat(count.row, occurrences, time_s, is_severe=event.severity != "info")

    def note(self, record: EventRecord) -> None:
        """Note that an event has a row of its own."""
        cause = _cause_of(record.event)
        count = self._causes.pop(cause, None)
        if count is None or not count.is_recent(record.time_s):
            count = _Count(record.time_s, 0, record.id)
        self._causes[cause] = count._replace(number=count.number + 1, row=record.id)
        if len(self._causes) > _MAX_CAUSES:
            del self._causes[next(iter(self._causes))]  # the one without a new row for the longest time


def _cause_of(event: Event) -> Event:
    """The event without what differs between events of one cause.

    An event that users can cause names its user, so that one user's events are not counted in another's row.
    """
    if event.common:
        return Event(event.severity, event.kind, event.subject, "", code=event.code, common=event.common)
    return event._replace(what=without_pids(event.what), cause=without_pids(event.cause))


def _shorten(events: list[T], event_of: Callable[[T], Event]) -> None:
    """Remove the oldest events of the most frequent group (see `EventTable`) until there are not too many."""
    while len(events) > _MAX_UNWRITTEN:
        groups: list[tuple[str, str, bool]] = []
        for element in events:
            event = event_of(element)
            groups.append((event.kind, event.severity, is_of_users(event)))
        frequent, _ = Counter(groups).most_common(1)[0]
        del events[groups.index(frequent)]


class EventLog:
    """Writes events to the state file, which `store` opens when the first event is recorded."""

    def __init__(
        self,
        store: Callable[[], Store],
        copy_file: str,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write no event yet.

        copy_file: the path of the copy.
        changed: called when `write_error` changes.
        clock: returns the time of events, in s since 1970.
        """
        self._clock = clock
        self._store = store
        self._copy = EventCopy(copy_file)
        self._changed = changed
        self._last_id: int | None = None
        # Events without an id, because the next id is unknown until the state file has been read.
        self._without_id: list[tuple[float, Event]] = []
        self._unwritten: list[EventRecord] = []
        self._repeats = RepeatCounter()
        #: What has been counted but not written, by the id of the row.
        self._uncounted: dict[int, Repeat] = {}
        #: The ids that the last counted warnings and errors took, by the id of the row, the newest last.
        self._repeat_ids: dict[int, int] = {}
        #: How many times of `Store.rebuilt` have been recorded.
        self._noted_rebuilt = 0
        #: Why events cannot be written; empty if they can.
        self.write_error = ""
        self.counts: Counter[tuple[str, str]] = Counter()
        self._listeners: list[Callable[[], None]] = []
        self._retry_at_s = 0.0
        #: Those who call `tick` soon after they were told that an event could not be written.
        self._retriers: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever events have been written."""
        self._listeners.append(listener)

    @contextlib.contextmanager
    def retried_by(self, request_tick: Callable[[], None]) -> Iterator[None]:
        """Call `request_tick` if an event cannot be written in the block, so that `tick` follows soon."""
        self._retriers.append(request_tick)
        try:
            yield
        finally:
            self._retriers.remove(request_tick)

    def record(self, event: Event) -> None:
        """Record the event with the current time; call it on the event loop's thread."""
        time_s = self._clock()
        self.counts[event.kind, event.severity] += 1
        repeat = self._repeats.count(event, time_s)
        if repeat:
            self._uncounted[repeat.id] = repeat
        else:
            self._without_id.append((time_s, event))
            _shorten(self._without_id, lambda timed: timed[1])
        self.flush()
        if self._has_more:
            for request_tick in self._retriers:
                request_tick()

    @property
    def _has_more(self) -> bool:
        return bool(self._without_id or self._unwritten or self._uncounted)

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
            EventTable(store).add(self._unwritten)
            self._write_counts(EventTable(store))
        except HostError as error:
            if not (isinstance(error, LockedError) and error.is_brief):
                self._note_write_error(error.message)
            return
        self._unwritten.clear()
        self._note_write_error("")
        self.note_rebuilt(store)
        for listener in self._listeners:
            listener()

    def _write_counts(self, table: EventTable) -> None:
        """Write what has been counted; raises HostError."""
        if not self._uncounted:
            return
        last_id = self.last_id()
        repeat_ids = {}
        for repeat in self._uncounted.values():
            if repeat.is_severe:
                last_id += 1
                repeat_ids[repeat.id] = last_id
        table.count(list(self._uncounted.values()), last_id)
        self._uncounted.clear()
        self._last_id = last_id
        for row, repeat_id in repeat_ids.items():
            self._repeat_ids.pop(row, None)
            self._repeat_ids[row] = repeat_id
        while len(self._repeat_ids) > _MAX_CAUSES:
            del self._repeat_ids[next(iter(self._repeat_ids))]

    def last_id(self) -> int:
        """Return the newest id of an event or of a counted one, 0 if there is none; raises HostError.

        The first call includes events that an earlier daemon could not write.
        """
        if self._last_id is None:
            written = EventTable(self._store()).last_id()
            missing = [record for record in self._copy.read() if record.id > written]
            self._unwritten += missing
            self._last_id = missing[-1].id if missing else written
        return self._last_id

    def after(self, last: int, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the oldest `limit` events with an id above `last`; raises HostError.

        Older ones in which warnings or errors were counted since are among them, each where its last one is.
        """
        self.last_id()
        table = EventTable(self._store())
        records = [*table.after(last, limit, kind), *self._not_written_since(last, 0.0, kind)]
        for row, repeat_id in self._repeat_ids.items():
            if row <= last < repeat_id:
                records += [record._replace(repeat_id=repeat_id) for record in table.with_id(row, kind)]
        return sorted(records, key=lambda record: record.position)[:limit]

    def newest(
        self,
        since_s: float,
        limit: int,
        kind: str = "",
        before: int | None = None,
        *,
        severe_first: bool = False,
    ) -> list[EventRecord]:
        """Return the newest `limit` events since `since_s` (s since 1970), oldest first; raises HostError.

        before: only those with a lower id, unless it is None
        severe_first: fill the list with warnings and errors first, in the order of `event_rank`
        """
        self.last_id()
        before = _MAX_EVENT_ID if before is None else before
        recent_s = self.recent_since_s(since_s) if severe_first else None
        written = EventTable(self._store()).newest(since_s, limit, kind, before, recent_s)
        unwritten = [record for record in self._not_written_since(0, since_s, kind) if record.id < before]
        records = [*written, *unwritten]
        if recent_s is not None:
            records.sort(key=lambda record: (-record.rank(recent_s), record.id))
        return sorted(records[-limit:], key=lambda record: record.id)

    def recent_since_s(self, since_s: float) -> float:
        """Return since when events are recent in a list that begins at `since_s`, 0 if it does not (s)."""
        return since_s or self._clock() - RECENT_S

    def count_from(self, first: int, since_s: float, kind: str = "", before: int | None = None) -> int:
        """Return how many events `newest` can choose from that do not precede `first`; raises HostError."""
        before = _MAX_EVENT_ID if before is None else before
        unwritten = self._not_written_since(first - 1, since_s, kind)
        unwritten = [record for record in unwritten if record.id < before]
        return EventTable(self._store()).count_from(first, since_s, kind, before) + len(unwritten)

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
        for record in self._unwritten:
            if record.event.kind == kind:
                newest_s[record.event.subject] = record.time_s
        lost = set()
        for name, time_s in since_s.items():
            if time_s >= oldest_s and time_s > newest_s.get(name, 0.0):
                lost.add(name)
        return lost

    def _not_written_since(self, last: int, since_s: float, kind: str) -> list[EventRecord]:
        records = []
        for record in self._unwritten:
            if record.id > last and record.time_s >= since_s and kind in ("", record.event.kind):
                records.append(record)
        return records

    def _assign_ids(self) -> None:
        """Assign ids to new events and copy them; raises HostError if the next id is unknown."""
        first = self.last_id() + 1
        new = []
        for number, (time_s, event) in enumerate(self._without_id, first):
            new.append(EventRecord(number, time_s, event))
        self._without_id.clear()
        self._last_id = first + len(new) - 1
        self._unwritten += new
        _shorten(self._unwritten, lambda record: record.event)
        self._copy.add(new)
        for record in new:
            self._repeats.note(record)

    def note_rebuilt(self, store: Store) -> None:
        """Record each time that the state file was rebuilt, and fill it with the events of their copy."""
        new = store.rebuilt[self._noted_rebuilt :]
        if not new:
            return
        self._noted_rebuilt = len(store.rebuilt)
        try:
            EventTable(store).add(self._copy.read())
        except HostError as error:
            self._note_write_error(error.message)
        for rebuilt in new:
            self.record(
                Event(
                    severity="error",
                    kind="daemon",
                    subject="state file",
                    what=rebuilt.what,
                    cause=rebuilt.cause,
                    consequence=REBUILT if rebuilt.has_copies else RECORDS_LOST,
                    code=reasons.STATE_FILE_DAMAGED,
                )
            )

    def _note_write_error(self, message: str) -> None:
        if message == self.write_error:
            return
        if message:
            log.error("events cannot be written to disk and are kept in %s: %s", self._copy.file, message)
        self.write_error = message
        self._changed()


class EventTable:
    """The events in a state file, bounded in age and, for each kind and severity, in number (`_prune`).

    Every method raises HostError.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, events: Sequence[EventRecord]) -> None:
        """Add all of the events or none; events already present are skipped."""
        if not events:
            return
        rows = [(record.id, record.time_s, *record.event.stored().values()) for record in events]
        before = self.last_id()
        self._store.write(_INSERT, rows)
        self._prune_if_due(before)

    def count(self, repeats: Sequence[Repeat], last_id: int) -> None:
        """Record all of these counts or none, and that all ids up to `last_id` have been used."""
        before = self.last_id()
        rows = [(repeat.id, repeat.occurrences, repeat.last_s) for repeat in repeats]
        self._store.write("INSERT OR REPLACE INTO event_repeat (event, count, last_s) VALUES (?, ?, ?)", rows)
        if last_id > before:
            self._store.write("UPDATE sqlite_sequence SET seq = ? WHERE name = 'event'", [(last_id,)])
        self._prune_if_due(before)

    def last_id(self) -> int:
        """Return the highest id ever used, 0 if there is none."""
        rows = self._store.read("SELECT seq FROM sqlite_sequence WHERE name = 'event'")
        return int(rows[0][0]) if rows else 0

    def newest(
        self,
        since_s: float,
        limit: int,
        kind: str = "",
        before: int = _MAX_EVENT_ID,
        recent_since_s: float | None = None,
    ) -> list[EventRecord]:
        """Return the newest `limit` events since `since_s` with an id below `before`, oldest first.

        They are chosen by their ranks, with those since `recent_since_s` first, unless it is None.
        """
        values: list[object] = [before, since_s, kind, kind]
        order = "id DESC"
        if recent_since_s is not None:
            values.append(recent_since_s)
            order = f"{RANK}, {order}"
        values.append(limit)
        query = f"{_SELECT} WHERE {_NEWEST} ORDER BY {order} LIMIT ?"
        return _records(sorted(self._store.read(query, tuple(values))))

    def count_from(self, first: int, since_s: float, kind: str, before: int) -> int:
        """Return how many events `newest` can choose from that do not precede the id `first`."""
        query = f"""SELECT COUNT(*) FROM event LEFT JOIN event_repeat ON event = id
            WHERE id >= ? AND {_NEWEST}"""
        values = (first, before, since_s, kind, kind)
        return int(self._store.read(query, values)[0][0])

    def after(self, last: int, limit: int, kind: str = "") -> list[EventRecord]:
        """Return the oldest `limit` events with an id above `last`, oldest first."""
        query = f"{_SELECT} WHERE id > ? AND (? = '' OR kind = ?) ORDER BY id LIMIT ?"
        return _records(self._store.read(query, (last, kind, kind, limit)))

    def with_id(self, number: int, kind: str = "") -> list[EventRecord]:
        """Return the event with this id, if it is there and of this kind."""
        query = f"{_SELECT} WHERE id = ? AND (? = '' OR kind = ?)"
        return _records(self._store.read(query, (number, kind, kind)))

    def times(self, kind: str) -> tuple[float, dict[str, float]]:
        """Return the times of the oldest event of this kind and of the newest by subject, in s since 1970.

        The first is that of the oldest event of any kind if there is none of this one.
        """
        query = """SELECT COALESCE((SELECT MIN(time_s) FROM event WHERE kind = ?),
            (SELECT MIN(time_s) FROM event), 0)"""
        (oldest,) = self._store.read(query, (kind,))
        query = """SELECT subject, MAX(COALESCE(last_s, time_s)) FROM event
            LEFT JOIN event_repeat ON event = id WHERE kind = ? GROUP BY subject"""
        return oldest[0], dict(self._store.read(query, (kind,)))

    def _prune_if_due(self, before: int) -> None:
        """Prune each time that so many ids have been used; `before` is what the last id was until now."""
        if before // _PRUNE_EVERY != self.last_id() // _PRUNE_EVERY:
            self._prune()

    def _prune(self) -> None:
        """Delete old events, by number first, because a clock set ahead makes new events look old."""
        groups: list[tuple[str, str, bool]] = []
        for kind in EVENT_KINDS:
            for severity in SEVERITIES:
                groups += [(kind, severity, True), (kind, severity, False)]
        statement = f"""DELETE FROM event WHERE kind = ?1 AND severity = ?2 AND {OF_USERS} = ?3 AND id <= (
            SELECT id FROM event WHERE kind = ?1 AND severity = ?2 AND {OF_USERS} = ?3
            ORDER BY id DESC LIMIT 1 OFFSET {MAX_EVENTS}
        )"""
        self._store.write(statement, groups)
        oldest_s = time.time() - OLDEST_EVENT_S
        statement = """DELETE FROM event WHERE time_s < ?1
            AND id NOT IN (SELECT event FROM event_repeat WHERE last_s >= ?1)"""
        self._store.write(statement, [(oldest_s,)])
        statement = "DELETE FROM event_repeat WHERE event NOT IN (SELECT id FROM event)"
        self._store.write(statement, [()])


def _records(rows: Iterable[Sequence[Any]]) -> list[EventRecord]:
    """Return the events of the rows, without those whose numbers are damaged."""
    records = []
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            records.append(_record(row))
    return records


def _record(row: Sequence[Any]) -> EventRecord:
    number, time_s, *fields, times, last_s = row
    event = Event(**dict(zip(_FIELDS, map(str, fields))))
    return EventRecord(int(number), float(time_s), event, int(times or 1), last_s)


class EventCopy:
    """The copy of the events, one JSON line each; lines that cannot be written or read are skipped.

    What users can cause at will has files of its own, so that it displaces nothing else.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self._of_users = f"{file}.users"

    def add(self, events: Iterable[EventRecord]) -> None:
        by_file: dict[str, list[EventRecord]] = {}
        for record in events:
            file = self._of_users if is_of_users(record.event) else self.file
            by_file.setdefault(file, []).append(record)
        for file, records in by_file.items():
            _append(file, records)

    def read(self) -> list[EventRecord]:
        records: dict[int, EventRecord] = {}
        for file in (self._of_users, self.file):
            for name in (f"{file}.old", file):
                with contextlib.suppress(OSError), open(name, encoding="utf-8", errors="replace") as lines:
                    records.update(_readable(lines))
        return [records[number] for number in sorted(records)]


def _append(name: str, events: Iterable[EventRecord]) -> None:
    """Append the events to a file, and rename it once it is large."""
    lines = ""
    for record in events:
        row = {"id": record.id, "time_s": record.time_s, **record.event.stored()}
        lines += json.dumps(row, separators=(",", ":")) + "\n"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(name), mode=0o755, exist_ok=True)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, lines.encode())
            is_large = os.fstat(file).st_size > _MAX_COPY_BYTES
        finally:
            os.close(file)
        if is_large:
            os.replace(name, f"{name}.old")


def _readable(lines: Iterable[str]) -> Iterator[tuple[int, EventRecord]]:
    """Yield the events of the lines that can be read, with their ids."""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            row = json.loads(line)
            if isinstance(row, list):  # as earlier versions have written it
                row = dict(zip(("id", "time_s", *_FIELDS), row))
            number = int(row["id"])
            if 0 < number < _MAX_EVENT_ID:
                event = Event(**{name: str(row.get(name, "")) for name in _FIELDS})
                yield number, EventRecord(number, float(row["time_s"]), event)
