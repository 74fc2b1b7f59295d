"""Whether servers start, and when one is ordered to find out, by a clock that the test turns."""

from __future__ import annotations

from yunion_mps.mps.server_history import ENDED, NOT_STARTED, SERVED, STARTED, Outcome
from yunion_mps.mps.server_starts import ASK_S, ATTEMPT_S, PAUSES_S, ServerStarts

FAILED = Outcome(NOT_STARTED, 7, 1000, 1, has_client=True)
OURS_FAILED = Outcome(NOT_STARTED, 8, 1000, 1, is_ordered=True)
OURS_STARTED = Outcome(STARTED, 9, 1000, is_ordered=True)
START = ["start_server -uid 1000"]
#: Those of another user, 1001, and of the daemon's own attempts for its user.
OTHER_FAILED = FAILED._replace(uid=1001)
ROOT_FAILED = OURS_FAILED._replace(uid=0)
ROOT_STARTED = OURS_STARTED._replace(uid=0)
START_AS_ROOT = ["start_server -uid 0"]


def failing_starts() -> ServerStarts:
    """Servers fail for 1000, who is the user of the control daemon, too: those of clients and one ordered."""
    starts = ServerStarts(1000)
    starts.note([FAILED] * 3, 0.0)
    assert deliver_commands(starts, 0.0) == START
    starts.note([OURS_FAILED], 0.0)
    return starts


def failing_for_one() -> ServerStarts:
    """Servers fail for 1000, but the control daemon's user is root."""
    starts = ServerStarts(0)
    fail(starts, 1000, 0.0)
    return starts


def fail(starts: ServerStarts, uid: int, now_s: float) -> None:
    """Have three servers of clients of this user fail, and one that is ordered for that."""
    starts.note([FAILED._replace(uid=uid)] * 3, now_s)
    assert deliver_commands(starts, now_s) == [f"start_server -uid {uid}"]
    starts.note([OURS_FAILED._replace(uid=uid)], now_s)


def deliver_commands(starts: ServerStarts, now_s: float) -> list[str]:
    """Have what is due at this time delivered."""
    commands = starts.commands(now_s, is_idle=True)
    starts.commands_delivered(commands, now_s)
    return commands


def ordered_start() -> ServerStarts:
    """Servers fail, and one has been ordered at 5 s."""
    starts = failing_starts()
    assert starts.commands(5.0, is_idle=True) == START
    starts.commands_delivered(START, 5.0)
    return starts


def test_after_three_failures_within_a_minute_one_is_ordered_at_once() -> None:
    starts = ServerStarts(1000)
    for now_s in (0.0, 30.0, 61.0):
        starts.note([FAILED], now_s)
        assert deliver_commands(starts, now_s) == []
    starts.note([FAILED], 80.0)
    assert deliver_commands(starts, 80.0) == START
    assert starts.failure is None, "only the log says so"
    starts.note([OURS_FAILED], 80.1)
    assert starts.failure == OURS_FAILED


def test_servers_fail_for_no_user_whose_ordered_server_starts() -> None:
    """Every local user can write lines into the log."""
    starts = ServerStarts(0)
    starts.note([FAILED] * 30, 0.0)
    assert deliver_commands(starts, 0.0) == START
    starts.note([OURS_FAILED], 0.1, is_idle=False)
    starts.note([OURS_STARTED], 0.2, is_idle=False)
    assert (starts.failing_users, starts.failure, list(starts.surplus)) == ({}, None, [9])


def test_a_server_that_starts_between_failures_ends_the_count() -> None:
    starts = ServerStarts(1000)
    starts.note([FAILED, FAILED, Outcome(STARTED, 7, 1000), FAILED, FAILED], 0.0)
    assert starts.failing_users == {}
    assert starts.due_s(0.0) is None


def test_a_server_is_ordered_for_the_user_whose_servers_failed() -> None:
    starts = failing_starts()
    assert starts.commands(4.9, is_idle=True) == []
    assert starts.commands(5.0, is_idle=True) == START


def test_no_server_is_ordered_while_one_runs() -> None:
    starts = failing_starts()
    assert starts.commands(100.0, is_idle=False) == []
    assert starts.commands(100.0, is_idle=True) == START


def test_an_order_is_repeated_until_it_is_delivered_and_then_awaited() -> None:
    starts = failing_starts()
    assert [starts.commands(now_s, is_idle=True) for now_s in (5.0, 6.0, 7.0)] == [START] * 3
    starts.commands_delivered(["shutdown_server 3"], 7.0)
    assert starts.commands(8.0, is_idle=True) == START
    starts.commands_delivered(START, 8.0)
    assert starts.commands(9.0, is_idle=True) == []
    assert starts.commands(8.0 + ATTEMPT_S, is_idle=True) == START, "its outcome was never logged"


def test_the_pauses_between_attempts_grow_to_a_minute() -> None:
    starts, now_s, pauses = failing_starts(), 0.0, []
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
    starts = failing_starts()
    starts.note([FAILED] * 6, 4.0)
    assert starts.failure == FAILED, "the last one"
    assert starts.commands(5.0, is_idle=True) == START


def test_an_ordered_server_that_starts_is_shut_down_at_once() -> None:
    starts = ordered_start()
    starts.note([OURS_STARTED], 5.1)
    assert starts.failure is None
    assert starts.is_awaiting
    assert list(starts.surplus) == [9]
    starts.surplus_asked()
    assert list(starts.surplus) == []
    assert starts.due_s(5.3) is None


def test_its_outcome_may_be_logged_before_the_order_is_answered() -> None:
    starts = failing_starts()
    assert starts.commands(5.0, is_idle=True) == START
    starts.note([OURS_FAILED], 5.1)
    starts.commands_delivered(START, 5.2)
    assert not starts.is_awaiting
    assert starts.commands(15.0, is_idle=True) == []
    assert starts.commands(15.1, is_idle=True) == START


def test_an_ordered_server_with_a_client_is_left_alone() -> None:
    starts = ordered_start()
    starts.note([OURS_STARTED._replace(has_client=True)], 5.1)
    assert starts.surplus == ()
    starts = ordered_start()
    starts.note([OURS_STARTED, Outcome(SERVED, 9, 1000, has_client=True, is_ordered=True)], 5.1)
    assert starts.surplus == ()


def test_an_ordered_server_that_has_ended_is_not_shut_down() -> None:
    starts = ordered_start()
    starts.note([OURS_STARTED, Outcome(ENDED, 9, 1000)], 5.1)
    assert starts.surplus == ()


def test_a_client_s_own_server_that_starts_ends_the_attempts() -> None:
    starts = failing_starts()
    starts.note([Outcome(STARTED, 9, 1000, has_client=True)], 3.0)
    assert starts.failure is None
    assert starts.commands(100.0, is_idle=True) == []


def test_an_operators_server_is_not_shut_down() -> None:
    starts = failing_starts()
    starts.note([OURS_STARTED], 3.0)
    assert starts.surplus == ()


# -- servers that fail for some users


def test_servers_that_fail_for_one_user_leave_the_others_served() -> None:
    starts = failing_for_one()
    assert (starts.failing_users, starts.failure) == ({1000: OURS_FAILED}, None)


def test_whether_others_have_servers_is_tried_at_once_as_root() -> None:
    starts = failing_for_one()
    assert deliver_commands(starts, 0.0) == START_AS_ROOT
    starts.note([ROOT_STARTED], 0.1)
    assert list(starts.surplus) == [9]
    assert (starts.failing_users, starts.failure) == ({1000: OURS_FAILED}, None)
    starts.surplus_asked()
    assert deliver_commands(starts, 4.9) == []
    assert deliver_commands(starts, 5.0) == START, "the user's are tried until one lives"
    starts.note([OURS_STARTED], 5.1)
    assert starts.failing_users == {}


def test_servers_that_fail_for_root_as_well_fail_for_all() -> None:
    starts = failing_for_one()
    assert deliver_commands(starts, 0.0) == START_AS_ROOT
    starts.note([ROOT_FAILED], 0.1)
    assert starts.failure == ROOT_FAILED
    assert deliver_commands(starts, 5.0) == START
    starts.note([OURS_FAILED], 5.1)
    assert deliver_commands(starts, 5.1) == START_AS_ROOT


def test_any_user_s_server_that_starts_ends_a_failure_for_all() -> None:
    starts = failing_for_one()
    deliver_commands(starts, 0.0)
    starts.note([ROOT_FAILED], 0.1)
    starts.note([Outcome(STARTED, 9, 1002, has_client=True)], 1.0)
    assert starts.failure is None
    assert set(starts.failing_users) == {0, 1000}
    assert deliver_commands(starts, 1.0) == START_AS_ROOT, "the others are tried at once"


def failing_for_two() -> ServerStarts:
    """Servers fail for 1000 and 1001, and whether root's do is not known yet."""
    starts = ServerStarts(0)
    starts.note([FAILED, OTHER_FAILED] * 3, 0.0)
    for uid in (1000, 1001):
        assert deliver_commands(starts, 0.1) == [f"start_server -uid {uid}"]
        starts.note([OURS_FAILED._replace(uid=uid)], 0.1)
    assert starts.failure is None
    return starts


def test_two_users_whose_servers_fail_are_not_all_if_root_s_start() -> None:
    starts = failing_for_two()
    assert deliver_commands(starts, 0.1) == START_AS_ROOT
    starts.note([ROOT_STARTED], 0.2)
    assert starts.failure is None
    assert set(starts.failing_users) == {1000, 1001}


def test_two_users_failing_are_all_if_root_s_server_never_starts() -> None:
    starts = failing_for_two()
    assert deliver_commands(starts, 0.1) == START_AS_ROOT
    starts.commands(0.1 + ATTEMPT_S, is_idle=False)
    assert starts.failure == OURS_FAILED._replace(uid=1001)


def test_a_new_failure_for_a_user_is_doubted_for_all_again() -> None:
    starts = failing_for_one()
    deliver_commands(starts, 0.0)
    starts.note([ROOT_STARTED], 0.1)
    fail(starts, 1001, 1.0)
    assert deliver_commands(starts, 1.0) == START_AS_ROOT
    starts.note([ROOT_FAILED], 1.1)
    assert starts.failure == ROOT_FAILED


def test_servers_that_an_order_waits_for_are_asked_at_intervals() -> None:
    starts = failing_for_one()
    assert deliver_commands(starts, 0.0) == START_AS_ROOT
    assert starts.blocking_servers([4], 0.1) == (), "the ordered server itself"
    starts.note([ROOT_STARTED], 0.1)
    starts.surplus_asked()
    assert starts.blocking_servers([5], 4.9) == ()
    assert starts.blocking_servers([5], 5.0) == (5,)
    starts.blocking_servers_asked(5.0)
    assert starts.blocking_servers([5], 5.0 + ASK_S - 0.1) == ()
    assert starts.blocking_servers([5], 5.0 + ASK_S) == (5,)


def test_an_overdue_order_does_not_keep_idle_servers_for_good() -> None:
    """A job of another user may begin just before the order arrives, which then waits for its server."""
    starts = ordered_start()
    assert starts.commands(5.0 + ATTEMPT_S - 0.1, is_idle=False) == []
    assert starts.blocking_servers([4], 5.0 + ATTEMPT_S - 0.1) == ()
    assert starts.commands(5.0 + ATTEMPT_S, is_idle=False) == []
    assert starts.blocking_servers([4], 5.0 + ATTEMPT_S) == (4,)
    assert starts.commands(5.0 + ATTEMPT_S, is_idle=True) == START


def test_an_undelivered_order_does_not_keep_idle_servers_for_good() -> None:
    """A job of another user begins after the order was chosen, and before the control daemon has it."""
    starts = failing_starts()
    assert starts.commands(5.0, is_idle=True) == START
    assert starts.commands(6.0, is_idle=False) == []
    assert starts.blocking_servers([4], 6.0) == (4,)
    assert starts.commands(7.0, is_idle=True) == START


def test_failed_starts_are_quiet_only_for_users_who_are_tried() -> None:
    starts = failing_for_one()
    starts.note([OTHER_FAILED], 0.0)
    assert starts.tried_users == {0, 1000}
