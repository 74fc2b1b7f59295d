"""Events: find recorded ones, and wait for new ones; long polls, which wait for any change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunion_mps.core.units import rfc3339
from yunion_mps.supervisor.event_log import EventLog, EventRecord

if TYPE_CHECKING:
    from yunion_mps import answers

T = TypeVar("T")


class LongPolls:
    """Requests that evaluate their answer again at each notification, until it is complete."""

    def __init__(self) -> None:
        #: What wakes each of them.
        self.waiting: set[Callable[[], None]] = set()
        self._is_closed = False

    async def wait_for(self, evaluate: Callable[[], T], is_complete: Callable[[T], bool], wait_s: float) -> T:
        """Return the result of `evaluate` once it is complete; after `wait_s` or a close, as it is then."""
        # The daemon imports this module before it is ready, and asyncio after that: without ssl, which would
        # take 4 MiB.
        import asyncio

        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            result = evaluate()
            left_s = deadline_s - asyncio.get_running_loop().time()
            if is_complete(result) or left_s <= 0 or self._is_closed:
                return result
            notified = asyncio.Event()
            self.waiting.add(notified.set)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(notified.wait(), left_s)
            finally:
                self.waiting.discard(notified.set)

    def notify(self) -> None:
        """Have all waiting requests evaluate their answers again; call it on the event loop's thread.

        Its callers guarantee that: work on other threads (`on_thread`) only returns what it has found, and
        the event loop then records events and changes the ledger.
        """
        for wake in self.waiting:
            wake()

    def close(self) -> None:
        """Answer all waiting requests now, and let none wait from now on."""
        self._is_closed = True
        self.notify()


class EventFilter(NamedTuple):
    """Selects events: the oldest after an id, or the newest since a time."""

    #: The id after which events are selected; None for the newest.
    after: int | None = None
    #: The time since which the newest are selected, in s since 1970.
    since_s: float = 0.0
    #: How many events are selected at most.
    limit: int = 100
    #: The kind of the events; empty for all.
    kind: str = ""
    #: Of the newest, only those with a lower id than this.
    before: int | None = None
    #: Whether warnings and errors fill the list of the newest first, in the order of `event_rank`.
    severe_first: bool = False


class EventService(LongPolls):
    """Finds recorded events, and wakes requests that wait for new ones; HTTP calls it."""

    def __init__(self, event_log: EventLog) -> None:
        super().__init__()
        self._event_log = event_log
        event_log.listen(self.notify)

    def find(self, event_filter: EventFilter) -> answers.EventListJson:
        """Return the events, oldest first, and the newest one's id; raises HostError."""
        since_s = event_filter.since_s
        limit = event_filter.limit
        kind = event_filter.kind
        before = event_filter.before
        omitted = 0
        recent_s = self._event_log.recent_since_s(since_s)
        if event_filter.after is not None:
            records = self._event_log.after(event_filter.after, limit, kind)
        else:
            severe_first = event_filter.severe_first
            records = self._event_log.newest(since_s, limit, kind, before, severe_first=severe_first)
            if severe_first and len(records) == limit:
                in_this_time = self._event_log.count_from(records[0].id, since_s, kind, before)
                omitted = max(0, in_this_time - len(records))
        last = self._event_log.last_id()
        if event_filter.after is not None and len(records) == limit:
            last = records[-1].position  # more may follow
        return {
            "events": [_event_json(record, recent_s) for record in records],
            "last": last,
            "omitted": omitted,
        }

    async def wait(self, event_filter: EventFilter, wait_s: float) -> answers.EventListJson:
        """Return the events; if there are none, the first that come within `wait_s`."""

        def is_complete(answer: answers.EventListJson) -> bool:
            is_beyond = answer["last"] < (event_filter.after or 0)  # a new event log may never reach this id
            return bool(answer["events"]) or is_beyond

        return await self.wait_for(lambda: self.find(event_filter), is_complete, wait_s)


def _event_json(record: EventRecord, recent_s: float) -> answers.EventJson:
    event = record.event
    return {
        "id": record.id,
        "time": rfc3339(record.time_s),
        "severity": event.severity,
        "kind": event.kind,
        "subject": event.subject,
        "what": event.what,
        "cause": event.cause,
        "consequence": event.consequence,
        "code": event.code,
        "count": record.occurrences,
        "last_time": rfc3339(record.time_s if record.last_s is None else record.last_s),
        "rank": record.rank(recent_s),
    }
