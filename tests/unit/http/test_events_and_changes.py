"""What is answered later: events that are waited for, changes, clients."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import Any

import pytest
from yunion_mps.core.errors import (
    ConfigError,
    HostError,
    NotAllowedError,
    NotFoundError,
    Problem,
    YunionError,
)
from yunion_mps.core.models import Event
from yunion_mps.core.reasons import SHORTAGE, hint_of
from yunion_mps.core.units import rfc3339
from yunion_mps.supervisor.event_log import MAX_REPEATS

from integration.daemon_host import eventually
from unit.http import fake_services
from unit.http.conftest import Serve
from unit.http.fake_services import FakeClients, FakeReloader
from unit.http.server_host import NOBODY, Answer, RawClient, ServerHost, request

LOST = Event("error", "gpu", "00:06.0", "lost", "GPU_IS_LOST", "its 4 devices are unavailable")
BACK = Event("info", "gpu", "00:06.0", "back")
READY = Event("info", "domain", "host", "applying -> ready")
WAIT = "/v1/events?after=0&wait_s=60"
BAD = ConfigError([Problem("a.conf", 3, "x is 0", "write 1"), Problem("b.yml", None, "y", "z")])
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


def whats(answer: Answer) -> list[str]:
    """What happened, by an answer's events."""
    assert answer.status == 200
    return [event["what"] for event in answer.json()["events"]]


def waiting(host: ServerHost, count: int = 1, target: str = WAIT) -> list[RawClient]:
    clients = [host.connect().send(request(target)) for _ in range(count)]
    eventually(lambda: len(host.events.waiting) == count, f"{count} that wait")
    return clients


def test_events_are_asked_for_by_time_kind_and_number(host: ServerHost) -> None:
    assert host.ask("GET", "/v1/events").json() == {"events": [], "last": 0, "omitted": 0}
    now_s = int(time.time())
    for before_s, event in ((300.5, LOST), (200, READY), (100, BACK)):
        host.record(event, now_s - before_s)
    times = {"time": rfc3339(now_s - 100), "last_time": rfc3339(now_s - 100)}
    assert host.ask("GET", "/v1/events?limit=1").json() == {
        "events": [{"id": 3, **times, **BACK.stored(), "count": 1, "rank": 4}],
        "last": 3,
        "omitted": 0,
    }
    for query, expected in {
        "": [LOST.what, READY.what, BACK.what],
        "?limit=2": [READY.what, BACK.what],
        f"?since={rfc3339(now_s - 300)}": [READY.what, BACK.what],
        f"?since={rfc3339(now_s - 99)}": [],
        f"?since={rfc3339(now_s - 200.5)}": [READY.what, BACK.what],
        f"?since={rfc3339(now_s - 200)}": [READY.what, BACK.what],
        f"?since={rfc3339(now_s - 199.999)}": [BACK.what],
        f"?since={rfc3339(now_s - 199)[:-1]}%2B00:00": [BACK.what],
        "?kind=gpu": [LOST.what, BACK.what],
        "?kind=gpu&limit=1": [BACK.what],
        "?kind=lease": [],
        "?after=1": [READY.what, BACK.what],
        "?after=0&limit=1": [LOST.what],
        "?after=3&wait_s=0": [],
        "?before=3": [LOST.what, READY.what],
        "?before=3&limit=1": [READY.what],
        "?before=3&kind=gpu": [LOST.what],
        "?before=1": [],
    }.items():
        assert whats(host.ask("GET", "/v1/events" + query)) == expected, query
    assert host.ask("GET", "/v1/events?after=3").json()["last"] == 3
    assert host.ask("GET", "/v1/events?after=1&kind=lease").json()["last"] == 3


def test_warnings_come_first_if_asked_and_following_loses_nothing(host: ServerHost) -> None:
    for event in (LOST, READY, BACK):
        host.record(event)
    answer = host.ask("GET", "/v1/events?severe_first=true&limit=1")
    assert whats(answer) == [LOST.what]
    assert (answer.json()["last"], answer.json()["omitted"]) == (3, 2)
    host.record(READY)
    assert whats(host.ask("GET", "/v1/events?after=3")) == [READY.what]
    answer = host.ask("GET", "/v1/events?severe_first=true&limit=2&before=4")
    assert whats(answer) == [LOST.what, BACK.what]
    assert answer.json()["omitted"] == 1
    answer = host.ask("GET", "/v1/events?severe_first=true")
    assert (len(whats(answer)), answer.json()["omitted"]) == (4, 0)
    answer = host.ask("GET", "/v1/events?severe_first=true&after=1&limit=1")
    assert (whats(answer), answer.json()["last"]) == ([READY.what], 2)


def test_a_request_that_waits_for_one_kind_gets_no_other(host: ServerHost) -> None:
    (client,) = waiting(host, target=WAIT + "&kind=gpu")
    host.record(READY)
    eventually(lambda: len(host.events.waiting) == 1, "that it waits on")
    host.record(BACK)
    assert whats(client.answer()) == [BACK.what]


def test_a_request_that_waits_is_answered_if_an_error_happens_again(host: ServerHost) -> None:
    for _ in range(MAX_REPEATS):
        host.record(LOST)
    (client,) = waiting(host, target=f"/v1/events?after={MAX_REPEATS}&wait_s=60")
    host.record(LOST)
    answer = client.answer().json()
    (again,) = answer["events"]
    assert (again["id"], again["count"], answer["last"]) == (MAX_REPEATS, 2, MAX_REPEATS + 1)
    (client,) = waiting(host, target=f"/v1/events?after={MAX_REPEATS + 1}&wait_s=60")
    host.record(READY)
    answer = client.answer().json()
    (new,) = answer["events"]
    assert (new["id"], new["count"], answer["last"]) == (MAX_REPEATS + 2, 1, MAX_REPEATS + 2)


def test_the_time_to_wait_ends(host: ServerHost) -> None:
    assert whats(host.ask("GET", "/v1/events?after=0&wait_s=1")) == []


def test_a_request_beyond_the_last_event_does_not_wait(host: ServerHost) -> None:
    host.record(LOST)
    assert host.ask("GET", "/v1/events?after=2&wait_s=60").json() == {"events": [], "last": 1, "omitted": 0}


def test_many_that_wait_cost_others_nothing(serve: Serve) -> None:
    """They have no deadline of ours, and others are served while they wait."""
    host = serve(request_timeout_s=1.0, idle_timeout_s=1.0)
    clients = waiting(host, 200)
    with host.connect() as idle:
        idle.ask("/v1/gpus")
        assert idle.ended()
    for path in ("/v1/status", "/v1/plan", "/v1/events"):
        assert host.ask("GET", path).status == 200
    assert len(host.events.waiting) == 200
    host.record(LOST)
    assert [whats(client.answer()) for client in clients] == [[LOST.what]] * 200


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (0, 3), (3, 0)])
def test_a_client_that_disconnects_while_it_waits_leaves_nothing_behind(
    host: ServerHost, before: int, behind: int
) -> None:
    others = request("/v1/gpus")
    clients = [host.connect().send(others * before + request(WAIT) + others * behind) for _ in range(20)]
    eventually(lambda: len(host.events.waiting) == 20, "20 that wait")
    for client in clients:
        client.close()
    host.wait_connections(0)
    eventually(lambda: not host.events.waiting, "that no request waits")
    host.assert_serves()


def test_a_client_that_has_shut_its_sending_side_gets_its_event(host: ServerHost) -> None:
    (client,) = waiting(host)
    client.socket.shutdown(socket.SHUT_WR)
    host.assert_serves()
    host.record(LOST)
    assert whats(client.answer()) == [LOST.what]
    assert client.ended()


def test_requests_behind_one_that_waits_are_answered_in_their_order(host: ServerHost) -> None:
    host.reloader.gate.clear()
    with host.connect() as client:
        client.send(b"".join(map(request, ("/v1/gpus", "/v1/plan", "/v1/status", "/v1/plan", "/v1/events"))))
        assert "gpus" in client.answer().json()
        eventually(lambda: host.reloader.asked == ["plan"], "the first question for the plan")
        client.send(request("/v1/clients"))
        host.assert_serves()
        host.reloader.gate.set()
        for field in ("changes", "host_id", "changes", "events", "servers"):
            assert field in client.answer().json()


def test_data_sent_during_a_wait_is_bounded(host: ServerHost) -> None:
    (client,) = waiting(host)
    client.socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.socket.send(b"x" * 65536)
    connections: Any = host.server.pool.connections
    (connection,) = connections
    assert connection.unhandled_bytes <= 48 << 10
    host.assert_serves()
    host.record(LOST)
    client.socket.setblocking(True)
    assert whats(client.answer()) == [LOST.what]
    assert client.answer().status in (400, 431)


def test_a_stopping_server_ends_all_waits(host: ServerHost) -> None:
    clients = waiting(host, 2)
    host.stop()
    assert [client.ended() for client in clients] == [True, True]


def post(host: ServerHost, target: str, uid: int = 0, words: str = "") -> Answer:
    with host.connect(uid) as client:
        return client.post(target, words)


@AS_ROOT
@pytest.mark.parametrize("target", ["/v1/reload", "/v1/reload?x=1", "/v1/reexec"])
def test_another_user_may_not_change_the_daemon(host: ServerHost, target: str) -> None:
    os.chmod(host.paths.socket, 0o666)
    assert post(host, target, NOBODY).problem == (
        403,
        "only root may reload or re-execute the daemon",
        "retry as root",
    )
    assert host.reloader.asked == []


@AS_ROOT
def test_another_user_may_read_all_there_is(host: ServerHost) -> None:
    os.chmod(host.paths.socket, 0o666)
    with host.connect(NOBODY) as client:
        for path in ("/v1/plan", "/v1/clients", "/v1/events"):
            assert client.ask(path).status == 200


@AS_ROOT
def test_the_user_that_terminates_a_client_is_passed_on(host: ServerHost) -> None:
    os.chmod(host.paths.socket, 0o666)
    assert post(host, "/v1/clients/4260/terminate", NOBODY).json()["ended"]
    assert post(host, "/v1/clients/4260/terminate", words="signals=kill").status == 200
    assert host.clients.done == [f"terminate 4260 for {NOBODY}", "terminate 4260 for 0 force"]


@pytest.mark.parametrize("pid", ["0", "1", "4194304", "9999999999"])
def test_terminating_a_pid_without_client_is_not_found(host: ServerHost, pid: str) -> None:
    assert post(host, f"/v1/clients/{pid}/terminate").problem == (
        404,
        f"PID {pid} is not an MPS client",
        "list the clients: yunion-mps who --clients",
    )


@pytest.mark.parametrize(
    ("error", "status", "what"),
    [
        (NotAllowedError("what", "hint"), 403, "what"),
        (NotFoundError("what", "hint"), 404, "what"),
        (HostError("what", "hint"), 409, "what"),
        (BAD, 422, "a.conf:3: x is 0: write 1\nb.yml: y: z"),
    ],
)
def test_a_refusal_has_its_status_and_words(
    host: ServerHost, error: YunionError, status: int, what: str
) -> None:
    host.reloader.error = error
    assert post(host, "/v1/reload").problem == (status, what, error.hint)
    assert host.ask("GET", "/v1/plan").problem == (status, what, error.hint)


def test_an_internal_error_is_a_500_and_logged(host: ServerHost, caplog: pytest.LogCaptureFixture) -> None:
    host.reloader.error = RuntimeError("our own")
    assert post(host, "/v1/reload").problem[:2] == (500, "internal error in the daemon")
    assert "the answer to POST /v1/reload failed" in caplog.text
    assert "RuntimeError: our own" in caplog.text
    host.assert_serves()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_shortage_while_an_answer_is_made_is_a_503(
    host: ServerHost, error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a module that only this answer needs cannot be read."""
    host.reloader.error = error
    what = f"the request cannot be answered: {why}"
    assert post(host, "/v1/reload").problem == (503, what, hint_of(SHORTAGE))
    assert "Traceback" not in caplog.text
    host.assert_serves()


@pytest.mark.parametrize("error", [None, HostError("too late: the caller is gone")])
@pytest.mark.parametrize("target", ["/v1/reload", "/v1/clients/4260/terminate"])
def test_a_change_is_finished_even_if_its_client_disconnects(
    host: ServerHost, target: str, error: YunionError | None
) -> None:
    changing: FakeReloader | FakeClients = host.reloader if target == "/v1/reload" else host.clients
    changing.gate.clear()
    changing.error = error
    client = host.connect().send(request(target, "POST"))
    eventually(lambda: changing.asked, "the request")
    client.close()
    host.wait_connections(0)
    assert changing.finished == []
    changing.gate.set()
    eventually(lambda: changing.finished == changing.asked, "its end")
    assert changing.done == ([] if error else changing.asked)


def test_the_plan_is_computed_for_each_request(host: ServerHost) -> None:
    assert host.ask("GET", "/v1/plan").json() == fake_services.NO_CHANGES
    host.reloader.planned = fake_services.PLANNED
    assert host.ask("GET", "/v1/plan").json() == fake_services.PLANNED
    assert host.ask("HEAD", "/v1/plan").status == 200
    assert host.reloader.done == ["plan"] * 3
