"""What systemd gets from the daemon, sd_notify(3) messages and log lines, and the job unit of a process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from traceback import walk_tb

from yunion_mps.host.proc import is_exiting
from yunion_mps.text import printable

#: The control group of an instance of systemd/yunion-mps-job@.service, or a group below it.
_JOB_UNIT = r"(?:^|/)system\.slice/(?:[^/]+\.slice/)*(yunion-mps-job@[^/]*\.service)(?:/|$)"
#: Below these, users' own service managers create groups with arbitrary names.
_USERS = r"/user(?:@|\.slice)"


class Notifier:
    """Reports the daemon's state to systemd; does nothing if systemd did not start it."""

    def __init__(self) -> None:
        self._last_status = ""
        self._socket: socket.socket | None = None
        address = os.environ.get("NOTIFY_SOCKET", "")
        if address:  # connected now, because later no descriptor may be left
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                connection.connect(f"\0{address[1:]}" if address.startswith("@") else address)
                self._socket = connection
            except OSError:
                connection.close()

    def ready(self, status: str = "") -> None:
        self._last_status = status
        self._send("READY=1", *([f"STATUS={status}"] if status else []))

    def status(self, status: str) -> None:
        """Set the status line of `systemctl status`; repetitions are not sent."""
        if status != self._last_status:
            self._send(f"STATUS={status}")
        self._last_status = status

    def reloading(self, status: str) -> None:
        """Report a change that `ready` ends; systemd considers the daemon up throughout."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", f"STATUS={status}")

    def stopping(self, status: str, within_s: int) -> None:
        """Report that the daemon is stopping and may take `within_s`, whatever the unit's timeout is."""
        within_us = within_s * 1_000_000
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={within_us}", f"STATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        """Send one line for each assignment: text quoted in a status cannot add another assignment."""
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.sendall("\n".join(map(printable, assignments)).encode())


def watchdog_interval_s() -> float | None:
    """Return half the interval in which systemd expects a sign of life; None if it expects none."""
    text = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 2_000_000


def job_unit_of(pid: int, proc: str = "/proc") -> str | None:
    """Return the job unit of the process, such as `yunion-mps-job@train.service`; None if unknown.

    systemd creates a control group for each unit, and no job can leave its own. Returns "" if the process is
    in no job unit, there are no control groups, or the process is in a PID namespace that is not visible here
    (PID 0). Unknown if the process is exiting or gone: control groups of version 1 then report `/`.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            groups = file.read().splitlines()
    except FileNotFoundError:
        groups = []
    except OSError:  # for example, no descriptor is left
        return None
    if pid and is_exiting(pid, proc):  # checked last, because it may exit at any time
        return None
    found = (re.search(_JOB_UNIT, group) for group in groups if not re.search(_USERS, group))
    return next((match[1] for match in found if match), "")


# -- the log on standard error: with `<N>` levels for systemd's journal, with timestamps for people

#: syslog(3) levels, as sd-daemon(3) reads them at the beginning of a line.
_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: How often one cause may log its traceback, and how many causes are remembered.
_INTERVAL_S, _MAX_CAUSES = 60.0, 256

#: The exception's class, and the file and line of each frame it passed through.
_Cause = tuple[object, ...]


class LineFormatter(logging.Formatter):
    """Indents continuation lines, so that quoted text cannot forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        first, *more = map(printable, super().format(record).split("\n"))
        return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in more)])


class JournalFormatter(LineFormatter):
    """Prefixes each line with its level, `<N>`, and no timestamp: the journal adds its own."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_LEVELS.get(record.levelno, 6)}>"
        return prefix + super().format(record).replace("\n", f"\n{prefix}")


class TracebackLimit(logging.Filter):
    """Drops a record whose exception was logged within the last minute; the next record counts the drops."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: When each cause was last logged, and how many records were dropped since.
        self._logged: dict[_Cause, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        now_s = self._clock()
        frames = walk_tb(error.__traceback__)
        cause = (type(error), *((frame.f_code.co_filename, line) for frame, line in frames))
        logged_s, dropped = self._logged.get(cause, (now_s - _INTERVAL_S, 0))
        if now_s - logged_s < _INTERVAL_S:
            self._logged[cause] = logged_s, dropped + 1
            return False
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more since the last traceback)", ()
        if len(self._logged) >= _MAX_CAUSES:
            self._logged.clear()
        self._logged[cause] = now_s, 0
        return True


def set_up_log(level: str, *, plain: bool = False) -> None:
    """Log from `level` on; `plain` omits time and level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(TracebackLimit())
    if plain:
        handler.setFormatter(LineFormatter("%(message)s"))
    elif _for_systemd():
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Collecting these takes time for every message, and none of our formats uses them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    atexit.register(_discard_unwritten)


def set_log_prefix(program: str) -> None:
    """Begin log lines with the program's name, as a command's errors do, unless they are for systemd."""
    if not _for_systemd():
        logging.getLogger().handlers[0].setFormatter(LineFormatter(f"{program}: %(message)s"))


def _for_systemd() -> bool:
    """Whether standard error goes to the journal (systemd.exec(5)) or to a service manager's pipe."""
    try:
        error = os.fstat(2)
    except OSError:
        return False
    if os.environ.get("JOURNAL_STREAM") == f"{error.st_dev}:{error.st_ino}":
        return True
    return bool(os.environ.get("NOTIFY_SOCKET")) and not os.isatty(2)


def _discard_unwritten() -> None:
    """Drop lines that cannot be written (full disk); otherwise Python would exit with 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    except (AttributeError, ValueError):  # it is closed or was never open
        pass
