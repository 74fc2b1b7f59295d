"""The control daemon's log: quote its last lines, report events that only it has, and limit its size.

It is the standard output of the running control daemon, so a log that has grown is truncated in place. Every
connection adds two lines and every query four, so the lines of our own queries would hide what matters; they
are removed from the part that is kept (measured with 535).

Source: nvidia-cuda-mps-control(1), -f and section "FILES".
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import DomainPlan, Event
from yunion_mps.core.reasons import Reason
from yunion_mps.core.text import decode_line
from yunion_mps.host.proc import user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.mps import directories
from yunion_mps.mps.log_lines import (
    CLIENT_WAITS,
    FAILURE,
    SERVER_BEGINS,
    LogLine,
    parse_lines,
    parse_server_lines,
    timestamp_parser,
)
from yunion_mps.mps.server_history import (
    CRASHED,
    ENDED,
    FAULTED,
    NOT_STARTED,
    STARTED,
    Outcome,
    ServerHistory,
)

LOG_NAME = "control.log"
OLDER = "control.log.1"
#: NVIDIA's server writes its own log beside it.
SERVER_LOG = "server.log"
MAX_BYTES = 1 << 20
_LAST_LINES = 5
_LAST_BYTES = 4000
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

#: How much of the end of server.log is searched for the cause of a failure.
_CAUSE_BYTES = 1 << 16
#: How old the last failed start may be that a new daemon counts: starts are attempted every minute.
_RECENT_S = 120.0


def log_hint(plan: DomainPlan) -> str:
    """Return a hint that names the control daemon's log, with its last lines but for our own queries."""
    path = os.path.join(plan.log_directory, LOG_NAME)
    try:
        with directories.open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = [decode_line(line) for line in _without_chatter(file.read()).splitlines()]
    except OSError:
        lines = []
    return f"see its log: {path}" + "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])


def log_size(plan: DomainPlan) -> int:
    """Return the size of the log in bytes; 0 if there is none."""
    try:
        with directories.locate(os.path.join(plan.log_directory, LOG_NAME)) as located:
            return os.fstat(located).st_size
    except (OSError, HostError):
        return 0


def log_since(plan: DomainPlan, start: int) -> bytes:
    """Return what the log has from this offset on, the first 256 KiB of it; empty if it cannot be read."""
    try:
        with directories.open_file(os.path.join(plan.log_directory, LOG_NAME)) as file:
            file.seek(start)
            return file.read(_MAX_BYTES)
    except (OSError, MemoryError):
        return b""


# -- its size


def bound_logs(plan: DomainPlan) -> None:
    """Truncate a log that has grown too large, and keep the important lines of its end in a file beside it.

    Nothing is raised: a failure is retried at the next poll.
    """
    file = os.path.join(plan.log_directory, LOG_NAME)
    with contextlib.suppress(OSError, HostError), directories.directory_of(file) as (directory, _):
        for name in (LOG_NAME, SERVER_LOG):
            _truncate(directory, plan.log_directory, name)


def _truncate(directory: int, path: str, name: str) -> None:
    try:
        if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size <= MAX_BYTES:
            return
    except FileNotFoundError:
        return
    log = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        size = os.fstat(log).st_size
        important = _without_chatter(os.pread(log, MAX_BYTES, max(0, size - MAX_BYTES)))
        try:
            _append_older(directory, path, f"{name}.1", important)
        finally:  # even if nothing can be kept, because then the disk is full
            os.ftruncate(log, 0)
    finally:
        os.close(log)


def _append_older(directory: int, path: str, name: str, lines: bytes) -> None:
    """Append to the older log, truncated first if it would become too large."""
    older = directories.open_log(directory, path, name)
    try:
        if os.fstat(older).st_size + len(lines) > MAX_BYTES:
            os.ftruncate(older, 0)
        os.write(older, lines)
    finally:
        os.close(older)


def _without_chatter(text: bytes) -> bytes:
    """Drop the lines of connections; a truncated file may begin with NULs on some file systems."""
    lines = text.replace(b"\0", b"").splitlines(keepends=True)
    return b"".join(line for line in lines if not _is_chatter(line))


def _is_chatter(line: bytes) -> bool:
    return any(trace in line for trace in _CHATTER)


# -- its events: servers that start, end and fail, and clients that wait


class LogNews(NamedTuple):
    """What a part of the log tells: what became of servers, and the lines about clients that wait."""

    outcomes: Sequence[Outcome] = ()
    waiting: Sequence[LogLine] = ()


class LogReader:
    """Follows the log of one control daemon, whose `ControlDaemon` has it."""

    def __init__(
        self,
        plan: DomainPlan,
        emit: Callable[[Event], None],
        servers: Callable[[], Sequence[int]],
        *,
        is_new: bool = False,
    ) -> None:
        """Start at the log's end: existing entries are from before.

        emit: called with each event.
        servers: returns the PIDs of the control daemon's servers.
        is_new: whether the control daemon is about to start, so that existing entries are of another process.
        """
        self._plan = plan
        self._emit = emit
        self._servers = servers
        self._path = os.path.join(plan.log_directory, LOG_NAME)
        #: How large it was at the last call.
        self.size = 0
        self._rest = b""
        self._history = ServerHistory()
        self._outcomes: list[Outcome] = []
        #: The users (uids) whose servers are known to fail, so that this is no event.
        self._failing_users: Collection[int] = ()
        if is_new:
            self.size = log_size(plan)
        else:
            self._outcomes += _recent_failures(self.read().outcomes)

    def note_failing_users(self, uids: Collection[int]) -> None:
        """Emit no events of failed starts of these users' servers."""
        self._failing_users = uids

    def report(self) -> bool:
        """Read what is new, and emit its events; return whether something has become of a server."""
        news = self.read()
        self._outcomes += news.outcomes
        outcomes: list[Outcome] = []
        for outcome in news.outcomes:
            if outcome.kind != NOT_STARTED or outcome.uid not in self._failing_users:
                outcomes.append(outcome)
        news = news._replace(outcomes=outcomes)
        if any(news):
            for event in events_of(news, self._plan, self._servers()):
                self._emit(event)
        return bool(self._outcomes)

    def take_outcomes(self) -> list[Outcome]:
        """Return what became of servers since the last call; at first, recent failures from before."""
        outcomes = self._outcomes
        self._outcomes = []
        return outcomes

    def displaced_by(self, server: int) -> int | None:
        """Return the user (uid) who waits or has waited for the server's end, by what was read so far.

        Before 550, the server accepts no new clients from then on, even if the user no longer waits.
        """
        return self._history.displaced_by(server)

    def read(self) -> LogNews:
        try:
            with directories.open_file(self._path) as log:
                size = os.fstat(log.fileno()).st_size
                if size < self.size:  # it was truncated
                    self.size = 0
                    self._rest = b""
                start = max(self.size, size - _MAX_BYTES)
                text = self._rest + os.pread(log.fileno(), size - start, start)
        except (OSError, MemoryError):  # the next call reads it
            return LogNews()
        self.size = size
        complete, _, self._rest = text.rpartition(b"\n")
        lines = list(parse_lines(complete))
        return LogNews(self._history.follow(lines), _waiting_lines(lines))


def _waiting_lines(lines: Iterable[LogLine]) -> list[LogLine]:
    """Return the lines about clients that wait, without those for whose user a server was begun later.

    Lines may be read seconds after they were written.
    """
    waiting: list[LogLine] = []
    for line in lines:
        if line.kind == CLIENT_WAITS:
            waiting.append(line)
        elif line.kind == SERVER_BEGINS:
            waiting = [entry for entry in waiting if entry.uid != line.uid]
    return waiting


def _recent_failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the failed starts of each user since his last server, if the last one was moments ago."""
    failed: dict[int | None, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.kind == NOT_STARTED:
            failed.setdefault(outcome.uid, []).append(outcome)
        elif outcome.kind == STARTED:
            failed.pop(outcome.uid, None)
    recent = []
    now_s = time.time()
    for outcomes_of_user in failed.values():
        with contextlib.suppress(ValueError):  # not a valid time
            if timestamp_parser(now_s)(outcomes_of_user[-1].time) >= now_s - _RECENT_S:
                recent += outcomes_of_user
    return recent


def describe_failure(outcome: Outcome, plan: DomainPlan) -> str:
    """Return how a server failed, and why: `failed to start: server.log: Failed to start : …`."""
    ends = {CRASHED: "ended unexpectedly", FAULTED: "had a fatal exception", NOT_STARTED: "failed to start"}
    return f"{ends[outcome.kind]}: {failure_cause(outcome, plan.log_directory)}"


def failure_cause(outcome: Outcome, log_directory: str) -> str:
    """Return why a server failed, quoted from server.log, or else what its control daemon's log shows."""
    words = _last_words(outcome, log_directory)
    if words:
        return f"{SERVER_LOG}: {words}"
    if outcome.kind == FAULTED:
        return "the log does not say which job caused it"
    if outcome.kind == NOT_STARTED and outcome.status:
        return f"the server exited with status {outcome.status}, and {SERVER_LOG} does not say why"
    if outcome.kind == NOT_STARTED:
        return "the server crashed or was killed before it was ready"
    return f"it exited with status {outcome.status}" if outcome.status else "it crashed or was killed"


def _last_words(outcome: Outcome, log_directory: str) -> str:
    """Return the last failure that server.log has of the server; empty if it has none.

    Words without a header count only if they are the last ones there, and younger than the server.
    """
    try:
        path = os.path.join(log_directory, SERVER_LOG)
        with directories.open_file(path) as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _CAUSE_BYTES))
            lines = list(parse_server_lines(file.read(_CAUSE_BYTES)))
    except (OSError, MemoryError):
        return ""
    own = [line.text for line in lines if line.writer_pid == outcome.pid and line.kind == FAILURE]
    if own:
        return own[-1]
    last = lines[-1] if lines else None
    if last is None or last.kind != FAILURE or last.writer_pid:
        return ""
    with contextlib.suppress(ValueError):  # the log does not say when the server began
        if status.st_mtime >= timestamp_parser(time.time())(outcome.begin_time):
            return last.text
    return ""


def events_of(news: LogNews, plan: DomainPlan, servers: Collection[int]) -> list[Event]:
    """Return the events for a part of the log. `servers` are the PIDs of the running servers.

    A server that fails to start is started six times within milliseconds (measured), which is one event of
    its user.
    """
    failed: dict[int | None, list[Outcome]] = {}
    for outcome in news.outcomes:
        if outcome.kind == NOT_STARTED:
            failed.setdefault(None if plan.multiuser else outcome.uid, []).append(outcome)
    events: list[Event] = []
    for outcome in news.outcomes:
        event = None if outcome.kind == NOT_STARTED else _outcome_event(outcome, plan)
        if event:
            events.append(event)
    events += [_failed_starts(outcomes, plan) for outcomes in failed.values()]
    if plan.multiuser:
        return events
    users = {line.uid for line in news.waiting if line.uid is not None}
    for uid in sorted(users):
        event = _waiting_event(news.waiting, uid, plan.name, servers)
        if event:
            events.append(event)
    return events


def _outcome_event(outcome: Outcome, plan: DomainPlan) -> Event | None:
    server = f"MPS server (PID {outcome.pid})" if outcome.pid else "an MPS server"
    server += _whose(outcome, plan)
    if outcome.kind == STARTED:
        return Event("info", "client", plan.name, f"{server} started", _why_started(outcome, plan))
    if outcome.kind == ENDED:
        return Event("info", "client", plan.name, f"{server} ended")
    if outcome.kind == CRASHED:
        consequence = "its jobs have failed" if outcome.has_client else ""
        return _failure_event(plan, f"{server} ended unexpectedly", outcome, consequence)
    if outcome.kind == FAULTED:
        consequence = "all jobs on that server fail; new jobs can start after the failed ones have ended"
        return _failure_event(plan, f"{server} had a fatal exception", outcome, consequence)
    return None


def _whose(outcome: Outcome, plan: DomainPlan) -> str:
    """Return ` of alice`, the server's user; empty if the log does not show it, or if all users share it.

    Events are counted by their texts (`event_log`): without a name, one user's deaths would hide another's.
    """
    if plan.multiuser or outcome.uid is None:
        return ""
    return f" of {user_name(outcome.uid)}"


def _why_started(outcome: Outcome, plan: DomainPlan) -> str:
    """Return the cause as far as the log shows it; with one server for all users, it says user 0 for all."""
    if not outcome.has_client:
        return "the command start_server" if outcome.is_ordered else ""
    if plan.multiuser or outcome.uid is None:
        return "a job connected"
    return f"a job of {user_name(outcome.uid)} connected"


def _failed_starts(failed: Sequence[Outcome], plan: DomainPlan) -> Event:
    # Without a number: more of them may be in the part that is read next, and then are no news.
    first = failed[0]
    servers = f"MPS server (PID {first.pid})"
    if len(failed) > 1:
        servers = f"MPS servers (PID {first.pid} and later)"
    text = f"{servers}{_whose(first, plan)} failed to start"
    has_client = any(outcome.has_client for outcome in failed)
    consequence = "jobs that wait for a server are refused" if has_client else ""
    return _failure_event(plan, text, failed[-1], consequence, reasons.SERVER_START_FAILED)


def failing_user_events(
    before: Mapping[int, Reason], after: Mapping[int, Reason], domain: str
) -> Iterator[Event]:
    """Yield the events if servers begin to fail for users (uids), with the reason, or start again."""
    for uid, reason in after.items():
        if uid not in before:
            name = user_name(uid)
            consequence = f"its devices are unavailable for {name} until a server starts; a start is retried"
            yield Event(
                severity="error",
                kind="client",
                subject=domain,
                what=f"unavailable for {name}",
                cause=reason,
                consequence=consequence,
                code=reason.code,
            )
    for uid in before:
        if uid not in after:
            yield Event("info", "client", domain, f"MPS servers of {user_name(uid)} start again")


def _failure_event(
    plan: DomainPlan, text: str, outcome: Outcome, consequence: str, code: str = reasons.SERVER_FAILED
) -> Event:
    return Event(
        severity="error",
        kind="client",
        subject=plan.name,
        what=text,
        cause=failure_cause(outcome, plan.log_directory),
        consequence=consequence,
        code=code,
    )


def _waiting_event(
    waiting: Sequence[LogLine], uid: int, domain: str, servers: Collection[int]
) -> Event | None:
    """Return the event for waiting clients; None if they have ended, or wait for their own user's server."""
    other_uids: set[int] = set()
    for pid in servers:
        other_uid = uid_of(pid)
        if other_uid is not None and other_uid != uid:
            other_uids.add(other_uid)
    if not other_uids:
        return None
    names = ", ".join(sorted(map(user_name, other_uids)))
    pids = []
    for entry in waiting:
        has_ended = entry.pid != 0 and uid_of(entry.pid) is None
        if entry.uid == uid and not has_ended:
            pids.append(str(entry.pid))
    if not pids:
        return None
    few = ", ".join(pids[:_MAX_NAMED]) + (", ..." if len(pids) > _MAX_NAMED else "")
    if len(pids) > 1:
        text = f"{len(pids)} jobs of {user_name(uid)} (PIDs {few}) wait"
    else:
        text = f"1 job of {user_name(uid)} (PID {few}) waits"
    return Event(
        severity="warning",
        kind="client",
        subject=domain,
        what=text,
        cause=f"MPS serves one user at a time, and is serving {names}",
        consequence="jobs start once the other user's jobs have ended",
        code=reasons.CLIENT_WAITING,
    )
