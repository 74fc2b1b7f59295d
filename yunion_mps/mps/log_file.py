"""The control daemon's log: its last lines, the events that only it tells, and a bound on its size.

It is the control daemon's standard output, which it writes to for as long as it lives; so a log that has
grown is emptied in place. Every connection costs it two lines, and every question four: those of ours would
hide what matters, and are left out of what is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.escaping import decoded
from yunion_mps.host.proc import uid_of, user_name
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps import directories

LOG_NAME = "control.log"
OLDER = "control.log.1"
#: NVIDIA's server writes its own log beside it.
SERVER_LOG = "server.log"
MAX_BYTES = 1 << 20
_LAST_LINES = 5
_LAST_BYTES = 4000
#: The host's time zone. The control daemon has no TZ in its environment, whatever there is in ours.
_ZONE = "/etc/localtime"
#: Lines of connections, and of questions that change nothing.
_CHATTER = (
    b" Accepting connection...",
    b" User did not send valid credentials",
    b" NEW UI",
    b" UI closed",
    b" Cmd:get_",
)

#: What is read at once; more than that between two reads is a flood, of which the end has to do.
_MAX_BYTES = 1 << 18
_MAX_NAMED = 5

_STARTED = re.compile(r"Starting new server (\d+) for user (\d+)")
_EXITED = re.compile(r"Server (\d+) exited with status (\d+)")
_WAITS = re.compile(r"NEW CLIENT (\d+) from user (\d+): Server is not ready, push client to pending list")
_FAULT = "Server encountered a fatal exception"
#: A server never ends by itself; what tells it to, apart from another user's waiting client (measured).
_ORDERS = ("Cmd:shutdown_server", "Cmd:quit", "quit command issued", "shutting down server")


def log_hint(plan: DomainPlan) -> str:
    """A hint: where the control daemon's log is, and its last lines without the traces of our questions."""
    path = os.path.join(plan.log_directory, LOG_NAME)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = [decoded(line) for line in _without_chatter(file.read()).splitlines()]
    except OSError:
        lines = []
    return f"its log is {path}" + "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])


def timestamp_parser(now_s: float, zone: str = _ZONE) -> Callable[[str], float]:
    """A function from the time of a line, `2026-11-20 13:45:07`, to s since 1970; it raises ValueError.

    A time that occurs twice, when summer time ends, is the later one unless that is after `now_s`.
    """
    from datetime import datetime, timezone, tzinfo  # here, because the daemon's start needs neither
    from zoneinfo import ZoneInfo

    here: tzinfo = timezone.utc
    with contextlib.suppress(OSError, ValueError), open(zone, "rb") as file:
        here = ZoneInfo.from_file(file)

    def read(text: str) -> float:
        first = datetime.fromisoformat(text).replace(tzinfo=here)
        second_s = first.replace(fold=1).timestamp()
        return second_s if second_s <= now_s else first.timestamp()

    return read


# -- its size


def bound_logs(plan: DomainPlan) -> None:
    """Empty a log that has grown too large, keeping what matters of its end in a file beside it.

    Nothing is raised: if it cannot be done now, it is tried again at the next poll.
    """
    with contextlib.suppress(OSError):
        directory = os.open(plan.log_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in (LOG_NAME, SERVER_LOG):
                _bound(directory, plan.log_directory, name)
        finally:
            os.close(directory)


def _bound(directory: int, path: str, name: str) -> None:
    try:
        if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size <= MAX_BYTES:
            return
    except FileNotFoundError:
        return
    log = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        size = os.fstat(log).st_size
        kept = _without_chatter(os.pread(log, MAX_BYTES, max(0, size - MAX_BYTES)))
        try:
            _keep(directory, path, f"{name}.1", kept)
        finally:  # also if nothing can be kept, because the disk is full then
            os.ftruncate(log, 0)
    finally:
        os.close(log)


def _keep(directory: int, path: str, name: str, kept: bytes) -> None:
    """Add to the older log, emptied first if it would become too large."""
    older = directories.open_log(directory, path, name)
    try:
        if os.fstat(older).st_size + len(kept) > MAX_BYTES:
            os.ftruncate(older, 0)
        os.write(older, kept)
    finally:
        os.close(older)


def _without_chatter(text: bytes) -> bytes:
    """The lines that are no traces of connections; NULs are what an emptied file begins with elsewhere."""
    lines = text.replace(b"\0", b"").splitlines(keepends=True)
    return b"".join(line for line in lines if not any(trace in line for trace in _CHATTER))


# -- its events: servers that come, go and fail, and clients that wait


class LogEntry(NamedTuple):
    """One thing that the log tells: `kind` is started, ordered, exited, died, waits or fault.

    `died` is an end without an order: 535 logs status 0 also for a server that a signal killed. `number` is
    the exit status, or else the user.
    """

    kind: str
    pid: int = 0
    number: int = 0


class LogReader:
    """Tells what is new in the log as events."""

    def __init__(
        self, plan: DomainPlan, tell: Callable[[Event], None], servers: Callable[[], Sequence[int]]
    ) -> None:
        """Begin at the log's end: what is there already belongs to the time before."""
        self._name = plan.name
        self._tell = tell
        self._servers = servers
        self._path = os.path.join(plan.log_directory, LOG_NAME)
        self._offset = 0
        self._rest = b""
        self._is_ordered = False
        self._user: int | None = None
        self.read()

    def tell(self) -> None:
        """Tell what is new since the last call, as events."""
        entries = self.read()
        for event in events_of(entries, self._name, self._servers()) if entries else ():
            self._tell(event)

    def read(self) -> list[LogEntry]:
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # it was emptied
                    self._offset, self._rest = 0, b""
                start = max(self._offset, size - _MAX_BYTES)
                file.seek(start)
                text = self._rest + file.read(size - start)
        except OSError:
            return []
        self._offset = size
        *lines, self._rest = text.split(b"\n")
        return [self._judged(entry) for line in lines if (entry := _entry(line.decode(errors="replace")))]

    def _judged(self, entry: LogEntry) -> LogEntry:
        """The same, except for the end of a server without an order."""
        if entry.kind == "started":
            self._is_ordered, self._user = False, entry.number
        elif entry.kind == "ordered" or (entry.kind == "waits" and entry.number != self._user):
            self._is_ordered = True
        elif entry.kind == "exited" and not entry.number and not self._is_ordered:
            return entry._replace(kind="died")
        return entry


def _entry(line: str) -> LogEntry | None:
    for kind, pattern in (("started", _STARTED), ("exited", _EXITED), ("waits", _WAITS)):
        found = pattern.search(line)
        if found:
            return LogEntry(kind, int(found[1]), int(found[2]))
    if any(order in line for order in _ORDERS):
        return LogEntry("ordered")
    return LogEntry("fault") if _FAULT in line else None


def events_of(entries: Sequence[LogEntry], domain: str, servers: Sequence[int]) -> list[Event]:
    """What the entries mean, as events. `servers` are the PIDs of those that run.

    A server that cannot start is started six times in some milliseconds (measured): that is one event.
    """
    failed = [one for one in entries if one.kind == "exited" and one.number]
    failed_pids = {one.pid for one in failed}
    events = [_event(one, domain) for one in entries if one not in failed and one.pid not in failed_pids]
    if failed:
        events.append(_failure(failed, domain))
    waiting = [one for one in entries if one.kind == "waits"]
    events += [_waiting(waiting, uid, domain, servers) for uid in sorted({one.number for one in waiting})]
    return [event for event in events if event]


def _event(entry: LogEntry, domain: str) -> Event | None:
    server = f"MPS server (PID {entry.pid})"
    if entry.kind == "started":
        cause = f"a job of {user_name(entry.number)} connected"
        return Event("info", "client", domain, f"{server} started", cause)
    if entry.kind == "exited":
        return Event("info", "client", domain, f"{server} ended")
    if entry.kind == "died":
        what = f"{server} ended unexpectedly"
        return _failed(domain, what, "it crashed or was killed", "its jobs have failed")
    if entry.kind == "fault":
        means = "every job on that server fails; new ones start once those have ended"
        what = "an MPS server had a fatal exception"
        return _failed(domain, what, "a fault in one of its jobs", means)
    return None


def _failure(failed: Sequence[LogEntry], domain: str) -> Event:
    first, *more = failed
    what = f"MPS server (PID {first.pid}) exited with status {first.number}"
    if more:
        what += f", and {len(more)} more"
    return _failed(domain, what, f"see {SERVER_LOG} beside its log", "its jobs have failed")


def _failed(domain: str, what: str, cause: str, means: str) -> Event:
    return Event("error", "client", domain, what, cause, means, reasons.SERVER_FAILED)


def _waiting(waiting: Sequence[LogEntry], uid: int, domain: str, servers: Sequence[int]) -> Event | None:
    """A client that waits for its own user's server, which is starting, is no event."""
    others = {other for pid in servers if (other := uid_of(pid)) is not None and other != uid}
    if not others:
        return None
    names = ", ".join(sorted(user_name(other) for other in others))
    pids = [str(one.pid) for one in waiting if one.number == uid]
    plural, verb = ("s", "wait") if len(pids) > 1 else ("", "waits")
    first = ", ".join(pids[:_MAX_NAMED]) + (", ..." if len(pids) > _MAX_NAMED else "")
    what = f"{len(pids)} job{plural} of {user_name(uid)} (PID{plural} {first}) {verb}"
    cause = f"MPS serves one user at a time, and {names} has the server"
    means = "jobs start when the other user's have ended; cuda_mps_multiuser: true serves all users at once"
    return Event("warning", "client", domain, what, cause, means, reasons.CLIENT_WAITING)
