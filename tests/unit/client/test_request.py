"""What a caller asks for is checked where that needs no daemon, with one error that says what is right."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from yunion_mps.client.clients import format_since
from yunion_mps.client.lease import LeaseArguments, LeaseMethod, whole_seconds
from yunion_mps.core.errors import YunionError


class Requests(LeaseMethod[LeaseArguments]):
    """A client that takes nothing."""

    def _take(self, request: LeaseArguments) -> LeaseArguments:
        return request


@pytest.mark.parametrize(("amount", "mib"), [("6GiB", 6144), ("512MiB", 512), ("1GiB", 1024)])
def test_an_amount_of_memory_has_its_unit(amount: str, mib: int) -> None:
    assert Requests().lease(memory=amount).members["memory_mib"] == mib


@pytest.mark.parametrize("wrong", ["6", "6GB", "0GiB", "1.5GiB", "", " 6GiB", "6 GiB", 6144, b"6GiB"])
def test_another_amount_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(YunionError, match=r"memory: .* is not an amount of memory") as raised:
        Requests().lease(memory=wrong)
    assert (raised.value.code, raised.value.hint) == (
        "invalid_request",
        "write a number of MiB or GiB, such as '6GiB'",
    )


@pytest.mark.parametrize(("wait_s", "whole"), [(0, 0), (0.2, 1), (60, 60), (math.inf, 30 * 86400)])
def test_a_wait_is_rounded_up_to_seconds(wait_s: float, whole: int) -> None:
    assert whole_seconds(wait_s) == whole


@pytest.mark.parametrize("wrong", [math.nan, None, "60"])
def test_a_wait_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(YunionError, match=r"wait_s: .* is not a number"):
        whole_seconds(wrong)


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(YunionError, match="wait_s: -5 is negative"):
        whole_seconds(-5)


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("count", 0, "invalid value for count: 0; write a whole number from 1 to 64"),
        ("count", 65, "invalid value for count: 65; write a whole number from 1 to 64"),
        ("name", "a b", "invalid value for name: 'a b'; write letters, digits and"),
        ("ttl_s", 0, "invalid value for ttl_s: 0; write a whole number from 1 to "),
        ("thread_percentage", 101, "invalid value for thread_percentage: 101; write a whole"),
        ("placement", "pack", "invalid value for placement: 'pack'; write one of binpack, spread"),
    ],
)
def test_an_argument_out_of_bounds_is_named_as_the_caller_wrote_it(
    argument: str, value: Any, said: str
) -> None:
    with pytest.raises(YunionError) as raised:
        Requests().lease(**{"name": "job-17", "memory": "6GiB", argument: value})
    assert f"{raised.value.message}; {raised.value.hint}".startswith(said)
    assert raised.value.code == "invalid_request"


def test_a_thread_percentage_is_sent_with_the_memory_that_it_requires() -> None:
    members = Requests().lease(memory="6GiB", thread_percentage=25).members
    assert (members["memory_mib"], members["thread_percentage"]) == (6144, 25)
    with pytest.raises(YunionError, match="thread_percentage: requires memory"):
        Requests().lease(thread_percentage=25)


def test_a_beginning_is_a_time_or_so_long_ago() -> None:
    moment = datetime(2026, 11, 20, 14, 45, tzinfo=timezone(timedelta(hours=1)))
    assert format_since(moment) == "2026-11-20T13:45:00.000Z"
    assert format_since(None) is None
    assert format_since(datetime.min.replace(tzinfo=timezone.utc)) == "1970-01-01T00:00:00.000Z"
    assert (format_since(timedelta(hours=1)) or "") < (format_since(timedelta(0)) or "")


@pytest.mark.parametrize("wrong", [datetime(2026, 11, 20), 1788000000.0, "2026-11-20"])  # noqa: DTZ001
def test_a_beginning_without_a_time_zone_is_refused(wrong: Any) -> None:
    with pytest.raises(YunionError, match=r"since: .* is not a time with a time zone"):
        format_since(wrong)
