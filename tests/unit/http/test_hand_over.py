"""The socket goes on: from one program to the next, and when its name was taken away."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future

import pytest
from yunion_mps.http.listener import Listener, listen_on
from yunion_mps.http.server import Server

from integration.daemon_host import eventually
from unit.http.conftest import Serve
from unit.http.server_host import PATIENCE_S, ServerHost, request
from unit.http.test_events_and_changes import WAIT, waiting, whats
from unit.http.test_turns import held_reads


def hand_over(host: ServerHost) -> Future[None]:
    """Begin to hand over, as the daemon's loop does."""

    async def work() -> None:
        host.events.close()
        await host.server.hand_over()

    return asyncio.run_coroutine_threadsafe(work(), host.loop)


def go_on(host: ServerHost) -> None:
    """Serve again on the same socket, as the next program does."""
    host.listener = Listener(host.paths, host.listener.socket.detach())
    host.server = Server(host.server.pool.application, host.server.pool.limits)
    host.call(host.server.open(host.listener.socket))


def test_a_client_that_connects_between_programs_is_answered_by_the_next(host: ServerHost) -> None:
    host.assert_serves()
    hand_over(host).result(PATIENCE_S)
    clients = [host.connect().send(request("/v1/gpus")) for _ in range(20)]
    assert host.listener.is_reachable
    assert len(host.server.pool.connections) == 0
    go_on(host)
    for client in clients:
        assert client.answer().status == 200


def test_a_server_whose_opening_is_cancelled_still_closes_its_socket(host: ServerHost) -> None:
    async def work() -> None:
        server, listener = Server(host.server.pool.application), listen_on("127.0.0.1:0")
        opening = asyncio.ensure_future(server.open(listener))
        await asyncio.sleep(0)  # it accepts clients now
        opening.cancel()
        await asyncio.wait([opening])
        await server.close()
        assert (opening.cancelled(), listener.fileno()) == (True, -1)

    host.call(work())


def test_requests_in_progress_are_answered_before_a_handover(host: ServerHost) -> None:
    host.reloader.gate.clear()
    client = host.connect().send(request("/v1/plan"))
    eventually(lambda: host.reloader.asked, "the question")
    handing = hand_over(host)
    host.reloader.gate.set()
    assert "changes" in client.answer().json()
    handing.result(PATIENCE_S)
    assert client.ended()


def test_a_request_that_was_sent_and_not_read_yet_is_answered_before(host: ServerHost) -> None:
    clients = [host.connect() for _ in range(20)]
    host.wait_connections(20)
    with held_reads(host):
        for client in clients:
            client.send(request("/v1/gpus"))
        handing = hand_over(host)
    for client in clients:
        assert client.answer().status == 200
    handing.result(PATIENCE_S)


def test_a_request_that_waits_for_events_does_not_delay_the_handover(serve: Serve) -> None:
    host = serve(hand_over_s=10 * PATIENCE_S)
    clients = waiting(host, 5)
    handing = hand_over(host)
    assert [whats(client.answer()) for client in clients] == [[]] * 5
    handing.result(PATIENCE_S)
    assert [client.ended() for client in clients] == [True] * 5


@pytest.mark.parametrize("sent", [b"", b"GET /v1/gpus HTTP/1.1\r\nHost"])
def test_a_client_that_stalls_does_not_delay_the_next_program(serve: Serve, sent: bytes) -> None:
    host = serve(hand_over_s=0.05)
    client = host.connect().send(sent)
    host.wait_connections(1)
    hand_over(host).result(PATIENCE_S)
    assert client.ended()


def test_a_slow_answer_does_not_delay_the_handover(serve: Serve) -> None:
    host = serve(hand_over_s=0.05)
    host.reloader.gate.clear()
    client = host.connect().send(request("/v1/plan"))
    eventually(lambda: host.reloader.asked, "the question")
    hand_over(host).result(PATIENCE_S)
    assert client.ended()


def test_a_removed_socket_is_recreated_without_dropping_connections(host: ServerHost) -> None:
    old = host.connect()
    old.ask("/v1/gpus")
    (client,) = waiting(host, target=WAIT)
    os.unlink(host.paths.socket)
    assert not host.listener.is_reachable
    host.call(host.server.reopen(host.listener))
    assert host.listener.is_reachable
    host.assert_serves()
    old.ask("/v1/gpus")
    assert len(host.server.pool.connections) >= 2
    client.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("reopens", [False, True])
def test_a_client_that_is_being_accepted_at_the_end_is_not_left_waiting(
    host: ServerHost, turns: int, reopens: bool
) -> None:
    """To accept takes asyncio some turns, and it forgets in silence whom it has not accepted by the end."""
    clients = []

    async def connect_and_end() -> None:
        clients.append(host.connect().send(request("/v1/gpus")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await (host.server.reopen(host.listener) if reopens else host.server.close())

    host.call(connect_and_end())
    answer = clients[0].answer_or_end()
    assert answer is None or answer.status == 200
