"""Log lines of the daemon and the gateway; text that they quote cannot forge another record."""

from __future__ import annotations

import logging

from yunion_mps.escaping import printable


class LineFormatter(logging.Formatter):
    """One line for a record; what continues it is indented, so that no text forges another record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines without control characters."""
        first, *more = map(printable, super().format(record).split("\n"))
        return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in more)])
