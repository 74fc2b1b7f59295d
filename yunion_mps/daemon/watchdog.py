"""The watchdog: notifies systemd only while the daemon is healthy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable

from yunion_mps.errors import HostError
from yunion_mps.host.systemd import Notifier, watchdog_interval_s
from yunion_mps.http.listener import Listener
from yunion_mps.http.server import Server
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

#: How often the daemon is checked if systemd's watchdog is not enabled.
_INTERVAL_S = 15.0
#: How long the daemon's own answer may take.
_ANSWER_S = 5.0
_REQUEST = b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Watchdog:
    def __init__(
        self, paths: Paths, listener: Listener, server: Server, notifier: Notifier, late: Callable[[], str]
    ) -> None:
        """`late` returns how overdue ticks are, as text; empty if they are in time."""
        self._paths = paths
        self._listener = listener
        self._server = server
        self._notifier = notifier
        self._late = late
        self._logged = ""

    async def run(self) -> None:
        """Check until the task is cancelled, and notify systemd while the daemon is healthy."""
        interval_s = watchdog_interval_s()
        if interval_s:
            self._notifier.alive()
        while True:
            await asyncio.sleep(interval_s or _INTERVAL_S)
            error_text = self._late() or await self._socket_error()
            if not error_text and interval_s:
                self._notifier.alive()
            if error_text and error_text != self._logged:
                log.error(
                    "unhealthy: %s; not notifying systemd's watchdog until this is resolved", error_text
                )
            self._logged = error_text

    async def _socket_error(self) -> str:
        """Why the daemon's socket does not answer, empty if it does; a removed socket is created again."""
        if not self._listener.is_reachable:
            try:
                await self._server.reopen(self._listener)
                log.warning("the socket %s was removed; creating it again", self._paths.socket)
            except HostError as error:
                return error.message
        try:
            answer = await asyncio.wait_for(_request_health(self._paths.socket), _ANSWER_S)
        except asyncio.TimeoutError:
            return f"the daemon's own socket does not answer within {_ANSWER_S:g} s"
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return ""  # this passes when clients disconnect, and a restart would not help
            return f"the daemon's own socket cannot be reached: {error.strerror or error}"
        return "" if answer.startswith(b"HTTP/1.1 ") else "the daemon's own socket does not answer"


async def _request_health(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(_REQUEST)
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
