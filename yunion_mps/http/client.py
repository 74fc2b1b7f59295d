"""The blocking and the asyncio client: call operations, with a deadline and an error for every failure."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import h11

from yunion_mps.core.errors import ConfigError, NotAllowedError, UnreachableError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.http.messages import STATUSES, Response
from yunion_mps.http.operation import EncodedRequest, Operation
from yunion_mps.http.parameters import Value

T = TypeVar("T")

_UNIT = "yunion-mps-daemon"


class BadConfigurationError(YunionError):
    """The daemon refuses the configuration; the message holds one problem a line."""

    exit_code = ConfigError.exit_code
    code = ConfigError.code


class NoAnswerError(UnreachableError):
    """The daemon did not answer in time."""


#: The errors by status; a caller of `DaemonClient` could not correct a 400 or 415.
_KINDS = {status: kind for kind, status in STATUSES.items() if status not in (400, 415)}
_KINDS[422] = BadConfigurationError
_SUCCESSES = (200, 201)
_ACCEPTED = "application/json, text/plain"
_PIECE_BYTES = 1 << 18
#: How long asyncio waits before connecting again if the listener's backlog is full, which no event reports.
_CONNECT_RETRY_S = 0.02
#: Of SO_PEERCRED: PID, user and group.
_CREDENTIALS = struct.Struct("3i")


class Exchange:
    """One request and its response, without I/O: send `request`, then feed what comes in."""

    def __init__(
        self, method: str, request: EncodedRequest, accept: str = _ACCEPTED, *, keep_alive: bool = False
    ) -> None:
        """With `keep_alive` the connection stays open after the response."""
        self._http = h11.Connection(h11.CLIENT)
        # A client of the gateway may send any bytes as Accept.
        headers = [(b"Host", b"localhost"), (b"Accept", accept.encode("latin-1"))]
        if not keep_alive:
            headers.append((b"Connection", b"close"))
        for name, value in request.headers:
            headers.append((name.encode(), value.encode()))
        if method == "POST":
            headers.append((b"Content-Length", b"%d" % len(request.body)))
        events: list[h11.Event] = [h11.Request(method=method, target=request.target, headers=headers)]
        if request.body:
            events.append(h11.Data(data=request.body))
        events.append(h11.EndOfMessage())
        self.request = b"".join(self._http.send(event) or b"" for event in events)
        self._status = 0
        self._content_type = ""
        self._etag = ""
        self._body = bytearray()

    def feed(self, data: bytes) -> Response | None:
        """Add received data, empty at EOF; returns the response once it is complete.

        Raises h11.ProtocolError, and ConnectionError at an EOF before the end of the response.
        """
        self._http.receive_data(data)
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                if data:
                    raise
                raise ConnectionError("it stopped or restarted") from None
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                self._status = event.status_code
                headers = dict(event.headers)
                self._content_type = headers.get(b"content-type", b"").decode()
                self._etag = headers.get(b"etag", b"").decode("latin-1")
            elif isinstance(event, h11.Data):
                self._body += event.data
            else:
                etag = (("ETag", self._etag),) if self._etag else ()
                return Response(self._status, self._content_type, bytes(self._body), etag)


class DaemonClient:
    """Calls operations of the daemon and blocks until it answers; each call opens a connection of its own."""

    def __init__(self, paths: Paths, timeout_s: float | None = None) -> None:
        """`timeout_s` replaces the timeouts of the operations."""
        self._path = paths.socket
        self._timeout_s = timeout_s

    def call(
        self,
        operation: Operation[T],
        timeout_s: float | None = None,
        *,
        until_closed: bool = False,
        **arguments: Value,
    ) -> T:
        """Return the answer; raises the YunionError of the failure. Nothing is retried.

        With `until_closed` it returns once the server has closed the connection, when that program has ended.
        """
        timeout_s = timeout_s or self._timeout_s or default_timeout_s(operation, arguments)
        exchange = Exchange(operation.method, operation.encode(arguments), keep_alive=until_closed)
        response = self._send(exchange, timeout_s, until_closed=until_closed)
        result: T = result_of(response, is_text=bool(operation.media_types))
        return result

    def is_visible(self, timeout_s: float) -> bool:
        """Return whether our PID namespace shows the daemon's process.

        Raises YunionError if the daemon cannot be reached.
        Otherwise the kernel reports its PID as 0 (unix(7), SO_PEERCRED), and its PIDs are not ours.
        """
        with self._connect(timeout_s) as connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(credentials)[0])

    def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """Return the answer, None if its ETag is still `if_none_match`, and its ETag.

        Raises the YunionError of a failure.
        """
        exchange = Exchange(operation.method, operation.encode(arguments))
        response = self._send(exchange, default_timeout_s(operation, arguments), until_closed=False)
        return conditional_result_of(response)

    def _send(self, exchange: Exchange, timeout_s: float, *, until_closed: bool) -> Response:
        deadline_s = time.monotonic() + timeout_s
        with self._connect(timeout_s) as connection:
            try:
                with contextlib.suppress(BrokenPipeError):  # one that is turned away can still read why
                    connection.sendall(exchange.request)
                response = None
                while response is None:
                    response = exchange.feed(_receive(connection, deadline_s))
                if until_closed and response.status == 200:
                    with contextlib.suppress(ConnectionError):
                        while _receive(connection, deadline_s):
                            pass
            except socket.timeout:
                raise timeout_error(self._path, timeout_s) from None
            except (OSError, h11.ProtocolError) as error:
                raise disconnected_error(self._path, error) from None
        return response

    def _connect(self, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # In a burst of clients a blocking connect waits in the kernel; with Python's timeout it fails.
            wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
            connection.connect(self._path)
            connection.settimeout(timeout_s)
        except OSError as error:
            connection.close()
            if error.errno == errno.EAGAIN:
                raise timeout_error(self._path, timeout_s) from None
            raise unreachable_error(self._path, error) from None
        return connection


class AsyncDaemonClient:
    """The same for asyncio; it is not bound to an event loop."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.socket

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """Return the answer; raises the YunionError of the failure. Nothing is retried."""
        timeout_s = timeout_s or default_timeout_s(operation, arguments)
        response = await self._send(Exchange(operation.method, operation.encode(arguments)), timeout_s)
        result: T = result_of(response, is_text=bool(operation.media_types))
        return result

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """Return the answer and its ETag, as `DaemonClient.call_if_changed` does; raises YunionError."""
        exchange = Exchange(operation.method, operation.encode(arguments))
        response = await self._send(exchange, default_timeout_s(operation, arguments))
        return conditional_result_of(response)

    async def wait_for_change(self, operation: Operation[Any], **arguments: Value) -> str:
        """Wait for a change; return the new ETag. Raises the YunionError of a failure.

        The answer is not decoded, because that can take much memory.
        """
        exchange = Exchange(operation.method, operation.encode(arguments))
        response = await self._send(exchange, default_timeout_s(operation, arguments))
        if response.status not in (*_SUCCESSES, 304):
            result_of(response)
        return dict(response.headers).get("ETag", "")

    async def _send(self, exchange: Exchange, timeout_s: float) -> Response:
        from yunion_mps.core.tasks import within  # asyncio, which a blocking client need not import

        return await within(timeout_s, send_to(self._path, exchange), timeout_error(self._path, timeout_s))

    async def sleep(self, delay_s: float) -> None:
        import asyncio  # as in send_to

        await asyncio.sleep(delay_s)


async def send_to(path: str, exchange: Exchange) -> Response:
    """Send the request to this socket, and return the response, without a timeout; raises YunionError."""
    import asyncio  # 60 ms, which a blocking client need not pay

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    connection.connect(path)
                    break
                await asyncio.sleep(_CONNECT_RETRY_S)
        except OSError as error:
            raise unreachable_error(path, error) from None
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(BrokenPipeError):  # one that is turned away can still read why
                await loop.sock_sendall(connection, exchange.request)
            response = None
            while response is None:
                response = exchange.feed(await loop.sock_recv(connection, _PIECE_BYTES))
        except (OSError, h11.ProtocolError) as error:
            raise disconnected_error(path, error) from None
        return response


def default_timeout_s(operation: Operation[T], arguments: Mapping[str, Value]) -> float:
    """Return how long to wait for the answer, in s: as long as the daemon may wait, too."""
    return operation.timeout_s + int(str(arguments.get("wait_s") or 0))


def unreachable_error(path: str, error: OSError) -> YunionError:
    """Return the error for a socket that cannot be connected to, with what starts the daemon."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotAllowedError(f"permission denied: cannot connect to {path}", _join_hint(os.geteuid()))
    if error.errno == errno.ENOENT:
        message = f"the daemon is not running: {path} does not exist"
    elif error.errno == errno.ECONNREFUSED:
        message = f"the daemon is not running: nothing is listening on {path}"
    else:
        message = f"the daemon cannot be reached on {path}: {error.strerror}"
    return UnreachableError(
        message, f"start it: systemctl start {_UNIT}; if that fails, see: systemctl status {_UNIT}"
    )


def _join_hint(uid: int) -> str:
    """Return how this user joins the group of the socket; usermod knows only users with a name."""
    from yunion_mps.host.proc import user_name  # 1 ms, which only this error needs

    name = user_name(uid)
    if name == f"uid {uid}":
        start = f"setpriv --reuid {uid} --regid {uid} --groups yunion-mps COMMAND"
        return f"run as root, or have root start COMMAND in the group, because {name} has no name: {start}"
    return f"run as root, or join the group: usermod -aG yunion-mps {name}, then log in again"


def timeout_error(path: str, timeout_s: float) -> NoAnswerError:
    """Return the error for a daemon that did not answer on this socket in time."""
    return NoAnswerError(
        f"the daemon did not answer on {path} within {timeout_s:g} s",
        f"see what it is doing: journalctl -u {_UNIT}; a restart kills jobs that are still running after "
        "cuda_mps_stop_timeout_s",
    )


def disconnected_error(path: str, error: Exception) -> UnreachableError:
    """Return the error for an answer that is incomplete or not HTTP."""
    return UnreachableError(
        f"the daemon's answer on {path} was cut off: {error}", f"see: journalctl -u {_UNIT}"
    )


def _receive(connection: socket.socket, deadline_s: float) -> bytes:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise socket.timeout
    connection.settimeout(left_s)
    return connection.recv(_PIECE_BYTES)


def conditional_result_of(response: Response) -> tuple[Any, str]:
    """Return the value of the response, None if it has not changed, and its ETag.

    Raises the YunionError of a failure.
    """
    value = None if response.status == 304 else result_of(response)
    return value, dict(response.headers).get("ETag", "")


def result_of(response: Response, *, is_text: bool = False) -> Any:
    """Return the value, or the text, of the response; raises the YunionError of a failure."""
    if response.status in _SUCCESSES and is_text:
        return response.body.decode(errors="replace")
    try:
        value = json.loads(response.body)
    except ValueError:
        raise UnreachableError(
            f"the daemon's answer (status {response.status}) is not JSON",
            "check which program listens on its socket: ss -xlp",
        ) from None
    if response.status in _SUCCESSES:
        return value
    problem = value if isinstance(value, dict) else {}
    message = str(problem.get("detail") or f"the daemon answered with status {response.status}")
    hint = str(problem.get("hint") or f"see: journalctl -u {_UNIT}")
    code = str(problem.get("code") or "")
    raise _KINDS.get(response.status, YunionError)(message, hint, code)
