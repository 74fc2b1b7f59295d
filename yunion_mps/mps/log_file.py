"""The control daemon's log: quote its last lines, report events that only it has, and limit its size.

It is the standard output of the running control daemon, so a log that has grown is truncated in place. Every
connection adds two lines and every query four, so the lines of our own queries would hide what matters; they
are removed from the part that is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.host.proc import uid_of, user_name
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps import directories
from yunion_mps.text import decode_line

LOG_NAME = "control.log"
OLDER = "control.log.1"
#: NVIDIA's server writes its own log beside it.
SERVER_LOG = "server.log"
MAX_BYTES = 1 << 20
_LAST_LINES = 5
_LAST_BYTES = 4000
#: The host's time zone: the control daemon has no TZ in its environment, unlike perhaps this process.
_ZONE = "/etc/localtime"
#: Lines of connections, and of queries that change nothing.
_CHATTER = (
    b" Accepting connection...",
    b" User did not send valid credentials",
    b" NEW UI",
    b" UI closed",
    b" Cmd:get_",
)

#: The most that is read at once; if more was written since the last read, only its end is read.
_MAX_BYTES = 1 << 18
_MAX_NAMED = 5

#: Compiled when they are used: that takes a start 0.3 ms.
_STARTED = r"Starting new server (\d+) for user (\d+)"
_EXITED = r"Server (\d+) exited with status (\d+)"
_WAITS = r"NEW CLIENT (\d+) from user (\d+): Server is not ready, push client to pending list"
_FAULT = "Server encountered a fatal exception"
#: A server never ends by itself; what makes it end, apart from another user's waiting client (measured).
_END_CAUSES = ("Cmd:shutdown_server", "Cmd:quit", "quit command issued", "shutting down server")


def log_hint(plan: DomainPlan) -> str:
    """A hint: where the control daemon's log is, and its last lines without the chatter of our queries."""
    path = os.path.join(plan.log_directory, LOG_NAME)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = [decode_line(line) for line in _without_chatter(file.read()).splitlines()]
    except OSError:
        lines = []
    return f"see its log: {path}" + "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])


def timestamp_parser(now_s: float, zone: str = _ZONE) -> Callable[[str], float]:
    """A function that parses a line's time, `2026-11-20 13:45:07`, to s since 1970; it raises ValueError.

    A time that occurs twice, when daylight saving time ends, is the later one unless that is after `now_s`.
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
    """Truncate a log that has grown too large, and keep the important lines of its end in a file beside it.

    Nothing is raised: a failure is retried at the next poll.
    """
    with contextlib.suppress(OSError):
        directory = os.open(plan.log_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in (LOG_NAME, SERVER_LOG):
                _truncate(directory, plan.log_directory, name)
        finally:
            os.close(directory)


def _truncate(directory: int, path: str, name: str) -> None:
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
            _append_older(directory, path, f"{name}.1", kept)
        finally:  # even if nothing can be kept, because then the disk is full
            os.ftruncate(log, 0)
    finally:
        os.close(log)


def _append_older(directory: int, path: str, name: str, kept: bytes) -> None:
    """Append to the older log, truncated first if it would become too large."""
    older = directories.open_log(directory, path, name)
    try:
        if os.fstat(older).st_size + len(kept) > MAX_BYTES:
            os.ftruncate(older, 0)
        os.write(older, kept)
    finally:
        os.close(older)


def _without_chatter(text: bytes) -> bytes:
    """Drop the lines of connections; a truncated file may begin with NULs on some file systems."""
    lines = text.replace(b"\0", b"").splitlines(keepends=True)
    return b"".join(line for line in lines if not any(trace in line for trace in _CHATTER))


# -- its events: servers that start, end and fail, and clients that wait


class LogEntry(NamedTuple):
    """One entry of the log: `kind` is started, shutdown, exited, crashed, waiting or fault.

    `crashed` is an unexpected exit: 535 logs status 0 even for a server that was killed by a signal. `number`
    is the exit status, or otherwise the user.
    """

    kind: str
    pid: int = 0
    number: int = 0


class LogReader:
    def __init__(
        self,
        plan: DomainPlan,
        emit: Callable[[Event], None],
        servers: Callable[[], Sequence[int]],
        *,
        is_new: bool = False,
    ) -> None:
        """Start at the log's end: existing entries are from before, and of another process if it `is_new`."""
        self._name = plan.name
        self._emit = emit
        self._servers = servers
        self._path = os.path.join(plan.log_directory, LOG_NAME)
        #: How large it was at the last call.
        self.size = 0
        self._rest = b""
        self._is_end_expected = False
        self._user: int | None = None
        if is_new:
            with contextlib.suppress(OSError):  # there is none yet
                self.size = os.stat(self._path).st_size
        else:
            self.read()

    def report(self) -> None:
        entries = self.read()
        for event in events_of(entries, self._name, self._servers()) if entries else ():
            self._emit(event)

    def read(self) -> list[LogEntry]:
        try:
            log = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(log).st_size
                if size < self.size:  # it was truncated
                    self.size, self._rest = 0, b""
                start = max(self.size, size - _MAX_BYTES)
                text = self._rest + os.pread(log, size - start, start)
            finally:
                os.close(log)
        except (OSError, MemoryError):  # the next call reads it
            return []
        self.size = size
        complete, _, self._rest = text.rpartition(b"\n")
        # Every entry has one of these, and most lines are our own probes', so they are not parsed.
        lines = [line for line in complete.split(b"\n") if b"erver" in line or b"quit" in line]
        entries = (_parse_line(line.decode(errors="replace")) for line in lines)
        return [self._classify(entry) for entry in entries if entry]

    def _classify(self, entry: LogEntry) -> LogEntry:
        """The entry, with `crashed` as the kind of an unexpected exit."""
        if entry.kind == "started":
            self._is_end_expected, self._user = False, entry.number
        elif entry.kind == "shutdown" or (entry.kind == "waiting" and entry.number != self._user):
            self._is_end_expected = True
        elif entry.kind == "exited" and not entry.number and not self._is_end_expected:
            return entry._replace(kind="crashed")
        return entry


def _parse_line(line: str) -> LogEntry | None:
    for kind, pattern in (("started", _STARTED), ("exited", _EXITED), ("waiting", _WAITS)):
        match = re.search(pattern, line)
        if match:
            return LogEntry(kind, int(match[1]), int(match[2]))
    if any(order in line for order in _END_CAUSES):
        return LogEntry("shutdown")
    return LogEntry("fault") if _FAULT in line else None


def events_of(entries: Sequence[LogEntry], domain: str, servers: Sequence[int]) -> list[Event]:
    """The events for the entries. `servers` are the PIDs of the running servers.

    A server that fails to start is started six times within milliseconds (measured), which is one event.
    """
    failed = [entry for entry in entries if entry.kind == "exited" and entry.number]
    failed_pids = {entry.pid for entry in failed}
    events = [
        _event(entry, domain) for entry in entries if entry not in failed and entry.pid not in failed_pids
    ]
    if failed:
        events.append(_exit_event(failed, domain))
    waiting = [entry for entry in entries if entry.kind == "waiting"]
    events += [
        _waiting_event(waiting, uid, domain, servers) for uid in sorted({entry.number for entry in waiting})
    ]
    return [event for event in events if event]


def _event(entry: LogEntry, domain: str) -> Event | None:
    server = f"MPS server (PID {entry.pid})"
    if entry.kind == "started":
        cause = f"a job of {user_name(entry.number)} connected"
        return Event("info", "client", domain, f"{server} started", cause)
    if entry.kind == "exited":
        return Event("info", "client", domain, f"{server} ended")
    if entry.kind == "crashed":
        what = f"{server} ended unexpectedly"
        return _failure_event(domain, what, "it crashed or was killed", "its jobs have failed")
    if entry.kind == "fault":
        consequence = "all jobs on that server fail; new jobs can start after the failed ones have ended"
        what = "an MPS server had a fatal exception"
        return _failure_event(domain, what, "a fault in one of its jobs", consequence)
    return None


def _exit_event(failed: Sequence[LogEntry], domain: str) -> Event:
    first, *more = failed
    what = f"MPS server (PID {first.pid}) exited with status {first.number}"
    if more:
        what += f", and {len(more)} more"
    return _failure_event(domain, what, f"see {SERVER_LOG}", "its jobs have failed")


def _failure_event(domain: str, what: str, cause: str, consequence: str) -> Event:
    return Event("error", "client", domain, what, cause, consequence, reasons.SERVER_FAILED)


def _waiting_event(
    waiting: Sequence[LogEntry], uid: int, domain: str, servers: Sequence[int]
) -> Event | None:
    """The event for waiting clients; None if they wait for their own user's server, which is starting."""
    other_uids = {other for pid in servers if (other := uid_of(pid)) is not None and other != uid}
    if not other_uids:
        return None
    names = ", ".join(sorted(user_name(other) for other in other_uids))
    pids = [str(entry.pid) for entry in waiting if entry.number == uid]
    plural, verb = ("s", "wait") if len(pids) > 1 else ("", "waits")
    first = ", ".join(pids[:_MAX_NAMED]) + (", ..." if len(pids) > _MAX_NAMED else "")
    what = f"{len(pids)} job{plural} of {user_name(uid)} (PID{plural} {first}) {verb}"
    cause = f"MPS serves one user at a time, and is serving {names}"
    consequence = "jobs start once the other user's jobs have ended"
    return Event("warning", "client", domain, what, cause, consequence, reasons.CLIENT_WAITING)
