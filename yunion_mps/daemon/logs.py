"""Logging to standard error: with `<N>` levels for the journal, with the time where a person looks on."""

from __future__ import annotations

import logging
import os
import sys

#: syslog(3) levels, as sd-daemon(3) reads them at the beginning of a line.
_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class JournalFormatter(logging.Formatter):
    """`<N>message`, each line of it with its level; the journal knows the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines for the journal."""
        prefix = f"<{_LEVELS.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def set_up(level: str) -> None:
    """Log from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("JOURNAL_STREAM") or os.environ.get("NOTIFY_SOCKET"):
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # What these record costs time on every message, and no format of ours uses it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
