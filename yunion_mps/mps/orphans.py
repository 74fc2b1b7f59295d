"""MPS servers whose control daemon is gone: they go on with their jobs, and with the limits of their start.

No job comes to them any more, nobody can ask them anything, and they keep their GPUs, which no other server
can use meanwhile in exclusive-process mode. So each is told of, waited for, and ended where no job uses its
GPUs any more, or the time of a stop is over.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable

from yunion_mps.errors import ShortageError
from yunion_mps.host.processes import Process
from yunion_mps.models import Event
from yunion_mps.mps.servers import named, still_serving

log = logging.getLogger(__name__)

#: For how long no job must have been seen: a job that has attached uses the GPU only some time later.
IDLE_S = 15.0
#: How long SIGTERM has to show before SIGKILL, and that before it is said once more.
GRACE_S = 2.0
UNKILLABLE_S = 60.0
_LOOK_AGAIN_S = 1.0
_LOOK_SOON_S = 0.05


class _Orphan:
    """One server: since when it has no jobs, when and why it is to end, and what was done for that."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.idle_s: float | None = None
        self.end_s: float | None = None
        self.why = ""
        self.signalled = False

    def end(self, at_s: float, why: str) -> None:
        if not self.signalled and (self.end_s is None or at_s < self.end_s):
            self.end_s, self.why = at_s, why

    def note_use(self, now_s: float, *, in_use: bool | None) -> None:
        if in_use is not False:
            self.idle_s = None
        elif self.idle_s is None:
            self.idle_s = now_s
        elif now_s >= self.idle_s + IDLE_S:
            self.end(now_s, "no job uses its GPUs")


class Orphans:
    """The orphans of one domain; nothing here waits."""

    def __init__(self, domain: str, tell: Callable[[Event], None]) -> None:
        self._domain = domain
        self._tell = tell
        self._orphans: list[_Orphan] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """The PIDs of those that still run."""
        return tuple(orphan.pid for orphan in self._orphans)

    def add(self, pids: Iterable[int], cause: str, end_s: float | None = None, why: str = "") -> None:
        """Care for those that still run and are not known yet; the caller knows that they are our servers.

        They are ended at `end_s` where that is given.
        """
        new = tuple(pid for pid in still_serving(pids) if pid not in self.pids)
        if new:
            orphans = [_Orphan(pid) for pid in new]
            if end_s is not None:
                for orphan in orphans:
                    orphan.end(end_s, why)
            self._orphans += orphans
            means = "its jobs go on with their limits; new ones may have to wait for its end"
            self._say("warning", f"{named(new)} lives on without its control daemon", cause, means)

    def end(self, at_s: float, why: str) -> None:
        """Have those that there are now ended at this time, also with jobs."""
        for orphan in self._orphans:
            orphan.end(at_s, why)

    def leave(self) -> None:
        """Let go of them, and say so."""
        if self._orphans:
            log.warning("domain %s: %s is left running", self._domain, named(self.pids))
            self._orphans = []

    def tick(self, now_s: float, *, in_use: bool | None) -> float | None:
        """Do what is due; when to be called again, None where there are none.

        `in_use` tells whether other processes than servers use their GPUs, None where that is unknown.
        """
        left = still_serving(self.pids)
        for orphan in [orphan for orphan in self._orphans if orphan.pid not in left]:
            self._orphans.remove(orphan)
            self._say("info", f"{named([orphan.pid])}, left without a control daemon, has ended", orphan.why)
        due_s = [self._tick(orphan, now_s, in_use=in_use) for orphan in self._orphans]
        return min(due_s, default=None)

    def _tick(self, orphan: _Orphan, now_s: float, *, in_use: bool | None) -> float:
        orphan.note_use(now_s, in_use=in_use)
        if orphan.end_s is not None and now_s >= orphan.end_s:
            self._signal(orphan, signal.SIGKILL if orphan.signalled else signal.SIGTERM)
            orphan.end_s = now_s + (UNKILLABLE_S if orphan.signalled else GRACE_S)
            orphan.signalled = True
        soon_s = now_s + (_LOOK_SOON_S if orphan.signalled else _LOOK_AGAIN_S)
        return soon_s if orphan.end_s is None else min(soon_s, orphan.end_s)

    def _signal(self, orphan: _Orphan, number: signal.Signals) -> None:
        try:
            process = Process.adopt(orphan.pid)
        except ShortageError as error:  # and not by its number, which may be another's by then
            log.warning("domain %s: %s", self._domain, error)
            return
        if process is None:
            return
        if still_serving([orphan.pid]):
            what = f"{named([orphan.pid])}, left without a control daemon, gets {number.name}"
            self._say("warning", what, orphan.why)
            process.signal(number)
            process.signal(signal.SIGCONT)  # a stopped process does not even see SIGTERM
        process.close()

    def _say(self, severity: str, what: str, cause: str, means: str = "") -> None:
        log.log(logging.INFO if severity == "info" else logging.WARNING, "domain %s: %s", self._domain, what)
        self._tell(Event(severity, "client", self._domain, what, cause, means))
