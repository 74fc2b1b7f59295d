"""The asyncio client: calls operations of the daemon as http/client does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TypeVar

import h11

from yunion_mps.http.client import (
    Exchange,
    conditional_result_of,
    default_timeout_s,
    disconnected_error,
    result_of,
    timeout_error,
    unreachable_error,
)
from yunion_mps.http.messages import Response
from yunion_mps.http.operation import Operation
from yunion_mps.http.parameters import Value
from yunion_mps.paths import Paths

T = TypeVar("T")

_PIECE_BYTES = 1 << 18
#: How long to wait before connecting again if the listener's backlog is full, in s.
_CONNECT_RETRY_S = 0.02


class AsyncDaemonClient:
    def __init__(self, paths: Paths) -> None:
        self._path = paths.socket

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """Return the answer; raises the YunionError of the failure. Nothing is retried."""
        timeout_s = timeout_s or default_timeout_s(operation, arguments)
        answer = await self._answer(Exchange(operation.method, operation.encode(arguments)), timeout_s)
        result: T = result_of(answer, is_text=bool(operation.media_types))
        return result

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """The answer and its ETag, as `DaemonClient.call_if_changed` returns them."""
        exchange = Exchange(operation.method, operation.encode(arguments))
        return conditional_result_of(await self._answer(exchange, default_timeout_s(operation, arguments)))

    async def _answer(self, exchange: Exchange, timeout_s: float) -> Response:
        # Not wait_for: until Python 3.12 it forgets a cancellation that comes with the answer.
        answering = asyncio.ensure_future(answer_on(self._path, exchange))
        try:
            await asyncio.wait({answering}, timeout=timeout_s)
            if not answering.done():
                raise timeout_error(self._path, timeout_s)
            return answering.result()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


async def answer_on(path: str, exchange: Exchange) -> Response:
    """Send the request to this socket, and return the answer, without a timeout; raises YunionError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0)
        try:
            await _connect(connection, path)
        except OSError as error:
            raise unreachable_error(path, error) from None
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(BrokenPipeError):  # one that is turned away can still read why
                await loop.sock_sendall(connection, exchange.request)
            answer = None
            while answer is None:
                answer = exchange.feed(await loop.sock_recv(connection, _PIECE_BYTES))
        except (OSError, h11.ProtocolError) as error:
            raise disconnected_error(path, error) from None
        return answer


async def _connect(connection: socket.socket, path: str) -> None:
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:  # the socket's backlog is full, and no event signals that it has room again
            await asyncio.sleep(_CONNECT_RETRY_S)
        else:
            return
