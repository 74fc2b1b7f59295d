"""Logging to standard error: with `<N>` levels for the journal, with the time where a person looks on."""

from __future__ import annotations

import atexit
import logging
import os
import sys

from yunion_mps.log_lines import LineFormatter
from yunion_mps.tracebacks import limit_tracebacks

#: syslog(3) levels, as sd-daemon(3) reads them at the beginning of a line.
_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class JournalFormatter(LineFormatter):
    """`<N>message`, each line of it with its level; the journal knows the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines for the journal."""
        prefix = f"<{_LEVELS.get(record.levelno, 6)}>"
        return prefix + super().format(record).replace("\n", f"\n{prefix}")


def set_up(level: str) -> None:
    """Log from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    if _for_systemd():
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    limit_tracebacks()
    # What these record costs time on every message, and no format of ours uses it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    atexit.register(_give_up_what_is_left)


def _for_systemd() -> bool:
    """Whether standard error goes to the journal, as systemd.exec(5) tells it, or to a manager's own pipe."""
    try:
        error = os.fstat(2)
    except OSError:
        return False
    if os.environ.get("JOURNAL_STREAM") == f"{error.st_dev}:{error.st_ino}":
        return True
    return bool(os.environ.get("NOTIFY_SOCKET")) and not os.isatty(2)


def _give_up_what_is_left() -> None:
    """Lines that could not be written (a full disk) would make Python end with 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    except (AttributeError, ValueError):  # it is closed, or was never there
        pass
