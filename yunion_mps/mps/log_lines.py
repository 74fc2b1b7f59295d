"""The grammar of NVIDIA's two logs: what a line of control.log or server.log says.

A line begins with a header, `[2026-11-20 12:40:49.964 Control 21889] `, whose last two fields are the writer
and its PID: from 550 on, `Starting new server` is written by the new process itself. Some text has neither a
header nor a newline, such as `ERROR: init 250 result=11`, so a header may follow it on its line.

Only the beginning of a message counts, because the control daemon repeats the commands of every user after
`Cmd:`. What the control daemons of 535 and 550 write was measured; lines of other releases (470 to 595) and
of MPS servers are from NVIDIA's documentation and from public reports.

Source: NVIDIA: Multi-Process Service, section "MPS Logging Format" (later "Appendix: Logging").
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from yunion_mps.core.text import printable

#: The kinds of lines.
OTHER = "other"
CONTROL_STARTED = "control daemon started"
CLIENT_WAITS = "client waits"
CLIENT_SERVED = "client served"
START_ORDERED = "start ordered"
END_ORDERED = "end ordered"
SERVER_BEGINS = "server begins"
SERVER_READY = "server ready"
SERVER_EXITED = "server exited"
#: A fatal exception of a server; the line does not say of which one.
SERVER_EXCEPTION = "server exception"
#: A reason why a server failed, in a message of that server, or of what was about to become it.
FAILURE = "failure"
CLIENT_CONNECTED = "client connected"

#: The host's time zone: the control daemon has no TZ in its environment, unlike perhaps this process.
_ZONE = "/etc/localtime"
_HEADER = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ "
    r"(?P<writer>Control|Legacy Server|Server|Client|Other) +(?P<by>\d{1,10})\] ?"
)
#: What a server calls a client: `4267`, and from 560 on `{PID: 4267, Context ID: 0}`.
_CLIENT = r"\{?(?:PID: )?(?P<pid>\d{1,10})\b(?:, Context ID: \d+\})?"
_NEW_CLIENT = r"NEW CLIENT (?P<pid>\d{1,10})\b from user (?P<uid>\d{1,10})\b"

_CONTROL_MESSAGES = (
    (CONTROL_STARTED, r"Starting control daemon using socket "),
    (CLIENT_WAITS, rf"{_NEW_CLIENT}: Server is not ready, push client to pending list"),
    (CLIENT_SERVED, rf"{_NEW_CLIENT}: Server already exists"),
    (START_ORDERED, r"Cmd:start_server +-uid +(?P<uid>\d{1,10})\b"),
    (END_ORDERED, r"Cmd:shutdown_server +(?P<pid>\d{1,10})\b"),
    (END_ORDERED, r"(?:Try|Force) shutting down server (?P<pid>\d{1,10})\b"),
    (END_ORDERED, r"Cmd:quit\b|quit command issued"),
    (SERVER_BEGINS, r"Starting new server (?P<pid>\d{1,10})\b for user (?P<uid>\d{1,10})\b"),
    (SERVER_READY, r"NEW SERVER (?P<pid>\d{1,10})\b: Ready"),
    (SERVER_EXITED, r"Server (?P<pid>\d{1,10})\b exited with status (?P<status>-?\d{1,10})\b"),
    (SERVER_EXCEPTION, r"Server encountered a fatal exception"),
    (FAILURE, r"Failed to start server using uid "),
)  # fmt: skip
#: The last one is for messages that were never seen; the first two are no failures of the server.
_SERVER_MESSAGES = (
    (CLIENT_CONNECTED, rf"(?:New )?[Cc]lient {_CLIENT} connected"),
    (OTHER, r"(?i)Receive command failed, assuming client exit|.*\bclient\b.*\b(?:disconnected|exit)"),
    (FAILURE, r"MPS is only supported on "),
    (FAILURE, r"(?i).*(?:fail|error|exception|not supported)"),
)


def _compiled(messages: Iterable[tuple[str, str]]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((kind, re.compile(pattern)) for kind, pattern in messages)


_CONTROL_PATTERNS = _compiled(_CONTROL_MESSAGES)
_SERVER_PATTERNS = _compiled(_SERVER_MESSAGES)

#: Nothing worth quoting is longer.
_MAX_TEXT = 200
#: A line of control.log without any of these says nothing. Most lines are about our own probes and queries.
_MARKS = (b"erver", b"SERVER", b"quit", b"control daemon", b"ERROR")


class LogLine(NamedTuple):
    """What a line says: a kind, and the values that lines of this kind have."""

    kind: str
    #: That of the server or client that the line is about: 0 if it is about all servers, or if the PID of the
    #: client is unknown, as in some containers.
    pid: int = 0
    uid: int | None = None
    #: The exit status of the server.
    status: int | None = None
    #: The message.
    text: str = ""
    #: The local time of the header (see `timestamp_parser`); empty without a header, like `writer`.
    time: str = ""
    writer: str = ""
    #: 0 without a header.
    writer_pid: int = 0


def parse_lines(log: bytes) -> Iterator[LogLine]:
    """Parse what says something in a part of control.log; its first and last line may be incomplete."""
    for line in log.split(b"\n"):
        if any(mark in line for mark in _MARKS):
            yield from parse_line(line.decode(errors="replace"))


def parse_server_lines(log: bytes) -> Iterator[LogLine]:
    """Parse all lines of a part of server.log."""
    for line in log.split(b"\n"):
        yield from parse_line(line.decode(errors="replace"))


def served_clients(log: bytes, command: str) -> list[LogLine] | None:
    """Return the lines about clients that got a running server, in this part of control.log.

    None if it does not have this command, and so perhaps not all that came before.
    """
    if f"] Cmd:{command}\n".encode() not in log:
        return None
    return [line for line in parse_lines(log) if line.kind == CLIENT_SERVED]


def parse_line(line: str) -> Iterator[LogLine]:
    """Parse a line of either log: one message, and before it another one without a header if it has that."""
    line = line.replace("\0", "").strip()  # a truncated file may begin with NULs on some file systems
    header = _HEADER.search(line)
    before = line[: header.start()] if header else line
    if before:
        yield LogLine(FAILURE if before.startswith("ERROR") else OTHER, text=_quotable(before))
    if header:
        yield _with_header(header, line[header.end() :])


def _with_header(header: re.Match[str], text: str) -> LogLine:
    messages = _CONTROL_PATTERNS if header["writer"] == "Control" else _SERVER_PATTERNS
    kind = OTHER
    values: dict[str, str | None] = {}
    for its_kind, pattern in messages:
        match = pattern.match(text)
        if match:
            kind = its_kind
            values = match.groupdict()
            break
    status = values.get("status")
    uid = values.get("uid")
    return LogLine(
        kind=kind,
        pid=int(values.get("pid") or 0),
        uid=None if uid is None else int(uid),
        status=None if status is None else int(status),
        text=_quotable(text),
        time=header["time"],
        writer=header["writer"],
        writer_pid=int(header["by"]),
    )


def _quotable(text: str) -> str:
    return printable(text.strip()[:_MAX_TEXT])


def timestamp_parser(now_s: float, zone: str = _ZONE) -> Callable[[str], float]:
    """Return a function that parses a line's time, `2026-11-20 13:45:07`, to s since 1970.

    The function raises ValueError for other texts.

    A time that occurs twice, when daylight saving time ends, is the later one unless that is after `now_s`.
    """
    from datetime import datetime, timezone, tzinfo  # here, because the daemon's start needs neither
    from zoneinfo import ZoneInfo

    time_zone: tzinfo = timezone.utc
    with contextlib.suppress(OSError, ValueError), open(zone, "rb") as file:
        time_zone = ZoneInfo.from_file(file)

    def read(text: str) -> float:
        earlier = datetime.fromisoformat(text).replace(tzinfo=time_zone)
        second_s = earlier.replace(fold=1).timestamp()
        return second_s if second_s <= now_s else earlier.timestamp()

    return read
