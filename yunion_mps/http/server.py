"""The server: accepts connections, closes them, and hands the socket over to the next program."""

from __future__ import annotations

import asyncio
import socket

from yunion_mps.http.connection import Connection
from yunion_mps.http.listener import Listener
from yunion_mps.http.pool import Application, ConnectionPool, Limits

#: Clients that may wait to be accepted, so that a burst of them is not turned away.
_BACKLOG = 512

#: Connections accepted a turn of the loop; asyncio logs as many errors if descriptors run out.
_ACCEPTS_A_TURN = 8

#: Turns of the loop from accepting a client to its connection.
_TURNS_TO_BEGIN = 5


class Server:
    """Accepts on the listening socket until it is closed."""

    def __init__(self, application: Application, limits: Limits = Limits()) -> None:  # noqa: B008 - it is frozen
        self.pool = ConnectionPool(application, limits)
        self._server: asyncio.AbstractServer | None = None
        self._listener: socket.socket | None = None

    async def open(self, listener: socket.socket) -> None:
        """Begin to accept, on a Unix socket or over TCP."""
        loop = asyncio.get_running_loop()
        self._listener = listener
        open_it = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        self._server = await open_it(lambda: Connection(self.pool), sock=listener, backlog=_ACCEPTS_A_TURN)
        listener.listen(_BACKLOG)

    async def reopen(self, listener: Listener) -> None:
        """Accept on a new socket because the name of the old one is gone; raises HostError."""
        await self._end_accepting()
        listener.renew()
        await self.open(listener.socket)

    async def close(self) -> None:
        """Accept no more, and end the connections that are open."""
        await self._end_accepting()
        self._abort_all()

    def _abort_all(self) -> None:
        for connection in [*self.pool.waiting, *self.pool.connections]:
            connection.abort()

    async def hand_over(self) -> None:
        """Accept no more, leave the socket open, and give clients a moment to read their answers.

        The kernel lets later clients wait for the program that goes on with the socket.
        """
        await self._pause_accepting()
        end_s = asyncio.get_running_loop().time() + self.pool.limits.hand_over_s
        while any(connection.is_busy for connection in self.pool.connections):
            if asyncio.get_running_loop().time() > end_s:
                break
            await asyncio.sleep(0.005)
        self._abort_all()

    async def _pause_accepting(self) -> None:
        """Leave new clients to the kernel, and let those that asyncio has accepted become connections."""
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)

    async def _end_accepting(self) -> None:
        """Close the socket; in this order, because asyncio forgets clients that it does not serve yet."""
        if self._server:
            await self._pause_accepting()
            self._server.close()
            self._server = self._listener = None
