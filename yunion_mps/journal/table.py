"""Events in the state file, bounded in number and age."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.host.store import Store
from yunion_mps.models import Event

#: How many events are kept, and for how long.
MOST_EVENTS = 10_000
OLDEST_EVENT_S = 30 * 86_400.0
_PRUNE_EVERY = 256


class Recorded(NamedTuple):
    """An event as it was recorded; ids grow, and are never used twice. `time_s` is in s since 1970."""

    id: int
    time_s: float
    event: Event


class Table:
    """The events of one state file; everything here raises HostError where that cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, events: Sequence[Recorded]) -> None:
        """Keep the events, all or none; those that are there already are left alone."""
        if not events:
            return
        rows = [(one.id, one.time_s, *one.event) for one in events]
        self._store.write("INSERT OR IGNORE INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if events[0].id // _PRUNE_EVERY != (events[-1].id + 1) // _PRUNE_EVERY:
            self._prune()

    def last_id(self) -> int:
        """The id of the newest event that there ever was, 0 where there was none yet."""
        rows = self._store.read("SELECT seq FROM sqlite_sequence WHERE name = 'event'")
        return int(rows[0][0]) if rows else 0

    def newest(self, since_s: float, limit: int, kind: str = "") -> list[Recorded]:
        """The newest `limit` events with a time from `since_s` on, oldest first."""
        query = "SELECT * FROM event WHERE time_s >= ? AND (? = '' OR kind = ?) ORDER BY id DESC LIMIT ?"
        return [_recorded(row) for row in reversed(self._store.read(query, since_s, kind, kind, limit))]

    def after(self, last: int, limit: int, kind: str = "") -> list[Recorded]:
        """The oldest `limit` events with an id above `last`, oldest first."""
        query = "SELECT * FROM event WHERE id > ? AND (? = '' OR kind = ?) ORDER BY id LIMIT ?"
        return [_recorded(row) for row in self._store.read(query, last, kind, kind, limit)]

    def _prune(self) -> None:
        """Forget the oldest; by number first, for a clock that was set ahead makes old ones of new ones."""
        self._store.write("DELETE FROM event WHERE id <= ?", [(self.last_id() - MOST_EVENTS,)])
        self._store.write("DELETE FROM event WHERE time_s < ?", [(time.time() - OLDEST_EVENT_S,)])


def _recorded(row: Sequence[object]) -> Recorded:
    number, time_s, *fields = row
    return Recorded(int(str(number)), float(str(time_s)), Event(*map(str, fields)))
