"""Failures of what is tried again: each is logged once, and each attempt is counted."""

from __future__ import annotations

import logging
from collections import Counter


class Failures:
    """The failures of one activity. `cause` is that of the last attempt, empty if it succeeded."""

    def __init__(self, log: logging.Logger, errors: Counter[str] | None = None, cause: str = "") -> None:
        """`errors` counts failed requests, by the program that was asked."""
        self._log = log
        self._errors = Counter[str]() if errors is None else errors
        self.cause = cause

    def report(self, cause: str, program: str = "") -> None:
        """Take note of a failed attempt; of a request to the program, if one is named."""
        if program:
            self._errors[program] += 1
        if cause != self.cause:
            self._log.warning("%s; trying again", cause)
        self.cause = cause

    def clear(self) -> None:
        """Take note of a successful attempt."""
        self.cause = ""
