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
from google.protobuf.struct_pb2 import ListValue
from google.protobuf.wrappers_pb2 import BytesValue
from grpclib.const import Status
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, TrailersReceived
from yunion_mps.kubernetes.kubelet.grpc import (
    MAX_CONNECTIONS,
    Method,
    Rpc,
    RpcError,
    RpcServer,
    answered_by,
    call_rpc,
    streamed_by,
)
from yunion_mps.kubernetes.received import MAX_HELD_BYTES, MAX_MESSAGE_BYTES, OF_PROCESS

from integration.daemon_host import eventually
from kubernetes.grpc_peers import PATIENCE_S, Loop, channel, our_server, their_server

pytestmark = pytest.mark.processes

REASON = "device 00:06.0-1 is in use:\n100 % of “trainer” has it"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: What precedes the value in an encoded message of the largest size.
_TAG_BYTES = 5


def rpc(name: str) -> Rpc[BytesValue, BytesValue]:
    return Rpc(f"/test.Test/{name}", BytesValue, BytesValue)


def encoded(value: bytes) -> bytes:
    return BytesValue(value=value).SerializeToString()


def framed(message: bytes) -> bytes:
    """A message as it is sent."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class Methods:
    """What the server answers in these tests."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self._release: asyncio.Event | None = None

    def all(self) -> list[Method]:
        return [
            answered_by(rpc("Echo"), self._echo),
            answered_by(rpc("Refuse"), self._refuse),
            answered_by(rpc("Break"), self._break),
            answered_by(rpc("Wait"), self._wait),
            streamed_by(rpc("Count"), self._count),
            streamed_by(rpc("Watch"), self._watch),
        ]

    async def _echo(self, request: BytesValue) -> BytesValue:
        return request

    async def _refuse(self, _: BytesValue) -> BytesValue:
        raise RpcError(Status.FAILED_PRECONDITION, REASON)

    async def _break(self, _: BytesValue) -> BytesValue:
        raise ValueError("broken")

    async def _wait(self, request: BytesValue) -> BytesValue:
        self.waiting.release()
        try:
            self._release = self._release or asyncio.Event()
            await self._release.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return BytesValue(value=b"waited")

    async def _watch(self, request: BytesValue) -> AsyncIterator[BytesValue]:
        yield BytesValue(value=b"first")
        yield await self._wait(request)

    def release(self) -> None:
        """Let the calls that wait end; in their event loop."""
        assert self._release
        self._release.set()

    async def _count(self, request: BytesValue) -> AsyncIterator[BytesValue]:
        for number in range(int(request.value)):
            yield BytesValue(value=bytes([number]) * 100_000)


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


def ask(client: grpc.Channel, method: str, value: bytes = b"") -> bytes:
    answer = client.unary_unary(f"/test.Test/{method}")(encoded(value), timeout=PATIENCE_S)
    return BytesValue.FromString(answer).value


def watch(client: grpc.Channel, method: str, value: bytes = b"") -> Any:
    """A call that yields the values of its answers."""
    call = client.unary_stream(
        f"/test.Test/{method}", response_deserializer=lambda data: BytesValue.FromString(data).value
    )
    return call(encoded(value), timeout=PATIENCE_S)


def refusal(client: grpc.Channel, method: str, request: bytes = b"") -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        ask(client, method, request)
    return caught.value


def test_messages_up_to_the_limit_are_echoed(client: grpc.Channel) -> None:
    for size in (0, 1, 20_000, MAX_MESSAGE_BYTES - _TAG_BYTES):
        assert ask(client, "Echo", b"x" * size) == b"x" * size


def test_a_longer_message_is_refused(client: grpc.Channel) -> None:
    refused = refusal(client, "Echo", b"x" * (MAX_MESSAGE_BYTES - _TAG_BYTES + 1))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(client, "Echo", b"the connection goes on") == b"the connection goes on"


def test_each_message_of_a_stream_arrives(client: grpc.Channel) -> None:
    answers = watch(client, "Count", b"20")
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
    assert _status(path, request) == Status.DEADLINE_EXCEEDED.value
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_a_call_that_the_client_abandons_is_cancelled(client: grpc.Channel, methods: Methods) -> None:
    answers = watch(client, "Watch")
    assert next(answers) == b"first"
    answers.cancel()
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_calls_end_with_their_connection(loop: Loop, path: Path, methods: Methods) -> None:
    with channel(path) as client:
        assert next(watch(client, "Watch")) == b"first"
    assert methods.cancelled.acquire(timeout=PATIENCE_S)


def test_many_calls_are_answered_at_the_same_time(client: grpc.Channel, methods: Methods, loop: Loop) -> None:
    calls = [client.unary_unary("/test.Test/Wait").future(b"", timeout=PATIENCE_S) for _ in range(90)]
    for _ in calls:
        assert methods.waiting.acquire(timeout=PATIENCE_S)
    loop.call(methods.release)
    assert {future.result() for future in calls} == {encoded(b"waited")}


def test_a_closing_server_ends_streams_and_lets_calls_finish(path: Path, methods: Methods) -> None:
    with channel(path) as client:
        with our_server(methods.all(), path) as loop:
            stream = watch(client, "Watch")
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
        assert waiting.result() == encoded(b"waited")
    assert not path.exists()


def test_a_closing_server_does_not_remove_a_newer_socket_at_its_path(path: Path) -> None:
    with Loop() as loop:
        first, second = RpcServer([]), RpcServer([])
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
            slow.sendall(_request(stream, "Count", data=framed(encoded(b"50"))))
        assert ask(client, "Echo", b"x") == b"x"


def test_a_peer_that_never_reads_is_not_read_either(client: grpc.Channel, path: Path) -> None:
    """Otherwise, the answers to its pings would fill the memory."""
    ping = b"\0\0\x08\x06\0\0\0\0\0" + b"12345678"
    with socket.socket(socket.AF_UNIX) as greedy:
        greedy.connect(str(path))
        greedy.sendall(_PREFACE)
        greedy.setblocking(False)

        def takes_nothing() -> bool:
            assert ask(client, "Echo", b"x") == b"x"  # the server has had a turn
            with contextlib.suppress(BlockingIOError):
                return greedy.send(ping * 1000) == 0
            return True

        eventually(lambda: all(takes_nothing() for _ in range(20)), "the kernel's buffers to be full")


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
    ("data", "expected"),
    [
        (b"", Status.INTERNAL),
        (framed(b"\x0a\x02four")[:-1], Status.INTERNAL),
        (framed(b"\x0a\x01x") + b"y", Status.INTERNAL),
        (framed(b"") + framed(b""), Status.INTERNAL),
        (framed(b"\x0a\x05four"), Status.INVALID_ARGUMENT),
        (b"\x01\0\0\0\x04zzzz", Status.UNIMPLEMENTED),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED),
    ],
)
def test_a_request_that_is_not_one_message_is_refused(
    loop: Loop, path: Path, data: bytes, expected: Status
) -> None:
    assert _status(path, _request(1, "Echo", data=data)) == expected.value


def test_a_request_with_very_many_parts_is_refused(path: Path) -> None:
    """A part may have two bytes, and takes much memory while it is answered."""

    async def answer(_: ListValue) -> BytesValue:
        return BytesValue()

    many = Rpc("/test.Test/Many", ListValue, BytesValue)
    with our_server([answered_by(many, answer)], path), channel(path) as client:
        call = client.unary_unary(many.path)
        assert call(b"\x0a\0" * 100_000, timeout=PATIENCE_S) == b""
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\x0a\0" * 100_001, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_fields_of_a_request_are_ignored(client: grpc.Channel) -> None:
    request = encoded(b"x") + b"\x4a\x01y" + b"\x51\1\2\3\4\5\6\7\x08"
    answer = client.unary_unary("/test.Test/Echo")(request, timeout=PATIENCE_S)
    assert BytesValue.FromString(answer).value == b"x"


def test_a_call_with_very_many_headers_is_not_answered(client: grpc.Channel, path: Path) -> None:
    many = {f"header-{number}": "" for number in range(100)}
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(path))
        peer.sendall(_request(1, "Echo", many))
        while peer.recv(65536):
            pass
    assert ask(client, "Echo", b"x") == b"x"


class Unfinished:
    """A peer that begins calls of Echo, and does not finish their messages, which are of the largest size."""

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
        """Send the length of a message, and half of it unless the server refuses that."""
        self._http.send_headers(stream, _headers("Echo"))
        self._send(stream, b"\0" + self._size.to_bytes(4, "big"))
        left = self._size // 2
        while left and stream not in self.statuses:
            size = min(left, self._http.local_flow_control_window(stream), 16384)
            if size:
                self._send(stream, bytes(size))
                left -= size
            else:
                self._receive()

    def _send(self, stream: int, data: bytes) -> None:
        self._http.send_data(stream, data)
        self.peer.sendall(self._http.data_to_send())

    def _receive(self) -> None:
        for event in self._http.receive_data(self.peer.recv(65536)):
            if isinstance(event, (ResponseReceived, TrailersReceived)):
                self.statuses[event.stream_id] = int(dict(event.headers)[b"grpc-status"])
        self.peer.sendall(self._http.data_to_send())

    def wait(self, stream: int) -> int:
        """The status of the call."""
        while stream not in self.statuses:
            self._receive()
        return self.statuses[stream]


def test_the_sum_of_unfinished_messages_is_limited(client: grpc.Channel, path: Path) -> None:
    """A peer may begin a hundred calls on each connection, and its messages may never end."""
    peers = [Unfinished(path) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.peer)
        for peer in peers[:2]:
            peer.begin(1)
        for peer, stream_id in ((peers[0], 3), (peers[1], 3), (peers[2], 1)):
            peer.begin(stream_id)
            assert peer.wait(stream_id) == Status.RESOURCE_EXHAUSTED.value
        assert OF_PROCESS.held_bytes <= MAX_HELD_BYTES
        peers[0].peer.close()
        eventually(lambda: OF_PROCESS.held_bytes < MAX_MESSAGE_BYTES + 100, "the end of its calls")
        assert ask(client, "Echo", b"x" * 1000) == b"x" * 1000
    eventually(lambda: OF_PROCESS.held_bytes == 0, "the end of all calls")


def test_calls_that_are_abandoned_at_once_leave_room_for_others(loop: Loop, path: Path) -> None:
    """A peer that was stopped for a while may find the requests and their ends together."""
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(str(path))
        for stream in range(1, 101, 2):
            http.send_headers(stream, _headers("Echo"))
            http.send_data(stream, bytes(5000))
            http.reset_stream(stream)
            peer.sendall(http.data_to_send())
            while http.outbound_flow_control_window < 5000:
                http.receive_data(peer.recv(65536))
    eventually(lambda: OF_PROCESS.held_bytes == 0, "the end of all calls")


def test_a_message_that_does_not_end_is_refused_in_time(methods: Methods, path: Path) -> None:
    with our_server(methods.all(), path, receive_s=0.1):
        peer = Unfinished(path, size=10)
        with peer.peer:
            peer.begin(1)
            assert peer.wait(1) == Status.DEADLINE_EXCEEDED.value
    assert OF_PROCESS.held_bytes == 0


def test_frames_of_an_unknown_type_are_ignored(loop: Loop, path: Path) -> None:
    unknown = b"\0\0\x04\x20\0\0\0\0\0" + b"1234"
    assert _status(path, _request(1, "Echo") + unknown) == Status.OK.value


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
        while last.recv(1000):
            pass
    eventually(lambda: ask(client, "Echo", b"x") == b"x", "room for others")


def test_our_client_and_our_server_agree(loop: Loop, path: Path) -> None:
    assert asked(path, "Echo", b"x") == b"x"
    refused = failure(path, "Refuse")
    assert (refused.status, refused.message) == (Status.FAILED_PRECONDITION, REASON)
    assert failure(path, "Nothing").status is Status.UNIMPLEMENTED


def test_a_request_of_another_content_type_is_refused(loop: Loop, path: Path) -> None:
    request = _request(1, "Echo", {"content-type": "application/json"})
    assert _status(path, request) == Status.UNKNOWN.value


def _headers(method: str, more: Mapping[str, str] = {}) -> list[tuple[str, str]]:
    fixed = {":method": "POST", ":path": f"/test.Test/{method}", ":scheme": "http", ":authority": "localhost"}
    return list({**fixed, "te": "trailers", "content-type": "application/grpc", **more}.items())


def _request(stream: int, method: str, headers: Mapping[str, str] = {}, data: bytes = b"\0\0\0\0\0") -> bytes:
    """A call by hand; the connection begins with the first."""
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    if stream > 1:
        http.clear_outbound_data_buffer()
    http.send_headers(stream, _headers(method, headers))
    http.send_data(stream, data, end_stream=True)
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
        while data := peer.recv(65536):
            for event in http.receive_data(data):
                if isinstance(event, (ResponseReceived, TrailersReceived)):
                    headers = dict(event.headers)
                    if b"grpc-status" in headers:
                        return int(headers[b"grpc-status"])
    pytest.fail("the connection was closed")


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
        "Large": lambda request, _: encoded(b"x" * int(BytesValue.FromString(request).value)),
        "Left": lambda _, context: encoded(b"%d" % context.time_remaining()),
        "Malformed": lambda _, __: b"\x0a\x05four",
        "Refuse": _refuse,
        "Wait": _wait,
    }
    with their_server("test.Test", methods, path):
        yield


def asked(path: Path, method: str, value: bytes = b"", timeout_s: float = PATIENCE_S) -> bytes:
    request = BytesValue(value=value)
    return asyncio.run(call_rpc(str(path), rpc(method), request, timeout_s)).value


def failure(path: Path, method: str, value: bytes = b"", timeout_s: float = PATIENCE_S) -> RpcError:
    with pytest.raises(RpcError) as caught:
        asked(path, method, value, timeout_s)
    return caught.value


def test_our_calls_are_answered(theirs: None, path: Path) -> None:
    for size in (0, 1, 1_000_000):
        assert asked(path, "Echo", b"x" * size) == b"x" * size
    largest = MAX_MESSAGE_BYTES - _TAG_BYTES
    assert asked(path, "Large", b"%d" % largest) == b"x" * largest
    assert 0 < int(asked(path, "Left")) <= PATIENCE_S
    assert OF_PROCESS.held_bytes == 0


def test_our_calls_raise_the_server_s_refusal(theirs: None, path: Path) -> None:
    refused = failure(path, "Refuse")
    assert (refused.status, refused.message) == (Status.FAILED_PRECONDITION, REASON)
    assert failure(path, "Nothing").status == Status.UNIMPLEMENTED


def test_an_answer_that_is_too_long_is_refused(theirs: None, path: Path) -> None:
    assert failure(path, "Large", b"%d" % MAX_MESSAGE_BYTES).status == Status.RESOURCE_EXHAUSTED


def test_an_answer_that_cannot_be_decoded_is_refused(theirs: None, path: Path) -> None:
    assert failure(path, "Malformed").status == Status.INTERNAL


def test_our_calls_end_at_their_deadline(theirs: None, path: Path) -> None:
    assert failure(path, "Wait", timeout_s=0.1).status == Status.DEADLINE_EXCEEDED


def test_a_socket_without_a_server_is_unavailable(path: Path) -> None:
    missing = failure(path, "Echo")
    assert (missing.status, missing.message) == (Status.UNAVAILABLE, f"{path}: No such file or directory")


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
        assert failure(path, "Echo").status == Status.UNAVAILABLE
        server.join()
