"""What became of each MPS server, by its control daemon's log: events, doctor and the domain agree on it.

A server has started once it is ready. One that exits before that failed to start, whatever other lines say:
the control daemon tries six times within milliseconds and then refuses the client (measured with 535 and
550). So did one that had a fatal exception without ever having had a client: no job can have caused that.

A server never ends by itself, and its status says little: 535 and 550 log 0 even for one that was killed by a
signal (measured). So an end with status 0 is unexpected unless something ordered it: a command, or a client
or a start of another user.

Source: NVIDIA: Multi-Process Service, sections "Provisioning Sequence", Server, and "Memory Protection and
Error Containment".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.mps.log_lines import (
    CLIENT_SERVED,
    CLIENT_WAITS,
    CONTROL_STARTED,
    END_ORDERED,
    SERVER_BEGINS,
    SERVER_EXCEPTION,
    SERVER_EXITED,
    SERVER_READY,
    START_ORDERED,
    LogLine,
)

#: What became of a server: it is ready,
STARTED = "started"
#: got its first client after that,
SERVED = "served"
#: ended as ordered,
ENDED = "ended"
#: ended unexpectedly,
CRASHED = "crashed"
#: had a fatal exception with clients,
FAULTED = "faulted"
#: or never started.
NOT_STARTED = "not started"
FAILURES = (CRASHED, FAULTED, NOT_STARTED)


class Outcome(NamedTuple):
    """What became of a server."""

    #: One of `STARTED` to `NOT_STARTED`.
    kind: str
    #: 0 if the log does not show it.
    pid: int = 0
    #: None if the log does not show it.
    uid: int | None = None
    #: The exit status, if it has exited.
    status: int | None = None
    #: Whether a client waited for it, or it had one.
    has_client: bool = False
    #: Whether the command `start_server` started it.
    is_ordered: bool = False
    #: The local time of the log's line; empty if it is not known.
    time: str = ""
    #: The local time when the server was begun; empty if it is not known.
    begin_time: str = ""


class _Server:
    """A server whose end the log does not have yet."""

    def __init__(self, pid: int, uid: int | None, begin_time: str) -> None:
        self.pid = pid
        self.uid = uid
        self.begin_time = begin_time
        self.is_ordered = False
        self.has_client = False
        self.is_ready = False
        self.has_exception = False
        self.is_end_expected = False
        #: The user for whom it is to end, if a client or a start of another user waits for that.
        self.displaced_by: int | None = None


def _server_from_before() -> _Server:
    """Return a server whose begin the log no longer has, which may have clients."""
    server = _Server(0, None, "")
    server.is_ready = True
    server.has_client = True
    return server


class ServerHistory:
    """Follows the servers of one control daemon through its log, line by line."""

    def __init__(self) -> None:
        self._forget_all()

    def _forget_all(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._from_before = _server_from_before()
        #: The users of clients that wait for a server, and those for which one was ordered by a command.
        self._waiting_uids: set[int | None] = set()
        self._ordered_uids: set[int | None] = set()
        self._is_quitting = False

    def follow(self, lines: Iterable[LogLine]) -> list[Outcome]:
        """Return what became of servers by these lines, which follow those of the last call."""
        outcomes = []
        for line in lines:
            outcome = self._follow(line)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def displaced_by(self, pid: int) -> int | None:
        """Return the user (uid) who waits or has waited for this server's end; None if no user does."""
        server = self._servers.get(pid)
        return server.displaced_by if server else None

    def _follow(self, line: LogLine) -> Outcome | None:
        if line.kind == CONTROL_STARTED:
            self._forget_all()
        elif line.kind == CLIENT_WAITS:
            self._waiting_uids.add(line.uid)
            self._ordered_uids.discard(line.uid)
            self._expect_end_of_others(line.uid)
        elif line.kind == CLIENT_SERVED:
            return self._serve(line)
        elif line.kind == START_ORDERED:
            # A client of this user that still waited would have had a server begun by now.
            self._waiting_uids.discard(line.uid)
            self._ordered_uids.add(line.uid)
            self._expect_end_of_others(line.uid)
        elif line.kind == END_ORDERED:
            self._order_end(line.pid)
        elif line.kind == SERVER_BEGINS:
            self._begin(line)
        elif line.kind == SERVER_READY:
            return self._make_ready(line)
        elif line.kind == SERVER_EXCEPTION:
            return self._note_exception(line)
        elif line.kind == SERVER_EXITED:
            return self._end(line)
        return None

    def _expect_end_of_others(self, uid: int | None) -> None:
        for server in (self._from_before, *self._servers.values()):
            if server.uid != uid:
                server.is_end_expected = True
                if server.displaced_by is None:
                    server.displaced_by = uid

    def _order_end(self, pid: int) -> None:
        if pid == 0:
            self._is_quitting = True
        else:
            self._servers.get(pid, self._from_before).is_end_expected = True

    def _begin(self, line: LogLine) -> None:
        server = _Server(line.pid, line.uid, line.time)
        server.has_client = line.uid in self._waiting_uids
        server.is_ordered = line.uid in self._ordered_uids
        self._ordered_uids.discard(line.uid)
        self._servers[line.pid] = server

    def _make_ready(self, line: LogLine) -> Outcome:
        server = self._servers.get(line.pid)
        if server is None:
            server = self._servers[line.pid] = _Server(line.pid, None, line.time)
        server.is_ready = True
        server.has_client |= server.uid in self._waiting_uids
        self._waiting_uids.discard(server.uid)
        return _outcome(STARTED, server, line)

    def _serve(self, line: LogLine) -> Outcome | None:
        """Note that the server of this user, the newest one, has a client."""
        for server in reversed(self._servers.values()):
            if server.uid == line.uid:
                if server.has_client:
                    return None
                server.has_client = True
                return _outcome(SERVED, server, line)
        return None

    def _note_exception(self, line: LogLine) -> Outcome | None:
        """Return the exception of the newest server, which exits next unless it has clients."""
        server = list(self._servers.values())[-1] if self._servers else self._from_before
        server.has_exception = True
        if server.is_ready and server.has_client:
            return _outcome(FAULTED, server, line)
        return None

    def _end(self, line: LogLine) -> Outcome | None:
        server = self._servers.pop(line.pid, None)
        if server is None:
            server = self._from_before
            self._from_before = _server_from_before()
            server.pid = line.pid
        is_expected = not line.status and (server.is_end_expected or self._is_quitting)
        if server.has_exception and server.is_ready and server.has_client:
            return None  # its exception was the failure
        if server.has_exception or not (server.is_ready or is_expected):
            kind = NOT_STARTED
        else:
            kind = ENDED if is_expected else CRASHED
        return _outcome(kind, server, line)


def _outcome(kind: str, server: _Server, line: LogLine) -> Outcome:
    return Outcome(
        kind=kind,
        pid=server.pid,
        uid=server.uid,
        status=line.status,
        has_client=server.has_client,
        is_ordered=server.is_ordered,
        time=line.time,
        begin_time=server.begin_time,
    )
