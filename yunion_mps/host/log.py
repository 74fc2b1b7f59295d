"""The log on standard error: with `<N>` levels for systemd's journal, with timestamps for people."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from traceback import walk_tb

from yunion_mps.core.text import printable

#: syslog(3) levels, as sd-daemon(3) reads them at the beginning of a line.
_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: How often one cause may log its traceback, and how many causes are remembered.
_INTERVAL_S = 60.0
_MAX_CAUSES = 256

#: The exception's class, and the file and line of each frame it passed through.
_Cause = tuple[object, ...]


class LineFormatter(logging.Formatter):
    """Indents continuation lines, so that quoted text cannot forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [printable(line) for line in super().format(record).split("\n")]
        indented = [line if line.startswith("  ") else f"  {line}" for line in lines[1:]]
        return "\n".join([lines[0], *indented])


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
            record.msg = f"{record.getMessage()} ({dropped} more since the last traceback)"
            record.args = ()
        if len(self._logged) >= _MAX_CAUSES:
            self._logged.clear()
        self._logged[cause] = now_s, 0
        return True


class Failures:
    """The failures of work that is retried: each cause is logged once, and every failed request is counted.

    errors: counts failed requests by program.
    cause: why there has been no attempt yet; later, why the last attempt failed, empty if it succeeded.
    level: the level at which each cause is logged.
    """

    def __init__(
        self,
        log: logging.Logger,
        errors: Counter[str] | None = None,
        cause: str = "",
        *,
        level: int = logging.WARNING,
    ) -> None:
        self._log = log
        self._errors = Counter[str]() if errors is None else errors
        self._level = level
        self.cause = cause

    def report(self, cause: str, program: str = "", *, consequence: str = "trying again") -> None:
        """Record a failed attempt; `program` is the one that was asked, if any."""
        if program:
            self._errors[program] += 1
        if cause != self.cause:
            self._log.log(self._level, "%s; %s", cause, consequence)
        self.cause = cause

    def clear(self) -> bool:
        """Record a successful attempt; return whether the one before had failed."""
        had_failed = bool(self.cause)
        self.cause = ""
        return had_failed


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
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
    atexit.register(_discard_unwritten)


def set_log_prefix(program: str) -> None:
    """Begin log lines with the program's name, as a command's errors do, unless they are for systemd."""
    if not _for_systemd():
        logging.getLogger().handlers[0].setFormatter(LineFormatter(f"{program}: %(message)s"))


def _for_systemd() -> bool:
    """Return whether standard error goes to the journal (systemd.exec(5)) or to a service manager's pipe."""
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
