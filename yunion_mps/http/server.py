"""The server: accepts and closes connections, and hands the socket over to the next program."""

from __future__ import annotations

import asyncio
import socket

from yunion_mps.http.connection import Connection
from yunion_mps.http.listener import Listener
from yunion_mps.http.pool import Application, ConnectionPool, Limits

#: How many clients may wait to be accepted, so that a burst of them is not refused.
_BACKLOG = 512

#: Connections accepted per turn of the loop; asyncio logs as many errors if descriptors run out.
_ACCEPTS_A_TURN = 8

#: Turns of the loop from accepting a client to `connection_made`.
_TURNS_TO_BEGIN = 5


class Server:
    def __init__(self, application: Application, limits: Limits = Limits()) -> None:  # noqa: B008 - it is frozen
        self.pool = ConnectionPool(application, limits)
        self._server: asyncio.AbstractServer | None = None
        self._listener: socket.socket | None = None

    async def open(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = listener
        create_server = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        self._server = await create_server(
            lambda: Connection(self.pool), sock=listener, backlog=_ACCEPTS_A_TURN
        )
        listener.listen(_BACKLOG)

    async def reopen(self, listener: Listener) -> None:
        """Accept on a new socket, because the name of the old one is gone; raises HostError."""
        await self._end_accepting()
        listener.renew()
        await self.open(listener.socket)

    async def close(self) -> None:
        await self._end_accepting()
        self._abort_all()

    def _abort_all(self) -> None:
        for connection in [*self.pool.waiting, *self.pool.connections]:
            connection.abort()

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
        self._abort_all()

    async def _pause_accepting(self) -> None:
        """Leave new clients in the kernel's backlog, and let accepted ones become connections."""
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(_TURNS_TO_BEGIN):
            await asyncio.sleep(0)

    async def _end_accepting(self) -> None:
        """Close the socket, after the pause: asyncio would drop clients that it has only accepted."""
        if self._server:
            await self._pause_accepting()
            self._server.close()
            self._server = self._listener = None
