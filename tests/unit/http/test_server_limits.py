"""A broken, slow, huge or hostile client costs the others nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable

import pytest
from yunion_mps.http.messages import Request, Response

from integration.daemon_host import eventually
from unit.http import snapshots
from unit.http.conftest import Serve
from unit.http.server_host import Answer, ServerHost, request

LESS = "send only the members that the operation defines"
LARGE = "/v1/devices?limit=0"
GARBAGE = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "binary": bytes(range(256)) * 4,
    "no version": b"GET /v1/status\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /v1/status HTTP/1.1\r\n\r\n",
    "two lengths": request("/v1/status", "GET", "Content-Length: 1", "Content-Length: 2"),
    "negative length": request("/v1/status", "GET", "Content-Length: -1"),
    "length and chunks": request("/v1/status", "GET", "Content-Length: 3", "Transfer-Encoding: gzip"),
    "another coding": request("/v1/status", "GET", "Transfer-Encoding: gzip"),
    "a header without colon": request("/v1/status", "GET", "nonsense"),
    "a space before the colon": request("/v1/status", "GET", "Name : value"),
    "a bare line": b"\r\nhello\r\n\r\n",
}


def refused(host: ServerHost, data: bytes) -> Answer:
    """What is answered last; the connection ends after that."""
    with host.connect() as client:
        with contextlib.suppress(BrokenPipeError):
            client.send(data)
        answer = client.answer()
        while "connection" not in answer.headers:
            answer = client.answer()
        assert answer.headers["connection"] == "close"
        assert client.ended()
        return answer


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_answered_with_400_and_the_connection_ended(host: ServerHost, data: bytes) -> None:
    answer = refused(host, data)
    assert answer.status == (501 if "gzip" in str(data) else 400)
    assert re.fullmatch(r"the request is not valid HTTP: [\w ,'-]+", answer.problem[1])
    host.assert_serves()


@pytest.mark.parametrize(
    "data",
    [request("/" + "x" * 20_000), request("/", "GET", *["A: b"] * 5000), b"x" * 99_999],
    ids=["target", "headers", "no end"],
)
def test_a_huge_head_is_answered_with_431(host: ServerHost, data: bytes) -> None:
    assert refused(host, data).problem == (
        431,
        "the request's header is larger than 16384 bytes",
        "send fewer or shorter headers",
    )
    host.assert_serves()


@pytest.mark.parametrize("head", ["Content-Length: 1000000000", "Transfer-Encoding: chunked"])
def test_a_huge_body_is_answered_with_413_before_it_has_come(host: ServerHost, head: str) -> None:
    chunk = b"x" * 1000
    piece = chunk if "Length" in head else b"3e8\r\n" + chunk + b"\r\n"
    data = request("/v1/status", "GET", head) + piece * 66
    assert refused(host, data).problem == (413, "the body is larger than 16384 bytes", LESS)
    host.assert_serves()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("/v1/gpus", "HEAD", "Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (request("/v1/gpus", "HEAD", "Content-Length: 99999") + bytes(99_999), 413),
        (request("/v1/gpus", "HEAD", "Content-Length: 10") + b"12345", 408),
        (request("/v1/gpus", "HEAD", *["A: b"] * 5000), 431),
    ],
    ids=["broken body", "huge body", "half a body", "huge head"],
)
def test_a_broken_head_request_is_answered_without_a_body(serve: Serve, data: bytes, status: int) -> None:
    host = serve(first_request_timeout_s=2)
    with host.connect() as client:
        with contextlib.suppress(BrokenPipeError):
            client.send(data)
        answer = client.answer("HEAD")
        assert answer
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert client.ended()
    host.assert_serves()


def test_garbage_after_a_head_request_is_answered_with_a_body(host: ServerHost) -> None:
    with host.connect() as client:
        client.send(request("/v1/gpus", "HEAD") + b"nonsense\r\n\r\n")
        head, garbage = client.answer("HEAD"), client.answer()
        assert head
        assert garbage
        assert (head.status, garbage.problem[0]) == (200, 400)
        assert client.ended()


def test_a_fault_of_ours_is_an_answer_and_no_connection_that_hangs(
    host: ServerHost, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty:
        async def _fail(self) -> Response:
            raise KeyError("unheard of")

        def handle(self, _: Request) -> Awaitable[Response]:
            return self._fail()

    host.server.pool.application, router = Faulty(), host.server.pool.application
    try:
        answer = host.ask("GET", "/v1/status")
    finally:
        host.server.pool.application = router
    assert answer.problem == (500, "internal error", "see the service's log: journalctl -u 'yunion-mps-*'")
    assert "unheard of" in caplog.text
    host.assert_serves()


def test_a_client_that_sends_a_byte_now_and_then_is_cut_at_its_deadline(serve: Serve) -> None:
    """However much of a head has come: only a whole request gives more time."""
    host = serve(first_request_timeout_s=2)
    sent = 0
    with host.connect() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100_000):
            client.send(b"GET /v1/gpus HTTP/1.1\r\nX: "[sent : sent + 1] or b"x")
            sent += 1
            host.assert_serves()
    assert 1 < sent < 100_000


@pytest.mark.parametrize(
    "part",
    [
        b"G",
        b"GET /v1/gpus HTTP/1.1\r\nHost: x\r\n",
        request("/v1/gpus", "GET", "Content-Length: 10") + b"12345",
        request("/v1/gpus") + request("/v1/gpus", "GET", "Content-Length: 10") + b"12345",
        request("/v1/leases", "POST", "Content-Type: application/json", "Content-Length: 9") + b'{"cou',
    ],
)
def test_a_request_that_does_not_end_is_answered_with_408(serve: Serve, part: bytes) -> None:
    answer = refused(serve(first_request_timeout_s=0.3, request_timeout_s=0.3), part)
    assert answer.problem == (408, "the request did not arrive in time", "send it at once")


def test_an_idle_connection_is_ended_at_its_time(serve: Serve) -> None:
    host = serve(idle_timeout_s=0.3)
    with host.connect() as client:
        assert client.ask("/v1/gpus").status == 200
        assert client.ended()


def test_a_client_that_does_not_take_its_answer_is_cut_at_its_deadline(serve: Serve) -> None:
    host = serve(snapshots.large(2400), answer_timeout_s=0.3)
    with host.connect() as client:
        client.send(request(LARGE))
        host.assert_serves()
        host.wait_connections(0)
        assert len(client.socket.recv(1 << 22)) < 1 << 20


def test_a_slow_reader_gets_its_whole_answer_while_others_are_served(serve: Serve) -> None:
    host = serve(snapshots.large(2400))
    whole = host.ask("GET", LARGE).body
    with host.connect() as client:
        client.send(request(LARGE, "GET", "Connection: close"))
        taken = b""
        while piece := client.socket.recv(100_000):
            taken += piece
            host.assert_serves()
        assert taken.endswith(whole)


def test_a_burst_of_clients_is_answered_to_the_last(host: ServerHost) -> None:
    clients = [host.connect() for _ in range(400)]
    for client in clients:
        client.send(request("/v1/gpus"))
    for client in clients:
        assert client.answer().status == 200
        client.close()
    host.wait_connections(0)


def test_a_user_who_leaves_large_answers_unread_gets_no_more_of_them(serve: Serve) -> None:
    host = serve(snapshots.large(2400), unread_bytes=1 << 19)
    with host.connect() as first, host.connect() as second, host.connect() as third:
        first.send(request(LARGE))
        eventually(lambda: host.server.pool.unread_bytes(0) > 1 << 19, "an answer that waits to be read")
        answer = second.ask(LARGE)
        too_much = (503, "too much response data is waiting to be read", "read it or request less")
        assert answer.problem == too_much
        assert third.ask("/v1/status").status == 200
        assert first.answer().json()["total"] == 2400
