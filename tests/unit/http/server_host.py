"""The API's server over a snapshot made by hand, in a thread of this process, and raw clients.

with ServerHost(reference()) as host:
    host.ask("GET", "/v1/status").status             # one request, one connection
    host.record(event)                               # an event comes, as the supervisor records it
    host.reloader.error = HostError("no", "because")  # what a reload is refused with: see fake_services.py
    with host.connect(uid=65534) as client:          # a connection of another user
        client.send(b"GET /v1/gpus HTTP/1.1\\r\\n...")
        client.answer()                              # the next answer
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yunion_mps.core.models import Event, Holder, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.host.store import Store
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.listener import Listener
from yunion_mps.http.pool import Limits
from yunion_mps.http.router import RequestCounter, Router
from yunion_mps.http.server import Server
from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor.event_log import EventLog

from integration.daemon_host import eventually
from request_bodies import request_body
from simhost.host import Closes
from unit.http.fake_services import FakeClients, FakeEvents, FakeLeases, FakeReloader, metrics, services

#: So long that only what never comes is missed, on however slow a machine.
PATIENCE_S = 60.0
NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
_SETRESUID = {"x86_64": 117, "aarch64": 147}[os.uname().machine]


def request(target: str, method: str = "GET", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


class Answer(NamedTuple):
    """What came back; the names of the headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> tuple[int, str, str | None]:
        assert self.headers["content-type"] == "application/problem+json"
        problem = self.json()
        assert (problem["type"], problem["status"]) == ("about:blank", self.status)
        return self.status, problem["detail"], problem.get("hint")


class RawClient(Closes):
    """One connection, on which a test writes what it likes; may be closed twice."""

    def __init__(self, path: str, uid: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        with as_user(uid):
            self.socket.connect(path)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> RawClient:
        self.socket.sendall(data)
        return self

    def ask(self, target: str, *head: str) -> Answer:
        return self.send(request(target, "GET", *head)).answer()

    def post(self, target: str, words: str = "") -> Answer:
        """The answer to a POST with this body, as `posting` has it; none is sent if it is empty."""
        body, headers = request_body(words) if words else (b"", {})
        lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": len(body)}.items()]
        return self.send(request(target, "POST", *lines) + body).answer()

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, to a request with `method`."""
        found = self.answer_or_end(method)
        assert found, "the connection has ended"
        return found

    def answer_or_end(self, method: str = "GET") -> Answer | None:
        try:
            line = self._file.readline()
            if not line:
                return None
            pairs = (found.decode().strip().partition(": ") for found in iter(self._file.readline, b"\r\n"))
            headers = {name.lower(): value for name, _, value in pairs}
            length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
            return Answer(int(line.split()[1]), headers, self._file.read(length))
        except ConnectionResetError:  # the kernel's word for an end with something of ours unread
            return None

    def ended(self) -> bool:
        """Wait for the connection's end, and tell whether nothing came before it."""
        return self.answer_or_end() is None

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Be another user for a moment, in this thread alone: its connections show that uid (SO_PEERCRED)."""
    _become(uid)
    try:
        yield
    finally:
        _become(0)


def _become(uid: int) -> None:
    """Change this thread's effective uid by the bare system call: libc's function changes every thread's."""
    if _LIBC.syscall(_SETRESUID, -1, uid, -1):
        raise OSError(ctypes.get_errno(), "setresuid")


@contextlib.contextmanager
def short_root() -> Iterator[Paths]:
    """A root with a run directory, short enough for a socket's address, that other users can look into."""
    root = tempfile.mkdtemp(prefix="api.", dir="/tmp")
    try:
        os.chmod(root, 0o755)
        paths = Paths(root)
        Path(paths.run_directory).mkdir(parents=True)
        yield paths
    finally:
        shutil.rmtree(root)


class ServerHost(Closes):
    """A server that serves; its end fails when anything was raised in its event loop."""

    def __init__(self, snapshot: Snapshot, limits: Limits | None = None, paths: Paths | None = None) -> None:
        """`paths` are below the root of a host that is there; by default it has a root of its own."""
        self.snapshot = snapshot
        #: When it is for the event log, in s since 1970; None for the time of this machine.
        self.event_time_s: float | None = None
        self.errors: list[str] = []
        self._clients: list[RawClient] = []
        self._stack = contextlib.ExitStack()
        self.paths = paths or self._stack.enter_context(short_root())
        self._use(self.paths)
        self.reloader = FakeReloader()
        self.clients = FakeClients()
        self.leases = FakeLeases()
        self.service = Queries(lambda: self.snapshot, time.time(), os.getpid())
        self.events = FakeEvents(self.event_log)
        self.metrics: Callable[[str], Awaitable[tuple[str, bytes]]] = metrics
        self.server = Server(self._router(), limits or Limits())
        self.listener = Listener(self.paths)
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(str(context)))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.call(self.server.open(self.listener.socket))

    def _use(self, paths: Paths) -> None:
        self.store = self._stack.enter_context(contextlib.closing(Store(paths)))
        self.event_log = EventLog(lambda: self.store, paths.events_copy, clock=self._event_clock)

    def _event_clock(self) -> float:
        return time.time() if self.event_time_s is None else self.event_time_s

    def begin_new_record(self, paths: Paths) -> None:
        """Keep events there from now on, as a daemon does that finds none of those before."""
        former = self.events
        self._use(paths)
        self.events = FakeEvents(self.event_log)
        self.server.pool.application = self._router()

        async def answer_who_waits() -> None:
            former.close()

        self.call(answer_who_waits())

    def become(
        self,
        pid: int,
        started_s: float,
        ledger: Ledger | None = None,
        name_holder: Callable[[Holder], str] = str,
    ) -> None:
        """Answer from now on as a daemon with this PID and these leases that began then."""
        self.service = Queries(lambda: self.snapshot, started_s, pid, ledger=ledger, name_holder=name_holder)
        self.server.pool.application = self._router()

    def _router(self) -> Router:
        found = services(self.service, self.reloader, self.clients, self.leases, self.events)
        return Router(Handlers(found, lambda accept: self.metrics(accept)), RequestCounter())

    def record(self, event: Event, time_s: float | None = None) -> None:
        """An event comes now; with `time_s`, there is one of then."""

        async def record() -> None:
            time_of_host_s = self.event_time_s
            if time_s is not None:
                self.event_time_s = time_s
            self.event_log.record(event)
            self.event_time_s = time_of_host_s

        self.call(record())

    def connect(self, uid: int = 0) -> RawClient:
        """A new connection, which ends with the server at the latest."""
        self._clients.append(RawClient(self.paths.socket, uid))
        return self._clients[-1]

    def ask(self, method: str, target: str, *headers: str) -> Answer:
        with self.connect() as client:
            return client.send(request(target, method, *headers)).answer(method)

    def assert_serves(self) -> None:
        """A well-behaved client gets its answer."""
        assert self.ask("GET", "/v1/status").status == 200

    def wait_connections(self, count: int) -> None:
        eventually(lambda: len(self.server.pool.connections) == count, f"{count} open connections")

    def keep_connections(self) -> None:
        """Something hangs on each connection that is open, as a lease does: none is idle."""

        async def keep() -> None:
            connection: Any
            for connection in self.server.pool.connections:
                connection.keep_open(lambda: None)

        self.call(keep())

    def stop(self) -> None:
        """Close the server, as a daemon that stops does."""
        self.reloader.gate.set()
        self.clients.gate.set()
        self.call(self.server.close())
        self.wait_connections(0)
        eventually(lambda: not self.events.waiting, "that no request waits for events")

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()
        for client in self._clients:
            client.close()
        self._stack.close()
        assert not self.server.pool.by_client
        assert self.errors == []

    def call(self, coroutine: Any) -> None:
        """Do this in the server's event loop."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)
