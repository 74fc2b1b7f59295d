"""The record of what happened: every change with its time, cause and consequence.

An event is in its copy in the run directory first and in the state file next, so that neither a full disk nor
a damaged file loses it. What cannot be written at once is written later, in order, and nothing waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.journal.copy import Copy
from yunion_mps.journal.table import Recorded, Table
from yunion_mps.models import Event

__all__ = ["Journal", "Recorded"]

log = logging.getLogger(__name__)

#: What is kept in memory while nothing can be written.
_MOST_UNWRITTEN = 1000


class Journal:
    """Keeps events in the store that `store` opens, once there is something to keep."""

    def __init__(
        self, store: Callable[[], Store], copy_file: str, changed: Callable[[], None] = lambda: None
    ) -> None:
        """`copy_file` is where their copy lies, and `changed` is called when `trouble` is another."""
        self._store = store
        self._copy = Copy(copy_file)
        self._changed = changed
        self._last_id: int | None = None
        # Those that have no id yet, for nobody knows the next one before the file was read.
        self._nameless: deque[tuple[float, Event]] = deque(maxlen=_MOST_UNWRITTEN)
        self._unwritten: deque[Recorded] = deque(maxlen=_MOST_UNWRITTEN)
        self._set_aside = ""
        #: Why events cannot be written now, empty where they can.
        self.trouble = ""
        #: How many were recorded, by kind and severity.
        self.counts: Counter[tuple[str, str]] = Counter()
        #: What is to be called, once, with the next event.
        self.waiting: list[Callable[[], None]] = []

    def record(self, event: Event) -> None:
        """Keep the event, with the time that it is now."""
        self._nameless.append((time.time(), event))
        self.counts[event.kind, event.severity] += 1
        self.flush()

    def flush(self) -> None:
        """Write what could not be written before."""
        if not self._nameless and not self._unwritten:
            return
        try:
            self._number()
            store = self._store()
            Table(store).add(list(self._unwritten))
        except HostError as error:
            self._note_trouble(error.message)
            return
        self._unwritten.clear()
        self._note_trouble("")
        if store.set_aside != self._set_aside:
            self._set_aside = store.set_aside
            self._begin_anew(store)
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()

    def last_id(self) -> int:
        """The id of the newest event, 0 where there was none yet; raises HostError."""
        return self._settle()

    def after(self, last: int, limit: int, kind: str = "") -> list[Recorded]:
        """The oldest `limit` events after the one with the id `last`; raises HostError."""
        self._settle()
        found = Table(self._store()).after(last, limit, kind)
        return [*found, *self._waiting_since(last, 0.0, kind)][:limit]

    def newest(self, since_s: float, limit: int, kind: str = "") -> list[Recorded]:
        """The newest `limit` events from `since_s` (s since 1970) on, oldest first; raises HostError."""
        self._settle()
        found = Table(self._store()).newest(since_s, limit, kind)
        return [*found, *self._waiting_since(0, since_s, kind)][-limit:]

    def _waiting_since(self, last: int, since_s: float, kind: str) -> list[Recorded]:
        """Those that are not in the file yet."""
        return [
            one
            for one in self._unwritten
            if one.id > last and one.time_s >= since_s and kind in ("", one.event.kind)
        ]

    def _number(self) -> None:
        """Give an id to each event that has none, and copy it; raises HostError where no id is known."""
        first = self._settle() + 1
        new = [Recorded(number, *one) for number, one in enumerate(self._nameless, first)]
        self._nameless.clear()
        self._last_id = first + len(new) - 1
        self._unwritten += new
        self._copy.add(new)

    def _settle(self) -> int:
        """The id that was given last; takes over, once, what a daemon before us could not write."""
        if self._last_id is None:
            written = Table(self._store()).last_id()
            missing = [one for one in self._copy.read() if one.id > written]
            self._unwritten += missing
            self._last_id = missing[-1].id if missing else written
        return self._last_id

    def _begin_anew(self, store: Store) -> None:
        """The file was damaged, and another was begun: give it the events of which there is a copy."""
        what = f"the state file could not be read: it is kept as {store.set_aside}"
        log.error("%s, and was begun anew", what)
        try:
            Table(store).add(self._copy.read())
        except HostError as error:
            self._note_trouble(error.message)
        means = "it was begun anew from copies: the events since the boot, and the former compute modes"
        self.record(Event("error", "daemon", "state file", what, "it is damaged", means))

    def _note_trouble(self, message: str) -> None:
        if message == self.trouble:
            return
        if message:
            log.error("events cannot be written, and are kept in %s: %s", self._copy.file, message)
        self.trouble = message
        self._changed()
