"""Requests sent all at once are answered one a turn: a client that sends many delays no other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from yunion_mps.http.pool import BUFFER_BYTES

from integration.daemon_host import eventually
from unit.http import snapshots
from unit.http.conftest import Serve
from unit.http.server_host import PATIENCE_S, ServerHost, request
from waiting import readable

COUNT = 300
#: Each is worked out separately; without a body, so that no answer waits to be read.
QUESTIONS = b"".join(request(f"/v1/devices?limit=1&offset={n}", "HEAD") for n in range(COUNT))


@contextlib.contextmanager
def held_reads(host: ServerHost) -> Iterator[None]:
    """Let the server read nothing meanwhile, so that it then finds all at once."""
    gate = threading.Event()
    host.loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
    try:
        yield
    finally:
        gate.set()


class Taker(threading.Thread):
    """Takes answers as they come, and counts them, to the end of the connection."""

    def __init__(self, connection: socket.socket, other: socket.socket | None = None) -> None:
        super().__init__()
        self.count = 0
        #: How many it had taken when there was something to read on the other connection.
        self.before: int | None = None
        self._connection, self._other = connection, other
        self.start()

    def run(self) -> None:
        left = b""
        with contextlib.suppress(OSError):
            while data := self._connection.recv(1024):
                *whole, left = (left + data).split(b"\r\n\r\n")
                self.count += sum(head.startswith(b"HTTP/1.1 200 ") for head in whole)
                if self._other and self.before is None and readable(self._other, 0):
                    self.before = self.count


def test_a_client_with_many_requests_at_once_leaves_others_their_turn(serve: Serve) -> None:
    host = serve(snapshots.large(480))
    with host.connect() as greedy, host.connect() as other:
        host.wait_connections(2)
        taker = Taker(greedy.socket, other.socket)
        with held_reads(host):
            greedy.send(QUESTIONS)
            greedy.socket.shutdown(socket.SHUT_WR)
            other.send(request("/v1/status"))
        taker.join(PATIENCE_S)
        assert other.answer().status == 200
        assert taker.count == COUNT
        assert taker.before is not None
        assert taker.before < COUNT / 4


@pytest.mark.parametrize("end", ["client", "server"])
def test_an_end_between_two_turns_leaves_nothing_behind(serve: Serve, end: str) -> None:
    host = serve(snapshots.large(480))
    clients = [host.connect() for _ in range(5)]
    host.wait_connections(5)
    with held_reads(host):
        for client in clients:
            client.send(QUESTIONS)
    for client in clients:
        client.answer("HEAD")
        if end == "client":
            client.close()
    if end == "server":
        host.stop()
    host.wait_connections(0)


def test_a_body_in_very_many_pieces_is_read_past_within_several_turns(serve: Serve) -> None:
    host = serve()
    with host.connect() as client:
        client.send(request("/v1/gpus", "GET", "Transfer-Encoding: chunked"))
        client.send(b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n" + request("/v1/status"))
        for _ in range(2):
            assert client.answer().status == 200


def test_the_requests_of_a_client_that_waits_for_its_turn_are_not_too_late(serve: Serve) -> None:
    """However long that takes: its deadline is for what it has to do itself."""
    host = serve(snapshots.large(480), request_timeout_s=0, idle_timeout_s=0, answer_timeout_s=PATIENCE_S)
    with held_reads(host):
        clients = [host.connect().send(QUESTIONS[: len(QUESTIONS) // 2]) for _ in range(2)]
    for taker in [Taker(client.socket) for client in clients]:
        taker.join(PATIENCE_S)
        assert taker.count >= COUNT // 2 - 1


def test_unread_data_of_many_connections_is_bounded_even_for_root(serve: Serve) -> None:
    """Of requests and answers together, whatever the size of the answers."""
    host = serve(snapshots.large(2400), answer_timeout_s=PATIENCE_S)
    targets = ("/v1/devices?limit=0", "/v1/devices?limit=100", "/v1/devices")
    size = len(host.ask("GET", targets[0]).body)
    clients = [host.connect() for _ in range(60)]
    for number, client in enumerate(clients):
        client.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.socket.send(request(targets[number % 3]) * 3000)
    connections: Any = host.server.pool.connections
    eventually(
        lambda: all(one.unread_bytes > BUFFER_BYTES for one in list(connections)), "no answers being taken"
    )
    for connection in connections:
        assert connection.unhandled_bytes < 64 << 10
        assert connection.unread_bytes < size + (32 << 10)
    assert host.server.pool.unread_bytes(0) < (16 << 20) + size + 60 * (96 << 10)
