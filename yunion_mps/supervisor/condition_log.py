"""The log lines and events of conditions that appear or end: the differences of two lists of conditions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_CDI_FILES, ABOUT_ENTRY, ABOUT_PIPE_DIRECTORY
from yunion_mps.core.models import Event

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
        current = {_key(condition): condition for condition in conditions if condition.kind in _RECORDED}
        self._last = current
        for key, condition in current.items():
            if key not in before or before[key].reason != condition.reason:
                recorded = _RECORDED[condition.kind]
                log.log(recorded.level, "%s", recorded.line(condition))
                self._record(recorded.begin(condition))
        for key, condition in before.items():
            if key not in current:
                event = _RECORDED[condition.kind].end(condition)
                log.info("%s: %s", event.subject, event.what)
                self._record(event)


def _key(condition: Condition) -> tuple[str, str]:
    """Return what stays the same of a condition; a directory may have several, of several domains."""
    is_of_directory = condition.kind == ABOUT_PIPE_DIRECTORY
    return condition.kind, condition.reason if is_of_directory else condition.subject


class _Recorded(NamedTuple):
    """How conditions of a kind are recorded."""

    #: The log line with which one begins, and its level.
    line: Callable[[Condition], str]
    level: int
    #: The events with which one begins and ends.
    begin: Callable[[Condition], Event]
    end: Callable[[Condition], Event]


def _entry_line(condition: Condition) -> str:
    return condition.text


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


def _directory_line(condition: Condition) -> str:
    return f"{condition.text}; {condition.hint}"


def _directory_begins(condition: Condition) -> Event:
    return Event("error", "domain", condition.subject, condition.reason, code=condition.reason.code)


def _directory_ends(condition: Condition) -> Event:
    return Event("info", "domain", condition.subject, f"no longer: {condition.reason}")


_WRITE_IS_RETRIED = "everything else continues, and the write is retried"


def _files_line(condition: Condition) -> str:
    return f"{condition.text}; {_WRITE_IS_RETRIED}"


def _files_begin(condition: Condition) -> Event:
    return Event(
        severity="warning",
        kind="daemon",
        subject="containers",
        what=condition.reason,
        consequence=_WRITE_IS_RETRIED,
        code=condition.reason.code,
    )


def _files_end(_: Condition) -> Event:
    return Event("info", "daemon", "containers", "containers can find the devices again")


_RECORDED = {
    ABOUT_ENTRY: _Recorded(_entry_line, logging.ERROR, _entry_begins, _entry_ends),
    ABOUT_PIPE_DIRECTORY: _Recorded(_directory_line, logging.WARNING, _directory_begins, _directory_ends),
    ABOUT_CDI_FILES: _Recorded(_files_line, logging.WARNING, _files_begin, _files_end),
}
