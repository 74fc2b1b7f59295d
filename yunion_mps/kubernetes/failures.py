"""Failures of work that is retried: a cause is logged once, and every failed request is counted."""

from __future__ import annotations

import logging
from collections import Counter


class Failures:
    """The failures of one activity. `cause` is why the last attempt failed, empty if it succeeded."""

    def __init__(self, log: logging.Logger, errors: Counter[str] | None = None, cause: str = "") -> None:
        """`errors` counts failed requests by program; `cause` is why there was no attempt yet."""
        self._log = log
        self._errors = Counter[str]() if errors is None else errors
        self.cause = cause

    def report(self, cause: str, program: str = "") -> None:
        """Record a failed attempt; `program` is the one that was asked, if any."""
        if program:
            self._errors[program] += 1
        if cause != self.cause:
            self._log.warning("%s; trying again", cause)
        self.cause = cause

    def clear(self) -> None:
        """Record a successful attempt."""
        self.cause = ""
