"""The server: many connections, and a share of them for every user."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from yunion_mps.http.connection import KEPT_BYTES, Answering, Connection, Limits
from yunion_mps.http.listener import Listener

#: Clients that may wait to be accepted, so that a burst of them is not turned away.
_BACKLOG = 512

#: Connections accepted a turn of the loop; asyncio logs as many errors where descriptors are short.
_ACCEPTS_A_TURN = 8

_ROOT = 0

#: Turns of the loop from accepting a client to its connection.
_TURNS_TO_BEGIN = 5


class Server:
    """Accepts on the listening socket until it is closed."""

    def __init__(self, router: Answering, limits: Limits = Limits()) -> None:  # noqa: B008 - it is frozen
        self.router = router
        self.limits = limits
        self.buffer = memoryview(bytearray(KEPT_BYTES))
        #: In the order of their last answers, or of their beginnings if there was none.
        self.connections: dict[Connection, None] = {}
        #: By user, or by address where nobody knows the user.
        self.by_client: Counter[int | str] = Counter()
        self._server: asyncio.AbstractServer | None = None
        self._listener: socket.socket | None = None

    async def open(self, listener: socket.socket) -> None:
        """Begin to accept, on a Unix socket or over TCP."""
        loop = asyncio.get_running_loop()
        self._listener = listener
        open_it = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        self._server = await open_it(lambda: Connection(self), sock=listener, backlog=_ACCEPTS_A_TURN)
        listener.listen(_BACKLOG)

    async def reopen(self, listener: Listener) -> None:
        """Accept on a new socket, for the name of the old one is gone; raises HostError."""
        await self._end_accepting()
        listener.renew()
        await self.open(listener.socket)

    async def close(self) -> None:
        """Accept no more, and end the connections that are open."""
        await self._end_accepting()
        for connection in list(self.connections):
            connection.abort()

    async def hand_over(self) -> None:
        """Accept no more, leave the socket open, and give what is being answered a moment to be read.

        Who connects from now on is kept waiting by the kernel for whoever goes on with the socket.
        """
        self.router.hurry()
        await self._pause_accepting()
        end_s = asyncio.get_running_loop().time() + self.limits.hand_over_s
        while any(connection.is_busy for connection in self.connections):
            if asyncio.get_running_loop().time() > end_s:
                break
            await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()

    async def _pause_accepting(self) -> None:
        """Leave who connects to the kernel, and let whom asyncio has accepted become a connection of ours."""
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)

    async def _end_accepting(self) -> None:
        """Close the socket; in this order, for asyncio forgets whom it has not yet begun to serve."""
        if self._server:
            await self._pause_accepting()
            self._server.close()
            self._server = self._listener = None

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more connection of this client.

        If there is none, it replaces the one of the idle connections whose last answer is the oldest.
        """
        candidates = self._replaceable_for(connection.client)
        if candidates is not None:
            idle = next((one for one in candidates if one.may_be_replaced), None)
            if idle is None:
                return False
            self.forget(idle)
            idle.make_room()
        self.connections[connection] = None
        self.by_client[connection.client] += 1
        return True

    def _replaceable_for(self, client: int | str) -> list[Connection] | None:
        """The connections of which one must be closed to admit the client; None if there is room."""
        limits, has = self.limits, self.by_client[client]
        if client != _ROOT and has >= limits.of_one_user:
            return [one for one in self.connections if one.client == client]
        room = limits.connections - (limits.kept_for_new_clients if has else 0)
        not_roots = len(self.connections) - self.by_client[_ROOT]
        if client != _ROOT and not_roots >= room - limits.kept_for_root:
            return [one for one in self.connections if one.client != _ROOT]
        return list(self.connections) if len(self.connections) >= room else None

    def note_answer(self, connection: Connection) -> None:
        """The connection has got an answer: it comes last in the order."""
        if connection in self.connections:
            self.connections[connection] = self.connections.pop(connection)

    def unread_bytes(self, client: int | str) -> int:
        """How much of the answers to this user waits to be read."""
        return sum(connection.unread_bytes for connection in self.connections if connection.client == client)

    def forget(self, connection: Connection) -> None:
        """The connection is over."""
        if connection in self.connections:
            del self.connections[connection]
            self.by_client[connection.client] -= 1
            if not self.by_client[connection.client]:
                del self.by_client[connection.client]
