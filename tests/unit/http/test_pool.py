"""Connections are few: what each user may have of them, and whose is ended for another."""

from __future__ import annotations

import os

import pytest

from integration.daemon_host import eventually
from unit.http import snapshots
from unit.http.conftest import Serve
from unit.http.server_host import NOBODY, RawClient, ServerHost, request

TOO_MANY = (503, "too many connections are open", "close some, or try again in a moment")
WAIT = request("/v1/events?after=0&wait_s=60")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def crowded_server(serve: Serve) -> Serve:
    """Make a server that ends no connection for being slow."""
    return lambda snapshot=None, **limits: serve(
        snapshot,
        **{"first_request_timeout_s": 600, "reserved_for_root": 0, "reserved_for_new_clients": 0, **limits},
    )


def admitted_connections(host: ServerHost, count: int, uid: int = 0, *, send: bytes = b"") -> list[RawClient]:
    """Open connections that are all admitted, and send this on each."""
    before = len(host.server.pool.connections)
    clients = [host.connect(uid).send(send) for _ in range(count)]
    host.wait_connections(before + count)
    return clients


def connections_with_leases(host: ServerHost, count: int, uid: int = 0) -> list[RawClient]:
    """Open connections on each of which a lease hangs."""
    clients = admitted_connections(host, count, uid)
    host.keep_connections()
    return clients


def assert_turned_away(host: ServerHost, uid: int = 0) -> None:
    with host.connect(uid) as client:
        assert_ended(client)


def assert_ended(client: RawClient) -> None:
    """It was told that there are too many, and ended."""
    answer = client.answer()
    assert answer.problem == TOO_MANY
    assert answer.headers["connection"] == "close"
    assert client.ended()


def assert_served(client: RawClient) -> None:
    assert client.ask("/v1/status").status == 200


def test_there_is_a_cap_on_connections_and_room_again_when_one_ends(crowded_server: Serve) -> None:
    host = crowded_server(connections=10)
    clients = connections_with_leases(host, 10)
    assert_turned_away(host)
    clients.pop().close()
    host.wait_connections(9)
    host.assert_serves()


def test_one_user_cannot_take_the_connections_of_another(crowded_server: Serve) -> None:
    host = crowded_server(connections=20, reserved_for_root=2, per_user=5)
    clients = connections_with_leases(host, 5, NOBODY)
    assert_turned_away(host, NOBODY)
    clients += connections_with_leases(host, 5, NOBODY - 1)
    assert_turned_away(host, NOBODY - 1)
    host.assert_serves()
    eventually(lambda: host.server.pool.by_client == {NOBODY: 5, NOBODY - 1: 5}, "five connections each")
    clients.pop(0).close()
    eventually(lambda: host.server.pool.by_client[NOBODY] == 4, "room for the first user")
    clients += admitted_connections(host, 1, NOBODY)


def test_all_other_users_together_leave_room_for_root(crowded_server: Serve) -> None:
    host = crowded_server(connections=10, reserved_for_root=3, per_user=4)
    connections_with_leases(host, 4, 1000)
    connections_with_leases(host, 3, 1001)
    assert_turned_away(host, 1002)
    host.assert_serves()
    host.wait_connections(7)
    connections_with_leases(host, 3)
    assert_turned_away(host)


def test_a_new_user_gets_a_connection_though_root_has_all_others(crowded_server: Serve) -> None:
    host = crowded_server(connections=10, reserved_for_root=2, reserved_for_new_clients=3)
    connections_with_leases(host, 7)
    assert_turned_away(host)
    connections_with_leases(host, 1, NOBODY)
    assert_turned_away(host, NOBODY)
    for uid in (NOBODY - 1, NOBODY - 2):
        connections_with_leases(host, 1, uid)


def test_a_new_user_gets_a_connection_though_others_have_theirs(crowded_server: Serve) -> None:
    host = crowded_server(connections=10, reserved_for_root=2, reserved_for_new_clients=3)
    connections_with_leases(host, 5, 1000)
    assert_turned_away(host, 1000)
    connections_with_leases(host, 1, 1001)
    assert_turned_away(host, 1001)
    connections_with_leases(host, 1)


@pytest.mark.parametrize("uid", [0, NOBODY])
@pytest.mark.parametrize("part", [b"", b"GET /v1/gp"], ids=["silent", "half a request"])
def test_a_user_whose_connections_are_all_half_open_gets_in(
    crowded_server: Serve, uid: int, part: bytes
) -> None:
    host = crowded_server(connections=20, per_user=20)
    clients = admitted_connections(host, 20, uid, send=part)
    for client in clients[:10]:
        with host.connect(uid) as another:
            assert_served(another)
            assert_ended(client)
            host.wait_connections(20)
        host.wait_connections(19)
        clients += admitted_connections(host, 1, uid, send=part)


def test_the_connection_that_was_idle_longest_is_ended_for_another(crowded_server: Serve) -> None:
    host = crowded_server(connections=3)
    clients = admitted_connections(host, 3)
    for client in (clients[1], clients[2], clients[0]):
        assert_served(client)
    assert_served(host.connect())
    assert clients[1].ended()
    for client in (clients[0], clients[2]):
        assert_served(client)


def test_a_waiting_event_request_is_closed_to_make_room(crowded_server: Serve) -> None:
    host = crowded_server(connections=2)
    clients = admitted_connections(host, 2, send=WAIT)
    eventually(lambda: len(host.events.waiting) == 2, "two that wait")
    host.assert_serves()
    assert_ended(clients[0])
    eventually(lambda: len(host.events.waiting) == 1, "one that waits")


@pytest.mark.parametrize(
    ("asked", "status"),
    [(request("/v1/plan"), 200), (request("/v1/leases", "POST", "Content-Length: 0"), 201)],
    ids=["a plan", "a lease"],
)
def test_a_request_that_is_being_answered_is_not_ended_for_another(
    crowded_server: Serve, asked: bytes, status: int
) -> None:
    host = crowded_server(connections=2)
    service = host.reloader if status == 200 else host.leases
    service.gate.clear()
    clients = admitted_connections(host, 2, send=asked)
    eventually(lambda: len(service.asked) == 2, "two that are being answered")
    assert_turned_away(host)
    service.gate.set()
    assert [client.answer().status for client in clients] == [status, status]


def test_connections_wait_for_those_that_are_busy_and_had_an_answer(crowded_server: Serve) -> None:
    host = crowded_server(connections=2, waiting=2)
    host.reloader.gate.clear()
    busy = admitted_connections(host, 2, send=request("/v1/plan") * 3)
    eventually(lambda: len(host.reloader.asked) == 2, "two that are being answered")
    waiting = []
    for number in (1, 2):
        waiting.append(host.connect().send(request("/v1/status")))
        eventually(lambda number=number: len(host.server.pool.waiting) == number, "one more that waits")  # type: ignore[misc]
    assert_turned_away(host)
    host.reloader.gate.set()
    assert [client.answer().status for client in busy] == [200, 200]
    assert [client.answer().status for client in waiting] == [200, 200]


def test_a_connection_that_waits_too_long_gets_an_error(crowded_server: Serve) -> None:
    host = crowded_server(connections=1, waiting=1, answer_timeout_s=0.2)
    host.reloader.gate.clear()
    admitted_connections(host, 1, send=request("/v1/plan"))
    eventually(lambda: len(host.reloader.asked) == 1, "one that is being answered")
    assert_turned_away(host)


def test_a_client_that_does_not_read_its_answer_makes_room(crowded_server: Serve) -> None:
    host = crowded_server(snapshots.large(2400), connections=1, answer_timeout_s=600)
    admitted_connections(host, 1, send=request("/v1/devices?limit=0"))
    eventually(lambda: host.server.pool.unread_bytes(0), "an answer that is not taken")
    host.assert_serves()


@pytest.mark.parametrize("part", [b"", b"G", request("/v1/gpus", "GET", "Content-Length: 9") + b"half"])
def test_the_first_request_has_a_deadline_of_its_own(serve: Serve, part: bytes) -> None:
    host = serve(first_request_timeout_s=2, request_timeout_s=600, idle_timeout_s=600)
    with host.connect() as client:
        answer = client.send(part).answer_or_end()
        assert (answer and answer.status) == (408 if part else None)


def test_a_user_has_only_so_many_requests_that_wait_for_events(crowded_server: Serve) -> None:
    host = crowded_server(awaiting_events=2)
    first, *others = admitted_connections(host, 2, NOBODY, send=WAIT)
    eventually(lambda: len(host.server.pool.awaiting.get(NOBODY, ())) == 2, "both waits")
    third = host.connect(NOBODY).send(WAIT)
    assert_ended(first)
    with host.connect(NOBODY) as client:
        assert_served(client)
    eventually(lambda: len(host.server.pool.awaiting.get(NOBODY, ())) == 2, "the others wait on")
    for client in (*others, third):
        client.close()
    eventually(lambda: NOBODY not in host.server.pool.awaiting, "nothing is kept")


def test_root_may_wait_for_events_on_all_of_its_connections(crowded_server: Serve) -> None:
    host = crowded_server(awaiting_events=2)
    admitted_connections(host, 5, send=WAIT)
    eventually(lambda: len(host.server.pool.awaiting.get(0, ())) == 5, "all wait")
