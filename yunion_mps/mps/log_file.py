"""The control daemon's log: what it said last, and that it never fills the disk.

It is the control daemon's standard output, which it writes to for as long as it lives; so a log that has
grown is emptied in place. Every connection costs it two lines, and every question four: those of ours would
bury what matters, and are left out of what is kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from yunion_mps.escaping import decoded
from yunion_mps.models import DomainPlan
from yunion_mps.mps import directories

LOG_NAME = "control.log"
OLDER = "control.log.1"
#: NVIDIA's server writes its own log beside it.
SERVER_LOG = "server.log"
LARGEST_BYTES = 1 << 20
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


def look_at_log(plan: DomainPlan) -> str:
    """Where the control daemon's log is, and its last words beyond the traces of our own questions."""
    path = os.path.join(plan.log_directory, LOG_NAME)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            told = [decoded(line) for line in _without_chatter(file.read()).splitlines()]
    except OSError:
        told = []
    return f"its log is {path}" + "".join(f"\n  {line}" for line in told[-_LAST_LINES:])


def timestamp_parser(now_s: float, zone: str = _ZONE) -> Callable[[str], float]:
    """A function from the time of a line, `2026-11-20 13:45:07`, to s since 1970; it raises ValueError.

    A time that occurs twice, when summer time ends, is the later one unless that is after `now_s`.
    """
    from datetime import datetime, timezone, tzinfo  # here, for the daemon's start needs neither
    from zoneinfo import ZoneInfo

    here: tzinfo = timezone.utc
    with contextlib.suppress(OSError, ValueError), open(zone, "rb") as file:
        here = ZoneInfo.from_file(file)

    def read(text: str) -> float:
        first = datetime.fromisoformat(text).replace(tzinfo=here)
        second_s = first.replace(fold=1).timestamp()
        return second_s if second_s <= now_s else first.timestamp()

    return read


def bound_logs(plan: DomainPlan) -> None:
    """Empty a log that has grown too large, keeping what matters of its end in a file beside it.

    Nothing is raised: where it cannot be done now, it is tried again at the next look.
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
        if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size <= LARGEST_BYTES:
            return
    except FileNotFoundError:
        return
    log = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        size = os.fstat(log).st_size
        kept = _without_chatter(os.pread(log, LARGEST_BYTES, max(0, size - LARGEST_BYTES)))
        try:
            _keep(directory, path, f"{name}.1", kept)
        finally:  # also where nothing can be kept, for the disk is full then
            os.ftruncate(log, 0)
    finally:
        os.close(log)


def _keep(directory: int, path: str, name: str, kept: bytes) -> None:
    """Add to the older log, or begin it anew where it would become too large."""
    older = directories.open_log(directory, path, name)
    try:
        if os.fstat(older).st_size + len(kept) > LARGEST_BYTES:
            os.ftruncate(older, 0)
        os.write(older, kept)
    finally:
        os.close(older)


def _without_chatter(text: bytes) -> bytes:
    """The lines that are no traces of connections; NULs are what an emptied file begins with elsewhere."""
    lines = text.replace(b"\0", b"").splitlines(keepends=True)
    return b"".join(line for line in lines if not any(trace in line for trace in _CHATTER))
