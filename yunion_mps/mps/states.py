"""The states of a domain, the legal changes between them, and when a failed start is retried."""

from __future__ import annotations

import logging
from collections.abc import Callable

from yunion_mps.core import reasons
from yunion_mps.core.enums import (
    ANSWERING,
    APPLYING,
    BACKOFF,
    DEGRADED,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    STOPPING,
    WEDGED,
)
from yunion_mps.core.errors import ShortageError, YunionError
from yunion_mps.core.models import Event
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, NO_REASON, Reason

log = logging.getLogger(__name__)

LEGAL_CHANGES: dict[str, tuple[str, ...]] = {
    STOPPED: (STARTING, FAILED),
    STARTING: (APPLYING, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    APPLYING: (READY, DEGRADED, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    READY: (APPLYING, DEGRADED, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    DEGRADED: (APPLYING, READY, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    WEDGED: (APPLYING, BACKOFF, FAILED, STOPPING, STOPPED),
    BACKOFF: (STARTING, FAILED, STOPPING, STOPPED),
    FAILED: (STARTING, FAILED, STOPPING, STOPPED),
    STOPPING: (STOPPED,),
}

#: The severity, and the consequence for devices and jobs, for the event log.
MEANINGS: dict[str, tuple[str, str]] = {
    STOPPED: ("info", "its devices are not served"),
    STARTING: ("info", "its devices are served once every limit has been read back"),
    APPLYING: ("info", "its devices are served once every limit has been read back"),
    READY: ("info", "its devices are served within their budgets"),
    DEGRADED: (
        "error",
        "its devices are not served until a server starts; a start is retried",
    ),
    WEDGED: ("error", "its devices are not served; running jobs are left alone"),
    BACKOFF: ("warning", "its devices are not served until it has restarted"),
    FAILED: ("error", "its devices are not served; a start is retried every minute"),
    STOPPING: ("info", "its devices are not served; running jobs are given time to end"),
}

#: The reason codes of transient states; other states have the code of an error.
_CODES = {
    STOPPED: reasons.DOMAIN_STOPPED,
    STARTING: reasons.DOMAIN_STARTING,
    APPLYING: reasons.DOMAIN_APPLYING,
    DEGRADED: reasons.SERVER_START_FAILED,
    WEDGED: reasons.CONTROL_DAEMON_SILENT,
    STOPPING: reasons.DOMAIN_STOPPING,
}

#: The wait before each restart; the first failure may be an accident, so it has none.
BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: The interval of later retries, while an operator has to act.
RETRY_S = 60.0
#: After serving this long, earlier failures no longer count.
STABLE_S = 60.0


class StateMachine:
    """Has one of the states, changes it in one place, and emits an event for every change.

    name: that of the domain.
    emit: called with each event.
    changed: called without arguments after each change of the state or of its reason.
    """

    def __init__(self, name: str, emit: Callable[[Event], None], changed: Callable[[], None]) -> None:
        self.state = STOPPED
        self.reason = Reason("not started yet", reasons.DOMAIN_STOPPED)
        self.error: YunionError | None = None
        self.since_s = 0.0
        #: How long it served the last time.
        self.served_s = 0.0
        #: When it is to be ticked at the latest, None to wait for what it watches, and whether it is at once,
        #: because something has changed since the last tick.
        self.due_s: float | None = None
        self._is_due = True
        self._name = name
        self._emit = emit
        self._notify = changed

    def _changed(self) -> None:
        self._is_due = True
        self._notify()

    def change_state(self, state: str, now_s: float, text: str, code: str = "") -> None:
        """Change the state, which only this method does.

        text: the reason in words; empty if there is none
        code: the reason code; if it is empty, that of the state
        """
        reason = Reason(text, code or _CODES[state]) if text else NO_REASON
        if state not in LEGAL_CHANGES[self.state]:
            raise AssertionError(f"domain {self._name}: {self.state} cannot become {state}")
        log.info("domain %s: %s -> %s%s", self._name, self.state, state, f" ({reason})" if reason else "")
        if self.state in ANSWERING:
            self.served_s = now_s - self.since_s
        severity, effect = MEANINGS[state]
        event = Event(
            severity=severity,
            kind="domain",
            subject=self._name,
            what=f"{self.state} -> {state}",
            cause=reason,
            consequence=effect,
            code=reason.code,
            common=_common(f"{self.state} -> {state}", reason),
        )
        is_repeated = self.state == state and self.reason == reason
        self.state = state
        self.since_s = now_s
        self.reason = reason
        if state in ANSWERING:
            self.error = None
        if not is_repeated:  # repeated failures with the same reason are one event
            self._emit(event)
        self._changed()

    def _change_reason(self, reason: Reason) -> None:
        if reason != self.reason:
            self.reason = reason
            log.warning("domain %s: %s", self._name, reason)
            still = f"still {self.state}"
            event = Event(
                severity="warning",
                kind="domain",
                subject=self._name,
                what=still,
                cause=reason,
                code=reason.code,
                common=_common(still, reason),
            )
            self._emit(event)
            self._changed()


def _common(text: str, reason: Reason) -> str:
    """Return what repeated events have in common if their reasons name a process: its user chose the name."""
    return text if reason.code in (CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT) else ""


def after_failure(count: int, error: YunionError, *, lasting: bool) -> tuple[str, float]:
    """Return the state after `count` failures, and the wait before the next start, with exponential backoff.

    A restart does not fix a `lasting` error, so it is retried slowly, unless it is a shortage, which passes.
    """
    if count > len(BACKOFF_S):
        return FAILED, RETRY_S
    if not lasting:
        return BACKOFF, BACKOFF_S[count - 1]
    if isinstance(error, ShortageError):
        return FAILED, BACKOFF_S[count - 1]
    return FAILED, RETRY_S
