"""HTTP as the server speaks it, to clients that mean well."""

from __future__ import annotations

import socket

import pytest

from unit.http import snapshots
from unit.http.conftest import Serve
from unit.http.server_host import ServerHost, request

PATHS = (
    *("/v1/devices", "/v1/devices/00:06.0-1", "/v1/events", "/v1/gpus", "/v1/clients"),
    *("/v1/status", "/v1/plan", "/v1/openapi.json"),
)


def test_one_connection_serves_many_requests(host: ServerHost) -> None:
    with host.connect() as client:
        for path in PATHS:
            answer = client.ask(path)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert "connection" not in answer.headers


def test_requests_sent_all_at_once_are_answered_in_their_order(host: ServerHost) -> None:
    with host.connect() as client:
        client.send(b"".join(request(path) for path in PATHS * 20))
        for path in PATHS * 20:
            answer = client.answer()
            if path != "/v1/status":
                assert answer.body == host.ask("GET", path).body


def test_a_request_that_comes_in_pieces_is_answered_like_a_whole_one(host: ServerHost) -> None:
    with host.connect() as client:
        for byte in request("/v1/gpus"):
            client.send(bytes([byte]))
        assert client.answer().body == host.ask("GET", "/v1/gpus").body


@pytest.mark.parametrize("headers", [("1.1", "Connection: close"), ("1.0",)], ids=["close", "HTTP/1.0"])
def test_a_connection_is_closed_if_its_client_asks_for_it(host: ServerHost, headers: tuple[str, ...]) -> None:
    version, *more = headers
    with host.connect() as client:
        answer = client.send(request("/v1/gpus", "GET", *more, version=version)).answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.ended()


@pytest.mark.parametrize("target", [*PATHS, "/v1/devices/nothing", "/nowhere", "/v1/gpus?x=1"])
def test_head_answers_as_get_does_but_without_the_body(host: ServerHost, target: str) -> None:
    get, head = host.ask("GET", target), host.ask("HEAD", target)
    if target != "/v1/status":
        assert head.headers == get.headers
    assert (head.status, head.body) == (get.status, b"")


def test_a_connection_stays_usable_after_head(host: ServerHost) -> None:
    with host.connect() as client:
        first = client.send(request("/v1/gpus", "HEAD")).answer("HEAD")
        assert (first.status, client.ask("/v1/gpus").json()["total"]) == (200, 1)


@pytest.mark.parametrize(
    ("method", "target", "refusal", "allowed"),
    [
        ("FETCH", "/v1/status", (405, "FETCH is not supported here", "use GET, HEAD"), "GET, HEAD"),
        ("GET", "/v1/reload", (405, "GET is not supported here", "use POST"), "POST"),
        ("GET", "/no", (404, "no such path: '/no'", "see the paths: /v1/openapi.json"), None),
    ],
)
def test_a_refusal_is_problem_details_with_what_is_allowed(
    host: ServerHost, method: str, target: str, refusal: tuple[int, str, str | None], allowed: str | None
) -> None:
    answer = host.ask(method, target)
    assert (answer.problem, answer.headers.get("allow")) == (refusal, allowed)


@pytest.mark.parametrize("head", ["Content-Length: 4", "Transfer-Encoding: chunked"])
def test_a_body_is_read_past(host: ServerHost, head: str) -> None:
    body = b"abcd" if "Length" in head else b"4\r\nabcd\r\n0\r\n\r\n"
    with host.connect() as client:
        for _ in range(2):
            assert client.send(request("/v1/gpus", "GET", head) + body).answer().status == 200


def test_a_client_that_expects_100_continue_gets_it(host: ServerHost) -> None:
    with host.connect() as client:
        client.send(request("/v1/gpus", "GET", "Content-Length: 4", "Expect: 100-continue"))
        assert client.answer("HEAD") == (100, {}, b"")
        assert client.send(b"abcd").answer().status == 200


def test_a_client_that_has_shut_its_sending_side_gets_the_whole_answer(serve: Serve) -> None:
    host = serve(snapshots.large(2400))
    with host.connect() as client:
        client.send(request("/v1/devices?limit=0"))
        client.socket.shutdown(socket.SHUT_WR)
        assert len(client.answer().json()["isolated_devices"]) == 2400
        assert client.ended()


def test_cached_answers_are_made_again_when_the_snapshot_has_changed(host: ServerHost) -> None:
    def total() -> int:
        return int(host.ask("GET", "/v1/devices").json()["total"])

    assert total() == 4
    host.snapshot = snapshots.troubled()
    assert total() == 4, "the cached answer, because the version is the same"
    host.snapshot = host.snapshot._replace(version=2)
    assert total() == 6


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /v1/gpus HTTP/1.1\r\nHost: x", request("/v1/gpus")])
def test_a_client_that_disconnects_at_any_moment_leaves_nothing_behind(host: ServerHost, sent: bytes) -> None:
    clients = [host.connect() for _ in range(20)]
    host.wait_connections(20)
    for client in clients:
        client.send(sent).close()
    host.wait_connections(0)
    host.assert_serves()


def test_a_stopping_server_ends_its_connections(serve: Serve) -> None:
    host = serve()
    client = host.connect()
    host.wait_connections(1)
    host.stop()
    assert client.ended()
