"""No server grows with the requests that it answers."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import pytest

from browser.scene import Served
from integration.daemon_host import PATIENCE_S, Daemon
from integration.gateway_host import Gateway, free_port

_WARM_UP, _REQUESTS = 4_000, 4_000
#: How many requests are sent on one connection: a connection costs more than a small request.
_ON_ONE = 10
#: A server that leaks one object of a connection grows by more than this in so many requests, each time. A
#: sound one may grow by more once, when its allocator takes more memory from the system.
_MAX_KIB = 210

_SMALL = "/nothing"
_PAGE = ("/", "/", "/overview.json", "/v1/events?limit=1", "/nothing")
_TARGETS = {
    "daemon": ("/v1/status", "/v1/status", "/v1/events", "/metrics", "/nothing"),
    "metrics_listen": ("/metrics", "/metrics", "/nothing"),
    "web_listen": _PAGE,
    "yunion-mps web": _PAGE,
}


class Server(NamedTuple):
    pid: int
    connect: Callable[[], socket.socket]

    def ask(self, targets: tuple[str, ...], count: int) -> None:
        """So many requests; a connection's last is one of `targets`, and every fifth of these is broken."""
        ends = zip(cycle(targets), cycle([*[False] * 4, True]))
        for target, is_broken in islice(ends, count // _ON_ONE):
            small = f"GET {_SMALL} HTTP/1.1\r\nHost: localhost\r\n\r\n" * (_ON_ONE - 1)
            head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            with self.connect() as client:
                client.sendall(f"{small}{head}{'broken' if is_broken else ''}\r\n\r\n".encode())
                answers = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert len(re.findall(rb"HTTP/1.1 \d", answers)) == _ON_ONE, answers
            assert answers.count(b"HTTP/1.1 400 ") == is_broken, answers

    @property
    def resident_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.fixture
def server(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Server]:
    kind, port = request.param, free_port()

    def connect() -> socket.socket:
        if kind != "daemon":
            return socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(daemon.socket_path))
        return client

    with ExitStack() as stack:
        if kind.endswith("_listen"):
            daemon.configure(**{kind: f"127.0.0.1:{port}"})
        daemon.start().wait_ready()
        pid = daemon.pid
        if kind == "yunion-mps web":
            pid = stack.enter_context(Served(daemon.host, port)).pid
        elif kind != "daemon":
            gateway = stack.enter_context(Gateway(daemon)).start()
            gateway.wait_listening(port)
            pid = gateway.pid
        yield Server(pid, connect)


@pytest.mark.parametrize("server", _TARGETS, indirect=True)
def test_a_server_does_not_grow_with_its_requests(server: Server, request: pytest.FixtureRequest) -> None:
    targets = _TARGETS[request.node.callspec.params["server"]]
    server.ask(targets, _WARM_UP)
    growths_kib = []
    for _ in range(2):
        before_kib = server.resident_kib
        server.ask(targets, _REQUESTS)
        growths_kib.append(server.resident_kib - before_kib)
    assert min(growths_kib) < _MAX_KIB, growths_kib
