"""The connection pool: limits the total and each client's share, and chooses which to close for a new one."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple, Protocol

from yunion_mps.http.messages import EventualResponse, Request

_ROOT = 0

#: How many bytes are buffered of requests that wait for their turn, and of unread answers.
BUFFER_BYTES = 16 << 10


class Limits(NamedTuple):
    """The limits; some connections are reserved for root, and some for clients that have none."""

    first_request_timeout_s: float = 10.0
    request_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0
    answer_timeout_s: float = 10.0
    #: How long clients have to read answers before the socket is handed over to another program.
    hand_over_s: float = 1.0
    head_bytes: int = 16 << 10
    body_bytes: int = 16 << 10
    connections: int = 528
    reserved_for_root: int = 64
    reserved_for_new_clients: int = 16
    per_user: int = 128
    #: How many of them may wait for events; the oldest ones give way. Root is not limited.
    awaiting_events: int = 64
    unread_bytes: int = 16 << 20
    #: How many connections may queue, first come, first served, instead of being refused. Over TCP one
    #: program may keep all connections of an address busy: answered ones are closed for queued ones.
    waiting: int = 0


class Application(Protocol):
    """Handles requests: the API's router, or the gateway's pages."""

    def handle(self, request: Request) -> EventualResponse:
        """Return the response, or an awaitable one; never raises."""


class PooledConnection(Protocol):
    """A connection, as the pool sees it."""

    #: The user, or the address of a client over TCP.
    client: int | str
    was_answered: bool

    @property
    def unread_bytes(self) -> int:
        """How much of its answers has not been read."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is arriving or being answered, or an answer is unread."""

    @property
    def is_replaceable(self) -> bool:
        """Whether it may be closed for a new one."""

    def begin(self) -> None:
        """Start to handle requests."""

    def evict(self) -> None:
        """Close it in favour of a new connection."""

    def abort(self) -> None:
        """Close it at once."""


class ConnectionPool:
    """The connections of a server, which calls it whenever one is made, answered or lost."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.application = application
        self.limits = limits
        #: The receive buffer of all connections, which is emptied after each read.
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        #: In the order of their last answers, or of their admission if there was none.
        self.connections: dict[PooledConnection, None] = {}
        #: By user, or by address over TCP.
        self.by_client: Counter[int | str] = Counter()
        self.waiting: deque[PooledConnection] = deque()
        #: By client, those whose requests wait for events, the oldest first.
        self.awaiting: dict[int | str, dict[PooledConnection, None]] = {}

    def admit(self, connection: PooledConnection) -> bool:
        """Admit the connection now, or queue it; returns whether either was possible.

        If the pool is full, it replaces the idle connection whose last answer is the oldest.
        """
        if self._replaceable_for(connection.client) is not None and self.waiting:
            is_admitted = False  # others are ahead of it
        else:
            is_admitted = self._admit(connection)
        if not is_admitted and len(self.waiting) < self.limits.waiting:
            self.waiting.append(connection)
            return True
        return is_admitted

    def _admit(self, connection: PooledConnection) -> bool:
        candidates = self._replaceable_for(connection.client)
        if candidates is not None:
            replaced = self._to_replace(candidates)
            if replaced is None:
                return False
            self._remove(replaced)
            replaced.evict()
        self.connections[connection] = None
        self.by_client[connection.client] += 1
        connection.begin()
        return True

    def _to_replace(self, candidates: list[PooledConnection]) -> PooledConnection | None:
        for connection in candidates:
            if connection.is_replaceable:
                return connection
        if self.limits.waiting:
            for connection in candidates:
                if connection.was_answered:
                    return connection
        return None

    def _admit_waiting(self) -> None:
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()

    def _replaceable_for(self, client: int | str) -> list[PooledConnection] | None:
        """Return the connections of which one must be closed to admit the client; None if there is room."""
        limits = self.limits
        own = self.by_client[client]
        if client != _ROOT and own >= limits.per_user:
            return [connection for connection in self.connections if connection.client == client]
        room = limits.connections - (limits.reserved_for_new_clients if own else 0)
        not_roots = len(self.connections) - self.by_client[_ROOT]
        if client != _ROOT and not_roots >= room - limits.reserved_for_root:
            return [connection for connection in self.connections if connection.client != _ROOT]
        return list(self.connections) if len(self.connections) >= room else None

    def note_awaiting(self, connection: PooledConnection) -> None:
        """Note that the connection's request waits for an event; the oldest ends if there are too many."""
        awaiting = self.awaiting.setdefault(connection.client, {})
        awaiting[connection] = None
        if connection.client != _ROOT and len(awaiting) > self.limits.awaiting_events:
            oldest = next(iter(awaiting))
            self.forget(oldest)
            oldest.evict()

    def note_answer(self, connection: PooledConnection) -> None:
        """Note that the connection was answered, which moves it to the end of the order."""
        self._forget_awaiting(connection)
        if connection in self.connections:
            del self.connections[connection]  # its client has to read the answer before it gives way
            self._admit_waiting()
            self.connections[connection] = None

    def unread_bytes(self, client: int | str) -> int:
        return sum(connection.unread_bytes for connection in self.connections if connection.client == client)

    def abort_all(self) -> None:
        for connection in [*self.waiting, *self.connections]:
            connection.abort()

    def forget(self, connection: PooledConnection) -> None:
        if connection in self.waiting:
            self.waiting.remove(connection)
        self._remove(connection)
        self._admit_waiting()

    def _forget_awaiting(self, connection: PooledConnection) -> None:
        awaiting = self.awaiting.get(connection.client, {})
        awaiting.pop(connection, None)
        if not awaiting:
            self.awaiting.pop(connection.client, None)

    def _remove(self, connection: PooledConnection) -> None:
        self._forget_awaiting(connection)
        if connection in self.connections:
            del self.connections[connection]
            self.by_client[connection.client] -= 1
            if not self.by_client[connection.client]:
                del self.by_client[connection.client]
