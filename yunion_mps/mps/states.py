"""The states of a domain, which may follow which, and when a failed start is tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from yunion_mps import reasons
from yunion_mps.errors import ShortageError, YunionError
from yunion_mps.models import Event
from yunion_mps.reasons import NO_REASON, Reason

log = logging.getLogger(__name__)

STOPPED = "stopped"
STARTING = "starting"  # the control daemon was started (or adopted) and does not answer yet
APPLYING = "applying"  # its limits are being set and read back
READY = "ready"  # every limit was read back: clients are served within their budgets
WEDGED = "wedged"  # it runs and does not answer, or cannot be reached
BACKOFF = "backoff"  # it ended or failed; the next start is due at a time
FAILED = "failed"  # no start helps before an operator has done something; tried again slowly
STOPPING = "stopping"  # it was asked to quit

LEGAL_CHANGES: dict[str, tuple[str, ...]] = {
    STOPPED: (STARTING, FAILED),
    STARTING: (APPLYING, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    APPLYING: (READY, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    READY: (APPLYING, WEDGED, BACKOFF, FAILED, STOPPING, STOPPED),
    WEDGED: (APPLYING, BACKOFF, FAILED, STOPPING, STOPPED),
    BACKOFF: (STARTING, FAILED, STOPPING, STOPPED),
    FAILED: (STARTING, FAILED, STOPPING, STOPPED),
    STOPPING: (STOPPED,),
}

#: How bad it is, and what it means for devices and jobs: both for the event log.
MEANINGS: dict[str, tuple[str, str]] = {
    STOPPED: ("info", "its devices are not served"),
    STARTING: ("info", "its devices are served once every limit has been read back"),
    APPLYING: ("info", "its devices are served once every limit has been read back"),
    READY: ("info", "its devices are served within their budgets"),
    WEDGED: ("error", "its devices are not served; running jobs are left alone"),
    BACKOFF: ("warning", "its devices are not served until it has restarted"),
    FAILED: ("error", "its devices are not served; it is retried every minute"),
    STOPPING: ("info", "its devices are not served; running jobs have time to end"),
}

#: The reason codes of the states that pass by themselves; other states have that of an error.
_CODES = {
    STOPPED: reasons.DOMAIN_STOPPED,
    STARTING: reasons.DOMAIN_STARTING,
    APPLYING: reasons.DOMAIN_APPLYING,
    WEDGED: reasons.CONTROL_DAEMON_SILENT,
    STOPPING: reasons.DOMAIN_STOPPING,
}

#: The wait before each new start; the first death may be an accident, and costs no time.
WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: Once those are used up, an operator has to act; it is still tried this often.
RETRY_S = 60.0
#: After this long in service, earlier failures count no more.
STABLE_S = 60.0


class StateMachine:
    """Is in one of the states, changes it in one place, and tells of every change."""

    def __init__(self, name: str, tell: Callable[[Event], None], changed: Callable[[], None]) -> None:
        self.state = STOPPED
        self.reason = Reason("not started yet", reasons.DOMAIN_STOPPED)
        #: What is wrong, None if nothing is.
        self.error: YunionError | None = None
        self.since_s = 0.0
        #: For how long it served when it did last.
        self.served_s = 0.0
        self._name = name
        self._tell = tell
        self._changed = changed

    def _change(self, state: str, now_s: float, text: str, code: str = "") -> None:
        """The one place that changes the state; without a `code`, the reason has the state's."""
        reason = Reason(text, code or _CODES[state]) if text else NO_REASON
        if state not in LEGAL_CHANGES[self.state]:
            raise AssertionError(f"domain {self._name}: {self.state} cannot become {state}")
        log.info("domain %s: %s -> %s%s", self._name, self.state, state, f" ({reason})" if reason else "")
        if self.state == READY:
            self.served_s = now_s - self.since_s
        before, again = self.state, (self.state, self.reason) == (state, reason)
        self.state, self.since_s, self.reason = state, now_s, reason
        if state == READY:
            self.error = None
        severity, means = MEANINGS[state]
        if not again:  # what fails every minute for the same reason is one event
            self._tell(
                Event(severity, "domain", self._name, f"{before} -> {state}", reason, means, reason.code)
            )
        self._changed()

    def _explain(self, reason: Reason) -> None:
        """Give another reason for the state that it is in."""
        if reason != self.reason:
            self.reason = reason
            log.warning("domain %s: %s", self._name, reason)
            still = f"still {self.state}"
            self._tell(Event("warning", "domain", self._name, still, reason, code=reason.code))
            self._changed()


def after_failure(count: int, error: YunionError, *, lasting: bool) -> tuple[str, float]:
    """The state after so many failures, and the wait before the next start: at once, later and later, slowly.

    What is `lasting` no new start mends by itself; it is tried slowly, unless it is a shortage, which passes.
    """
    exhausted = count > len(WAITS_S)
    slow = exhausted or (lasting and not isinstance(error, ShortageError))
    return FAILED if lasting or exhausted else BACKOFF, RETRY_S if slow else WAITS_S[count - 1]
