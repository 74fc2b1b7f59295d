"""Times as the API writes them, and durations as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.units import duration_s, duration_text, rfc3339, seconds

NOON_S = 1795175100.123


@pytest.mark.parametrize(
    ("moment_s", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (NOON_S, "2026-11-20T11:45:00.123Z"),
        (NOON_S + 0.0009, "2026-11-20T11:45:00.123Z"),
        (1795175100.9999, "2026-11-20T11:45:00.999Z"),
        (99_999_999_999, "5138-11-16T09:46:39.000Z"),
    ],
)
def test_a_time_has_milliseconds_and_is_in_utc(moment_s: float, text: str) -> None:
    assert rfc3339(moment_s) == text


@pytest.mark.parametrize(
    "text",
    ["2026-11-20T11:45:00.123Z", "2026-11-20t11:45:00.123000z", "2026-11-20 17:15:00.123+05:30",
     "2026-11-20T00:15:00.123-11:30"],
)  # fmt: skip
def test_every_way_to_write_a_time_is_read(text: str) -> None:
    assert seconds(text) == NOON_S


@pytest.mark.parametrize(
    "text",
    ["", "now", "1795175100", "2026-11-20", "2026-11-20T11:45:00", "2026-11-20T11:45Z",
     "2026-13-20T11:45:00Z", "2026-11-20T25:45:00Z", "2026-11-20T11:45:00.Z", "2026-11-20T11:45:00+24:00",
     "20261120T114500Z", "٢٠٢٦-11-20T11:45:00Z"],
)  # fmt: skip
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        seconds(text)


@given(st.integers(0, 4_000_000_000_000).map(lambda ms: ms / 1000))
def test_a_formatted_time_is_parsed_to_the_same_value(moment_s: float) -> None:
    assert seconds(rfc3339(moment_s)) == pytest.approx(moment_s, abs=1e-4)
    assert rfc3339(seconds(rfc3339(moment_s))) == rfc3339(moment_s)


@pytest.mark.parametrize(
    ("whole_s", "text"),
    [(1, "1s"), (90, "90s"), (600, "10m"), (5400, "90m"), (7200, "2h"), (86_400_000, "1000d"),
     (604_800, "7d")],
)  # fmt: skip
def test_a_duration_is_written_as_users_type_it(whole_s: int, text: str) -> None:
    assert duration_text(whole_s) == text


@given(st.integers(0, 999_999_999))
def test_a_formatted_duration_is_parsed_to_the_same_value(whole_s: int) -> None:
    assert duration_s(duration_text(whole_s)) == whole_s
