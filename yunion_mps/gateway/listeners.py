"""The gateway's listeners: opened and closed as the addresses change; one that fails is tried again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

from yunion_mps.config.values import split_endpoint
from yunion_mps.gateway import addresses
from yunion_mps.gateway.handlers import MetricsHandler, Web
from yunion_mps.http.connection import Application, Limits
from yunion_mps.http.server import Server
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

#: Any local user reaches a port of 127.0.0.1, and all of them are one client there.
LIMITS = Limits(first_request_timeout_s=2.0)
_POLL_S = 2.0


async def serve(paths: Paths) -> None:
    """Serve at the addresses that the daemon has published, until there are none."""
    listeners = Listeners({"metrics_listen": MetricsHandler(paths), "web_listen": Web(paths)})
    while True:
        wanted = addresses.read(paths)
        await listeners.follow(wanted)
        if not wanted:
            return
        await asyncio.sleep(_POLL_S)


class Listeners:
    """One listener for each key of host.conf that has an address."""

    def __init__(self, handlers: Mapping[str, Application]) -> None:
        """`handlers` answer, by key."""
        self._handlers = handlers
        self._open: dict[str, tuple[str, Server]] = {}
        self._logged: dict[str, str] = {}

    async def follow(self, wanted: Mapping[str, str]) -> None:
        """Listen at these addresses (by key) and nowhere else."""
        for key, (address, server) in list(self._open.items()):
            if wanted.get(key) != address:
                await server.close()
                del self._open[key]
                log.info("%s: %s is closed", key, address)
        for key, address in wanted.items():
            if key not in self._open and key in self._handlers:
                await self._try(key, address)

    async def _try(self, key: str, address: str) -> None:
        try:
            listener = listen(address)
        except OSError as error:
            failure = f"{key} is {address}, where nothing can be served: {error.strerror}"
            if self._logged.get(key) != failure:
                log.error("%s; it is tried again. Choose another port in host.conf", failure)
            self._logged[key] = failure
            return
        server = Server(self._handlers[key], LIMITS)
        await server.open(listener)
        self._open[key] = address, server
        self._logged.pop(key, None)
        log.info("%s: serving at http://%s/", key, address)


def listen(address: str) -> socket.socket:
    """A socket that listens at the address (`127.0.0.1:9434`, `[::1]:9434`); raises OSError."""
    host, port = split_endpoint(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen()
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener
