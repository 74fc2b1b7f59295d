"""Events in the state file: found by id, by time and by kind, and bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.host.store import Store
from yunion_mps.models import Event
from yunion_mps.paths import Paths
from yunion_mps.supervisor.event_log import MOST_EVENTS, OLDEST_EVENT_S, EventRecord, EventTable

EVENT = Event("info", "domain", "host", "stopped -> starting", "it was asked for", "nothing")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[EventTable]:
    with closing(Store(Paths(str(tmp_path)))) as store:
        yield EventTable(store)


def several(first: int, count: int, time_s: float) -> list[EventRecord]:
    return [EventRecord(number, time_s, EVENT) for number in range(first, first + count)]


def test_events_are_given_by_id_by_time_and_by_kind(table: EventTable) -> None:
    assert (table.last_id(), table.newest(0.0, 10)) == (0, [])
    kinds = ["domain", "gpu", "domain"]
    added = [
        EventRecord(number, 10.0 * number, EVENT._replace(kind=kinds[number - 1])) for number in (1, 2, 3)
    ]
    table.add(added)
    assert table.last_id() == 3
    assert table.newest(0.0, 10) == added
    assert [one.id for one in table.newest(0.0, 2)] == [2, 3], "the newest, oldest first"
    assert [one.id for one in table.newest(20.0, 10)] == [2, 3]
    assert [one.id for one in table.newest(0.0, 10, "gpu")] == [2]
    assert [one.id for one in table.after(1, 1)] == [2]
    assert [one.id for one in table.after(0, 9, "domain")] == [1, 3]


def test_an_event_that_is_there_is_not_changed_and_not_added_twice(table: EventTable) -> None:
    table.add(several(1, 3, 1.0))
    table.add(several(2, 3, 9.0))
    assert [(one.id, one.time_s) for one in table.after(0, 9)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 9.0)]


def test_events_are_bounded_in_number_and_age_and_their_ids_go_on(table: EventTable) -> None:
    now_s = time.time()
    table.add(several(1, 5, now_s - OLDEST_EVENT_S - 10))
    table.add(several(6, MOST_EVENTS + 300, now_s))
    left = table.after(0, 20_000)
    assert MOST_EVENTS <= len(left) <= MOST_EVENTS + 300
    table.add(several(MOST_EVENTS + 306, 300, now_s))
    left = table.after(0, 20_000)
    assert len(left) <= MOST_EVENTS + 300
    assert min(one.time_s for one in left) == now_s
    assert table.last_id() == MOST_EVENTS + 605
    for number in range(MOST_EVENTS + 606, MOST_EVENTS + 1200):  # as they come: one at a time
        table.add(several(number, 1, now_s))
    assert len(table.after(0, 20_000)) <= MOST_EVENTS + 300
