"""What a check has to say: how bad it is, what was seen, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OK = "ok"
SKIPPED = "skipped"  # it was not looked at, and cannot be here: no daemon, no right to, no GPU
UNKNOWN = "unknown"  # looking at it failed: the check broke, or took too long
WARNING = "warning"
PROBLEM = "problem"

#: From the worst to the best: the order of the report.
LEVELS = (PROBLEM, WARNING, UNKNOWN, SKIPPED, OK)


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    what: str
    remedy: str = ""


Findings = Sequence[Finding]


def ok(what: str) -> Finding:
    """All is well."""
    return Finding(OK, what)


def skipped(what: str, remedy: str = "") -> Finding:
    """Not looked at, and why."""
    return Finding(SKIPPED, what, remedy)


def warning(what: str, remedy: str) -> Finding:
    """Some programs will fail, or get something else than they should."""
    return Finding(WARNING, what, remedy)


def problem(what: str, remedy: str) -> Finding:
    """Programs fail now, or run without their limits."""
    return Finding(PROBLEM, what, remedy)
