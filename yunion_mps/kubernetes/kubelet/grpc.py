"""gRPC over Unix sockets, by grpclib: methods of services that are answered, and unary calls.

grpclib limits neither messages nor connections, and a server that closes breaks off its calls. What is added
here bounds what peers make this process keep, and lets calls finish.

Source: github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md and doc/statuscodes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableSequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import Buffer, EventsProcessor, H2Protocol
from grpclib.protocol import Stream as HttpStream
from grpclib.server import Server, Stream

from yunion_mps.core.tasks import first_of, within
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.kubernetes.received import MAX_MESSAGE_BYTES, OF_PROCESS

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)

#: How many connections a server has: a kubelet makes a few.
MAX_CONNECTIONS = 16
#: How many headers a call has at most: a kubelet sends about ten.
_MAX_HEADERS = 64
#: How much a connection may receive before it is read: the least that HTTP/2 allows.
_WINDOW_BYTES = (1 << 16) - 1
#: How long a request may take to arrive, in s; the kubelet's are sent at once.
_RECEIVE_S = 10.0
#: How long calls have to finish when the server closes, in s.
_CLOSE_S = 2.0
_MAX_TEXT = 1000
#: How many parts a request has at most, such as containers or ids: a node has at most 71,680 units of memory.
_MAX_PARTS = 100_000

_CONFIGURATION = Configuration(
    http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES
)


class RpcError(GRPCError):
    """A call failed, with this status."""

    message: str

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(status, message)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Rpc(Generic[RequestT, AnswerT]):
    """A method of a service, with the types of its messages; an answer may be one of a stream."""

    path: str
    request: type[RequestT]
    answer: type[AnswerT]


class Method(NamedTuple):
    """How a server answers a method: `answers` yields messages, or raises RpcError.

    A stream is ended when the server closes; other calls have a moment to finish.
    """

    rpc: Rpc[Any, Any]
    answers: Callable[[Any], AsyncIterator[Message]]
    is_stream: bool


def answered_by(rpc: Rpc[RequestT, AnswerT], answer: Callable[[RequestT], Awaitable[AnswerT]]) -> Method:
    """Return the method as a server answers it: `answer` gets the request, and returns the one answer."""

    async def answers(request: RequestT) -> AsyncIterator[Message]:
        yield await answer(request)

    return Method(rpc=rpc, answers=answers, is_stream=False)


def streamed_by(rpc: Rpc[RequestT, AnswerT], answers: Callable[[RequestT], AsyncIterator[AnswerT]]) -> Method:
    """Return the method as a server answers it: `answers` gets the request, and yields answers."""
    return Method(rpc=rpc, answers=answers, is_stream=True)


class _Received(Buffer):
    """What a call has received. Each message counts from when its length is known until the call ends."""

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        super().__init__(acknowledge)
        self._held_bytes = 0

    async def read(self, size: int) -> bytes:
        """Return so many bytes; raises RpcError if that is too much."""
        if size > MAX_MESSAGE_BYTES:
            message = f"a message is larger than {MAX_MESSAGE_BYTES} bytes"
            raise RpcError(Status.RESOURCE_EXHAUSTED, message)
        if not OF_PROCESS.hold(size):
            message = "too much is received at the same time: try again later"
            raise RpcError(Status.RESOURCE_EXHAUSTED, message)
        self._held_bytes += size
        return await super().read(size)

    def close(self) -> None:
        """Hold nothing any longer."""
        OF_PROCESS.release(self._held_bytes)
        self._held_bytes = 0


class _Processor(EventsProcessor):
    """Has each call of a connection receive into `_Received`."""

    def process(self, event: Any) -> None:
        with contextlib.suppress(NotImplementedError):  # frames of an unknown type are ignored
            super().process(event)

    def process_request_received(self, event: Any) -> None:
        if len(event.headers) > _MAX_HEADERS:
            self.close("too many headers")
        else:
            super().process_request_received(event)

    def process_stream_reset(self, event: Any) -> None:
        super().process_stream_reset(event)
        self._release(event.stream_id)  # a call that is cancelled before it has begun does not do that

    def register(self, stream: HttpStream) -> Callable[[], None]:
        super().register(stream)
        assert stream.id is not None
        stream.buffer = _Received(partial(self.connection.ack, stream.id))
        return partial(self._release, stream.id)

    def _release(self, stream_id: int) -> None:
        """Forget the call, unless that has been done, and let the peer send as much for other calls."""
        stream = self.streams.pop(stream_id, None)
        if stream:
            assert isinstance(stream.buffer, _Received)
            stream.buffer.close()
            self.connection.stream_close_waiter.set()
            if not self.connection.is_closing():
                self.connection.ack(stream_id, stream.buffer.unacked_size())


class _Connection(H2Protocol):
    """A connection of either side, in place of one that grpclib has made."""

    def __init__(self, protocol: H2Protocol) -> None:
        super().__init__(protocol.handler, protocol.config, protocol.h2_config)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.processor = _Processor(self.handler, self.connection)
        self._transport = transport

    def pause_writing(self) -> None:
        """Read nothing from a peer that does not read: most frames, such as a ping, have to be answered."""
        super().pause_writing()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()
        super().resume_writing()


class _ServerConnection(_Connection):
    """A connection of a server, which has `connections`; one too many is closed."""

    def __init__(self, protocol: H2Protocol, connections: set[_ServerConnection]) -> None:
        super().__init__(protocol)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._connections) < MAX_CONNECTIONS:
            self._connections.add(self)
        else:
            self.processor.close()

    def connection_lost(self, error: BaseException | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)


class _Service:
    """The methods of a server, as grpclib wants them."""

    def __init__(self, methods: Iterable[Method], receive_s: float) -> None:
        self._methods = methods
        self._receive_s = receive_s
        self.stopping = asyncio.Event()
        #: The calls that are being answered, with their statuses.
        self.calls: set[asyncio.Task[None]] = set()

    def __mapping__(self) -> dict[str, Handler]:
        mapping: dict[str, Handler] = {}
        for method in self._methods:
            rpc = method.rpc
            cardinality = Cardinality.UNARY_STREAM if method.is_stream else Cardinality.UNARY_UNARY
            mapping[rpc.path] = Handler(partial(self._answer, method), cardinality, rpc.request, rpc.answer)
        return mapping

    async def _answer(self, method: Method, stream: Stream[Any, Any]) -> None:
        """Answer a call; raises RpcError."""
        call = asyncio.current_task()
        assert call
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        late = RpcError(Status.DEADLINE_EXCEEDED, f"the request did not arrive within {self._receive_s:g} s")
        try:
            request = await within(self._receive_s, _receive(stream), late)
            if method.is_stream:
                await first_of(_send(stream, method.answers(request)), self.stopping.wait())
                if self.stopping.is_set():
                    raise RpcError(Status.UNAVAILABLE, "the server is stopping")
            else:
                await _send(stream, method.answers(request))
        except RpcError as error:
            raise RpcError(error.status, error.message[:_MAX_TEXT]) from None
        except Exception as error:  # the caller is told, and other calls go on
            log.exception("a call could not be answered")
            raise RpcError(Status.INTERNAL, f"internal error: {error!r}"[:_MAX_TEXT]) from None


async def _receive(stream: Stream[Any, Any]) -> Any:
    """Return the one message of a request; raises RpcError."""
    incomplete = RpcError(Status.INTERNAL, "expected one complete message")
    try:
        request = await stream.recv_message()
        surplus = await stream.recv_message()
    except DecodeError as error:
        message = f"the request cannot be decoded: {error}"
        raise RpcError(Status.INVALID_ARGUMENT, message) from None
    except NotImplementedError:
        raise RpcError(Status.UNIMPLEMENTED, "compressed messages are not supported") from None
    except AssertionError:  # less data than the length says
        raise incomplete from None
    if request is None or surplus is not None:
        raise incomplete
    for _, value in request.ListFields():
        if isinstance(value, MutableSequence) and len(value) > _MAX_PARTS:
            raise RpcError(Status.RESOURCE_EXHAUSTED, f"the request has more than {_MAX_PARTS} parts")
    return request


async def _send(stream: Stream[Any, Any], answers: AsyncIterator[Message]) -> None:
    async for answer in answers:
        await stream.send_message(answer)


async def _refuse(_: Stream[Any, Any]) -> None:
    raise RpcError(Status.UNIMPLEMENTED, "there is no such gRPC method")


class _Methods(dict[str, Handler]):
    """Methods by their paths; any other path has one that refuses, with all headers that gRPC-Go needs."""

    _UNKNOWN = Handler(_refuse, Cardinality.UNARY_UNARY, Message, Message)

    def get(self, path: str, _: object = None) -> Handler:
        return super().get(path, self._UNKNOWN)


class _Server(Server):
    """A server of grpclib's, of whose connections we know."""

    def __init__(self, service: _Service) -> None:
        super().__init__([service], config=_CONFIGURATION)
        self._mapping = _Methods(self._mapping)
        self.connections: set[_ServerConnection] = set()

    def _protocol_factory(self) -> H2Protocol:
        return _ServerConnection(super()._protocol_factory(), self.connections)

    async def listen(self, path: str) -> asyncio.AbstractServer:
        """Create the socket, which does not accept connections yet; raises OSError."""
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(self._protocol_factory, path, start_serving=False)


class RpcServer:
    """Serves methods on a Unix socket."""

    def __init__(self, methods: Iterable[Method], receive_s: float = _RECEIVE_S) -> None:
        """`receive_s` is how long a request may take to arrive."""
        self._methods = methods
        self._receive_s = receive_s
        self._path = ""
        self._version: FileVersion | None = None
        self._listener: asyncio.AbstractServer | None = None

    async def open(self, path: str) -> None:
        """Listen there, in place of a socket that an earlier process has left.

        Raises OSError if that is not possible.
        """
        self._service = _Service(self._methods, self._receive_s)
        self._server = _Server(self._service)
        self._listener = await self._server.listen(path)
        self._path = path
        self._version = version_of(path)
        os.chmod(path, 0o600)
        await self._listener.start_serving()

    @property
    def is_reachable(self) -> bool:
        """Return whether clients can connect to the socket: its name may have been removed or replaced."""
        return self._version is not None and version_of(self._path) == self._version

    async def close(self) -> None:
        """Stop listening, end streams, and let other calls finish.

        The socket is removed if its name is still ours.
        """
        if not self._listener:
            return
        if self.is_reachable:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._listener.close()
        self._service.stopping.set()
        if self._service.calls:
            await asyncio.wait(self._service.calls, timeout=_CLOSE_S)
        for connection in list(self._server.connections):
            connection.processor.close()


class _Channel(Channel):
    """A channel of grpclib's, whose connection limits what it receives."""

    def _protocol_factory(self) -> H2Protocol:
        return _Connection(super()._protocol_factory())


async def call_rpc(
    socket_path: str, rpc: Rpc[RequestT, AnswerT], request: RequestT, timeout_s: float
) -> AnswerT:
    """Call the method of the server on this socket, and return its one answer.

    Raises RpcError with the status that the server answers; without a valid answer, it is UNAVAILABLE,
    DEADLINE_EXCEEDED or INTERNAL.
    """
    channel = _Channel(path=socket_path, config=_CONFIGURATION)
    call = UnaryUnaryMethod(channel, rpc.path, rpc.request, rpc.answer)
    try:
        return await call(request, timeout=timeout_s)
    except GRPCError as error:
        raise RpcError(error.status, error.message or "") from None
    except asyncio.TimeoutError:
        message = f"{socket_path}: no answer within {timeout_s:g} s"
        raise RpcError(Status.DEADLINE_EXCEEDED, message) from None
    except OSError as error:
        raise RpcError(Status.UNAVAILABLE, f"{socket_path}: {error.strerror or error}") from None
    except StreamTerminatedError as error:
        raise RpcError(Status.UNAVAILABLE, f"{socket_path}: {error}") from None
    except (DecodeError, ProtocolError, AssertionError, NotImplementedError) as error:
        raise RpcError(Status.INTERNAL, f"{socket_path}: the answer is not valid: {error}") from None
    finally:
        channel.close()
