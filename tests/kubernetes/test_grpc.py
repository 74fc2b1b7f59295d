"""gRPC as grpcio speaks it: our server answers its client, our client asks its server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, TrailersReceived
from yunion_mps.kubernetes.kubelet.grpc import (
    MAX_CONNECTIONS,
    Method,
    RpcError,
    RpcServer,
    StatusCode,
    call_unary,
)
from yunion_mps.kubernetes.received import MAX_HELD_BYTES, MAX_MESSAGE_BYTES, OF_PROCESS

from integration.daemon_host import eventually
from kubernetes.grpc_peers import PATIENCE_S, Loop, channel, our_server, their_server

pytestmark = pytest.mark.processes

REASON = "device 00:06.0-1 is in use:\n100 % of “trainer” has it"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Methods:
    """What the server answers in these tests."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self._release: asyncio.Event | None = None

    def all(self) -> dict[str, Method]:
        return {
            "/test.Test/Echo": Method(self._echo),
            "/test.Test/Refuse": Method(self._refuse),
            "/test.Test/Break": Method(self._break),
            "/test.Test/Wait": Method(self._wait),
            "/test.Test/Count": Method(self._count, is_stream=True),
            "/test.Test/Watch": Method(self._wait, is_stream=True),
        }

    async def _echo(self, request: bytes) -> AsyncIterator[bytes]:
        yield request

    async def _refuse(self, _: bytes) -> AsyncIterator[bytes]:
        raise RpcError(StatusCode.FAILED_PRECONDITION, REASON)
        yield b""

    async def _break(self, _: bytes) -> AsyncIterator[bytes]:
        raise ValueError("broken")
        yield b""

    async def _wait(self, request: bytes) -> AsyncIterator[bytes]:
        yield b"first"
        self.waiting.release()
        try:
            self._release = self._release or asyncio.Event()
            await self._release.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise

    def release(self) -> None:
        """Let the calls that wait end; in their event loop."""
        assert self._release
        self._release.set()

    async def _count(self, request: bytes) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield bytes([number]) * 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.sock"


@pytest.fixture
def methods() -> Methods:
    return Methods()


@pytest.fixture
def loop(methods: Methods, path: Path) -> Iterator[Loop]:
    with our_server(methods.all(), path) as loop:
        yield loop


@pytest.fixture
def client(loop: Loop, path: Path) -> Iterator[grpc.Channel]:
    with channel(path) as opened:
        yield opened


def ask(client: grpc.Channel, method: str, request: bytes = b"") -> bytes:
    return bytes(client.unary_unary(f"/test.Test/{method}")(request, timeout=PATIENCE_S))


def refusal(client: grpc.Channel, method: str, request: bytes = b"") -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        ask(client, method, request)
    return caught.value


def test_messages_up_to_the_limit_are_echoed(client: grpc.Channel) -> None:
    for size in (0, 1, 20_000, MAX_MESSAGE_BYTES):
        assert ask(client, "Echo", b"x" * size) == b"x" * size


def test_a_longer_message_is_refused(client: grpc.Channel) -> None:
    refused = refusal(client, "Echo", b"x" * (MAX_MESSAGE_BYTES + 1))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(client, "Echo", b"the connection goes on") == b"the connection goes on"


def test_each_message_of_a_stream_arrives(client: grpc.Channel) -> None:
    answers = client.unary_stream("/test.Test/Count")(b"20", timeout=PATIENCE_S)
    assert [(answer[0], len(answer)) for answer in answers] == [(number, 100_000) for number in range(20)]


def test_a_refusal_has_its_status_and_its_text(client: grpc.Channel) -> None:
    refused = refusal(client, "Refuse")
    assert (refused.code(), refused.details()) == (grpc.StatusCode.FAILED_PRECONDITION, REASON)


def test_an_unknown_method_is_unimplemented(client: grpc.Channel) -> None:
    assert refusal(client, "Nothing").code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_internal_error_is_answered_and_logged(
    client: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    refused = refusal(client, "Break")
    assert (refused.code(), refused.details()) == (
        grpc.StatusCode.INTERNAL,
        "internal error: ValueError('broken')",
    )
    assert "ValueError: broken" in caplog.text
    assert ask(client, "Echo", b"still there") == b"still there"


def test_a_call_ends_at_its_deadline(loop: Loop, path: Path, methods: Methods) -> None:
    request = _request(1, "Wait", {"grpc-timeout": "50m"})
    assert _status(path, request) == StatusCode.DEADLINE_EXCEEDED
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_a_call_that_the_client_abandons_is_cancelled(client: grpc.Channel, methods: Methods) -> None:
    answers = client.unary_stream("/test.Test/Watch")(b"")
    assert next(answers) == b"first"
    answers.cancel()
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_calls_end_with_their_connection(loop: Loop, path: Path, methods: Methods) -> None:
    with channel(path) as client:
        assert next(client.unary_stream("/test.Test/Watch")(b"")) == b"first"
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_many_calls_are_answered_at_the_same_time(client: grpc.Channel, methods: Methods, loop: Loop) -> None:
    calls = [client.unary_unary("/test.Test/Wait").future(b"", timeout=PATIENCE_S) for _ in range(90)]
    for _ in calls:
        assert methods.waiting.acquire(timeout=PATIENCE_S)
    loop.call(methods.release)
    assert {future.result() for future in calls} == {b"first"}


def test_a_closing_server_ends_streams_and_lets_calls_finish(path: Path, methods: Methods) -> None:
    with channel(path) as client:
        with our_server(methods.all(), path) as loop:
            stream = client.unary_stream("/test.Test/Watch")(b"")
            assert next(stream) == b"first"
            waiting = client.unary_unary("/test.Test/Wait").future(b"", timeout=PATIENCE_S)
            for _ in range(2):
                assert methods.waiting.acquire(timeout=PATIENCE_S)

            def finish() -> None:
                assert methods.cancelled.acquire(timeout=PATIENCE_S)  # the stream has ended
                loop.call(methods.release)

            finishing = threading.Thread(target=finish)
            finishing.start()
        finishing.join()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the server is stopping"
        assert waiting.result() == b"first"
    assert not path.exists()


def test_a_closing_server_does_not_remove_a_newer_socket_at_its_path(path: Path) -> None:
    with Loop() as loop:
        first, second = RpcServer({}), RpcServer({})
        loop.run(first.open(str(path)))
        loop.run(second.open(str(path)))
        assert (first.is_reachable, second.is_reachable) == (False, True)
        loop.run(first.close())
        assert path.exists()
        loop.run(second.close())
        assert not path.exists()


def test_a_peer_that_does_not_read_does_not_delay_others(client: grpc.Channel, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        for stream in range(1, 40, 2):
            slow.sendall(_request(stream, "Count", framed=b"\0\0\0\0\x0250"))
        assert ask(client, "Echo", b"x") == b"x"


def test_a_peer_that_asks_and_never_reads_is_disconnected(loop: Loop, path: Path) -> None:
    ping = b"\0\0\x08\x06\0\0\0\0\0" + b"12345678"
    with socket.socket(socket.AF_UNIX) as greedy:
        greedy.settimeout(PATIENCE_S)
        greedy.connect(str(path))
        greedy.sendall(_PREFACE)
        with contextlib.suppress(ConnectionError):
            while True:  # the kernel's buffers, then ours, and then it must end
                greedy.sendall(ping * 1000)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\0" * 100,
        _PREFACE + b"\0\x40\x01" + b"\0" * 20_000,  # a frame that is too long
        _PREFACE + b"\0\0\x05\x01\x04\0\0\0\x01\xff\xff\xff\xff\xff",  # headers that cannot be decompressed
        _PREFACE + b"\0\0\x04\x08\0\0\0\0\0\0\0\0\0",  # a window that grows by 0
    ],
)
def test_what_is_not_http_2_is_disconnected(client: grpc.Channel, path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(path))
        peer.sendall(data)
        while peer.recv(65536):
            pass
    assert ask(client, "Echo", b"x") == b"x"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", StatusCode.INTERNAL),
        (b"\0\0\0\0\x05four", StatusCode.INTERNAL),
        (b"\0\0\0\0\x03four", StatusCode.INTERNAL),
        (b"\x01\0\0\0\x04zzzz", StatusCode.UNIMPLEMENTED),
        (b"\0\xff\xff\xff\xff", StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_request_that_is_not_one_message_is_refused(
    loop: Loop, path: Path, message: bytes, expected: StatusCode
) -> None:
    assert _status(path, _request(1, "Echo", framed=message)) == expected


class Unfinished:
    """A peer that begins calls of Echo, each with most of a message of the largest size."""

    def __init__(self, path: Path, size: int = MAX_MESSAGE_BYTES) -> None:
        self._http = H2Connection(H2Configuration(client_side=True))
        self._http.initiate_connection()
        self._size = size
        self.peer = socket.socket(socket.AF_UNIX)
        self.peer.settimeout(PATIENCE_S)
        self.peer.connect(str(path))
        #: The status of each call that has been answered, by its stream.
        self.statuses: dict[int, int] = {}

    def begin(self, stream: int) -> None:
        fixed = {":method": "POST", ":path": "/test.Test/Echo", ":scheme": "http", ":authority": "localhost"}
        self._http.send_headers(stream, {**fixed, "content-type": "application/grpc"}.items())
        self.send(stream, b"\0" + self._size.to_bytes(4, "big"))

    def fill(self, stream: int) -> None:
        """Send all but the last byte, unless the server refuses that."""
        left = self._size - 1
        while left and stream not in self.statuses:
            size = min(left, self._http.local_flow_control_window(stream), 16384)
            if size:
                self.send(stream, bytes(size))
                left -= size
            else:
                self.receive()

    def send(self, stream: int, data: bytes) -> None:
        self._http.send_data(stream, data)
        self.peer.sendall(self._http.data_to_send())

    def receive(self) -> None:
        for event in self._http.receive_data(self.peer.recv(65536)):
            if isinstance(event, (ResponseReceived, TrailersReceived)):
                headers = dict(event.headers)
                self.statuses[event.stream_id] = int(headers[b"grpc-status"])
        self.peer.sendall(self._http.data_to_send())

    def wait(self, stream: int) -> int:
        """The status of the call."""
        while stream not in self.statuses:
            self.receive()
        return self.statuses[stream]


def test_the_sum_of_unfinished_messages_is_limited(client: grpc.Channel, path: Path) -> None:
    """A peer may begin a hundred calls on each connection, and its messages may never end."""
    peers = [Unfinished(path) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.peer)
            for stream in (1, 3, 5, 7):
                peer.begin(stream)
        for peer in peers[:2]:
            peer.fill(1)
        for peer, stream in ((peers[0], 3), (peers[1], 3), (peers[2], 1)):
            peer.fill(stream)
            assert peer.wait(stream) == StatusCode.RESOURCE_EXHAUSTED
        assert OF_PROCESS.held_bytes <= MAX_HELD_BYTES
        peers[0].peer.close()
        eventually(lambda: OF_PROCESS.held_bytes < MAX_MESSAGE_BYTES + 100, "the end of its calls")
        assert ask(client, "Echo", b"x" * 1000) == b"x" * 1000
    eventually(lambda: OF_PROCESS.held_bytes == 0, "the end of all calls")


def test_a_message_that_does_not_end_is_refused_in_time(methods: Methods, path: Path) -> None:
    with our_server(methods.all(), path, receive_s=0.1):
        peer = Unfinished(path, size=10)
        with peer.peer:
            peer.begin(1)
            assert peer.wait(1) == StatusCode.DEADLINE_EXCEEDED
    assert OF_PROCESS.held_bytes == 0


def test_more_connections_than_a_kubelet_makes_are_closed(client: grpc.Channel, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(MAX_CONNECTIONS)]
        for peer in peers:
            peer.settimeout(PATIENCE_S)
            peer.connect(str(path))
        assert all(peer.recv(1) for peer in peers[: MAX_CONNECTIONS - 1])
        last = stack.enter_context(socket.socket(socket.AF_UNIX))
        last.settimeout(PATIENCE_S)
        last.connect(str(path))
        assert last.recv(1) == b""
    eventually(lambda: ask(client, "Echo", b"x") == b"x", "room for others")


def test_a_request_of_another_content_type_is_refused(loop: Loop, path: Path) -> None:
    request = _request(1, "Echo", {"content-type": "application/json"})
    assert _status(path, request) == StatusCode.UNIMPLEMENTED


def _request(
    stream: int, method: str, headers: Mapping[str, str] = {}, framed: bytes = b"\0\0\0\0\0"
) -> bytes:
    """A call by hand; the connection begins with the first."""
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    if stream > 1:
        http.clear_outbound_data_buffer()
    fixed = {":method": "POST", ":path": f"/test.Test/{method}", ":scheme": "http", ":authority": "localhost"}
    http.send_headers(stream, {**fixed, "content-type": "application/grpc", **headers}.items())
    http.send_data(stream, framed, end_stream=True)
    return http.data_to_send()


def _status(path: Path, request: bytes) -> int:
    """The status that a request by hand is answered with."""
    http = H2Connection(H2Configuration(client_side=True))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(path))
        peer.sendall(request)
        http.initiate_connection()
        http.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")])
        while True:
            for event in http.receive_data(peer.recv(65536)):
                if isinstance(event, (ResponseReceived, TrailersReceived)):
                    headers = dict(event.headers)
                    if b"grpc-status" in headers:
                        return int(headers[b"grpc-status"])


def _refuse(_: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, REASON)
    return b""


def _wait(_: bytes, context: Any) -> bytes:
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(PATIENCE_S)
    return b""


@pytest.fixture
def theirs(path: Path) -> Iterator[None]:
    """grpcio's server; `Left` answers with the time that the call has left."""
    methods = {
        "Echo": lambda request, _: request,
        "Large": lambda request, _: b"x" * int(request),
        "Left": lambda _, context: b"%d" % context.time_remaining(),
        "Refuse": _refuse,
        "Wait": _wait,
    }
    with their_server("test.Test", methods, path):
        yield


def asked(path: Path, method: str, request: bytes = b"", timeout_s: float = PATIENCE_S) -> bytes:
    return asyncio.run(call_unary(str(path), f"/test.Test/{method}", request, timeout_s))


def failure(path: Path, method: str, request: bytes = b"", timeout_s: float = PATIENCE_S) -> RpcError:
    with pytest.raises(RpcError) as caught:
        asked(path, method, request, timeout_s)
    return caught.value


def test_our_calls_are_answered(theirs: None, path: Path) -> None:
    for size in (0, 1, 1_000_000):
        assert asked(path, "Echo", b"x" * size) == b"x" * size
    assert asked(path, "Large", b"%d" % MAX_MESSAGE_BYTES) == b"x" * MAX_MESSAGE_BYTES
    assert 0 < int(asked(path, "Left")) <= PATIENCE_S


def test_our_calls_raise_the_server_s_refusal(theirs: None, path: Path) -> None:
    refused = failure(path, "Refuse")
    assert (refused.status, refused.message) == (StatusCode.FAILED_PRECONDITION, REASON)
    assert failure(path, "Nothing").status == StatusCode.UNIMPLEMENTED


def test_an_answer_that_is_too_long_is_refused(theirs: None, path: Path) -> None:
    assert failure(path, "Large", b"%d" % (MAX_MESSAGE_BYTES + 1)).status == StatusCode.RESOURCE_EXHAUSTED


def test_our_calls_end_at_their_deadline(theirs: None, path: Path) -> None:
    assert failure(path, "Wait", timeout_s=0.1).status == StatusCode.DEADLINE_EXCEEDED


def test_a_socket_without_a_server_is_unavailable(path: Path) -> None:
    missing = failure(path, "Echo")
    assert (missing.status, missing.message) == (StatusCode.UNAVAILABLE, f"{path}: No such file or directory")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 1000])
def test_a_server_that_does_not_speak_grpc_is_unavailable(path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        server = threading.Thread(target=serve)
        server.start()
        assert failure(path, "Echo").status == StatusCode.UNAVAILABLE
        server.join()
