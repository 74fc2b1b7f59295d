"""The log lines and events of conditions that appear or end: the differences of two lists of conditions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from yunion_mps.conditions import Condition
from yunion_mps.enums import ABOUT_ENTRY, ABOUT_PIPE_DIRECTORY
from yunion_mps.models import Event

log = logging.getLogger(__name__)


class ConditionLog:
    """Records which conditions are new, and which have ended, compared with the last list.

    Those of GPUs, domains and their settings are recorded where they are noticed, with what happened.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._last: Mapping[tuple[str, str], Condition] = {}

    def note(self, conditions: Iterable[Condition]) -> None:
        """Log and record the differences to the list of the last call."""
        before = self._last
        current = {_key(condition): condition for condition in conditions if condition.kind in _BEGIN}
        self._last = current
        for key, condition in current.items():
            if key not in before or before[key].reason != condition.reason:
                begin, level = _BEGIN[condition.kind]
                log.log(level, "%s", _log_line(condition))
                self._record(begin(condition))
        for key, condition in before.items():
            if key not in current:
                self._record(_END[condition.kind](condition))


def _key(condition: Condition) -> tuple[str, str]:
    """Return what stays the same of a condition; a directory may have several, of several domains."""
    is_of_directory = condition.kind == ABOUT_PIPE_DIRECTORY
    return condition.kind, condition.reason if is_of_directory else condition.subject


def _log_line(condition: Condition) -> str:
    return f"{condition.text}; {condition.advice}" if condition.advice else condition.text


def _entry_begins(condition: Condition) -> Event:
    return Event(
        severity="error",
        kind="gpu",
        subject=f"entry {condition.subject}",
        what="missing",
        cause=condition.reason,
        consequence="the entry has no devices; the others are not affected",
        code=condition.reason.code,
    )


def _entry_ends(condition: Condition) -> Event:
    return Event("info", "gpu", f"entry {condition.subject}", "no longer missing")


def _directory_begins(condition: Condition) -> Event:
    return Event("error", "domain", condition.subject, condition.reason, code=condition.reason.code)


def _directory_ends(condition: Condition) -> Event:
    return Event("info", "domain", condition.subject, f"no longer: {condition.reason}")


#: The event with which a condition of a kind begins, and the level of its log line.
_BEGIN: Mapping[str, tuple[Callable[[Condition], Event], int]] = {
    ABOUT_ENTRY: (_entry_begins, logging.ERROR),
    ABOUT_PIPE_DIRECTORY: (_directory_begins, logging.WARNING),
}
_END: Mapping[str, Callable[[Condition], Event]] = {
    ABOUT_ENTRY: _entry_ends,
    ABOUT_PIPE_DIRECTORY: _directory_ends,
}
