"""The log lines and events of conditions that appear or end: the differences of two lists of conditions.

What is wrong as long as a condition lasts is recorded here, when it begins, when its reason changes in kind
and when it ends. What happened once, such as an Xid, the end of a server or a change by another program, is
recorded where it is noticed; so are the changes of state of a domain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import (
    ABOUT_CDI_FILES,
    ABOUT_COMPUTE_MODE,
    ABOUT_ENTRY,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    ABOUT_PIPE_DIRECTORY,
    ABOUT_SETTING,
    ABOUT_TIME_SLICE,
    CONDITION_STATUSES,
    REFUSED,
)
from yunion_mps.core.models import Event, Gpu, Snapshot
from yunion_mps.core.reasons import BUSY, LAYOUT_WAITS
from yunion_mps.core.text import without_pids

log = logging.getLogger(__name__)


class ConditionLog:
    """Records which conditions are new, and which have ended, compared with the last list."""

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._last: Mapping[tuple[str, str], Condition] = {}

    def note(self, snapshot: Snapshot, *, is_settled: bool = False) -> None:
        """Log and record the differences to the list of the last call.

        is_settled: whether all that is due has been tried. Only then, conditions that may end within the same
            round are compared, such as that of a MIG layout which is about to be brought into effect
        """
        before = self._last
        current: dict[tuple[str, str], Condition] = {}
        for key, condition in before.items():
            if _RECORDED[condition.kind].ends_in_round and not is_settled:
                current[key] = condition
        for condition in snapshot.conditions:
            recorded = _RECORDED.get(condition.kind)
            if recorded is None or condition.status not in recorded.statuses:
                continue
            if is_settled or not recorded.ends_in_round:
                current[_key(condition)] = condition
        self._last = current
        for key, condition in current.items():
            if key not in before or _what_is_told(before[key]) != _what_is_told(condition):
                self._begin(condition)
        for key, condition in before.items():
            if key not in current:
                self._end(condition, snapshot)

    def _begin(self, condition: Condition) -> None:
        recorded = _RECORDED[condition.kind]
        event = recorded.begin(condition)
        if recorded.line:
            log.log(logging.getLevelName(event.severity.upper()), "%s", recorded.line(condition))
        self._record(event)

    def _end(self, condition: Condition, snapshot: Snapshot) -> None:
        event = _RECORDED[condition.kind].end(condition, snapshot)
        if event:
            log.info("%s: %s", condition.name or event.subject, event.what)
            self._record(event)


def _key(condition: Condition) -> tuple[str, str]:
    """Return what stays the same of a condition; a directory may have several, of several domains."""
    is_of_directory = condition.kind == ABOUT_PIPE_DIRECTORY
    return condition.kind, condition.reason if is_of_directory else condition.subject


def _what_is_told(condition: Condition) -> object:
    """Return what is recorded again if it differs.

    Of what a change waits for, that is whether it is leases, servers or processes: these may come and go all
    the time, and each of them would be an event.
    """
    users, code = condition.waits_for, condition.reason.code
    if users:
        return code, bool(users.leases or users.more_leases), bool(users.servers), bool(users.processes)
    return code, without_pids(condition.reason)


class _Recorded(NamedTuple):
    """How conditions of a kind are recorded."""

    #: The event with which one begins.
    begin: Callable[[Condition], Event]
    #: The event with which it ends, from what is in effect then; None if there is nothing to tell.
    end: Callable[[Condition, Snapshot], Event | None]
    #: The log line with which it begins; None if that is logged where it is noticed.
    line: Callable[[Condition], str] | None = None
    #: Those that are recorded.
    statuses: tuple[str, ...] = CONDITION_STATUSES
    #: Whether one may begin and end within a round of `Reconciliation`; that is not recorded.
    ends_in_round: bool = False


# -- entries


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


def _entry_ends(condition: Condition, snapshot: Snapshot) -> Event:
    del snapshot
    return Event("info", "gpu", f"entry {condition.subject}", "no longer missing")


# -- GPUs


def _gpu_line(condition: Condition) -> str:
    return f"GPU {condition.subject} cannot be used: {condition.reason}"


def _gpu_begins(condition: Condition) -> Event:
    return Event(
        severity="error",
        kind="gpu",
        subject=condition.subject,
        what="unavailable",
        cause=condition.reason,
        consequence="its devices are unavailable",
        code=condition.reason.code,
    )


def _gpu_ends(condition: Condition, snapshot: Snapshot) -> Event:
    gpu = _find_gpu(condition, snapshot)
    if gpu is None or gpu.reason or not snapshot.plan.divides(gpu):
        state, consequence = "no longer configured", ""
    else:
        state, consequence = "available", "it can be used again"
    return Event(
        severity="info",
        kind="gpu",
        subject=condition.subject,
        what=state,
        cause=f"previously unavailable: {condition.reason}",
        consequence=consequence,
    )


def _find_gpu(condition: Condition, snapshot: Snapshot) -> Gpu | None:
    for gpu in snapshot.inventory.gpus:
        if gpu.address == condition.subject:
            return gpu
    return None


# -- settings of GPUs that the driver refuses


def _setting_begins(condition: Condition) -> Event:
    return Event(
        severity="warning",
        kind=_event_kind(condition),
        subject=condition.subject,
        what=condition.reason,
        code=condition.reason.code,
    )


def _setting_ends(condition: Condition, snapshot: Snapshot) -> Event:
    del snapshot
    return Event("info", _event_kind(condition), condition.subject, f"no longer: {condition.reason}")


def _event_kind(condition: Condition) -> str:
    return "compute_mode" if condition.kind == ABOUT_COMPUTE_MODE else "gpu"


# -- MIG layouts


def _layout_line(condition: Condition) -> str:
    return f"GPU {condition.subject}: {condition.reason}"


def _layout_begins(condition: Condition) -> Event:
    is_wrong = condition.reason.code not in (*LAYOUT_WAITS, BUSY)
    return Event(
        severity="warning" if is_wrong else "info",
        kind="mig",
        subject=condition.subject,
        what="pending",
        cause=condition.reason,
        consequence="instances of the layout that already exist keep serving",
        code=condition.reason.code,
    )


def _layout_ends(condition: Condition, snapshot: Snapshot) -> Event | None:
    gpu = _find_gpu(condition, snapshot)
    if gpu is None or gpu.reason:
        return None  # which another condition says
    return Event("info", "mig", condition.subject, "no longer pending", f"it was pending: {condition.reason}")


# -- directories and files


def _directory_line(condition: Condition) -> str:
    return f"{condition.text}; {condition.hint}"


def _directory_begins(condition: Condition) -> Event:
    return Event("error", "domain", condition.subject, condition.reason, code=condition.reason.code)


def _directory_ends(condition: Condition, snapshot: Snapshot) -> Event:
    del snapshot
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


def _files_end(condition: Condition, snapshot: Snapshot) -> Event:
    del condition, snapshot
    return Event("info", "daemon", "containers", "containers can find the devices again")


_REFUSED_SETTING = _Recorded(_setting_begins, _setting_ends, statuses=(REFUSED,))
_RECORDED = {
    ABOUT_ENTRY: _Recorded(_entry_begins, _entry_ends, _entry_line),
    ABOUT_GPU: _Recorded(_gpu_begins, _gpu_ends, _gpu_line),
    ABOUT_COMPUTE_MODE: _REFUSED_SETTING,
    ABOUT_TIME_SLICE: _REFUSED_SETTING,
    ABOUT_SETTING: _REFUSED_SETTING,
    ABOUT_MIG_LAYOUT: _Recorded(_layout_begins, _layout_ends, _layout_line, ends_in_round=True),
    ABOUT_PIPE_DIRECTORY: _Recorded(_directory_begins, _directory_ends, _directory_line),
    ABOUT_CDI_FILES: _Recorded(_files_begin, _files_end, _files_line),
}
