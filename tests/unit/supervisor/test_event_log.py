"""The event log: written at once, or later and in order, bounded; its copy survives a kill at any byte."""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.enums import EVENT_KINDS, SEVERITIES
from yunion_mps.core.models import Event
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, LIMITS_OVERWRITTEN
from yunion_mps.host.store import Store
from yunion_mps.supervisor.event_log import (
    MAX_EVENTS,
    MAX_REPEATS,
    OLDEST_EVENT_S,
    REPEAT_S,
    RETRY_S,
    EventCopy,
    EventLog,
    EventRecord,
    EventTable,
    Repeat,
)
from yunion_mps.supervisor.event_rank import is_of_users


def event(what: str, kind: str = "domain") -> Event:
    return Event("info", kind, "host", what)


class Disk:
    """A store whose disk can be full: then SQLite writes no event."""

    def __init__(self, store: Store, file: str) -> None:
        self.store = store
        self._file = file

    def __call__(self) -> Store:
        return self.store

    def fill(self) -> None:
        for table in ("event", "event_repeat"):
            refuse = "BEGIN SELECT RAISE(ABORT, 'disk full'); END"
            self._change(f"CREATE TRIGGER full_{table} BEFORE INSERT ON {table} {refuse}")

    def free(self) -> None:
        for table in ("event", "event_repeat"):
            self._change(f"DROP TRIGGER full_{table}")

    def _change(self, statement: str) -> None:
        """Change the file as another program does."""
        with closing(sqlite3.connect(self._file)) as connection, connection:
            connection.execute(statement)


@pytest.fixture
def disk(paths: Paths) -> Iterator[Disk]:
    with closing(Store(paths)) as store:
        yield Disk(store, paths.store)


@pytest.fixture
def now_s() -> list[float]:
    """The time of the event log, in s since 1970, as its only item."""
    return [time.time()]


@pytest.fixture
def event_log(disk: Disk, paths: Paths, now_s: list[float]) -> EventLog:
    return EventLog(disk, paths.events_copy, clock=lambda: now_s[0])


def whats(event_log: EventLog) -> list[str]:
    return [one.event.what for one in event_log.after(0, 10_000)]


def test_unwritten_events_are_written_later_in_order(
    disk: Disk, event_log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    event_log.record(event("0"))
    disk.fill()
    for what in "abc":
        event_log.record(event(what))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert whats(event_log) == ["0", "a", "b", "c"], "they are shown all the same"
    disk.free()
    event_log.record(event("d"))
    assert whats(event_log) == ["0", "a", "b", "c", "d"]
    disk.fill()
    event_log.record(event("e"))
    assert len(caplog.records) == 2, "a new shortage is a new trouble"
    disk.free()
    event_log.flush()
    assert whats(event_log)[-1] == "e"


def test_events_in_memory_are_bounded_to_the_newest(disk: Disk, event_log: EventLog) -> None:
    disk.fill()
    for number in range(1500):
        event_log.record(event(str(number)))
    disk.free()
    event_log.flush()
    assert whats(event_log) == [str(number) for number in range(500, 1500)]


def test_a_listener_is_called_when_events_were_written(disk: Disk, event_log: EventLog) -> None:
    called: list[str] = []
    event_log.listen(lambda: called.append("x"))
    disk.fill()
    event_log.record(event("a"))
    assert called == []
    disk.free()
    event_log.record(event("b"))
    assert called == ["x"]


def test_the_newest_events_are_shown_before_they_are_written(disk: Disk, event_log: EventLog) -> None:
    event_log.record(event("a"))
    disk.fill()
    event_log.record(event("b", "gpu"))
    event_log.record(event("c"))
    assert event_log.write_error.endswith("cannot be written: disk full")
    assert whats(event_log) == ["a", "b", "c"]
    assert [one.id for one in event_log.after(1, 1)] == [2]
    assert [one.event.what for one in event_log.newest(0.0, 2)] == ["b", "c"]
    assert [one.event.what for one in event_log.newest(0.0, 9, "gpu")] == ["b"]
    assert event_log.last_id() == 3
    disk.free()
    event_log.flush()
    assert event_log.write_error == ""
    assert whats(event_log) == ["a", "b", "c"]


def test_a_row_with_a_damaged_number_hides_no_other_event(disk: Disk, event_log: EventLog) -> None:
    for what in "ab":
        event_log.record(event(what))
    disk.store.write("UPDATE event SET time_s = 'x' WHERE what = ?", [("a",)])
    assert [one.event.what for one in event_log.after(0, 9)] == ["b"]


def test_events_are_written_by_a_timer_once_they_can_be(disk: Disk, event_log: EventLog) -> None:
    asked: list[str] = []
    assert event_log.tick(0.0) is None
    disk.fill()
    with event_log.retried_by(lambda: asked.append("x")):
        event_log.record(event("a"))
    assert asked == ["x"]
    assert event_log.tick(5.0) == 5.0 + RETRY_S
    disk.free()
    assert event_log.tick(5.5) == 5.0 + RETRY_S, "too early"
    assert event_log.tick(5.0 + RETRY_S) is None
    assert [one.event.what for one in EventTable(disk.store).after(0, 9)] == ["a"]
    assert (asked, event_log.write_error) == (["x"], "")


def test_a_short_lock_of_the_state_file_is_not_reported(
    disk: Disk, event_log: EventLog, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    event_log.record(event("a"))
    with disk.store.without_waiting(), closing(sqlite3.connect(paths.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        event_log.record(event("b"))
    assert (event_log.write_error, caplog.records) == ("", [])
    assert event_log.tick(1.0) is None
    assert [one.event.what for one in EventTable(disk.store).after(0, 9)] == ["a", "b"]


def test_a_daemon_that_is_killed_while_the_disk_is_full_loses_no_event(disk: Disk, paths: Paths) -> None:
    first = EventLog(disk, paths.events_copy)
    first.record(event("a"))
    disk.fill()
    first.record(event("b"))
    first.record(event("c"))
    disk.free()
    second = EventLog(disk, paths.events_copy)
    assert second.last_id() == 3
    assert whats(second) == ["a", "b", "c"]
    second.record(event("d"))
    assert [one.event.what for one in EventTable(disk.store).after(0, 9)] == ["a", "b", "c", "d"]
    assert [one.id for one in second.after(0, 9)] == [1, 2, 3, 4]


def test_a_damaged_file_is_rebuilt_with_the_events_since_the_boot(paths: Paths) -> None:
    with closing(Store(paths)) as store:
        first = EventLog(lambda: store, paths.events_copy)
        first.record(event("a"))
        first.record(event("b"))
    Path(paths.store).write_bytes(b"torn" * 1024)
    with closing(Store(paths)) as store:
        second = EventLog(lambda: store, paths.events_copy)
        second.record(event("c"))
        told = second.after(0, 9)
        assert [(one.id, one.event.what) for one in told[:3]] == [(1, "a"), (2, "b"), (3, "c")]
        assert f"{paths.store}.unreadable" in told[3].event.what
        assert len(told) == 4


def test_no_event_is_lost_when_the_file_is_damaged_while_in_use(paths: Paths) -> None:
    with closing(Store(paths)) as store:
        event_log = EventLog(lambda: store, paths.events_copy)
        event_log.record(event("a"))
        with closing(sqlite3.connect(paths.store)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with open(paths.store, "r+b") as file:
            file.write(b"\xff" * os.stat(paths.store).st_size)
        event_log.record(event("b"))
        assert whats(event_log)[:2] == ["a", "b"]
        assert [one.id for one in event_log.after(0, 9)] == [1, 2, 3]


def test_a_write_failure_and_its_end_are_reported(disk: Disk, paths: Paths) -> None:
    told: list[str] = []
    kept = EventLog(disk, paths.events_copy, lambda: told.append(kept.write_error))
    disk.fill()
    kept.record(event("a"))
    kept.record(event("b"))
    disk.free()
    kept.record(event("c"))
    assert told == [f"the state file {paths.store} cannot be written: disk full", ""]


# -- the table


@pytest.fixture
def table(disk: Disk) -> EventTable:
    return EventTable(disk.store)


def recorded(number: int, time_s: float = 1.5, kind: str = "gpu") -> EventRecord:
    return EventRecord(number, time_s, Event("info", kind, "00:06.0", f"what {number}", "cäuse\n", "x"))


def several(first: int, count: int, time_s: float) -> list[EventRecord]:
    return [recorded(number, time_s) for number in range(first, first + count)]


def test_events_are_selected_by_id_time_and_kind(table: EventTable) -> None:
    assert (table.last_id(), table.newest(0.0, 10)) == (0, [])
    added = [recorded(1, 10.0, "domain"), recorded(2, 20.0, "gpu"), recorded(3, 30.0, "domain")]
    table.add(added)
    assert table.last_id() == 3
    assert table.newest(0.0, 10) == added
    assert [one.id for one in table.newest(0.0, 2)] == [2, 3], "the newest, oldest first"
    assert [one.id for one in table.newest(20.0, 10)] == [2, 3]
    assert [one.id for one in table.newest(0.0, 10, "gpu")] == [2]
    assert [one.id for one in table.after(1, 1)] == [2]
    assert [one.id for one in table.after(0, 9, "domain")] == [1, 3]


def leased(number: int) -> Event:
    """What a user causes by taking a lease: its process and device differ each time."""
    return Event("info", "lease", f"00:06.0-{number % 4}", f"granted to job-{number} of alice")


def test_leases_displace_neither_xids_nor_deaths(event_log: EventLog, disk: Disk) -> None:
    kept = [
        Event("warning", "gpu", "00:06.0", "Xid 31"),
        Event("error", "client", "host", "MPS server (PID 7) ended unexpectedly"),
        Event("info", "client", "host", "MPS server (PID 8) started"),
        Event("info", "domain", "host", "applying -> ready"),
    ]
    for one in kept:
        event_log.record(one)
    events = [EventRecord(number, time.time(), leased(number)) for number in range(5, MAX_EVENTS + 800)]
    EventTable(disk.store).add(events)
    found = [one.event for one in EventTable(disk.store).after(0, 20_000)]
    assert [one for one in found if one.kind != "lease"] == kept
    assert MAX_EVENTS <= len(found) <= MAX_EVENTS + 300


XID = Event("warning", "gpu", "00:06.0", "Xid 31")
FAILED = Event("error", "client", "host", "MPS server failed")


def test_what_users_cause_hides_no_warning_in_the_newest(
    event_log: EventLog, disk: Disk, now_s: list[float]
) -> None:
    event_log.record(XID)
    events = [EventRecord(number, now_s[0], leased(number)) for number in range(2, 5000)]
    clients = [EventRecord(number, now_s[0], FAILED) for number in range(5000, 5010)]
    EventTable(disk.store).add([*events, *clients])
    plain = event_log.newest(0.0, 100)
    assert [record.id for record in plain] == [*range(4910, 5010)]
    shown = event_log.newest(0.0, 100, severe_first=True)
    assert [record.id for record in shown] == [1, *range(4911, 5010)], "in order of time"
    few = event_log.newest(0.0, 3, severe_first=True)
    assert [record.id for record in few] == [1, 5008, 5009], "failures of jobs are caused at will, too"
    assert event_log.count_from(1, 0.0) == 5009
    assert event_log.count_from(1, 0.0, "gpu") == 1
    assert event_log.count_from(2, 0.0, before=10) == 8


KINDS_AND_SEVERITIES = [(kind, severity) for kind in EVENT_KINDS for severity in SEVERITIES]


def test_what_users_cause_comes_after_errors_and_warnings(event_log: EventLog, now_s: list[float]) -> None:
    for kind, severity in [*KINDS_AND_SEVERITIES, *KINDS_AND_SEVERITIES]:
        event_log.record(Event(severity, kind, "host", "x"))
    events = event_log.newest(0.0, 100)
    ranked = sorted(events, key=lambda record: (record.rank(now_s[0]), -record.id))
    by_rank = [(is_of_users(record.event), record.event.severity) for record in ranked]
    others = [(False, "error")] * 14 + [(False, "warning")] * 14
    of_users = [(True, "error")] * 4 + [(True, "warning")] * 4
    assert by_rank[: len(others + of_users)] == others + of_users
    for limit in range(1, len(events) + 1):
        chosen = event_log.newest(0.0, limit, severe_first=True)
        assert {record.id for record in chosen} == {record.id for record in ranked[:limit]}


@pytest.mark.parametrize("code", [CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, LIMITS_OVERWRITTEN])
def test_what_any_user_can_do_to_a_control_daemon_hides_no_warning(event_log: EventLog, code: str) -> None:
    """They can connect to it and say nothing, under any name, and command it."""
    fallen = Event("warning", "gpu", "00:06.0", "Xid 79", code="xid")
    event_log.record(fallen)
    for number in range(110):
        event_log.record(Event("error", "domain", "host", "ready -> wedged", f"job-{number}", code=code))
    assert event_log.newest(0.0, 3, severe_first=True)[0].event == fallen


def test_events_with_texts_of_users_are_counted_by_what_is_common(event_log: EventLog) -> None:
    for number in range(30):
        what = f"job-{number} (PID 5) of bob: terminated"
        event_log.record(Event("warning", "client", "host", what, common="jobs of bob"))
    event_log.record(Event("warning", "client", "host", "job of eve: ended", common="jobs of eve"))
    records = event_log.newest(0.0, 100)
    assert [record.occurrences for record in records] == [*[1] * 9, 21, 1]


def test_the_log_keeps_what_no_user_can_cause(event_log: EventLog, disk: Disk) -> None:
    failed = Event("error", "domain", "host", "ready -> failed", code="domain_failed")
    event_log.record(failed)
    wedged = Event("error", "domain", "host", "ready -> wedged", code=CONTROL_DAEMON_SILENT)
    EventTable(disk.store).add([EventRecord(number, 1e9, wedged) for number in range(2, 6000)])
    assert failed in [record.event for record in event_log.newest(0.0, 10_000)]


def test_a_copy_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_text('[3,5.0,"error","gpu","00:06.0","gone","a cause","a consequence","gpu_lost"]\n')
    event = Event("error", "gpu", "00:06.0", "gone", "a cause", "a consequence", "gpu_lost")
    assert EventCopy(str(copy)).read() == [EventRecord(3, 5.0, event)]


def test_terminated_jobs_hide_no_death_of_a_server(event_log: EventLog) -> None:
    event_log.record(FAILED)
    for number in range(110):
        event_log.record(Event("warning", "client", "host", f"job-{number} (PID 5) of nobody: terminated"))
    assert event_log.newest(0.0, 100, severe_first=True)[0].event == FAILED


def test_warnings_come_first_for_a_day_or_from_a_given_time_on(
    event_log: EventLog, now_s: list[float]
) -> None:
    begin_s = now_s[0]
    for recorded_event in (XID, leased(1), leased(2)):
        event_log.record(recorded_event)
    now_s[0] += 86_400
    assert [record.id for record in event_log.newest(0.0, 2, severe_first=True)] == [1, 3]
    now_s[0] += 1
    assert [record.id for record in event_log.newest(0.0, 2, severe_first=True)] == [2, 3]
    assert [record.id for record in event_log.newest(begin_s, 2, severe_first=True)] == [1, 3]


def test_unwritten_events_leave_room_for_warnings(event_log: EventLog, disk: Disk) -> None:
    for recorded_event in (XID, leased(1), leased(2)):
        event_log.record(recorded_event)
    disk.fill()
    event_log.record(leased(3))
    disk.free()
    assert [record.id for record in event_log.newest(0.0, 2, severe_first=True)] == [1, 4]
    assert [record.id for record in event_log.newest(0.0, 1, severe_first=True)] == [1]
    assert event_log.count_from(1, 0.0) == 4


def test_leases_displace_no_other_event_from_memory(event_log: EventLog, disk: Disk) -> None:
    disk.fill()
    event_log.record(event("Xid 31", "gpu"))
    for number in range(1500):
        event_log.record(leased(number))
    disk.free()
    event_log.flush()
    assert whats(event_log)[0] == "Xid 31"
    assert len(whats(event_log)) == 1000
    disk.fill()
    event_log.record(event("Xid 48", "gpu"))
    for number in range(2000, 3500):
        event_log.record(leased(number))
    disk.free()
    event_log.flush()
    assert "Xid 48" in whats(event_log)


def test_leases_displace_no_other_event_from_the_copy(tmp_path: Path) -> None:
    copy = EventCopy(str(tmp_path / "events"))
    copy.add([recorded(1)])
    for first in range(2, 20_000, 100):
        copy.add(EventRecord(number, 1.5, leased(number)) for number in range(first, first + 100))
    copy.add([recorded(20_100)])
    kept = copy.read()
    assert [one.id for one in kept if one.event.kind == "gpu"] == [1, 20_100]
    assert [one.id for one in kept] == sorted(one.id for one in kept)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_200_000


def test_many_events_of_one_cause_are_counted_in_one_row(
    event_log: EventLog, disk: Disk, now_s: list[float], paths: Paths
) -> None:
    now_s[0] = 1000.0
    for pid in range(MAX_REPEATS + 20):
        now_s[0] += 1.0
        event_log.record(event(f"granted to job (PID {pid}, alice)", "lease"))
        event_log.record(event("another cause" if pid < 3 else f"cause {pid}"))
    rows = event_log.newest(0.0, 1000, "lease")
    assert [one.occurrences for one in rows] == [1] * (MAX_REPEATS - 1) + [21]
    assert (rows[-1].time_s, rows[-1].last_s) == (1000.0 + MAX_REPEATS, 1000.0 + MAX_REPEATS + 20)
    assert [one.id for one in event_log.newest(1029.0, 10, "lease")] == [rows[-1].id], "by its last time"
    assert event_log.not_recorded("lease", {"host": 1030.0}) == set()
    assert event_log.not_recorded("lease", {"host": 1031.0}) == {"host"}
    assert event_log.counts["lease", "info"] == MAX_REPEATS + 20
    again = EventLog(disk, paths.events_copy)
    assert again.newest(0.0, 1000, "lease") == rows, "and the next daemon knows it"


def death(pid: int, user: str = "nobody") -> Event:
    return Event("error", "client", "host", f"MPS server (PID {pid}) of {user} ended unexpectedly")


def test_one_users_deaths_are_not_counted_in_anothers_row(event_log: EventLog) -> None:
    for pid in range(12):
        event_log.record(death(pid))
    event_log.record(death(20, "root"))
    rows = event_log.newest(0.0, 100)
    assert [(one.event.what.split()[5], one.occurrences) for one in rows[-2:]] == [("nobody", 3), ("root", 1)]


def test_events_with_lists_of_processes_are_counted_too(event_log: EventLog) -> None:
    for pid in range(MAX_REPEATS + 2):
        event_log.record(event(f"2 jobs of nobody (PIDs {pid}, {pid + 1}, ...) wait", "client"))
    assert event_log.newest(0.0, 1)[0].occurrences == 3


def test_those_who_follow_hear_of_counted_warnings_and_errors(event_log: EventLog) -> None:
    for pid in range(MAX_REPEATS):
        event_log.record(death(pid))
        event_log.record(event("a"))
    row = event_log.newest(0.0, 1, "client")[0].id
    last = event_log.last_id()
    event_log.record(event("a"))
    assert (event_log.after(last, 9), event_log.last_id()) == ([], last), "what is no warning is only counted"
    event_log.record(death(30))
    event_log.record(death(31))
    event_log.record(event("b"))
    again, new = event_log.after(last, 9)
    assert (again.id, again.occurrences, again.position) == (row, 3, last + 2)
    assert (new.event.what, new.id, new.position) == ("b", last + 3, last + 3)
    assert event_log.after(last, 1) == [again]
    assert event_log.after(again.position, 9) == [new]
    assert event_log.after(last, 9, "domain") == [new]
    assert [one.id for one in event_log.after(row - 1, 99, "client")] == [row], "once is enough"


def test_the_next_daemon_uses_no_id_of_a_counted_event_again(
    event_log: EventLog, disk: Disk, paths: Paths
) -> None:
    for pid in range(MAX_REPEATS + 5):
        event_log.record(death(pid))
    last = event_log.last_id()
    again = EventLog(disk, paths.events_copy)
    assert again.last_id() == last == MAX_REPEATS + 5
    again.record(event("a"))
    assert [one.id for one in again.after(last, 9)] == [last + 1]


def test_counted_events_do_not_keep_old_ones_from_being_deleted(table: EventTable) -> None:
    now_s = time.time()
    table.add(several(1, 2, now_s - OLDEST_EVENT_S - 10))
    for number in range(3, 300, 2):
        table.add([recorded(number, now_s)])
        table.count([Repeat(number, 5, now_s, is_severe=True)], number + 1)
    assert table.after(0, 1)[0].id == 3


def test_events_of_one_cause_have_rows_of_their_own_again_later(
    event_log: EventLog, now_s: list[float]
) -> None:
    for _ in range(MAX_REPEATS + 1):
        event_log.record(event("a"))
    now_s[0] += REPEAT_S
    event_log.record(event("a"))
    assert [one.occurrences for one in event_log.newest(0.0, 100)] == [1] * (MAX_REPEATS - 1) + [2, 1]
    now_s[0] -= 2 * REPEAT_S  # the clock was set back
    event_log.record(event("a"))
    assert len(event_log.newest(-REPEAT_S, 100)) == MAX_REPEATS + 2


def test_counts_that_cannot_be_written_are_written_later(event_log: EventLog, disk: Disk) -> None:
    for _ in range(MAX_REPEATS):
        event_log.record(event("a"))
    disk.fill()
    event_log.record(event("a"))
    event_log.record(event("a"))
    disk.free()
    event_log.tick(1.0)
    assert [one.occurrences for one in event_log.after(MAX_REPEATS - 1, 9)] == [3]


def test_old_events_are_deleted_with_their_counts(table: EventTable, disk: Disk) -> None:
    old_s = time.time() - OLDEST_EVENT_S - 10
    table.add(several(1, 2, old_s))
    repeats = [Repeat(1, 5, old_s, is_severe=False), Repeat(2, 5, time.time(), is_severe=False)]
    table.count(repeats, table.last_id())
    table.add(several(3, 300, time.time()))
    assert [one.id for one in table.after(0, 2)] == [2, 3], "the second happened again lately"
    assert disk.store.read("SELECT event FROM event_repeat") == [(2,)]


def test_a_recorded_event_is_neither_changed_nor_repeated(table: EventTable) -> None:
    table.add(several(1, 3, 1.0))
    table.add(several(2, 3, 9.0))
    assert [(one.id, one.time_s) for one in table.after(0, 9)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 9.0)]


def test_events_are_bounded_in_number_and_age_with_rising_ids(table: EventTable) -> None:
    now_s = time.time()
    table.add(several(1, 5, now_s - OLDEST_EVENT_S - 10))
    table.add(several(6, MAX_EVENTS + 300, now_s))
    left = table.after(0, 20_000)
    assert MAX_EVENTS <= len(left) <= MAX_EVENTS + 300
    table.add(several(MAX_EVENTS + 306, 300, now_s))
    left = table.after(0, 20_000)
    assert len(left) <= MAX_EVENTS + 300
    assert min(one.time_s for one in left) == now_s
    assert table.last_id() == MAX_EVENTS + 605
    for number in range(MAX_EVENTS + 606, MAX_EVENTS + 1200):  # as they come: one at a time
        table.add(several(number, 1, now_s))
    assert len(table.after(0, 20_000)) <= MAX_EVENTS + 300


# -- the copy


def test_the_copys_events_are_read_by_the_next_daemon(tmp_path: Path) -> None:
    file = str(tmp_path / "run/events")
    EventCopy(file).add([recorded(1), recorded(2)])
    EventCopy(file).add([recorded(3)])
    assert EventCopy(file).read() == [recorded(1), recorded(2), recorded(3)]
    assert (tmp_path / "run/events").stat().st_mode & 0o777 == 0o600, "others' commands may stand in it"


def test_invalid_lines_of_the_copy_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "events"
    copy = EventCopy(str(file))
    copy.add([recorded(1)])
    fields = '1,"info","gpu","00:06.0","what","cause","x"]'
    with file.open("a") as out:
        out.write(f"[1e999,{fields}\n[{10**30},{fields}\n[-1,{fields}\n{'[' * 100_000}\n")
    copy.add([recorded(2)])
    assert copy.read() == [recorded(1), recorded(2)]


def test_the_copy_is_bounded_and_keeps_the_newest_events(tmp_path: Path) -> None:
    copy = EventCopy(str(tmp_path / "events"))
    for first in range(1, 20_000, 100):
        copy.add(recorded(number) for number in range(first, first + 100))
    kept = copy.read()
    assert kept[-1].id == 20_000
    assert len(kept) > 4_000
    assert [one.id for one in kept] == list(range(kept[0].id, 20_001)), "and none is missing between"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_100_000


@given(st.integers(0, 200))
def test_a_line_that_was_cut_off_costs_no_other(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        EventCopy(str(file)).add([recorded(1), recorded(2), recorded(3)])
        whole = file.read_bytes()
        file.write_bytes(whole[: max(0, len(whole) - cut)])
        kept = [one.id for one in EventCopy(str(file)).read()]
        assert kept == [1, 2, 3][: len(kept)]
        assert len(kept) >= 3 - 1 - cut // 60


def test_a_copy_that_is_missing_or_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert EventCopy(str(tmp_path / "none")).read() == []
    EventCopy(str(tmp_path / "file/events")).add([recorded(1)])
