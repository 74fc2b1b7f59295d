"""The record of what happened: every change with its time, cause and consequence.

What cannot be written at once (a full disk) is kept in memory and written later, in order, and nothing else
waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from yunion_mps.errors import HostError
from yunion_mps.models import Event
from yunion_mps.store import Recorded, Store

log = logging.getLogger(__name__)

#: What is kept in memory while nothing can be written.
_MOST_UNWRITTEN = 1000


class Journal:
    """Keeps events in the store that `store` opens, once there is something to keep."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._unwritten: deque[tuple[float, Event]] = deque(maxlen=_MOST_UNWRITTEN)
        self._trouble = ""
        #: What is to be called, once, with the next event.
        self.waiting: list[Callable[[], None]] = []

    def record(self, event: Event) -> None:
        """Keep the event, with the time that it is now."""
        self._unwritten.append((time.time(), event))
        self.flush()

    def flush(self) -> None:
        """Write what could not be written before."""
        if not self._unwritten:
            return
        try:
            self._store().add_events(list(self._unwritten))
        except HostError as error:
            if error.message != self._trouble:
                log.error("events cannot be written, and are kept in memory: %s", error.message)
            self._trouble = error.message
            return
        self._unwritten.clear()
        self._trouble = ""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()

    def last_id(self) -> int:
        """The id of the newest event, 0 where there was none yet; raises HostError."""
        return self._store().last_event()

    def after(self, last: int, limit: int, kind: str = "") -> list[Recorded]:
        """The oldest `limit` events after the one with the id `last`; raises HostError."""
        return self._store().first_events(last, limit, kind)

    def newest(self, since_s: float, limit: int, kind: str = "") -> list[Recorded]:
        """The newest `limit` events from `since_s` (s since 1970) on, oldest first; raises HostError."""
        return self._store().events(0, since_s, limit, kind)
