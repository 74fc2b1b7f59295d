"""The server and its connections: each handles its requests one at a time, without delaying the others.

Sending a request and reading its answer have deadlines, and requests have a size limit. h11 parses; a request
that it rejects is answered and the connection closed. The server hands its socket over to the next program.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

import h11

from yunion_mps.host.proc import job_unit_of
from yunion_mps.host.sockets import UNKNOWN_UID, peer_credentials
from yunion_mps.http.listener import Listener, is_disconnected
from yunion_mps.http.messages import Request, Response, problem_response
from yunion_mps.http.pool import BUFFER_BYTES, Application, ConnectionPool, Limits

log = logging.getLogger(__name__)

#: From this size on, answers count against the client's limit of unread bytes.
_LARGE_RESPONSE_BYTES = 64 << 10

#: How many h11 events are handled before other connections get their turn.
_EVENTS_A_TURN = 64

#: How soon an honest client has sent its first request; a slower one may be replaced.
_FIRST_REQUEST_S = 0.25

#: How many clients may wait to be accepted, so that a burst of them is not refused.
_BACKLOG = 512

#: Connections accepted per turn of the loop; asyncio logs as many errors if descriptors run out.
_ACCEPTS_A_TURN = 8

#: Turns of the loop from accepting a client to `connection_made`.
_TURNS_TO_BEGIN = 5

TOO_MANY = problem_response(503, "too many connections are open", "close some, or try again in a moment")


class Connection(asyncio.BufferedProtocol):
    """One client's connection: handles one request per turn, so that no client monopolizes the loop."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pid = 0
        self.uid = UNKNOWN_UID
        self.unit: str | None = ""
        #: The user, or the address of a client over TCP.
        self.client: int | str = UNKNOWN_UID
        self._on_close: list[Callable[[], None]] = []
        self._pool = pool
        self._limits = pool.limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=pool.limits.head_bytes)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._request: h11.Request | None = None
        self._body = b""
        self._blocked = False
        self._is_admitted = False
        self._admitted_s = 0.0
        self.was_answered = False
        self._awaits_event = False
        self._pending: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self.pid, self.uid = peer_credentials(transport.get_extra_info("socket"))
        self.unit = job_unit_of(self.pid)  # now, because the process may end and its PID be reused
        address = transport.get_extra_info("peername") or ("",)
        self.client = self.uid if self.uid != UNKNOWN_UID else str(address[0])
        self._set_deadline(self._limits.answer_timeout_s)
        if not self._pool.admit(self):
            self._refuse(TOO_MANY)

    def begin(self) -> None:
        """Start to handle requests, because the pool has admitted it."""
        self._is_admitted = True
        self._admitted_s = asyncio.get_running_loop().time()
        self._set_deadline(self._limits.first_request_timeout_s)
        if self.unhandled_bytes:
            self._turn = asyncio.get_running_loop().call_soon(self._process)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer:
            self._timer.cancel()
        if self._turn:
            self._turn.cancel()
        if self._pending:
            self._pending.cancel()
        self._pool.forget(self)
        for call in self._on_close:
            call()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that all connections share, because it is emptied at once."""
        del sizehint
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._http.receive_data(bytes(self._pool.buffer[:nbytes]))
        waits = self._pending or not self._is_admitted
        if waits and self._transport and self.unhandled_bytes > BUFFER_BYTES:
            self._transport.pause_reading()
        self._process()

    def eof_received(self) -> bool:
        """Answer what the client has sent before the close, because it sends no more."""
        self._http.receive_data(b"")
        if self._pending and self._transport and is_disconnected(self._transport.get_extra_info("socket")):
            self._transport.abort()  # the client cannot receive the answer
        self._process()
        return True

    def pause_writing(self) -> None:
        """Set a deadline and read no more requests, because the client does not read its answer."""
        assert self._transport is not None
        self._blocked = True
        self._transport.pause_reading()
        self._set_deadline(self._limits.answer_timeout_s)

    def resume_writing(self) -> None:
        self._blocked = False
        self._set_deadline(self._idle_timeout_s)
        self._process()

    @property
    def _idle_timeout_s(self) -> float | None:
        return None if self._on_close else self._limits.idle_timeout_s

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def unhandled_bytes(self) -> int:
        """How much has been received of requests that wait for their turn."""
        return len(self._http.trailing_data[0])

    @property
    def is_busy(self) -> bool:
        """Whether a request is arriving or being answered, or an answer is unread."""
        waits = self._pending is not None or self._turn is not None or self.unread_bytes > 0
        return waits or not self.was_answered or self.unhandled_bytes > 0

    @property
    def is_replaceable(self) -> bool:
        """Whether it may be closed for a new one: it handles no request, and no lease depends on it."""
        if self._on_close:
            return False
        if self._pending is not None:
            return self._awaits_event
        if not self.was_answered and self._limits.waiting:
            return asyncio.get_running_loop().time() - self._admitted_s > _FIRST_REQUEST_S
        return self._blocked or self._turn is None

    def await_event(self) -> None:
        """Note that the current request waits for an event, so the connection may be replaced."""
        self._awaits_event = True
        self._pool.note_awaiting(self)

    def keep_open(self, on_close: Callable[[], None]) -> None:
        """Exempt it from the idle timeout, because something is bound to it; call `on_close` at its end."""
        self._on_close.append(on_close)

    def evict(self) -> None:
        """Close it in favour of a new connection; a request that has begun is refused."""
        if (not self.was_answered or self._request_has_begun) and not self.unread_bytes:
            self._refuse(TOO_MANY)
        else:
            self.abort()

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    def _process(self) -> None:
        """Handle one turn; the rest waits for the next turn, and nothing is read until then."""
        had_to_wait = self._turn is not None
        self._turn = None
        if self._transport is None or self._transport.is_closing() or self._blocked or self._pending:
            return
        if not self._is_admitted:
            return
        try:
            more = self._handle()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint if error.error_status_hint in (400, 431, 501) else 400
            text = str(error).partition(":")[0]  # h11 adds the bytes
            why = f"the request is not valid HTTP: {text}"
            hint = "send HTTP/1.1 requests, as curl does"
            if status == 431:
                why = f"the request's header is larger than {self._limits.head_bytes} bytes"
                hint = "send fewer or shorter headers"
            self._refuse(problem_response(status, why, hint))
            return
        if self._pending:
            if self.unhandled_bytes <= BUFFER_BYTES:
                self._transport.resume_reading()  # to notice if the client disconnects
        elif more and not self._blocked:
            self._transport.pause_reading()
            self._turn = asyncio.get_running_loop().call_soon(self._process)
        elif not self._blocked:
            self._transport.resume_reading()
            if had_to_wait:  # what the client has sent meanwhile is not late
                begun = self._request_has_begun
                self._set_deadline(self._limits.request_timeout_s if begun else self._idle_timeout_s)

    def _handle(self) -> bool:
        """Handle received events, up to one answer; returns whether more may be buffered."""
        for _ in range(_EVENTS_A_TURN):
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._start_request(event)
            elif isinstance(event, h11.Data):
                self._add_body(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._dispatch()
                return self._http.trailing_data != (b"", False)
            else:
                if isinstance(event, h11.ConnectionClosed):
                    self._close()
                return False
        return True

    def _start_request(self, request: h11.Request) -> None:
        self._request = request
        self._body = b""
        # h11 limits a head that arrives in pieces, but not one that arrives at once.
        size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > self._limits.head_bytes:
            raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        if self.was_answered:
            self._set_deadline(self._limits.request_timeout_s)
        if self._transport and self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._transport.write(self._http.send(go_on) or b"")

    def _add_body(self, piece: bytes) -> None:
        self._body += piece
        if len(self._body) > self._limits.body_bytes:
            text = f"the body is larger than {self._limits.body_bytes} bytes"
            self._refuse(problem_response(413, text, "send only the members that the operation defines"))
            raise h11.RemoteProtocolError("body too large")

    def _dispatch(self) -> None:
        assert self._request is not None
        request = self._request
        method = request.method.decode()
        target = request.target.decode("ascii", "replace")
        pairs = reversed(list(request.headers))  # of repeated headers the first counts
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        asked = Request(
            method=method,
            target=target,
            uid=self.uid,
            pid=self.pid,
            unit=self.unit,
            keep_open=self.keep_open,
            headers=headers,
            body=self._body,
            await_event=self.await_event,
        )
        self._body = b""
        response = self._pool.application.handle(asked)
        if isinstance(response, Response):
            self._respond(response)
            return
        if self._timer:
            self._timer.cancel()  # the request has its own deadline, which may be longer
        self._pending = asyncio.ensure_future(response)
        self._pending.add_done_callback(self._on_response)

    def _on_response(self, awaited: asyncio.Future[Response]) -> None:
        self._pending = None
        if awaited.cancelled():
            self.abort()  # there will be no answer
            return
        if self._transport is None or self._transport.is_closing():
            return
        failure = awaited.exception()
        if failure:  # without an answer, the client would wait forever
            log.error("a request could not be answered", exc_info=failure)
            hint = "see the service's log: journalctl -u 'yunion-mps-*'"
            self._respond(problem_response(500, "internal error", hint))
        else:
            self._respond(awaited.result())
        if not self._transport.is_closing():
            self._process()

    def _respond(self, response: Response) -> None:
        large = len(response.body) > _LARGE_RESPONSE_BYTES
        if large and self._pool.unread_bytes(self.client) > self._limits.unread_bytes:
            response = problem_response(
                503, "too much response data is waiting to be read", "read it or request less"
            )
        self._send(response)
        self._awaits_event = False
        self._pool.note_answer(self)
        self._set_deadline(self._limits.answer_timeout_s if self._blocked else self._idle_timeout_s)
        if self._http.our_state is h11.MUST_CLOSE:
            self._close()
        elif self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._request = None

    def _send(self, response: Response) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self.was_answered = True
        headers = [*response.headers]
        if response.status != 304:
            length = str(len(response.body))
            headers += [("Content-Type", response.content_type), ("Content-Length", length)]
        head = h11.Response(status_code=response.status, headers=headers)
        out = self._http.send(head) or b""
        is_head = self._request is not None and self._request.method == b"HEAD"
        if not is_head:
            out += self._http.send(h11.Data(data=response.body)) or b""
        out += self._http.send(h11.EndOfMessage()) or b""
        self._transport.write(out)

    def _refuse(self, response: Response) -> None:
        """Send the response if still possible, and close."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(response._replace(headers=(*response.headers, ("Connection", "close"))))
        self._close()

    def _close(self) -> None:
        """Close once the client has read what was written, or at the deadline."""
        if self._transport and not self._transport.is_closing():
            self._transport.close()
            self._set_deadline(self._limits.answer_timeout_s)

    def _set_deadline(self, wait_s: float | None) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timeout)

    @property
    def _request_has_begun(self) -> bool:
        state = self._http.our_state
        return state is h11.SEND_RESPONSE or (state is h11.IDLE and self.unhandled_bytes > 0)

    def _on_timeout(self) -> None:
        """Close the connection of a client that was too slow; answer an incomplete request with 408."""
        if self._transport is None:
            return
        if self._turn or self._pending:  # the daemon is slow, not the client
            self._set_deadline(self._limits.request_timeout_s)
            return
        if not self._is_admitted:
            self._refuse(TOO_MANY)
        elif self._request_has_begun and not self._blocked and not self._transport.is_closing():
            self._refuse(problem_response(408, "the request did not arrive in time", "send it at once"))
        else:
            self._transport.abort()


class Server:
    """Accepts connections on one socket at a time; owns their pool."""

    def __init__(self, application: Application, limits: Limits = Limits()) -> None:  # noqa: B008 - it is frozen
        self.pool = ConnectionPool(application, limits)
        self._server: asyncio.AbstractServer | None = None
        self._listener: socket.socket | None = None

    async def open(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = listener
        create_server = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        self._server = await create_server(
            lambda: Connection(self.pool), sock=listener, backlog=_ACCEPTS_A_TURN, start_serving=False
        )
        await self._server.start_serving()  # if this is cancelled, `close` has a server to close
        listener.listen(_BACKLOG)

    async def reopen(self, listener: Listener) -> None:
        """Accept on a new socket, because the name of the old one is gone; raises HostError."""
        await self._stop_accepting()
        listener.renew()
        await self.open(listener.socket)

    async def close(self) -> None:
        await self._stop_accepting()
        self.pool.abort_all()

    async def hand_over(self) -> None:
        """Stop accepting, leave the socket open, and give clients a moment to read their answers.

        Later clients wait in the kernel's backlog for the program that continues with the socket.
        """
        await self._pause_accepting()
        end_s = asyncio.get_running_loop().time() + self.pool.limits.hand_over_s
        while any(connection.is_busy for connection in self.pool.connections):
            if asyncio.get_running_loop().time() > end_s:
                break
            await asyncio.sleep(0.005)
        self.pool.abort_all()

    async def _pause_accepting(self) -> None:
        """Leave new clients in the kernel's backlog, and let accepted ones become connections."""
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)

    async def _stop_accepting(self) -> None:
        """Close the socket, after the pause: asyncio would drop clients that it has only accepted."""
        if self._server:
            await self._pause_accepting()
            self._server.close()
            self._server = None
            self._listener = None
