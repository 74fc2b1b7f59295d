"""One domain as a state machine: it is told the time, does what can be done now, and never waits.

`tick` is called when a descriptor of `descriptors()` is readable or the time that it returned has come. The
state changes in `_change` and nowhere else. Every state that waits for something has a deadline.

Limits that are set count for the next MPS server only. So `plan` is what clients get, `wanted` what they are
to get, and where the two differ while it serves, the change is pending.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from yunion_mps.errors import ControlError, HostError, YunionError
from yunion_mps.models import DomainPlan, DomainStatus, Event
from yunion_mps.mps import launch
from yunion_mps.mps.adoption import as_served
from yunion_mps.mps.applying import Applying, InForce
from yunion_mps.mps.backoff import Backoff
from yunion_mps.mps.control import SilentError
from yunion_mps.mps.control_daemon import ControlDaemon
from yunion_mps.mps.diagnosis import why_silent
from yunion_mps.mps.ending import Ending
from yunion_mps.mps.log_file import look_at_log
from yunion_mps.mps.ownership import MpsProcess
from yunion_mps.mps.states import (
    APPLYING,
    BACKOFF,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    STOPPING,
    WEDGED,
    Told,
)
from yunion_mps.mps.succession import LOOK_AGAIN_S, Succession
from yunion_mps.mps.watch import LimitsChangedError, Watch
from yunion_mps.mps.wedge import Wedge

log = logging.getLogger(__name__)

#: How long clients have to end after a `quit`, before the control daemon ends their servers.
STOP_TIMEOUT_S = 10


class Domain(Told):
    """A control daemon, from its start over its limits to its end."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        tell: Callable[[Event], None],
        changed: Callable[[], None],
        remembered: InForce | None = None,
    ) -> None:
        """`tell` gets every event, and `changed` is called when the status is another.

        `remembered` is what was `in_force` when an earlier daemon wrote it down.
        """
        super().__init__(plan.name, tell, changed)
        self.wanted = plan
        self.restarts = 0
        self.stop_timeout_s = STOP_TIMEOUT_S
        #: Whether processes other than servers use its GPUs, as NVML told last; None where that is unknown.
        self.in_use: bool | None = None
        #: When that look began; and whether another one is wanted at once.
        self.looked_s = math.inf
        self.wants_look = False
        #: Whether it is to end once no server has jobs: the configuration has no place for it any more.
        self.retiring = False
        #: Whether a compute mode of its GPUs is to be put back once no server runs on them.
        self.holds_modes = False
        in_force = remembered or InForce(plan)
        self._succession = succession = Succession(in_force, lambda: self.control.pid, tell, changed)
        is_remembered = remembered is not None
        self.control = ControlDaemon(plan, program, tell, succession.children, is_remembered=is_remembered)
        self._deadline_s = 0.0
        self._backoff = Backoff()

    # -- what it is at

    @property
    def in_force(self) -> InForce:
        """What its clients get, and the servers for which that is not what is wanted."""
        return self._succession.in_force

    @property
    def plan(self) -> DomainPlan:
        """What its clients get."""
        return self.in_force.plan

    def status(self) -> DomainStatus:
        """What the snapshot shows of it."""
        pending = ""
        if self.state not in (STOPPED, STOPPING):
            pending = self._succession.pending(retiring=self.retiring, holds_modes=self.holds_modes)
        waits_for = self._succession.in_the_way(every=self._renews_all) if pending else ()
        now = (self.state, self.reason, self.control.pid, self.since_s, self.restarts)
        return DomainStatus(self.plan, *now, pending, waits_for)

    def descriptors(self) -> list[int]:
        """What to watch for reading: the control daemon's end, and the answers that are awaited."""
        return self.control.descriptors()

    def server_pids(self) -> list[int]:
        """The PIDs of its MPS servers, also of those that have outlived their control daemon."""
        return [*self._succession.children(), *self._succession.orphans.pids]

    @property
    def _renews_all(self) -> bool:  # every server of its control daemon is to end
        return self.retiring or self.holds_modes

    # -- what it is told

    def start(self, now_s: float, ours: Sequence[MpsProcess] | None = None) -> None:
        """Begin: directories, then the control daemon; the rest is done by ticks.

        `ours` are the MPS processes of ours that run, if the caller has just searched for them.
        """
        self._succession.begin(now_s)
        what = f"asks the running control daemon (PID {self.control.pid}) again"
        if not self.control.runs:
            try:
                what = self.control.begin(self.wanted, self.plan, ours)
            except HostError as error:
                self._fail(now_s, error, lasting=True)
                return
            if not self.control.was_found:
                self._succession.in_force = InForce(self.wanted)
        self.control.await_answer(now_s)
        self._change(STARTING, now_s, f"{what}; it does not answer yet")

    def stop(self, now_s: float, *, spare_found: bool = False, timeout_s: int | None = None) -> None:
        """Begin to stop; what runs nothing stops at once, the others by ticks.

        Clients have `timeout_s` to end, or what was configured. With `spare_found`, what was running before
        us is left as it is, with its clients.
        """
        if self.state in (STOPPED, STOPPING):
            return
        self.control.drop()
        if spare_found:
            self._succession.orphans.leave()
            if self.control.took_over:
                self.control.leave()
        wait_s = self.stop_timeout_s if timeout_s is None else timeout_s
        if self.control.runs:
            self.control.end(self.plan, now_s, timeout_s=wait_s)
        self._succession.end(now_s + wait_s)
        if self.control.runs or self._succession.orphans.pids:
            self._change(STOPPING, now_s, f"waiting up to {wait_s} s for its clients to end")
        else:
            self._change(STOPPED, now_s, "stopped")

    def change(self, plan: DomainPlan, now_s: float) -> None:
        """Aim at other limits; a control daemon that serves gets them at once, for its next server."""
        self.retiring = False
        if self.state in (BACKOFF, FAILED):
            self._deadline_s = now_s  # somebody may have mended what kept it from starting
        differs, self.wanted = plan != self.wanted, plan
        if differs and not self.control.runs:
            self._succession.in_force = InForce(plan)
        elif differs:
            self.control.target = as_served(plan, self.control.target)
            if self.control.target == self.plan:  # its servers have just that
                self._succession.take_back()
            if self.state in (APPLYING, READY):
                self._apply(now_s, "the configuration has changed: its limits are being set", setting=True)
        self._changed()

    def retire(self) -> None:
        """End it once its servers have ended."""
        self.retiring = True
        self._changed()

    def renew(self, now_s: float, *, force: bool) -> None:
        """Have the servers that something waits for end: once their clients have, with `force` at once."""
        self._succession.ask_to_end(now_s, force=force)

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for not before a descriptor."""
        due_s = self._step(now_s)
        if self.state != STOPPED:
            also_s = self._succession.tick(now_s, in_use=self.in_use)
            due_s = min((time_s for time_s in (due_s, also_s) if time_s is not None), default=None)
        return due_s

    def _step(self, now_s: float) -> float | None:
        if self.control.has_ended:
            self._ended(now_s)
        step = {
            STARTING: self._tick_starting,
            APPLYING: self._tick_applying,
            READY: self._tick_ready,
            WEDGED: self._tick_wedged,
            BACKOFF: self._tick_waiting,
            FAILED: self._tick_waiting,
            STOPPING: self._tick_stopping,
        }.get(self.state)
        try:
            return step(now_s) if step else None
        except YunionError as error:
            self._give_up(now_s, error)
            return self._step(now_s)

    def _tick_starting(self, now_s: float) -> float | None:
        assert isinstance(self.control.work, launch.Starting)
        due_s = self.control.work.tick(now_s)
        if due_s is not None:
            return due_s
        served = self.control.has_served
        what = "read" if served else "set and read back"
        self._apply(now_s, f"its limits are being {what}", setting=not served)
        return self._step(now_s)

    def _apply(self, now_s: float, reason: str, *, setting: bool) -> None:
        self.control.apply(self.in_force, now_s, setting=setting, idle=self.in_use is False)
        if self.state == APPLYING:
            self._explain(reason)
        else:
            self._change(APPLYING, now_s, reason)

    def _tick_applying(self, now_s: float) -> float | None:
        work = self.control.work
        assert isinstance(work, Applying)
        result = work.tick(now_s)
        if isinstance(result, float):
            self._explain(work.note or self.reason)
            return result
        self._succession.in_force = result
        self.control.watch(now_s)
        self._change(READY, now_s, "")
        return self._step(now_s)

    def _tick_ready(self, now_s: float) -> float | None:
        work = self.control.work
        assert isinstance(work, Watch)
        if self.retiring and not self.server_pids():
            self.stop(now_s)
            return self._step(now_s)
        self._succession.look_after_old(self.control.target)
        work.order(self._succession.orders(now_s, every=self._renews_all, in_use=self.in_use), now_s)
        try:
            due_s = work.tick(now_s)
        except LimitsChangedError as error:
            self._succession.note_strangers(self._succession.children(), work.servers, error.message)
            self._apply(now_s, "somebody else has changed its limits: they are set again", setting=True)
            return self._step(now_s)
        self.probe_s = work.probe_s
        return min(due_s, now_s + LOOK_AGAIN_S) if self._renews_all or self.in_force.old_servers else due_s

    def _tick_wedged(self, now_s: float) -> float | None:
        work = self.control.work
        assert isinstance(work, Wedge)
        due_s = work.tick(now_s, in_use=self.in_use, looked_s=self.looked_s)
        if due_s is None:
            self._apply(now_s, "it answers again; its limits are being read", setting=False)
            return self._step(now_s)
        if work.spared_for:
            self._explain(work.reason)
        return due_s

    def _tick_waiting(self, now_s: float) -> float | None:
        if self.retiring and not self.server_pids():
            self.stop(now_s)
            return self._step(now_s)
        if self.retiring and not self.control.runs:
            return now_s + LOOK_AGAIN_S  # only for jobs to end; nothing new is started for that
        if now_s < self._deadline_s:
            return self._deadline_s
        self.start(now_s)
        return self._step(now_s) if self.state == STARTING else self._deadline_s

    def _tick_stopping(self, now_s: float) -> float | None:
        if isinstance(self.control.work, Ending):
            return self.control.work.tick(now_s)
        if not self._succession.orphans.pids:
            self._change(STOPPED, now_s, "stopped")
        return None

    def _ended(self, now_s: float) -> None:
        """The control daemon is gone: as we wished, or on its own."""
        replaced = self.control.is_replaced
        what = self.control.bury()
        self._succession.bereave(what, now_s if replaced else None)
        if self.state in (BACKOFF, FAILED):
            self._deadline_s = now_s  # what was wrong was wrong with this one
        elif self.state != STOPPING:
            self._fail(now_s, ControlError(what, look_at_log(self.plan)))

    def _give_up(self, now_s: float, error: YunionError) -> None:
        """End a control daemon that never served; one that may have jobs at work is treated with care."""
        control = self.control
        control.drop()
        if control.runs and control.has_served and isinstance(error, SilentError):
            why = why_silent(control.process.pid, self.plan.pipe_directory) or error.message
            self.error = error
            self._change(WEDGED, now_s, control.begin_anew(why, now_s).reason)
            self.wants_look = True  # for whether jobs are in its way is believed only by a look from now on
            log.error("domain %s: %s. It is told to go on. %s", self.plan.name, self.reason, error.hint)
            return
        if control.runs and not control.has_served:
            control.kill()
            self._succession.bereave(error.message)  # where a job has come before it had its limits
        self._fail(now_s, error)

    def _fail(self, now_s: float, error: YunionError, *, lasting: bool = False) -> None:
        served_s = now_s - self.since_s if self.state == READY else self.served_s
        state, wait_s = self._backoff.after(error, served_s, lasting=lasting)
        self.served_s = 0.0
        self.restarts += 1
        self.error, self._deadline_s = error, now_s + wait_s
        log.error("domain %s: %s; next start in %g s. %s", self.plan.name, error.message, wait_s, error.hint)
        self._change(state, now_s, error.message)
