"""What became of servers, as the order of lines in their control daemon's log shows it."""

from __future__ import annotations

import pytest
from yunion_mps.mps.log_lines import parse_lines
from yunion_mps.mps.server_history import Outcome, ServerHistory

BEGIN = "Starting control daemon using socket /tmp/p/control"
EXCEPTION = "Server encountered a fatal exception. Shutting down"


def waits_line(uid: int = 1000) -> str:
    return f"NEW CLIENT 5 from user {uid}: Server is not ready, push client to pending list"


def begins_line(pid: int = 7, uid: int = 1000) -> str:
    return f"Starting new server {pid} for user {uid}"


def ready_line(pid: int = 7) -> str:
    return f"NEW SERVER {pid}: Ready"


def ends_line(status: int = 0, pid: int = 7) -> str:
    return f"Server {pid} exited with status {status}"


def served_line(uid: int = 1000) -> str:
    return f"NEW CLIENT 6 from user {uid}: Server already exists"


def log_of(*messages: str) -> bytes:
    return "".join(f"[2026-11-20 12:40:49.964 Control 1] {text}\n" for text in messages).encode()


def outcomes(*messages: str) -> list[Outcome]:
    return ServerHistory().follow(parse_lines(log_of(*messages)))


def kinds(*messages: str) -> list[str]:
    return [outcome.kind for outcome in outcomes(*messages)]


JOB = (waits_line(), begins_line(), ready_line())


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (JOB, ["started"]),
        ((*JOB, ends_line()), ["started", "crashed"]),
        ((*JOB, ends_line(1)), ["started", "crashed"]),
        ((*JOB, "Cmd:shutdown_server 7", ends_line()), ["started", "ended"]),
        ((*JOB, "Cmd:shutdown_server 8", ends_line()), ["started", "crashed"]),
        ((*JOB, "Cmd:shutdown_server 7", ends_line(1)), ["started", "crashed"]),
        ((*JOB, "quit command issued with timeout of 10", ends_line()), ["started", "ended"]),
        ((*JOB, "Try shutting down server 7, backoff is disabled", ends_line()), ["started", "ended"]),
        ((*JOB, "Force shutting down server 7", ends_line()), ["started", "ended"]),
        ((*JOB, waits_line(0), ends_line()), ["started", "ended"]),
        ((*JOB, waits_line(1000), ends_line()), ["started", "crashed"]),
        ((*JOB, "Cmd:start_server -uid 0", ends_line()), ["started", "ended"]),
        ((waits_line(), begins_line(), ends_line(1)), ["not started"]),
        ((waits_line(), begins_line(), ends_line(0)), ["not started"]),
        ((waits_line(), begins_line(), EXCEPTION, ends_line(1)), ["not started"]),
        ((waits_line(), begins_line(), waits_line(0), ends_line(0)), ["ended"]),
        (
            (waits_line(), begins_line(), ends_line(1), begins_line(8), ready_line(8)),
            ["not started", "started"],
        ),
        ((*JOB, EXCEPTION, ends_line(1)), ["started", "faulted"]),
        (
            ("Cmd:start_server -uid 1000", begins_line(), ready_line(), EXCEPTION, ends_line(1)),
            ["started", "not started"],
        ),
        (("Cmd:start_server -uid 1000", begins_line(), ready_line(), served_line()), ["started", "served"]),
        ((*JOB, served_line()), ["started"]),
        ((*JOB, BEGIN, ends_line()), ["started", "crashed"]),
    ],
)
def test_what_became_of_a_server(messages: tuple[str, ...], expected: list[str]) -> None:
    assert kinds(*messages) == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((ends_line(),), ["crashed"]),
        ((ends_line(1),), ["crashed"]),
        ((waits_line(0), ends_line()), ["ended"]),
        (("Cmd:shutdown_server 7", ends_line()), ["ended"]),
        (("Cmd:shutdown_server 7", ends_line(), ends_line(0, 8)), ["ended", "crashed"]),
        ((EXCEPTION, ends_line(1)), ["faulted"]),
        ((ready_line(), ends_line()), ["started", "crashed"]),
    ],
)
def test_a_server_whose_begin_the_log_has_lost_had_started(
    messages: tuple[str, ...], expected: list[str]
) -> None:
    assert kinds(*messages) == expected


def test_a_server_has_a_client_if_one_waited_for_it_or_connected() -> None:
    (job,) = outcomes(*JOB)
    assert (job.has_client, job.is_ordered, job.uid) == (True, False, 1000)
    (ordered,) = outcomes("Cmd:start_server -uid 1000", begins_line(), ready_line())
    assert (ordered.has_client, ordered.is_ordered) == (False, True)
    (joined,) = outcomes("Cmd:start_server -uid 1000", begins_line(), waits_line(), ready_line())
    assert (joined.has_client, joined.is_ordered) == (True, True)


def test_clients_that_were_refused_are_none_of_an_ordered_servers() -> None:
    *_, last = outcomes(
        waits_line(), begins_line(), ends_line(1), "Cmd:start_server -uid 1000", begins_line(8), ready_line(8)
    )
    assert (last.kind, last.has_client, last.is_ordered) == ("started", False, True)


def test_an_order_for_a_server_that_exists_is_not_the_next_ones() -> None:
    *_, last = outcomes(
        *JOB, "Cmd:start_server -uid 1000", ends_line(), waits_line(), begins_line(8), ready_line(8)
    )
    assert (last.has_client, last.is_ordered) == (True, False)


def test_lines_may_come_in_parts() -> None:
    history = ServerHistory()
    lines = list(parse_lines(log_of(waits_line(), begins_line(), EXCEPTION, ends_line(1))))
    found = [outcome.kind for line in lines for outcome in history.follow([line])]
    assert found == ["not started"]


def test_a_failed_start_has_its_status_and_both_times() -> None:
    text = b"[2026-11-20 12:40:49.9 Control 7] Starting new server 7 for user 0\n"
    text += b"[2026-11-20 12:40:51.1 Control 1] Server 7 exited with status 3\n"
    (outcome,) = ServerHistory().follow(parse_lines(text))
    assert (outcome.status, outcome.begin_time, outcome.time) == (
        3,
        "2026-11-20 12:40:49",
        "2026-11-20 12:40:51",
    )


@pytest.mark.parametrize(
    ("messages", "uid"),
    [
        (JOB, None),
        ((*JOB, waits_line()), None),
        ((*JOB, waits_line(1001)), 1001),
        ((*JOB, waits_line(1001), waits_line(1002)), 1001),
        ((*JOB, waits_line(1001), ends_line(), begins_line(8, 1001), ready_line(8)), None),
    ],
)
def test_a_server_is_displaced_by_the_first_other_user_who_waits(
    messages: tuple[str, ...], uid: int | None
) -> None:
    history = ServerHistory()
    history.follow(parse_lines(log_of(*messages)))
    assert history.displaced_by(7) == uid
    assert history.displaced_by(8) is None
