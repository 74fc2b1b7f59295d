"""The record of events: written at once, or later and in order, and never waited for."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.journal import Journal
from yunion_mps.journal.table import Table
from yunion_mps.models import Event
from yunion_mps.paths import Paths


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
def paths(tmp_path: Path) -> Paths:
    return Paths(str(tmp_path))


@pytest.fixture
def disk(paths: Paths) -> Iterator[Disk]:
    with closing(Store(paths)) as store:
        yield Disk(store)


@pytest.fixture
def journal(disk: Disk, paths: Paths) -> Journal:
    return Journal(disk, paths.events_copy)


def whats(journal: Journal) -> list[str]:
    return [one.event.what for one in journal.after(0, 10_000)]


def test_an_event_is_there_at_once(disk: Disk, journal: Journal) -> None:
    journal.record(event("a"))
    journal.record(event("b", "gpu"))
    assert whats(journal) == ["a", "b"]
    assert journal.last_id() == 2
    assert [one.event.what for one in journal.after(1, 10)] == ["b"]
    assert [one.event.what for one in journal.newest(0.0, 1)] == ["b"]
    assert [one.event.what for one in journal.newest(0.0, 9, "domain")] == ["a"]


def test_what_cannot_be_written_is_written_later_in_order_and_said_once(
    disk: Disk, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.record(event("0"))
    disk.full = True
    for what in "abc":
        journal.record(event(what))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    disk.full = False  # for reading
    assert whats(journal) == ["0", "a", "b", "c"], "they are shown all the same"
    journal.record(event("d"))
    assert whats(journal) == ["0", "a", "b", "c", "d"]
    disk.full = True
    journal.record(event("e"))
    assert len(caplog.records) == 2, "a new shortage is a new trouble"
    disk.full = False
    journal.flush()
    assert whats(journal)[-1] == "e"


def test_what_is_kept_in_memory_is_bounded_and_the_newest_count(disk: Disk, journal: Journal) -> None:
    disk.full = True
    for number in range(1500):
        journal.record(event(str(number)))
    disk.full = False
    journal.flush()
    assert whats(journal) == [str(number) for number in range(500, 1500)]


def test_whoever_waits_is_called_once_with_the_next_event_that_is_written(
    disk: Disk, journal: Journal
) -> None:
    called: list[str] = []
    journal.waiting.append(lambda: called.append("x"))
    disk.full = True
    journal.record(event("a"))
    assert called == []
    disk.full = False
    journal.record(event("b"))
    journal.record(event("c"))
    assert called == ["x"]


def test_the_newest_are_shown_although_they_are_not_written_yet(disk: Disk, journal: Journal) -> None:
    journal.record(event("a"))
    written = disk.store.write
    disk.store.write = _full  # type: ignore[method-assign]
    journal.record(event("b", "gpu"))
    journal.record(event("c"))
    assert journal.trouble == "disk full"
    assert whats(journal) == ["a", "b", "c"]
    assert [one.id for one in journal.after(1, 1)] == [2]
    assert [one.event.what for one in journal.newest(0.0, 2)] == ["b", "c"]
    assert [one.event.what for one in journal.newest(0.0, 9, "gpu")] == ["b"]
    assert journal.last_id() == 3
    disk.store.write = written  # type: ignore[method-assign]
    journal.flush()
    assert journal.trouble == ""
    assert whats(journal) == ["a", "b", "c"]


def _full(statement: str, rows: Sequence[tuple[object, ...]]) -> None:
    raise HostError("disk full")


def test_a_daemon_that_is_killed_while_the_disk_is_full_loses_no_event(disk: Disk, paths: Paths) -> None:
    first = Journal(disk, paths.events_copy)
    first.record(event("a"))
    disk.full = True
    first.record(event("b"))
    first.record(event("c"))
    disk.full = False
    second = Journal(disk, paths.events_copy)
    assert second.last_id() == 3
    assert whats(second) == ["a", "b", "c"]
    second.record(event("d"))
    assert [one.event.what for one in Table(disk.store).after(0, 9)] == ["a", "b", "c", "d"]
    assert [one.id for one in second.after(0, 9)] == [1, 2, 3, 4]


def test_a_damaged_file_is_begun_anew_with_the_events_since_the_boot_and_that_is_an_event(
    paths: Paths,
) -> None:
    with closing(Store(paths)) as store:
        first = Journal(lambda: store, paths.events_copy)
        first.record(event("a"))
        first.record(event("b"))
    Path(paths.store).write_bytes(b"torn" * 1024)
    with closing(Store(paths)) as store:
        second = Journal(lambda: store, paths.events_copy)
        second.record(event("c"))
        told = second.after(0, 9)
        assert [(one.id, one.event.what) for one in told[:3]] == [(1, "a"), (2, "b"), (3, "c")]
        assert f"{paths.store}.unreadable" in told[3].event.what
        assert len(told) == 4


def test_events_are_lost_neither_when_the_file_is_damaged_while_it_is_in_use(paths: Paths) -> None:
    with closing(Store(paths)) as store:
        journal = Journal(lambda: store, paths.events_copy)
        journal.record(event("a"))
        with closing(sqlite3.connect(paths.store)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with open(paths.store, "r+b") as file:
            file.write(b"\xff" * os.stat(paths.store).st_size)
        journal.record(event("b"))
        assert whats(journal)[:2] == ["a", "b"]
        assert [one.id for one in journal.after(0, 9)] == [1, 2, 3]


def test_without_a_copy_events_are_kept_all_the_same(disk: Disk, paths: Paths) -> None:
    Path(paths.run_directory).parent.mkdir()
    Path(paths.run_directory).write_text("in the way")
    journal = Journal(disk, paths.events_copy)
    journal.record(event("a"))
    assert whats(journal) == ["a"]


def test_that_there_is_trouble_and_that_it_is_over_is_told(disk: Disk, paths: Paths) -> None:
    told: list[str] = []
    kept = Journal(disk, paths.events_copy, lambda: told.append(kept.trouble))
    disk.full = True
    kept.record(event("a"))
    kept.record(event("b"))
    disk.full = False
    kept.record(event("c"))
    assert told == ["the state file cannot be written: disk full", ""]
