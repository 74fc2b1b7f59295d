"""What a control daemon's log tells that nothing else does: servers that come, go and fail, and who waits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from yunion_mps.host.proc import uid_of, user_name
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps.log_file import LOG_NAME, SERVER_LOG

#: What is read at once; more than that between two looks is a flood, of which the end has to do.
_MOST_BYTES = 1 << 18
_MOST_NAMED = 5

_STARTED = re.compile(r"Starting new server (\d+) for user (\d+)")
_EXITED = re.compile(r"Server (\d+) exited with status (\d+)")
_WAITS = re.compile(r"NEW CLIENT (\d+) from user (\d+): Server is not ready, push client to pending list")
_FAULT = "Server encountered a fatal exception"
#: A server never ends by itself; what tells it to, apart from another user's waiting client (measured).
_ORDERS = ("Cmd:shutdown_server", "Cmd:quit", "quit command issued", "shutting down server")


class News(NamedTuple):
    """One thing that the log tells: `kind` is started, ordered, exited, died, waits or fault.

    `died` is an end that nobody asked for: 535 logs status 0 also for a server that a signal killed.
    """

    kind: str
    pid: int = 0
    number: int = 0


class NewsReader:
    """Reads on where it ended before."""

    def __init__(
        self, plan: DomainPlan, tell: Callable[[Event], None], servers: Callable[[], Sequence[int]]
    ) -> None:
        """Begin at the log's end: what is there already was told to an earlier reader, or to nobody."""
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
        news = self.read()
        for event in events_of(news, self._name, self._servers()) if news else ():
            self._tell(event)

    def read(self) -> list[News]:
        """What is new since the last call."""
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # it was emptied
                    self._offset, self._rest = 0, b""
                start = max(self._offset, size - _MOST_BYTES)
                file.seek(start)
                text = self._rest + file.read(size - start)
        except OSError:
            return []
        self._offset = size
        *lines, self._rest = text.split(b"\n")
        return [self._judged(news) for line in lines if (news := _news(line.decode(errors="replace")))]

    def _judged(self, news: News) -> News:
        """The same, but for the end of a server that nobody has told to end."""
        if news.kind == "started":
            self._is_ordered, self._user = False, news.number
        elif news.kind == "ordered" or (news.kind == "waits" and news.number != self._user):
            self._is_ordered = True
        elif news.kind == "exited" and not news.number and not self._is_ordered:
            return news._replace(kind="died")
        return news


def events_of(news: Sequence[News], domain: str, servers: Sequence[int]) -> list[Event]:
    """What it means, as events. `servers` are the PIDs of those that run.

    A server that cannot start is started six times in some milliseconds (measured): that is one event.
    """
    failed = [one for one in news if one.kind == "exited" and one.number]
    failed_pids = {one.pid for one in failed}
    told = [_told(one, domain) for one in news if one not in failed and one.pid not in failed_pids]
    if failed:
        told.append(_failure(failed, domain))
    waiting = [one for one in news if one.kind == "waits"]
    told += [_waiting(waiting, uid, domain, servers) for uid in sorted({one.number for one in waiting})]
    return [event for event in told if event]


def _told(news: News, domain: str) -> Event | None:
    who = f"MPS server (PID {news.pid})"
    if news.kind == "started":
        return Event("info", "client", domain, f"{who} started", f"a job of {user_name(news.number)} came")
    if news.kind == "exited":
        return Event("info", "client", domain, f"{who} ended")
    if news.kind == "died":
        what = f"{who} ended without being asked to"
        return Event("error", "client", domain, what, "it crashed or was killed", "its jobs have failed")
    if news.kind == "fault":
        means = "every job on that server fails; new ones start once those are gone"
        what = "an MPS server had a fatal exception"
        return Event("error", "client", domain, what, "a fault of a job", means)
    return None


def _failure(failed: Sequence[News], domain: str) -> Event:
    first, *more = failed
    what = f"MPS server (PID {first.pid}) exited with status {first.number}"
    if more:
        what += f", and {len(more)} more"
    return Event("error", "client", domain, what, f"see {SERVER_LOG} beside its log", "its jobs have failed")


def _waiting(waiting: Sequence[News], uid: int, domain: str, servers: Sequence[int]) -> Event | None:
    """A client that waits for its own user's server, which starts, is nothing to speak of."""
    others = {other for pid in servers if (other := uid_of(pid)) is not None and other != uid}
    if not others:
        return None
    names = ", ".join(sorted(user_name(other) for other in others))
    pids = [str(one.pid) for one in waiting if one.number == uid]
    plural, verb = ("s", "wait") if len(pids) > 1 else ("", "waits")
    first = ", ".join(pids[:_MOST_NAMED]) + (", ..." if len(pids) > _MOST_NAMED else "")
    what = f"{len(pids)} job{plural} of {user_name(uid)} (PID{plural} {first}) {verb}"
    cause = f"MPS serves one user at a time, and {names} has the server"
    means = "jobs start when the other user's have ended; cuda_mps_multiuser: true serves all users at once"
    return Event("warning", "client", domain, what, cause, means)


def _news(line: str) -> News | None:
    for kind, pattern in (("started", _STARTED), ("exited", _EXITED), ("waits", _WAITS)):
        found = pattern.search(line)
        if found:
            return News(kind, int(found[1]), int(found[2]))
    if any(order in line for order in _ORDERS):
        return News("ordered")
    return News("fault") if _FAULT in line else None
