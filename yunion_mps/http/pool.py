"""The pool of connections: how many there may be, each client's share, and which gives way to a new one."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple, Protocol

from yunion_mps.http.messages import Answer, Request

_ROOT = 0

#: What is kept of requests that wait for their turn, and of answers before no more of them is made.
KEPT_BYTES = 16 << 10


class Limits(NamedTuple):
    """What one client may use. Some connections are reserved for root, and some for clients without any."""

    first_request_timeout_s: float = 10.0
    request_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0
    answer_timeout_s: float = 10.0
    #: How long clients have to read answers before another program goes on with the socket.
    hand_over_s: float = 1.0
    head_bytes: int = 16 << 10
    body_bytes: int = 16 << 10
    connections: int = 528
    kept_for_root: int = 64
    kept_for_new_clients: int = 16
    of_one_user: int = 128
    unread_bytes: int = 16 << 20
    #: How many connections wait for a place, first come, first served, instead of being refused. Over TCP one
    #: program may keep all connections of an address busy: one that has had an answer gives way to them.
    waiting: int = 0


class Application(Protocol):
    """What answers the requests: the API's router, or the gateway's pages."""

    def answer(self, request: Request) -> Answer:
        """The response, or an awaitable one; never raises."""


class Member(Protocol):
    """A connection, as far as its pool knows it."""

    #: The user, or the address of a client over TCP.
    client: int | str

    @property
    def unread_bytes(self) -> int:
        """How much of its answers has not been read."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is on its way or being answered, or its answer not read yet."""

    @property
    def may_be_replaced(self) -> bool:
        """Whether it may be closed for a new one."""

    @property
    def was_answered(self) -> bool:
        """Whether it has had an answer."""

    def begin(self) -> None:
        """Handle requests: it has its place."""

    def make_room(self) -> None:
        """Close it in favour of a new connection."""

    def abort(self) -> None:
        """End it now."""


class ConnectionPool:
    """The connections, and each client's share of them."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.application = application
        self.limits = limits
        #: Of all connections: what comes in is taken out at once.
        self.buffer = memoryview(bytearray(KEPT_BYTES))
        #: In the order of their last answers, or of their beginnings if there was none.
        self.connections: dict[Member, None] = {}
        #: By user, or by address over TCP.
        self.by_client: Counter[int | str] = Counter()
        self.waiting: deque[Member] = deque()

    def admit(self, connection: Member) -> bool:
        """Let the connection begin, now or once it has a place; returns whether it will have one.

        If there is no room, it replaces the one of the idle connections whose last answer is the oldest.
        """
        if self._replaceable_for(connection.client) is not None and self.waiting:
            has_place = False  # others have waited longer
        else:
            has_place = self._place(connection)
        if not has_place and len(self.waiting) < self.limits.waiting:
            self.waiting.append(connection)
            return True
        return has_place

    def _place(self, connection: Member) -> bool:
        candidates = self._replaceable_for(connection.client)
        if candidates is not None:
            replaced = next((one for one in candidates if one.may_be_replaced), None)
            if replaced is None and self.limits.waiting:
                replaced = next((one for one in candidates if one.was_answered), None)
            if replaced is None:
                return False
            self._remove(replaced)
            replaced.make_room()
        self.connections[connection] = None
        self.by_client[connection.client] += 1
        connection.begin()
        return True

    def _place_waiting(self) -> None:
        while self.waiting and self._place(self.waiting[0]):
            self.waiting.popleft()

    def _replaceable_for(self, client: int | str) -> list[Member] | None:
        """The connections of which one must be closed to admit the client; None if there is room."""
        limits, has = self.limits, self.by_client[client]
        if client != _ROOT and has >= limits.of_one_user:
            return [one for one in self.connections if one.client == client]
        room = limits.connections - (limits.kept_for_new_clients if has else 0)
        not_roots = len(self.connections) - self.by_client[_ROOT]
        if client != _ROOT and not_roots >= room - limits.kept_for_root:
            return [one for one in self.connections if one.client != _ROOT]
        return list(self.connections) if len(self.connections) >= room else None

    def note_answer(self, connection: Member) -> None:
        """The connection has got an answer: it comes last in the order."""
        if connection in self.connections:
            del self.connections[connection]  # its client has to read the answer before it gives way
            self._place_waiting()
            self.connections[connection] = None

    def unread_bytes(self, client: int | str) -> int:
        """How much of the answers to this client has not been read."""
        return sum(connection.unread_bytes for connection in self.connections if connection.client == client)

    def forget(self, connection: Member) -> None:
        """The connection has ended."""
        if connection in self.waiting:
            self.waiting.remove(connection)
        self._remove(connection)
        self._place_waiting()

    def _remove(self, connection: Member) -> None:
        if connection in self.connections:
            del self.connections[connection]
            self.by_client[connection.client] -= 1
            if not self.by_client[connection.client]:
                del self.by_client[connection.client]
