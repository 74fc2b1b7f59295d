"""HTTP as the server speaks it, to clients that mean well."""

from __future__ import annotations

import socket

import pytest

from unit.http import snapshots
from unit.http.conftest import Serve
from unit.http.server_host import ServerHost, request

NO_QUERY = "the query cannot be taken apart"
AS_PAIRS = "write it as name=value&name=value"
KNOWN = "addr, dev_type, device_path, limit, model, numa_node, offset, unused, vendor_device_id"
STRANGE = ("%FF", "%00", "%F0%9F%90%8D", "%", "%zz", "..%2f..", "a" * 8000, "%0a%1b[2J")
PATHS = (
    "/v1/devices",
    "/v1/devices/00:06.0-1",
    "/v1/events",
    "/v1/gpus",
    "/v1/clients",
    "/v1/status",
    "/v1/plan",
    "/v1/openapi.json",
)


def test_one_connection_serves_many_requests(host: ServerHost) -> None:
    with host.connect() as client:
        for path in PATHS:
            answer = client.send(request(path)).answer()
            assert answer is not None
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert "connection" not in answer.headers


def test_requests_sent_all_at_once_are_answered_in_their_order(host: ServerHost) -> None:
    with host.connect() as client:
        client.send(b"".join(request(path) for path in PATHS * 20))
        for path in PATHS * 20:
            answer = client.answer()
            assert answer is not None
            if path != "/v1/status":
                assert answer.body == host.ask("GET", path).body


def test_a_request_that_comes_in_pieces_is_answered_like_a_whole_one(host: ServerHost) -> None:
    with host.connect() as client:
        for byte in request("/v1/gpus"):
            client.send(bytes([byte]))
        answer = client.answer()
        assert answer is not None
        assert answer.body == host.ask("GET", "/v1/gpus").body


@pytest.mark.parametrize("headers", [("1.1", "Connection: close"), ("1.0",)], ids=["close", "HTTP/1.0"])
def test_a_connection_is_closed_if_its_client_asks_for_it(host: ServerHost, headers: tuple[str, ...]) -> None:
    version, *more = headers
    with host.connect() as client:
        answer = client.send(request("/v1/gpus", "GET", *more, version=version)).answer()
        assert answer is not None
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.ended()


@pytest.mark.parametrize("target", [*PATHS, "/v1/devices/nothing", "/nowhere", "/v1/gpus?x=1"])
def test_head_answers_as_get_does_but_without_the_body(host: ServerHost, target: str) -> None:
    get, head = host.ask("GET", target), host.ask("HEAD", target)
    if target != "/v1/status":
        assert head.headers == get.headers
    assert (head.status, head.body) == (get.status, b"")


def test_after_a_head_the_connection_goes_on(host: ServerHost) -> None:
    with host.connect() as client:
        first = client.send(request("/v1/gpus", "HEAD")).answer("HEAD")
        second = client.send(request("/v1/gpus")).answer()
        assert first is not None
        assert second is not None
        assert (first.status, second.json()["total"]) == (200, 1)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FETCH"])
def test_other_methods_are_refused_with_the_ones_that_are_allowed(host: ServerHost, method: str) -> None:
    answer = host.ask(method, "/v1/status")
    assert answer.problem == (405, f"{method} is not possible here", None)
    assert answer.headers["allow"] == "GET, HEAD"
    assert host.ask(method, "/nowhere").status == 404


@pytest.mark.parametrize("target", ["/", "/v1", "/v1/", "/v1/devices/", "/v1/devices/a/b", "/v1/Status", "*"])
def test_a_path_that_is_none_is_answered_with_404(host: ServerHost, target: str) -> None:
    detail = f"there is nothing at {target!r}"
    assert host.ask("GET", target).problem == (404, detail, "the paths are in /v1/openapi.json")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("target", ["http://[", "//[/v1/gpus", "http://]/"])
def test_a_target_that_is_no_url_is_refused(host: ServerHost, method: str, target: str) -> None:
    detail = "the request's target is no URL that can be taken apart"
    assert host.ask(method, target).problem == (400, detail, None)


@pytest.mark.parametrize(
    ("query", "detail", "hint"),
    [
        ("limit=x", "limit is 'x'", "write a whole number from 0 to 100000"),
        ("limit=-1", "limit is '-1'", "write a whole number from 0 to 100000"),
        ("limit=100001", "limit is '100001'", "write a whole number from 0 to 100000"),
        ("limit=1.0", "limit is '1.0'", "write a whole number from 0 to 100000"),
        ("limit=", "limit is ''", "write a whole number from 0 to 100000"),
        ("limit=%D9%A3", "limit is '٣'", "write a whole number from 0 to 100000"),
        ("offset=2147483648", "offset is '2147483648'", "write a whole number from 0 to 2147483647"),
        ("numa_node=none", "numa_node is 'none'", "write a whole number from -1 to 2147483647"),
        ("numa_node=-2", "numa_node is '-2'", "write a whole number from -1 to 2147483647"),
        ("unused=1", "unused is '1'", "write unused=true or unused=false"),
        ("limit=1&limit=2", "a parameter is given twice", None),
        ("adress=00:06.0", "'adress' is no parameter", f"the parameters are {KNOWN}"),
        ("limit", NO_QUERY, AS_PAIRS),
        ("&".join(f"x{n}=1" for n in range(33)), NO_QUERY, AS_PAIRS),
    ],
)
def test_a_bad_query_is_refused_by_name(host: ServerHost, query: str, detail: str, hint: str | None) -> None:
    assert host.ask("GET", f"/v1/devices?{query}").problem == (400, detail, hint)


@pytest.mark.parametrize("path", ["/v1/devices/00:06.0-1", "/v1/gpus", "/v1/status", "/v1/openapi.json"])
def test_a_path_without_parameters_takes_none(host: ServerHost, path: str) -> None:
    assert host.ask("GET", f"{path}?limit=1").problem == (
        400,
        "'limit' is no parameter",
        "there are none here",
    )


@pytest.mark.parametrize(
    "target",
    [
        "/v1/devices/00%3A06.0-1",
        "/v1/devices/00%3a06.0%2d1",
        "http://localhost/v1/devices/00:06.0-1",
        "http://yunion-mps/v1/devices/00:06.0-1?",
        "/v1/devices/00:06.0-1#fragment",
    ],
)
def test_a_target_may_be_spelt_in_every_way_that_http_has(host: ServerHost, target: str) -> None:
    answer = host.ask("GET", target)
    assert (answer.status, answer.json()["addr"]) == (200, "00:06.0-1")


@pytest.mark.parametrize("name", STRANGE)
def test_a_device_of_a_strange_name_is_not_there(host: ServerHost, name: str) -> None:
    answer = host.ask("GET", f"/v1/devices/{name}")
    assert answer.status == 404
    assert len(answer.body) < 1000
    assert answer.problem[1].isprintable()


@pytest.mark.parametrize("model", ["Tesla%20P40", "Tesla+P40", "%54esla%20P40"])
def test_spaces_in_a_filter_may_be_written_both_ways(host: ServerHost, model: str) -> None:
    assert host.ask("GET", f"/v1/devices?model={model}").json()["total"] == 4


@pytest.mark.parametrize("head", ["Content-Length: 4", "Transfer-Encoding: chunked"])
def test_a_body_is_read_past(host: ServerHost, head: str) -> None:
    body = b"abcd" if "Length" in head else b"4\r\nabcd\r\n0\r\n\r\n"
    with host.connect() as client:
        for _ in range(2):
            answer = client.send(request("/v1/gpus", "GET", head) + body).answer()
            assert answer is not None
            assert answer.status == 200


def test_a_client_that_expects_100_continue_gets_it(host: ServerHost) -> None:
    with host.connect() as client:
        client.send(request("/v1/gpus", "GET", "Content-Length: 4", "Expect: 100-continue"))
        leave = client.answer("HEAD")
        assert leave == (100, {}, b"")
        answer = client.send(b"abcd").answer()
        assert answer is not None
        assert answer.status == 200


def test_a_device_s_name_may_hold_a_slash_that_is_written_as_a_part_of_it(host: ServerHost) -> None:
    detail = "there is no device ../../x"
    assert host.ask("GET", "/v1/devices/..%2F..%2Fx").problem[:2] == (404, detail)


def test_a_client_that_has_shut_its_sending_side_gets_the_whole_answer(serve: Serve) -> None:
    host = serve(snapshots.large(2400))
    with host.connect() as client:
        client.send(request("/v1/devices?limit=0"))
        client.socket.shutdown(socket.SHUT_WR)
        answer = client.answer()
        assert answer is not None
        assert len(answer.json()["isolated_devices"]) == 2400
        assert client.ended()


def test_cached_answers_are_made_again_when_the_snapshot_has_changed(host: ServerHost) -> None:
    assert host.ask("GET", "/v1/gpus").json()["total"] == 1
    host.snapshot = snapshots.troubled()._replace(version=2)
    assert host.ask("GET", "/v1/gpus").json()["total"] == 4


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
