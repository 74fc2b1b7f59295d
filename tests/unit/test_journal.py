"""The record of events: written at once, or later and in order, and never waited for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.journal import Journal
from yunion_mps.models import Event
from yunion_mps.paths import Paths
from yunion_mps.store import Store


def event(what: str, kind: str = "domain") -> Event:
    return Event("info", kind, "host", what)


class Disk:
    """A store that can be full."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.full = False

    def __call__(self) -> Store:
        if self.full:
            raise HostError("the state file cannot be written: disk full")
        return self.store


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with closing(Store(Paths(str(tmp_path)))) as store:
        yield Disk(store)


def whats(journal: Journal) -> list[str]:
    return [one.event.what for one in journal.after(0, 10_000)]


def test_an_event_is_there_at_once(disk: Disk) -> None:
    journal = Journal(disk)
    journal.record(event("a"))
    journal.record(event("b", "gpu"))
    assert whats(journal) == ["a", "b"]
    assert journal.last_id() == 2
    assert [one.event.what for one in journal.after(1, 10)] == ["b"]
    assert [one.event.what for one in journal.newest(0.0, 1)] == ["b"]
    assert [one.event.what for one in journal.newest(0.0, 9, "domain")] == ["a"]


def test_what_cannot_be_written_is_written_later_in_order_and_said_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(disk)
    disk.full = True
    for what in "abc":
        journal.record(event(what))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    disk.full = False
    assert whats(journal) == []
    journal.record(event("d"))
    assert whats(journal) == ["a", "b", "c", "d"]
    disk.full = True
    journal.record(event("e"))
    assert len(caplog.records) == 2, "a new shortage is a new trouble"
    disk.full = False
    journal.flush()
    assert whats(journal)[-1] == "e"


def test_what_is_kept_in_memory_is_bounded_and_the_newest_count(disk: Disk) -> None:
    journal = Journal(disk)
    disk.full = True
    for number in range(1500):
        journal.record(event(str(number)))
    disk.full = False
    journal.flush()
    assert whats(journal) == [str(number) for number in range(500, 1500)]


def test_whoever_waits_is_called_once_with_the_next_event_that_is_written(disk: Disk) -> None:
    journal = Journal(disk)
    called: list[str] = []
    journal.waiting.append(lambda: called.append("x"))
    disk.full = True
    journal.record(event("a"))
    assert called == []
    disk.full = False
    journal.record(event("b"))
    journal.record(event("c"))
    assert called == ["x"]
