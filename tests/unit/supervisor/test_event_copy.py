"""The copy of the newest events: bounded, and as good as it can be after a kill at any byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.models import Event
from yunion_mps.supervisor.event_log import EventCopy, EventRecord


def recorded(number: int) -> EventRecord:
    return EventRecord(
        number, 1.5 * number, Event("info", "gpu", "00:06.0", f"what {number}", "cäuse\n", "x")
    )


def test_what_was_added_is_read_by_the_next(tmp_path: Path) -> None:
    file = str(tmp_path / "run/events")
    EventCopy(file).add([recorded(1), recorded(2)])
    EventCopy(file).add([recorded(3)])
    assert EventCopy(file).read() == [recorded(1), recorded(2), recorded(3)]
    assert (tmp_path / "run/events").stat().st_mode & 0o777 == 0o600, "others' commands may stand in it"


def test_what_is_no_event_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "events"
    copy = EventCopy(str(file))
    copy.add([recorded(1)])
    fields = '1,"info","gpu","00:06.0","what","cause","x"]'
    with file.open("a") as out:
        out.write(f"[1e999,{fields}\n[{10**30},{fields}\n[-1,{fields}\n{'[' * 100_000}\n")
    copy.add([recorded(2)])
    assert copy.read() == [recorded(1), recorded(2)]


def test_it_is_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
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


def test_where_there_is_none_nothing_is_read_and_where_it_cannot_be_nothing_breaks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert EventCopy(str(tmp_path / "none")).read() == []
    EventCopy(str(tmp_path / "file/events")).add([recorded(1)])
