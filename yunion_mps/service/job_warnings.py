"""Jobs that exceed their budgets or wait for another user's MPS server: warnings in the log, and events.

`status` shows them while they last. In the log, they are found later, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from yunion_mps.core.conditions import Condition
from yunion_mps.core.models import Event
from yunion_mps.core.reasons import OVER_BUDGET
from yunion_mps.service.status import StatusService
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: A job whose memory varies around its budget is reported once, until it has been within it for so long.
QUIET_S = 60.0

#: What a problem is about: its code, GPU, devices and process. The processes of a budget may change.
_Subject = tuple[str, str, tuple[str, ...], int]


class JobWarnings:
    """Reports problems of jobs when they begin and when they have ended; the monitor calls it."""

    def __init__(self, supervisor: Supervisor, status: StatusService) -> None:
        self._supervisor = supervisor
        self._status = status
        self._record: Callable[[Event], None] = supervisor.event_log.record
        #: When each reported problem was last found (monotonic).
        self._last_s: dict[_Subject, float] = {}

    async def look(self) -> None:
        """Find the problems of jobs now; without a job, that costs nothing."""
        problems: list[Condition] | None = []
        if self._supervisor.jobs.started or self._supervisor.fleet.has_servers:
            problems = await self._status.job_problems()
        if problems is not None:
            self.note(problems, time.monotonic())

    def note(self, problems: Iterable[Condition], now_s: float) -> None:
        """Report which of `problems`, all that there are at the time `now_s`, are new, and which ended."""
        for problem in problems:
            subject = _subject_of(problem)
            if subject not in self._last_s:
                self._report(problem)
            self._last_s[subject] = now_s
        for subject, last_s in list(self._last_s.items()):
            if now_s - last_s >= QUIET_S:
                del self._last_s[subject]
                self._report_end(subject)

    def _report(self, problem: Condition) -> None:
        log.warning("%s; %s", problem.text, problem.hint)
        if problem.reason.code == OVER_BUDGET:
            event = Event(
                severity="warning",
                kind="client",
                subject=", ".join(problem.devices),
                what="its jobs exceed their budget",
                cause=problem.text,
                consequence="other jobs on the GPU may run out of memory",
                code=OVER_BUDGET,
            )
            self._record(event)

    def _report_end(self, subject: _Subject) -> None:
        code, _, devices, _ = subject
        if code == OVER_BUDGET:
            text = "its jobs are within their budget again"
            self._record(Event("info", "client", ", ".join(devices), text))


def _subject_of(problem: Condition) -> _Subject:
    pid = 0 if problem.reason.code == OVER_BUDGET else problem.pid or 0
    return problem.reason.code, problem.gpu, problem.devices, pid
