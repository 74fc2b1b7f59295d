"""The listeners: opened and closed as the configuration changes; one that cannot be opened is tried again."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.config.endpoints import split
from yunion_mps.http.connection import Answering, Limits
from yunion_mps.http.server import Server

log = logging.getLogger(__name__)

#: Any local user reaches a port of 127.0.0.1, and all of them are one client there.
LIMITS = Limits(first_request_timeout_s=2.0)


class _Open(NamedTuple):
    address: str
    server: Server


class Doors:
    """One listener for each key of host.conf that opens one."""

    def __init__(self, routers: Mapping[str, Answering]) -> None:
        """`routers` answer, by key."""
        self._routers = routers
        self._open: dict[str, _Open] = {}
        self._said: dict[str, str] = {}

    async def follow(self, wanted: Mapping[str, str]) -> None:
        """Listen at these addresses (by key) and nowhere else."""
        for key, door in list(self._open.items()):
            if wanted.get(key) != door.address:
                await door.server.close()
                del self._open[key]
                log.info("%s: %s is closed", key, door.address)
        for key, address in wanted.items():
            if key not in self._open and key in self._routers:
                await self._try(key, address)

    async def _try(self, key: str, address: str) -> None:
        try:
            listener = listen(address)
        except OSError as error:
            self._say(key, f"{key} is {address}, where nothing can be served: {error.strerror}")
            return
        server = Server(self._routers[key], LIMITS)
        await server.open(listener)
        self._open[key] = _Open(address, server)
        self._said.pop(key, None)
        log.info("%s: serving at http://%s/", key, address)

    def _say(self, key: str, trouble: str) -> None:
        if self._said.get(key) != trouble:
            log.error("%s; it is tried again until that works. Choose another port in host.conf", trouble)
        self._said[key] = trouble


def listen(address: str) -> socket.socket:
    """A socket that listens at the address (`127.0.0.1:9434`, `[::1]:9434`); raises OSError."""
    host, port = split(address)
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
