"""Events: those recorded, and a wait for the next ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.supervisor.event_log import EventLog
from yunion_mps.times import rfc3339

if TYPE_CHECKING:
    from yunion_mps import answers


class EventFilter(NamedTuple):
    """Which events: after an id (the oldest first), or the newest from a time (s since 1970) on."""

    after: int | None = None
    since_s: float = 0.0
    limit: int = 100
    kind: str = ""


class Events:
    """Finds events; requests may wait for them."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        #: What wakes the requests that wait.
        self.waiting: set[Callable[[], None]] = set()
        self._is_ending = False
        event_log.listen(self.wake)

    def find(self, wanted: EventFilter) -> answers.EventList:
        """The events, oldest first, and the newest one's id; raises HostError."""
        if wanted.after is None:
            found = self._event_log.newest(wanted.since_s, wanted.limit, wanted.kind)
        else:
            found = self._event_log.after(wanted.after, wanted.limit, wanted.kind)
        return {
            "events": [
                {
                    "id": one.id,
                    "time": rfc3339(one.time_s),
                    "severity": one.event.severity,
                    "kind": one.event.kind,
                    "subject": one.event.subject,
                    "what": one.event.what,
                    "cause": one.event.cause,
                    "consequence": one.event.consequence,
                    "code": one.event.code,
                }
                for one in found
            ],
            "last": found[-1].id if found else self._event_log.last_id(),
        }

    async def wait(self, wanted: EventFilter, wait_s: float) -> answers.EventList:
        """The events; if there are none, the first that come within `wait_s`."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while True:
            found = self.find(wanted)
            left_s = end_s - asyncio.get_running_loop().time()
            is_beyond = found["last"] < (wanted.after or 0)  # the event log began again: it may never come
            if found["events"] or is_beyond or left_s <= 0 or self._is_ending:
                return found
            more = asyncio.Event()
            self.waiting.add(more.set)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(more.wait(), left_s)
            finally:
                self.waiting.discard(more.set)

    def wake(self) -> None:
        """Let the requests that wait search again."""
        for wake in [*self.waiting]:  # events are also recorded on other threads
            wake()

    def end_waits(self) -> None:
        """Answer requests that wait with what there is, and let none wait any more."""
        self._is_ending = True
        self.wake()
