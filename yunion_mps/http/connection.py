"""Connections: each has its requests handled one after another, at no cost to other connections.

Each has a deadline for its request and for reading the answer, and a bound on what it may send. h11 parses;
a request that it refuses is answered and the connection closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import h11

from yunion_mps.host.systemd import job_unit_of
from yunion_mps.http.listener import STRANGER, is_gone, peer_of
from yunion_mps.http.messages import Request, Response, problem
from yunion_mps.http.pool import KEPT_BYTES, ConnectionPool

log = logging.getLogger(__name__)

#: From this size on it is looked at how much a user has left unread.
_LARGE_ANSWER_BYTES = 64 << 10

#: A body may come in this many pieces before others get their turn.
_EVENTS_A_TURN = 64


_NOT_MODIFIED = 304

#: So soon a client has sent its request, if it is not there to take places from others.
_FIRST_REQUEST_S = 0.25

TOO_MANY = problem(503, "too many connections are open", "close some, or try again in a moment")


class Connection(asyncio.BufferedProtocol):
    """One client: its requests one after another, one a turn, so that none keeps the loop from others."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pid = 0
        self.uid = STRANGER
        self.unit: str | None = ""
        #: The user, or the address of a client over TCP.
        self.client: int | str = STRANGER
        self._at_end: list[Callable[[], None]] = []
        self._pool = pool
        self._limits = pool.limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=pool.limits.head_bytes)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._request: h11.Request | None = None
        self._body = b""
        self._blocked = False
        self._has_place = False
        self._begun_s = 0.0
        self._fresh = True
        self._awaits_event = False
        self._awaited: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=KEPT_BYTES)
        self.pid, self.uid = peer_of(transport.get_extra_info("socket"))
        self.unit = job_unit_of(self.pid)  # now, because the process may end, and its PID be given again
        address = transport.get_extra_info("peername") or ("",)
        self.client = self.uid if self.uid != STRANGER else str(address[0])
        self._set_deadline(self._limits.answer_timeout_s)
        if not self._pool.admit(self):
            self._refuse(TOO_MANY)

    def begin(self) -> None:
        """Handle requests: it has its place."""
        self._has_place = True
        self._begun_s = asyncio.get_running_loop().time()
        self._set_deadline(self._limits.first_request_timeout_s)
        if self._http.trailing_data[0]:
            self._turn = asyncio.get_running_loop().call_soon(self._work)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer:
            self._timer.cancel()
        if self._turn:
            self._turn.cancel()
        if self._awaited:
            self._awaited.cancel()
        self._pool.forget(self)
        for call in self._at_end:
            call()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that all connections share, because it is emptied at once."""
        del sizehint
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._http.receive_data(bytes(self._pool.buffer[:nbytes]))
        waits = self._awaited or not self._has_place
        if waits and self._transport and len(self._http.trailing_data[0]) > KEPT_BYTES:
            self._transport.pause_reading()
        self._work()

    def eof_received(self) -> bool:
        """The client sends no more; what it has asked is still answered, and then the connection closed."""
        self._http.receive_data(b"")
        if self._awaited and self._transport and is_gone(self._transport.get_extra_info("socket")):
            self._transport.abort()  # the client cannot get what it waits for
        self._work()
        return True

    def pause_writing(self) -> None:
        """The client does not read its answer: it gets a deadline, and no more is read from it."""
        assert self._transport is not None
        self._blocked = True
        self._transport.pause_reading()
        self._set_deadline(self._limits.answer_timeout_s)

    def resume_writing(self) -> None:
        self._blocked = False
        self._set_deadline(self._idle_timeout_s)
        self._work()

    @property
    def _idle_timeout_s(self) -> float | None:
        return None if self._at_end else self._limits.idle_timeout_s

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def is_busy(self) -> bool:
        """Whether a request is on its way or being answered, or its answer not read yet."""
        waits = self._awaited is not None or self._turn is not None or self.unread_bytes > 0
        return waits or self._fresh or bool(self._http.trailing_data[0])

    @property
    def may_be_replaced(self) -> bool:
        """Whether it may be closed for a new one: no request is being handled, and no lease depends on it."""
        if self._at_end or (self._awaited is not None and not self._awaits_event):
            return False
        if self._fresh and self._limits.waiting:
            return asyncio.get_running_loop().time() - self._begun_s > _FIRST_REQUEST_S
        return self._blocked or self._turn is None

    @property
    def was_answered(self) -> bool:
        """Whether it has had an answer."""
        return not self._fresh

    def await_event(self) -> None:
        """The current request waits for an event; until then the connection may be replaced."""
        self._awaits_event = True

    def keep(self, at_end: Callable[[], None]) -> None:
        """Something hangs on this connection: it may be idle for good, and `at_end` is called at its end."""
        self._at_end.append(at_end)

    def make_room(self) -> None:
        """Close it in favour of a new connection, and say so if a request has begun."""
        if (self._fresh or self._request_has_begun) and not self.unread_bytes:
            self._refuse(TOO_MANY)
        else:
            self.abort()

    def abort(self) -> None:
        """End it now, whatever is under way."""
        if self._transport:
            self._transport.abort()

    def _work(self) -> None:
        """Take a turn: what is left after it waits for the next one, and nothing is read until then."""
        self._turn = None
        if self._transport is None or self._transport.is_closing() or self._blocked or self._awaited:
            return
        if not self._has_place:
            return
        try:
            more = self._handle()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint if error.error_status_hint in (400, 431, 501) else 400
            why = f"the request is not valid HTTP: {error}"
            if status == 431:
                why = f"the request's head is larger than {self._limits.head_bytes} bytes"
            self._refuse(problem(status, why))
            return
        if self._awaited:
            if len(self._http.trailing_data[0]) <= KEPT_BYTES:
                self._transport.resume_reading()  # so that the client's end is noticed
        elif more and not self._blocked:
            self._transport.pause_reading()
            self._turn = asyncio.get_running_loop().call_soon(self._work)
        elif not self._blocked:
            self._transport.resume_reading()

    def _handle(self) -> bool:
        """Handle what has come in, up to one answer; returns whether something may be left."""
        for _ in range(_EVENTS_A_TURN):
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data):
                self._take(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._answer()
                return self._http.trailing_data != (b"", False)
            else:
                if isinstance(event, h11.ConnectionClosed):
                    self._close()
                return False
        return True

    def _begin(self, request: h11.Request) -> None:
        self._request = request
        self._body = b""
        # h11 bounds a head that comes in pieces, not one that comes whole.
        size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > self._limits.head_bytes:
            raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        if not self._fresh:
            self._set_deadline(self._limits.request_timeout_s)
        if self._transport and self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._transport.write(self._http.send(go_on) or b"")

    def _take(self, piece: bytes) -> None:
        """Add a piece to the body, up to a size."""
        self._body += piece
        if len(self._body) > self._limits.body_bytes:
            what = f"the body is larger than {self._limits.body_bytes} bytes"
            self._refuse(problem(413, what, "send only the members that the operation has"))
            raise h11.RemoteProtocolError("body too large")

    def _answer(self) -> None:
        assert self._request is not None
        request = self._request
        method, target = request.method.decode(), request.target.decode("ascii", "replace")
        pairs = reversed(list(request.headers))  # of what comes twice, the first counts
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        peer = (self.uid, self.pid, self.unit)
        asked = Request(method, target, *peer, self.keep, headers, self._body, self.await_event)
        self._body = b""
        answer = self._pool.application.answer(asked)
        if isinstance(answer, Response):
            self._give(answer)
            return
        if self._timer:
            self._timer.cancel()  # it has its own deadline, which may be longer than ours
        self._awaited = asyncio.ensure_future(answer)
        self._awaited.add_done_callback(self._got)

    def _got(self, awaited: asyncio.Future[Response]) -> None:
        self._awaited = None
        if awaited.cancelled():
            self.abort()  # there is no answer, and none will come
            return
        if self._transport is None or self._transport.is_closing():
            return
        failure = awaited.exception()
        if failure:  # without an answer, the client would wait for good, and its connection with it
            log.error("a request could not be answered", exc_info=failure)
        self._give(problem(500, "a fault, which the log tells of") if failure else awaited.result())
        if not self._transport.is_closing():
            self._work()

    def _give(self, answer: Response) -> None:
        large = len(answer.body) > _LARGE_ANSWER_BYTES
        if large and self._pool.unread_bytes(self.client) > self._limits.unread_bytes:
            answer = problem(503, "too much of your answers waits to be read", "read it, or ask for less")
        self._send(answer)
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
        self._fresh = False
        headers = [*response.headers]
        if response.status != _NOT_MODIFIED:
            length = str(len(response.body))
            headers += [("Content-Type", response.content_type), ("Content-Length", length)]
        head = h11.Response(status_code=response.status, headers=headers)
        out = self._http.send(head) or b""
        is_head = self._request is not None and self._request.method == b"HEAD"
        out += b"" if is_head else self._http.send(h11.Data(data=response.body)) or b""
        out += self._http.send(h11.EndOfMessage()) or b""
        self._transport.write(out)

    def _refuse(self, response: Response) -> None:
        """Answer if that is still possible, and close."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(response._replace(headers=(*response.headers, ("Connection", "close"))))
        self._close()

    def _close(self) -> None:
        """Close once what was written has been taken, and within the deadline for that."""
        if self._transport and not self._transport.is_closing():
            self._transport.close()
            self._set_deadline(self._limits.answer_timeout_s)

    def _set_deadline(self, wait_s: float | None) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._too_late)

    @property
    def _request_has_begun(self) -> bool:
        """Whether the client waits for an answer, or has sent a part of its request."""
        state = self._http.our_state
        return state is h11.SEND_RESPONSE or (state is h11.IDLE and bool(self._http.trailing_data[0]))

    def _too_late(self) -> None:
        """The client was too slow; a request that it has begun is answered with that."""
        if self._transport is None:
            return
        if self._turn or self._awaited:  # it is we who are slow
            self._set_deadline(self._limits.request_timeout_s)
            return
        if not self._has_place:
            self._refuse(TOO_MANY)
        elif self._request_has_begun and not self._blocked and not self._transport.is_closing():
            self._refuse(problem(408, "the request did not arrive in time"))
        else:
            self._transport.abort()
