"""gRPC over Unix sockets: a server, and unary calls, over h2's HTTP/2, without threads or C code.

Messages are bytes here and are not compressed. grpcio is not used because its wheels are for one version of
Python each.

Source: github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md, sections "Requests" and "Responses".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from enum import IntEnum
from typing import NamedTuple
from urllib.parse import quote, unquote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from yunion_mps.core.text import parse_number
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.kubernetes.received import MAX_MESSAGE_BYTES, OF_PROCESS

log = logging.getLogger(__name__)

#: How many connections a server has: a kubelet makes a few.
MAX_CONNECTIONS = 64
#: A message is preceded by a byte that says whether it is compressed, and its length.
_PREFIX_BYTES = 5
_LENGTH_BYTES = 4
#: How much is written at once, because a peer may allow frames of megabytes.
_PIECE_BYTES = 1 << 16
#: A peer that makes us send without reading is disconnected once this much is waiting for it.
_MAX_UNREAD_BYTES = 1 << 20
#: How long a request may take to arrive, in s; the kubelet's are sent at once.
_RECEIVE_S = 10.0
#: How long calls have to finish when the server closes, in s.
_CLOSE_S = 2.0
_CONTENT_TYPE = b"application/grpc"
_MAX_TEXT = 1000
#: The characters of a status message that need no percent-encoding.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
#: The units of a `grpc-timeout` header, in s.
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

#: The only stream of a client's connection.
_CALL = 1


class StatusCode(IntEnum):
    """The statuses that are used here.

    Source: github.com/grpc/grpc, doc/statuscodes.md.
    """

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """A call failed; `status` is a StatusCode, or the number of another one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Method(NamedTuple):
    """How the server answers a method: `answers` yields encoded messages, or raises RpcError.

    A stream is ended when the server closes; other calls have a moment to finish.
    """

    answers: Callable[[bytes], AsyncIterator[bytes]]
    is_stream: bool = False


class _Inbox:
    """Receives one message in pieces; `message` is the message, or an RpcError if it is not acceptable.

    Its bytes count as held until `close`, which the owner calls when the call has ended.
    """

    def __init__(self) -> None:
        self._held_bytes = 0
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # asyncio would log an exception that is never retrieved, as when the call has already ended.
        self.message.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        if self.message.done():
            return
        if not OF_PROCESS.hold(len(data)):
            what = "too much is received at the same time: try again later"
            self.fail(RpcError(StatusCode.RESOURCE_EXHAUSTED, what))
            return
        self._held_bytes += len(data)
        self._data += data
        if max(self._length, len(self._data) - _PREFIX_BYTES) > MAX_MESSAGE_BYTES:
            what = f"a message is larger than {MAX_MESSAGE_BYTES} bytes"
            self.fail(RpcError(StatusCode.RESOURCE_EXHAUSTED, what))

    def end(self) -> None:
        """Note that nothing follows."""
        if self.message.done():
            return
        if len(self._data) != _PREFIX_BYTES + self._length:
            self.fail(RpcError(StatusCode.INTERNAL, "expected one complete message"))
        elif self._data[0]:
            self.fail(RpcError(StatusCode.UNIMPLEMENTED, "compressed messages are not supported"))
        else:
            del self._data[:_PREFIX_BYTES]
            self.message.set_result(bytes(self._data))
            self._data.clear()

    def fail(self, error: RpcError) -> None:
        if not self.message.done():
            self.message.set_exception(error)
            self.close()

    def close(self) -> None:
        """Hold nothing any longer."""
        self._data.clear()
        OF_PROCESS.release(self._held_bytes)
        self._held_bytes = 0

    @property
    def _length(self) -> int:
        return int.from_bytes(self._data[1:_PREFIX_BYTES], "big")


class _Connection(asyncio.Protocol):
    """What both sides of an HTTP/2 connection have in common."""

    _transport: asyncio.Transport

    def __init__(self, *, is_client: bool) -> None:
        self._http = H2Connection(H2Configuration(client_side=is_client, header_encoding=None))
        self._may_send = asyncio.Event()
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http.initiate_connection()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._http.receive_data(data):
                self._on_event(event)
            self._flush()
        except H2Error as error:  # h2 has queued a GOAWAY frame for the peer
            log.debug("a peer violated HTTP/2: %s", error)
            self._flush()
            self._transport.close()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._may_send.set()

    async def send_message(self, stream: int, message: bytes, *, is_last: bool = False) -> None:
        """Send a message as fast as the peer reads it; raises H2Error if the stream is closed."""
        data = memoryview(b"\0" + len(message).to_bytes(_LENGTH_BYTES, "big") + message)
        while data:
            window = self._http.local_flow_control_window(stream)
            at_once = min(self._http.max_outbound_frame_size, _PIECE_BYTES)
            size = min(window, at_once, len(data))
            if size <= 0 or self._is_paused:
                self._may_send.clear()
                await self._may_send.wait()
                continue
            self._http.send_data(stream, bytes(data[:size]), end_stream=is_last and size == len(data))
            data = data[size:]
            self._flush()

    def close(self) -> None:
        """Tell the peer, and close once everything has been sent."""
        with contextlib.suppress(H2Error):
            self._http.close_connection()
        self._flush()
        self._transport.close()

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, (events.WindowUpdated, events.RemoteSettingsChanged)):
            self._may_send.set()
        elif isinstance(event, events.DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self._on_data(event.stream_id, event.data)
        elif isinstance(event, events.ConnectionTerminated):
            self._transport.close()

    def _on_data(self, stream: int, data: bytes) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        data = self._http.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                self._transport.abort()


class _Call:
    """A call that the server answers."""

    def __init__(self, *, is_stream: bool) -> None:
        self.is_stream = is_stream
        self.inbox = _Inbox()
        self.task: asyncio.Task[None] | None = None
        #: What the caller is told of the cancellation of the task; None if there is no caller left.
        self.refusal: RpcError | None = None

    def end(self, refusal: RpcError | None = None) -> None:
        self.refusal = self.refusal or refusal
        if self.task:
            self.task.cancel()


class _ServerConnection(_Connection):
    def __init__(
        self, methods: Mapping[str, Method], connections: set[_ServerConnection], receive_s: float
    ) -> None:
        super().__init__(is_client=False)
        self._methods = methods
        self._connections = connections
        self._receive_s = receive_s
        self._calls: dict[int, _Call] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            transport.close()
            return
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.discard(self)
        for call in self._calls.values():
            call.end()

    async def drain(self) -> None:
        """End streams, let other calls finish, and close."""
        for call in self._calls.values():
            if call.is_stream:
                call.end(RpcError(StatusCode.UNAVAILABLE, "the server is stopping"))
        tasks = [call.task for call in self._calls.values() if call.task]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        self.close()

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.RequestReceived):
            self._open(event.stream_id, dict(event.headers))
        elif isinstance(event, events.StreamReset) and event.stream_id in self._calls:
            self._calls[event.stream_id].end()
        elif isinstance(event, events.StreamEnded) and event.stream_id in self._calls:
            self._calls[event.stream_id].inbox.end()
        else:
            super()._on_event(event)

    def _open(self, stream: int, headers: Mapping[bytes, bytes]) -> None:
        method = self._methods.get(headers.get(b":path", b"").decode("latin-1"))
        if not headers.get(b"content-type", b"").startswith(_CONTENT_TYPE):
            method = None
        call = self._calls[stream] = _Call(is_stream=method is not None and method.is_stream)
        call.task = asyncio.ensure_future(self._answer(stream, call, method))
        loop = asyncio.get_running_loop()
        what = f"the request did not arrive within {self._receive_s:g} s"
        late = RpcError(StatusCode.DEADLINE_EXCEEDED, what)
        arrival = loop.call_later(self._receive_s, call.inbox.fail, late)
        call.inbox.message.add_done_callback(lambda _: arrival.cancel())

        def forget(_: object) -> None:
            arrival.cancel()
            call.inbox.close()
            self._calls.pop(stream, None)

        call.task.add_done_callback(forget)
        timeout_s = _seconds(headers.get(b"grpc-timeout", b""))
        if timeout_s is not None:
            expired = RpcError(StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")
            timer = loop.call_later(timeout_s, call.end, expired)
            call.task.add_done_callback(lambda _: timer.cancel())

    def _on_data(self, stream: int, data: bytes) -> None:
        if stream in self._calls:
            self._calls[stream].inbox.feed(data)

    async def _answer(self, stream: int, call: _Call, method: Method | None) -> None:
        """Answer the call with messages and a status; ends silently if the peer has gone."""
        has_begun = False
        failure = RpcError(StatusCode.OK, "")
        try:
            if method is None:
                raise RpcError(StatusCode.UNIMPLEMENTED, "there is no such gRPC method")
            async for message in method.answers(await call.inbox.message):
                if not has_begun:
                    self._http.send_headers(stream, [(b":status", b"200"), (b"content-type", _CONTENT_TYPE)])
                    has_begun = True
                await self.send_message(stream, message)
        except RpcError as error:
            failure = error
        except H2Error:
            return
        except asyncio.CancelledError:
            if call.refusal is None:
                raise
            failure = call.refusal
        except Exception as error:  # the caller is told, and other calls go on
            log.exception("a call could not be answered")
            failure = RpcError(StatusCode.INTERNAL, f"internal error: {error!r}")
        self._end(stream, failure, has_begun=has_begun)

    def _end(self, stream: int, failure: RpcError, *, has_begun: bool) -> None:
        text = quote(failure.message[:_MAX_TEXT], safe=_PLAIN).encode()
        trailers = [(b"grpc-status", b"%d" % failure.status), (b"grpc-message", text)]
        headers = [] if has_begun else [(b":status", b"200"), (b"content-type", _CONTENT_TYPE)]
        with contextlib.suppress(H2Error):  # the peer has closed the stream meanwhile
            self._http.send_headers(stream, headers + trailers, end_stream=True)
            self._http.reset_stream(stream, ErrorCodes.NO_ERROR)  # the peer need not send more of its request
        self._flush()


def _seconds(timeout: bytes) -> float | None:
    """Return the value of a `grpc-timeout` header in s; None if it is missing or malformed."""
    match = re.fullmatch(rb"([0-9]{1,8})([HMSmun])", timeout)
    return int(match[1]) * _UNITS_S[match[2]] if match else None


class RpcServer:
    """Serves methods, by their paths, on a Unix socket."""

    def __init__(self, methods: Mapping[str, Method], receive_s: float = _RECEIVE_S) -> None:
        """`receive_s` is how long a request may take to arrive."""
        self._methods = methods
        self._receive_s = receive_s
        self._connections: set[_ServerConnection] = set()
        self._server: asyncio.AbstractServer | None = None
        self._path = ""
        self._version: FileVersion | None = None

    async def open(self, path: str) -> None:
        """Listen there, in place of a socket that an earlier process has left.

        Raises OSError if that is not possible.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _ServerConnection(self._methods, self._connections, self._receive_s),
            path,
            start_serving=False,
        )
        self._path = path
        self._version = version_of(path)
        os.chmod(path, 0o600)
        await self._server.start_serving()

    @property
    def is_reachable(self) -> bool:
        """Return whether clients can connect to the socket: its name may have been removed or replaced."""
        return self._version is not None and version_of(self._path) == self._version

    async def close(self) -> None:
        """Stop listening, remove the socket if its name is still ours, and let calls finish."""
        if self._server:
            if self.is_reachable:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            self._server.close()
        draining = [connection.drain() for connection in self._connections]
        await asyncio.gather(*draining)


class _ClientConnection(_Connection):
    """A connection for one call."""

    def __init__(self) -> None:
        super().__init__(is_client=True)
        self.inbox = _Inbox()

    def connection_lost(self, error: Exception | None) -> None:
        what = f"the connection was closed{f': {error}' if error else ''}"
        self.inbox.fail(RpcError(StatusCode.UNAVAILABLE, what))

    async def send(self, method: str, request: bytes, timeout_s: float) -> None:
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", _CONTENT_TYPE),
            (b"grpc-timeout", b"%dm" % (timeout_s * 1000)),
        ]
        with contextlib.suppress(H2Error):  # the server refuses the call before it has all of it
            self._http.send_headers(_CALL, headers)
            await self.send_message(_CALL, request, is_last=True)

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            self._on_headers(dict(event.headers))
        elif isinstance(event, events.StreamReset):
            what = f"the call was refused: error {event.error_code}"
            self.inbox.fail(RpcError(StatusCode.UNAVAILABLE, what))
        elif isinstance(event, events.StreamEnded):
            self.inbox.fail(RpcError(StatusCode.UNKNOWN, "the answer has no status"))
        else:
            super()._on_event(event)

    def _on_headers(self, headers: Mapping[bytes, bytes]) -> None:
        http_status = headers.get(b":status", b"200")
        status = headers.get(b"grpc-status")
        if http_status != b"200":
            self.inbox.fail(RpcError(StatusCode.UNKNOWN, f"HTTP status {http_status.decode('latin-1')}"))
        elif status == b"0":
            self.inbox.end()
        elif status is not None:
            text = unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
            code = parse_number(status.decode("latin-1"))
            self.inbox.fail(RpcError(StatusCode.UNKNOWN if code is None else code, text))

    def _on_data(self, _: int, data: bytes) -> None:
        self.inbox.feed(data)


async def call_unary(socket_path: str, method: str, request: bytes, timeout_s: float) -> bytes:
    """Call a method of the server on this socket and return its one answer.

    Raises RpcError with the server's status, or UNAVAILABLE or DEADLINE_EXCEEDED if there is no answer.
    """
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_unix_connection(_ClientConnection, socket_path)
    except OSError as error:
        raise RpcError(StatusCode.UNAVAILABLE, f"{socket_path}: {error.strerror or error}") from None
    expired = RpcError(StatusCode.DEADLINE_EXCEEDED, f"{socket_path}: no answer within {timeout_s:g} s")
    timer = loop.call_later(timeout_s, connection.inbox.fail, expired)
    sending = asyncio.ensure_future(connection.send(method, request, timeout_s))
    try:
        return await connection.inbox.message
    finally:
        timer.cancel()
        sending.cancel()
        connection.inbox.close()
        connection.close()
