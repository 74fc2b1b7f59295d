"""Who waits for an MPS server that another user has.

The control daemon keeps such a client waiting, and tells only its log of it. That it is served since is told
by no line of its own: when a server starts for a user, all of that user's clients are served (measured).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from yunion_mps.host.proc import uid_of
from yunion_mps.models import DomainPlan
from yunion_mps.mps.log_file import LOG_NAME, OLDER, timestamp_parser

_LINE = re.compile(
    rb"^\0*\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ Control +\d+\] (?:"
    rb"NEW CLIENT (?P<client>\d+) from user (?P<of>\d+): Server is not ready, push client to pending list"
    rb"|Starting new server (?P<server>\d+) for user (?P<user>\d+)"
    rb"|NEW SERVER (?P<ready>\d+): Ready"
    rb"|(?P<begin>Starting control daemon))",
    re.MULTILINE,
)


class Waiter(NamedTuple):
    """A client that waits since then (s since 1970), and the server (PID) that it waits for."""

    pid: int
    uid: int
    since_s: float
    server: int


def waiting_at(plan: DomainPlan, servers: Sequence[int]) -> list[Waiter]:
    """Those who wait while these servers run, the first to come first; nobody where one serves all users.

    Also those in containers: the log has the PIDs that the kernel gave it. One that gave up without ending is
    not told from one that waits.
    """
    owners = {pid: uid for pid in servers if (uid := uid_of(pid)) is not None}
    if plan.multiuser or not owners:
        return []
    found = []
    for pid, (uid, since_s) in pending_in(_logs(plan), timestamp_parser(time.time())).items():
        others = [server for server, owner in owners.items() if owner != uid]
        if uid_of(pid) == uid:
            found.append(Waiter(pid, uid, since_s, (others or list(owners))[0]))
    return sorted(found, key=lambda one: one.since_s)


def pending_in(log: bytes, seconds: Callable[[str], float]) -> dict[int, tuple[int, float]]:
    """The user and the time of each client (by PID) that the log last says is kept waiting."""
    pending: dict[int, tuple[int, float]] = {}
    users: dict[bytes, int] = {}
    for line in _LINE.finditer(log):
        if line["begin"]:
            pending, users = {}, {}
        elif line["client"]:
            with contextlib.suppress(ValueError, OverflowError):  # of the time, where somebody writes there
                pending[int(line["client"])] = (int(line["of"]), seconds(line["time"].decode()))
        else:
            if line["server"]:
                users[line["server"]] = int(line["user"])
            served = users.get(line["server"] or line["ready"])
            pending = {pid: one for pid, one in pending.items() if one[0] != served}
    return pending


def _logs(plan: DomainPlan) -> bytes:
    """All that there is of the log: what it was emptied of, and what was written since; 2 MiB at most."""
    parts = []
    for name in (OLDER, LOG_NAME):
        with contextlib.suppress(OSError), open(os.path.join(plan.log_directory, name), "rb") as file:
            parts.append(file.read())
    return b"\n".join(parts)
