"""Durations and moments as people write them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import pytest
from yunion_mps.cli.events import moment
from yunion_mps.cli.options import Duration
from yunion_mps.http.parameters import LATEST_S

#: 2026-11-20 13:45:07 in Berlin, an hour ahead of UTC; at that place it is summer until 2026-10-25.
NOW_S = 1795178707


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("0s", "2026-11-20 13:45:07"),
        ("90", "2026-11-20 13:43:37"),
        ("90s", "2026-11-20 13:43:37"),
        ("10m", "2026-11-20 13:35:07"),
        ("2h", "2026-11-20 11:45:07"),
        ("3d", "2026-11-17 13:45:07"),
        ("1w", "2026-11-13 13:45:07"),
        ("today", "2026-11-20 00:00:00"),
        ("yesterday", "2026-11-19 00:00:00"),
        ("2026-11-20", "2026-11-20 00:00:00"),
        ("2026-11-20 13:45", "2026-11-20 13:45:00"),
        ("2026-11-20 13:45:59", "2026-11-20 13:45:59"),
        ("2026-11-20T13:45", "2026-11-20 13:45:00"),
        ("2026-07-01 12:00", "2026-07-01 12:00:00"),
        ("1795178707", "2026-11-20 13:45:07"),
        ("2026-11-20T12:45:07.999Z", "2026-11-20 13:45:07"),
        ("2026-11-20t18:15:07+05:30", "2026-11-20 13:45:07"),
        ("999999999w", "1970-01-01 01:00:00"),
        ("1900-01-01", "1970-01-01 01:00:00"),
    ],
)
def test_a_moment_is_by_the_local_time(text: str, then: str) -> None:
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment(text, NOW_S))) == then


def test_yesterday_crosses_months_and_changes_of_the_clock() -> None:
    for now, before in (("2026-03-01 00:30", "2026-02-28"), ("2026-10-26 00:10", "2026-10-25")):
        assert moment("yesterday", moment(now, NOW_S)) == moment(before, NOW_S)


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "m", "-5m", "1.5h", "10 m", "5y", "1234567890m", "now", "Today", "tomorrow", "123456789012",
        "2026-13-01", "2026-02-30", "20-11-2026", "13:45",
        "2026-11-20 25:00", "2026-11-20 13", "2026-11-20 13:45:07 CET", "2026-11-20T13:45T", "\uff12h",
        "\u0663" * 10,
    ],
)  # fmt: skip
def test_an_invalid_since_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it has no words: the option's are told
        moment(text, NOW_S)


def test_no_moment_is_later_than_the_daemon_takes() -> None:
    assert moment("9999-12-31", NOW_S) == moment("9999-12-31T00:00:00Z", NOW_S) == LATEST_S
    assert moment("99999999999", NOW_S) == LATEST_S


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("1w", 604_800)],
)
def test_a_duration_is_in_seconds_unless_it_names_a_unit(text: str, duration_s: int) -> None:
    assert Duration().convert(text, None, None) == duration_s


@pytest.mark.parametrize(
    "text", ["", "s", "-1", "+1", "1.5", "1.5h", "10 m", "5y", "1h30m", "1234567890", "\uff12h", "forever"]
)
def test_an_invalid_duration_is_wrong_usage_with_a_hint(text: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        Duration().convert(text, None, None)
    assert caught.value.message == f"{text!r} is not a duration: use 90, 90s, 10m, 2h or 1d."


@pytest.mark.parametrize(
    ("bounds", "text", "wrong"),
    [
        ((), "0s", "too short: use at least 1s"),
        ((90, 600), "1m", "too short: use at least 90s"),
        ((1, 600), "11m", "too long: use at most 10m"),
        ((1, 14 * 86_400), "3w", "too long: use at most 14d"),
    ],
)
def test_a_duration_out_of_its_bounds_is_wrong_usage(bounds: tuple[int, ...], text: str, wrong: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        Duration(*bounds).convert(text, None, None)
    assert caught.value.message == f"{text} is {wrong}."
