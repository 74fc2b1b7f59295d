"""A domain as a state machine that takes the time as a parameter and never blocks.

`tick` is called when it `is_due`: something of `watched()` is readable, the time that it returned has come,
or one of the other methods has changed something. The state changes only in `_change`. Every state that waits
for something has a deadline.

New limits apply only to the next MPS server. So clients have the plan `in_effect` and should have the
`desired` one; while the two differ in a serving domain, the change is pending.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Sequence

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
from yunion_mps.core.errors import ControlError, HostError, YunionError
from yunion_mps.core.models import DomainPlan, DomainStatus, Event
from yunion_mps.core.reasons import Reason
from yunion_mps.host.proc import user_name
from yunion_mps.host.processes import Watchable, earliest
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask
from yunion_mps.mps.conversation import UnresponsiveError
from yunion_mps.mps.directory_record import NO_RECORD, DirectoryRecord
from yunion_mps.mps.forced_end import EndOrder, ForcedEnd, UnconfirmedClients
from yunion_mps.mps.health import HealthMonitor, LimitsChangedError
from yunion_mps.mps.lifecycle import Recovery, Shutdown, Startup
from yunion_mps.mps.limits import LimitsInEffect, LimitsSetter
from yunion_mps.mps.log_file import failing_user_events, failure_cause, log_hint
from yunion_mps.mps.processes import FindProcesses, MpsProcess, our_processes
from yunion_mps.mps.rollover import FORCE_WITHIN_S, POLL_S, Rollover
from yunion_mps.mps.server_history import Outcome
from yunion_mps.mps.server_starts import ServerStarts
from yunion_mps.mps.states import STABLE_S, StateMachine, after_failure

log = logging.getLogger(__name__)

#: How long clients have to end after `quit`, before the control daemon shuts down their servers.
STOP_TIMEOUT_S = 10


class Domain(StateMachine):
    """A control daemon, from its start through its limits to its end."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        emit: Callable[[Event], None],
        changed: Callable[[], None],
        recorded: LimitsInEffect | None = None,
        directory_record: DirectoryRecord = NO_RECORD,
    ) -> None:
        """Neither find nor start a control daemon yet.

        program: the path of NVIDIA's control program.
        emit: called with each event.
        changed: called without arguments when the status has changed.
        recorded: what an earlier daemon recorded as in effect; None if it recorded nothing.
        directory_record: that of the directories that are created for it.
        """
        super().__init__(plan.name, emit, changed)
        self.desired = plan
        self.restarts = 0
        self.stop_timeout_s = STOP_TIMEOUT_S
        #: How long the last probe of its control daemon took.
        self.probe_s: float | None = None
        #: Whether processes other than servers use its GPUs, as of NVML's last answer; None if unknown.
        self.in_use: bool | None = None
        #: When that poll of NVML began, and whether another one is requested at once.
        self._polled_s = math.inf
        self._wants_poll = False
        #: Whether it ends once no server has jobs, and whether it will end or change once leases have ended.
        self.retiring = False
        self._waits_for_leases = False
        #: Whether a compute mode of its GPUs will be restored once no server runs on them.
        self._awaits_restoration = False
        self.control = ControlDaemon(
            plan,
            program,
            emit,
            is_recorded=recorded is not None,
            directory_record=directory_record,
        )
        self._rollover = Rollover(recorded or LimitsInEffect(plan), self.control.servers, emit, self._changed)
        self._starts = ServerStarts(os.geteuid())
        #: The failure of a server that the reason of the state describes.
        self._reported_failure: Outcome | None = None
        #: For whom (uids) servers do not start, although they do for others, and why; and the last failures.
        self._failing_users: dict[int, Reason] = {}
        self._failures_of_users: dict[int, Outcome] = {}
        self._task: ControlTask | None = None
        #: The order to end servers by force if only confirmed clients end with them, and how it is carried
        #: out: instead of the task, whose turn it is after that. Then the clients for which that mattered.
        self._end_order: EndOrder | None = None
        self._forced_end: ForcedEnd | None = None
        self._unconfirmed_clients: list[UnconfirmedClients] = []
        self._deadline_s = 0.0
        #: The number of failures since it last served for a long time.
        self._failures = 0

    # -- its state

    @property
    def limits_in_effect(self) -> LimitsInEffect:
        return self._rollover.limits_in_effect

    @property
    def in_effect(self) -> DomainPlan:
        return self.limits_in_effect.plan

    def status(self) -> DomainStatus:
        pending = ""
        if self.state not in (STOPPED, STOPPING):
            pending = self._rollover.pending(
                retiring=self.retiring, awaits_restoration=self._awaits_restoration
            )
        waits_for = self._rollover.blocking_servers(every=self._ends_all_servers) if pending else ()
        return DomainStatus(
            plan=self.in_effect,
            state=self.state,
            reason=self.reason,
            pid=self.control.pid,
            since_s=self.since_s,
            restarts=self.restarts,
            pending=pending,
            waits_for=waits_for,
            failing_users=self._failing_users,
            orphans=self._rollover.orphans.pids,
        )

    def can_serve(self, plan: DomainPlan) -> bool:
        """Return whether it can continue with this plan, whose GPUs its control daemon has or should have."""
        order = self.control.order
        if order and not order.can_serve(plan):
            return False
        if plan.same_control_daemon(self.desired):
            return True
        has_its_gpus = set(self.in_effect.gpu_uuids) == set(plan.gpu_uuids)
        return has_its_gpus and plan.for_gpus(self.desired.gpu_uuids).same_control_daemon(self.desired)

    def watched(self) -> list[Watchable]:
        """Return what to watch for reading: the control daemon's end, and pending answers."""
        end: list[Watchable] = [self.control.process] if self.control.has_process else []
        for task in (self._task, self._forced_end):
            if task:
                end += task.watched()
        return end

    @property
    def is_occupied(self) -> bool:
        """Whether its limits cannot be set now, and this is retried."""
        return isinstance(self._task, LimitsSetter) and bool(self._task.note)

    def server_pids(self, *, at_last_tick: bool = False) -> list[int]:
        """Return the PIDs of its MPS servers, orphans among them."""
        return [*self.control.servers(at_last_tick=at_last_tick), *self._rollover.orphans.pids]

    @property
    def awaits_servers(self) -> bool:
        """Whether a change waits for its servers; each is ended once NVML and the server list no client."""
        return bool(self._rollover.own_blocking_servers(every=self._ends_all_servers))

    @property
    def is_draining(self) -> bool:
        """Whether it admits no new jobs and shuts down each server after its clients, because it will end."""
        return self._rollover.drains and (self._ends_all_servers or self._waits_for_leases)

    @property
    def _ends_all_servers(self) -> bool:
        return self.retiring or self._awaits_restoration

    # -- control

    def configure(self, program: str, stop_timeout_s: int) -> None:
        """Use this program, if it is not empty, and this stop timeout from now on."""
        if program:
            self.control.use_program(program)
        self.stop_timeout_s = stop_timeout_s

    def start(self, now_s: float, ours: Sequence[MpsProcess] | None = None) -> None:
        """Start or adopt the control daemon; ticks do the rest.

        `ours` are our running MPS processes, if the caller has just searched for them.
        """
        self._rollover.control_daemon_started(now_s)
        text = f"reconnecting to the running control daemon (PID {self.control.pid})"
        if not self.control.has_process:
            try:
                text = self.control.adopt_or_start(self.desired, self.in_effect, ours)
            except HostError as error:
                self._fail(now_s, error, lasting=True)
                return
            if not self.control.was_adopted:
                self._rollover.limits_found(LimitsInEffect(self.desired))
        self._task = Startup(self._idle_control(), now_s)
        self.change_state(STARTING, now_s, f"{text}; waiting for its answer")

    def stop(self, now_s: float, *, spare_adopted: bool = False, timeout_s: int | None = None) -> None:
        """Begin to stop; a domain without processes stops at once, others by ticks.

        Clients have `timeout_s` to end, or the configured time. With `spare_adopted`, what was running before
        this daemon is left running, with its clients.
        """
        if self.state in (STOPPED, STOPPING):
            return
        self.cancel_task()
        self._end_order = None
        if spare_adopted:
            self._rollover.orphans.detach()
            if self.control.has_process and self.control.was_adopted:  # it may have jobs
                self.control.detach()
        wait_s = self.stop_timeout_s if timeout_s is None else timeout_s
        if self.control.has_process:
            self._task = Shutdown(self.control, now_s, timeout_s=wait_s)
        self._rollover.stop(now_s + wait_s)
        if self.control.has_process or self._rollover.orphans.pids:
            self.change_state(STOPPING, now_s, f"waiting up to {wait_s} s for its clients to end")
        else:
            self.change_state(STOPPED, now_s, "stopped")

    def change(self, plan: DomainPlan, now_s: float, *, waits_for_leases: bool = False) -> None:
        """Make `plan` the desired one; a serving control daemon gets its limits for its next server.

        A drain lasts as long as the change that it was requested for `waits_for_leases`.
        """
        if not (self._waits_for_leases and waits_for_leases):
            self._rollover.end_drain()
        self.retiring = False
        self._waits_for_leases = waits_for_leases
        if self.state in (BACKOFF, FAILED):
            self._deadline_s = now_s  # an operator may have fixed what kept it from starting
        differs = plan != self.desired
        self.desired = plan
        if differs and not self.control.has_process:
            self._rollover.limits_found(LimitsInEffect(plan))
        elif differs:
            self.control.change(plan)
            if self.control.target == self.in_effect:  # its servers have these limits
                self._rollover.change_withdrawn()
            if self.state in (APPLYING, *ANSWERING):
                self._apply(now_s, "the configuration has changed: its limits are being set", set_first=True)
        self._changed()

    def retire(self) -> None:
        """End it once its servers have ended."""
        if not (self.retiring or self._waits_for_leases):
            self._rollover.end_drain()
        self.retiring = True
        self._waits_for_leases = False
        self._changed()

    def await_restoration(self, *, is_awaited: bool) -> None:
        """Set whether compute modes of its GPUs are to be restored once its servers have ended."""
        if is_awaited != self._awaits_restoration:
            self._awaits_restoration = is_awaited
            self._changed()

    def drain(self, now_s: float) -> None:
        """Shut down the servers that a change waits for after their clients, and admit no new ones."""
        self._rollover.drain(now_s)
        self._set_end_order(None)

    def end_servers(
        self, now_s: float, may_end: Callable[[int], bool], with_all_clients: Collection[int]
    ) -> None:
        """Shut down the servers that a change waits for at once, with their clients.

        may_end: says whether a client (PID) may be ended. A server with another one is shut down after its
            clients (see `take_unconfirmed`).
        with_all_clients: the servers (PIDs) that end whatever clients they have. No other server that has
            outlived its control daemon is ended.
        """
        self._rollover.end_at_once(now_s, with_all_clients)
        others = [pid for pid in self.control.servers() if pid not in with_all_clients]
        order = EndOrder(may_end, now_s + FORCE_WITHIN_S, frozenset(with_all_clients))
        self._set_end_order(order if others else None)

    def _set_end_order(self, order: EndOrder | None) -> None:
        """Make this the only order to end servers; None for one that does not depend on their clients."""
        self._is_due = True
        self._close_forced_end()
        self._end_order = order
        self._unconfirmed_clients = []
        self._changed()

    def is_forcing(self, now_s: float) -> bool:
        """Return whether it is not yet known which servers are not ended because of `may_end`."""
        is_ordered = self._end_order is not None and now_s <= self._end_order.until_s
        return is_ordered or self._forced_end is not None

    def take_unconfirmed(self) -> list[UnconfirmedClients]:
        """Return the clients for which `may_end` was false, with their servers; only once."""
        unconfirmed = self._unconfirmed_clients
        self._unconfirmed_clients = []
        return unconfirmed

    def note_use(self, *, in_use: bool | None, polled_s: float | None = None) -> None:
        """Note whether processes other than servers use its GPUs, by a poll of NVML begun at `polled_s`."""
        # While it serves, the same answer again changes nothing.
        self._is_due = self._is_due or in_use != self.in_use or self.state != READY
        self.in_use = in_use
        if polled_s is not None:
            self._polled_s = polled_s

    def note_new_log_lines(self) -> bool:
        """Read what is new in the log; return whether that makes a tick due."""
        has_outcomes = self.control.log.report()
        self._is_due = self._is_due or has_outcomes
        return has_outcomes

    def take_poll_request(self) -> bool:
        """Return whether NVML is to be polled at once; true only once for each cause."""
        requested = self._wants_poll
        self._wants_poll = False
        return requested

    # -- time

    def is_due(self, now_s: float, readable: Collection[Watchable]) -> bool:
        """Return whether a tick has something to do; dozens of domains usually have nothing."""
        is_late = self.due_s is not None and now_s >= self.due_s
        return self._is_due or is_late or bool(readable and not set(self.watched()).isdisjoint(readable))

    def tick(self, now_s: float, find: FindProcesses = our_processes) -> float | None:
        """Do what is due; return when to be called again at the latest, None to wait for what is watched.

        `find` lists our processes; dozens of domains share one search.
        """
        self._is_due = False
        due_s = self._step(now_s)
        if self.state != STOPPED:
            due_s = earliest((due_s, self._rollover.tick(now_s, in_use=self.in_use, find=find)))
        self.due_s = now_s if self._is_due else due_s
        return self.due_s

    def _step(self, now_s: float) -> float | None:
        if self.control.has_ended:
            self._reap(now_s)
        step = {
            STARTING: self._tick_starting,
            APPLYING: self._tick_applying,
            READY: self._tick_answering,
            DEGRADED: self._tick_answering,
            WEDGED: self._tick_wedged,
            BACKOFF: self._tick_waiting,
            FAILED: self._tick_waiting,
            STOPPING: self._tick_stopping,
        }.get(self.state)
        try:
            return step(now_s) if step else None
        except YunionError as error:
            self._handle_error(now_s, error)
            return self._step(now_s)

    def _tick_starting(self, now_s: float) -> float | None:
        assert isinstance(self._task, Startup)
        due_s = self._task.tick(now_s)
        if due_s is not None:
            return due_s
        self._begin_to_apply(now_s)
        return self._step(now_s)

    def _begin_to_apply(self, now_s: float, because: str = "") -> None:
        """Set a new control daemon's limits; if they may be set already, read them first."""
        served = self.control.has_served
        text = "read" if served else "set and read back"
        self._apply(now_s, f"{because}its limits are being {text}", set_first=not served)

    def _apply(self, now_s: float, reason: str, *, set_first: bool) -> None:
        idle = self.in_use is False
        self._task = LimitsSetter(self._idle_control(), self.limits_in_effect, set_first=set_first, idle=idle)
        if self.state == APPLYING:
            self._change_reason(Reason(reason, reasons.DOMAIN_APPLYING))
        else:
            self.change_state(APPLYING, now_s, reason)

    def _tick_applying(self, now_s: float) -> float | None:
        assert isinstance(self._task, LimitsSetter)
        result = self._task.tick(now_s)
        if isinstance(result, float):
            self._change_reason(self._task.note or self.reason)
            return result
        self._rollover.limits_found(result)
        self.control.note_served()
        self._task = HealthMonitor(self._idle_control(), now_s)
        self._note_outcomes(now_s)
        self._change_by_starts(now_s)
        return self._step(now_s)

    def _tick_answering(self, now_s: float) -> float | None:
        monitor = self._task
        assert isinstance(monitor, HealthMonitor)
        every = self._ends_all_servers or self.is_draining
        # Also without any server left: it reports which clients have ended with the servers.
        if self._end_order and not monitor.is_busy:
            due_s = self._tick_forced_end(now_s, self._end_order, every=every)
            if due_s is not None:
                return due_s
        if self.retiring and not self.server_pids():
            self.stop(now_s)
            return self._step(now_s)
        self._rollover.note_ended(self.control.target)
        if self._starts.due_s(now_s) is not None:
            self._read_log(now_s)
        # A server that is ordered must not delay the end of the domain, or of what uses the GPUs.
        is_idle = not (every or self.server_pids())
        commands = [
            *self._rollover.commands(now_s, every=every),
            *self._starts.commands(now_s, is_idle=is_idle),
        ]
        idle = [
            *self._rollover.idle_servers(now_s, every=every, in_use=self.in_use),
            *self._starts.surplus,
        ]
        if self.in_use is False and not every:
            idle += self._starts.blocking_servers(self.control.servers(), now_s)
        idle = list(dict.fromkeys(idle))
        try:
            due_s = monitor.tick(now_s, commands, idle)
        except LimitsChangedError as error:
            self._rollover.limits_overwritten(monitor.servers, error.message)
            self._apply(now_s, "another program changed its limits: setting them again", set_first=True)
            return self._step(now_s)
        finally:
            self._rollover.commands_delivered(monitor.delivered)
            self._starts.commands_delivered(monitor.delivered, now_s)
            if monitor.has_asked:
                self._rollover.idle_servers_asked(now_s)
                self._starts.surplus_asked()
                self._starts.blocking_servers_asked(now_s)
        self.probe_s = monitor.probe_s
        self._note_outcomes(now_s)
        self._change_by_starts(now_s)
        if every or self.limits_in_effect.old_servers:
            due_s = min(due_s, now_s + POLL_S)
        return earliest((due_s, self._starts.due_s(now_s)))

    def _tick_forced_end(self, now_s: float, order: EndOrder, *, every: bool) -> float | None:
        """Carry out the order; return when to be called again, None if that is done."""
        if self._forced_end is None:
            servers: list[int] = []
            for pid in self._rollover.own_blocking_servers(every=every):
                if pid not in order.with_all_clients:
                    servers.append(pid)
            self._forced_end = ForcedEnd(self.control, servers, order)
        due_s = self._forced_end.tick(now_s)
        if due_s is None:
            self._close_forced_end()
            self._end_order = None
        return due_s

    def _note_outcomes(self, now_s: float) -> None:
        outcomes = self.control.log.take_outcomes()
        if outcomes:
            self._starts.note(outcomes, now_s, is_idle=not self.server_pids())

    def _read_log(self, now_s: float) -> None:
        self.control.log.report()
        self._note_outcomes(now_s)

    def _change_by_starts(self, now_s: float) -> None:
        """Be ready or degraded, depending on whether servers start, and tell for whom they do not."""
        failure = self._starts.failure
        self.control.log.note_failing_users(self._starts.tried_users)
        self._change_failing_users()
        if failure is None:
            if self.state != READY:
                self.change_state(READY, now_s, "")
            return
        if self.state == DEGRADED and failure is self._reported_failure:
            return
        self._reported_failure = failure
        cause = failure_cause(failure, self.control.target.log_directory)
        reason = Reason(f"MPS servers fail to start: {cause}", reasons.SERVER_START_FAILED)
        if self.state != DEGRADED:
            self.change_state(DEGRADED, now_s, reason)
        else:
            self._change_reason(reason)

    def _change_failing_users(self) -> None:
        """Tell for which users servers do not start, unless they start for none."""
        is_degraded = self._starts.failure is not None
        failures = {} if is_degraded else self._starts.failing_users
        if failures == self._failures_of_users:
            return
        before = self._failing_users
        self._failing_users = {}
        self._failures_of_users = failures
        for uid, failure in failures.items():
            cause = failure_cause(failure, self.control.target.log_directory)
            text = f"MPS servers of {user_name(uid)} fail to start: {cause}"
            self._failing_users[uid] = Reason(text, reasons.SERVER_START_FAILED)
        if before == self._failing_users:
            return
        if not is_degraded:
            for event in failing_user_events(before, self._failing_users, self.in_effect.name):
                log.warning("domain %s: %s", event.subject, event.cause or event.what)
                self._emit(event)
        self._changed()

    def _tick_wedged(self, now_s: float) -> float | None:
        task = self._task
        if isinstance(task, Recovery):
            due_s = task.tick(now_s, in_use=self.in_use, polled_s=self._polled_s)
            if due_s is None:
                self._begin_to_apply(now_s, "it answers again; ")
                return self._step(now_s)
            if not task.failed:
                self._change_reason(task.reason)
                return due_s
            task = Shutdown(self._idle_control(), now_s, timeout_s=None)
            self._task = task
        assert isinstance(task, Shutdown)
        return task.tick(now_s)

    def _tick_waiting(self, now_s: float) -> float | None:
        if self.retiring and not self.server_pids():
            self.stop(now_s)
            return self._step(now_s)
        if self.retiring and not self.control.has_process:
            return now_s + POLL_S  # it only waits for jobs to end
        if now_s < self._deadline_s:
            return self._deadline_s
        self.start(now_s)
        return self._step(now_s) if self.state == STARTING else self._deadline_s

    def _tick_stopping(self, now_s: float) -> float | None:
        if isinstance(self._task, Shutdown):
            return self._task.tick(now_s)
        if not self._rollover.orphans.pids:
            self.change_state(STOPPED, now_s, "stopped")
        return None

    # -- the current operation on the control daemon

    def cancel_task(self) -> None:
        """Abandon the current operation on the control daemon, as the end of our process does."""
        self._close_forced_end()
        if self._task:
            self._task.close()
            self._task = None

    def _close_forced_end(self) -> None:
        if self._forced_end:
            self._unconfirmed_clients += self._forced_end.unconfirmed
            self._forced_end.close()
            self._forced_end = None

    def _idle_control(self) -> ControlDaemon:
        """Return the control daemon, after canceling its current task."""
        self.cancel_task()
        return self.control

    # -- failures

    def _reap(self, now_s: float) -> None:
        """Note that the control daemon has ended, as requested or unexpectedly."""
        replaced = isinstance(self._task, Shutdown) and self._task.is_replacement
        self.cancel_task()
        message, servers = self.control.reap(was_replaced=replaced)
        self._rollover.control_daemon_exited(message, servers, now_s if replaced else None)
        if self.state in (BACKOFF, FAILED):
            self._deadline_s = now_s  # a new one may not have the same problem
        elif self.state != STOPPING:
            self._fail(now_s, ControlError(message, log_hint(self.in_effect), reasons.CONTROL_DAEMON_EXITED))

    def _handle_error(self, now_s: float, error: YunionError) -> None:
        """Recover an unresponsive control daemon, which may have jobs; kill one without limits."""
        control = self.control
        self.cancel_task()
        if control.has_process and isinstance(error, UnresponsiveError):
            self.error = error
            recovery = Recovery(control, error, now_s)
            self._task = recovery
            self.change_state(WEDGED, now_s, recovery.reason, recovery.reason.code)
            self._wants_poll = True  # only a poll from now on shows that it has no jobs
            hint = reasons.hint_of(self.reason.code)
            log.error("domain %s: %s; trying to resume it; %s", self.in_effect.name, self.reason, hint)
            return
        if control.has_process and not control.has_served:
            self._rollover.control_daemon_exited(error.message, control.kill())
        self._fail(now_s, error)

    def _fail(self, now_s: float, error: YunionError, *, lasting: bool = False) -> None:
        served_s = now_s - self.since_s if self.state in ANSWERING else self.served_s
        self._failures = 1 if served_s >= STABLE_S else self._failures + 1
        state, wait_s = after_failure(self._failures, error, lasting=lasting)
        self.served_s = 0.0
        self.restarts += 1
        self.error = error
        self._deadline_s = now_s + wait_s
        log.error(
            "domain %s: %s; next start in %g s; %s", self.in_effect.name, error.message, wait_s, error.hint
        )
        self.change_state(state, now_s, error.message, error.code)
