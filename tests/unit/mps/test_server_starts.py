"""Whether servers start, and when one is ordered to find out, by a clock that the test turns."""

from __future__ import annotations

from yunion_mps.mps.server_history import ENDED, NOT_STARTED, SERVED, STARTED, Outcome
from yunion_mps.mps.server_starts import ATTEMPT_S, PAUSES_S, ServerStarts

FAILED = Outcome(NOT_STARTED, 7, 1000, 1, has_client=True)
OURS_FAILED = Outcome(NOT_STARTED, 8, 1000, 1, is_ordered=True)
OURS_STARTED = Outcome(STARTED, 9, 1000, is_ordered=True)
START = ["start_server -uid 1000"]


def failing(now_s: float = 0.0) -> ServerStarts:
    starts = ServerStarts()
    starts.note([FAILED] * 3, now_s)
    return starts


def attempting() -> ServerStarts:
    """Servers fail, and one has been ordered at 5 s."""
    starts = failing()
    assert starts.commands(5.0, is_idle=True) == START
    starts.commands_delivered(START, 5.0)
    return starts


def test_three_failures_within_a_minute_mean_that_servers_do_not_start() -> None:
    starts = ServerStarts()
    for now_s in (0.0, 30.0, 61.0):
        starts.note([FAILED], now_s)
        assert starts.failure is None
    starts.note([FAILED], 80.0)
    assert starts.failure == FAILED


def test_a_server_that_starts_between_failures_ends_the_count() -> None:
    starts = ServerStarts()
    starts.note([FAILED, FAILED, Outcome(STARTED, 7, 1000), FAILED, FAILED], 0.0)
    assert starts.failure is None
    assert starts.due_s(0.0) is None


def test_a_server_is_ordered_for_the_user_whose_servers_failed() -> None:
    starts = failing()
    assert starts.commands(4.9, is_idle=True) == []
    assert starts.commands(5.0, is_idle=True) == START


def test_no_server_is_ordered_while_one_runs() -> None:
    starts = failing()
    assert starts.commands(100.0, is_idle=False) == []
    assert starts.commands(100.0, is_idle=True) == START


def test_an_order_is_repeated_until_it_is_delivered_and_then_awaited() -> None:
    starts = failing()
    assert [starts.commands(now_s, is_idle=True) for now_s in (5.0, 6.0, 7.0)] == [START] * 3
    starts.commands_delivered(["shutdown_server 3"], 7.0)
    assert starts.commands(8.0, is_idle=True) == START
    starts.commands_delivered(START, 8.0)
    assert starts.commands(9.0, is_idle=True) == []
    assert starts.commands(8.0 + ATTEMPT_S, is_idle=True) == START, "its outcome was never logged"


def test_the_pauses_between_attempts_grow_to_a_minute() -> None:
    starts, now_s, pauses = failing(), 0.0, []
    for _ in range(7):
        begun_s = now_s
        while not starts.commands(now_s, is_idle=True):
            now_s += 1
        pauses.append(now_s - begun_s)
        starts.commands_delivered(START, now_s)
        starts.note([OURS_FAILED], now_s)
    assert pauses == [*PAUSES_S, 60.0, 60.0]
    assert pauses[0] == 5.0


def test_a_client_s_failure_delays_no_attempt() -> None:
    starts = failing()
    starts.note([FAILED] * 6, 4.0)
    assert starts.commands(5.0, is_idle=True) == START


def test_an_ordered_server_that_starts_is_shut_down_at_once() -> None:
    starts = attempting()
    starts.note([OURS_STARTED], 5.1)
    assert starts.failure is None
    assert starts.is_awaiting
    assert list(starts.surplus) == [9]
    starts.surplus_asked()
    assert list(starts.surplus) == []
    assert starts.due_s(5.3) is None


def test_its_outcome_may_be_logged_before_the_order_is_answered() -> None:
    starts = failing()
    assert starts.commands(5.0, is_idle=True) == START
    starts.note([OURS_FAILED], 5.1)
    starts.commands_delivered(START, 5.2)
    assert not starts.is_awaiting
    assert starts.commands(15.0, is_idle=True) == []
    assert starts.commands(15.1, is_idle=True) == START


def test_an_ordered_server_with_a_client_is_left_alone() -> None:
    starts = attempting()
    starts.note([OURS_STARTED._replace(has_client=True)], 5.1)
    assert starts.surplus == ()
    starts = attempting()
    starts.note([OURS_STARTED, Outcome(SERVED, 9, 1000, has_client=True, is_ordered=True)], 5.1)
    assert starts.surplus == ()


def test_an_ordered_server_that_has_ended_is_not_shut_down() -> None:
    starts = attempting()
    starts.note([OURS_STARTED, Outcome(ENDED, 9, 1000)], 5.1)
    assert starts.surplus == ()


def test_a_client_s_own_server_that_starts_ends_the_attempts() -> None:
    starts = failing()
    starts.note([Outcome(STARTED, 9, 0, has_client=True)], 3.0)
    assert starts.failure is None
    assert starts.commands(100.0, is_idle=True) == []


def test_an_operators_server_is_not_shut_down() -> None:
    starts = failing()
    starts.note([OURS_STARTED], 3.0)
    assert starts.surplus == ()
