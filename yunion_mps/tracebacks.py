"""Limits the log to one traceback a minute for each cause, however often a client provokes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

_INTERVAL_S = 60.0
#: How many causes are remembered; more than there should ever be.
_MOST_CAUSES = 256

#: The exception's class, and the file and line of each frame that it passed.
_Cause = tuple[object, ...]


class TracebackLimit(logging.Filter):
    """Drops a record whose exception was logged within the last minute; the next one counts the dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: When each cause was logged, and how many records were dropped since.
        self._logged: dict[_Cause, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        now_s = self._clock()
        cause = (type(error), *_places(error.__traceback__))
        logged_s, dropped = self._logged.get(cause, (now_s - _INTERVAL_S, 0))
        if now_s - logged_s < _INTERVAL_S:
            self._logged[cause] = logged_s, dropped + 1
            return False
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more since the last traceback)", ()
        if len(self._logged) >= _MOST_CAUSES:
            self._logged.clear()
        self._logged[cause] = now_s, 0
        return True


def limit_tracebacks() -> None:
    """Add a `TracebackLimit` to every handler; to be called once logging is configured."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(TracebackLimit())


def _places(traceback: TracebackType | None) -> list[tuple[str, int]]:
    places = []
    while traceback:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return places
