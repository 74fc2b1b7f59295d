"""A requests session whose every http:// URL leads to one Unix socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool


def unix_session(path: Path) -> requests.Session:
    """Return a session that asks the server on this socket, whatever the URL's host."""
    session = requests.Session()
    session.trust_env = False  # no proxy stands between us and the socket
    session.mount("http://", _Adapter(path))
    return session


class _Adapter(HTTPAdapter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._pool = _Pool(path)

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> HTTPConnectionPool:
        return self._pool

    def close(self) -> None:
        self._pool.close()
        super().close()


class _Pool(HTTPConnectionPool):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def _new_conn(self) -> Any:
        return _Connection(self._path)


class _Connection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))
