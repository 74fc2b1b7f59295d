"""Rollover: replace MPS servers with old limits, and end orphaned servers, without ending their jobs.

A server keeps the limits that it was started with, stays after its last client has ended, and may outlive its
control daemon. So a change of limits is in effect only when the servers from before it have ended.

Source: nvidia-cuda-mps-control(1), set_default_active_thread_percentage and shutdown_server; NVIDIA:
Multi-Process Service, section "Provisioning Sequence", Server.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Iterable

from yunion_mps.core import reasons
from yunion_mps.core.errors import ShortageError
from yunion_mps.core.models import DomainPlan, Event
from yunion_mps.core.waits import Servers, Users, describe_servers, wait_reason
from yunion_mps.host.processes import earliest
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import (
    GRACE_S,
    UNKILLABLE_S,
    FindProcesses,
    orphaned_servers,
    our_processes,
    running_servers,
    signal_server,
)

log = logging.getLogger(__name__)

#: How soon after a start all processes are searched for orphans; an immediate search would delay the start.
SEARCH_AFTER_S = 1.0
#: How often the servers are polled at most, and whether awaited ones have ended.
POLL_S = 1.0
_STOP = "its jobs did not end in time"
#: How often awaited servers without clients are asked to shut down.
_END_REQUEST_INTERVAL_S = 10.0
#: How long a forced shutdown is attempted, if the control daemon does not receive it at once.
FORCE_WITHIN_S = 5.0

#: How long no job must have been seen on the GPUs of an orphan before it is ended. Nothing lists its clients,
#: unlike those of a server with a control daemon, and NVML lists a job only some time after it has attached.
IDLE_S = 15.0
_POLL_SOON_S = 0.05


class Rollover:
    """Knows which limits the servers of a domain have, and which servers have to end; the domain ticks it."""

    def __init__(
        self,
        limits_in_effect: LimitsInEffect,
        servers: Callable[[], tuple[int, ...]],
        emit: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        """Know of no orphans yet.

        limits_in_effect: what an earlier daemon recorded, or the desired limits.
        servers: returns the PIDs of the control daemon's servers, at any time.
        emit: called with each event.
        changed: called without arguments when the limits in effect or the orphans have changed.
        """
        self._limits = limits_in_effect
        self._servers = servers
        self.orphans = OrphanedServers(limits_in_effect.plan.name, emit)
        self._emit = emit
        self._changed = changed
        self._poll_at_s = 0.0
        self._search_s: float | None = None
        self._stop_s: float | None = None
        self._next_request_s = 0.0
        self._end_requested_s = 0.0
        #: The servers to shut down if a change waits for them, and whether to force that despite clients.
        self._end_requests: dict[int, bool] = {}
        #: Whether servers that start later are to be shut down after their clients, until all have ended.
        self.drains = False
        self._drained: set[int] = set()

    def control_daemon_started(self, now_s: float) -> None:
        """Note that a control daemon is being started or adopted; servers of an earlier one may still run."""
        self._search_s = now_s + SEARCH_AFTER_S
        self._stop_s = None

    def control_daemon_exited(self, cause: str, servers: Iterable[int], end_s: float | None = None) -> None:
        """Note that the control daemon has ended, so that its running servers are orphans.

        end_s: when they are to be ended; None if their clients are waited for.
        """
        why = "it has no jobs"
        if self._stop_s is not None:
            end_s = self._stop_s
            why = _STOP
        self.orphans.add(servers, cause, end_s, why)
        self._changed()

    def stop(self, at_s: float) -> None:
        """Stop: current and future orphans have until `at_s`, like clients."""
        self._stop_s = at_s
        self.orphans.end(at_s, _STOP)

    def tick(self, now_s: float, *, in_use: bool | None, find: FindProcesses = our_processes) -> float | None:
        """Note servers that started or ended; returns when to be called again. `find` lists our processes."""
        before = self.orphans.pids
        if now_s >= self._poll_at_s:  # not at every tick, because dozens of starting domains tick often
            self._poll_at_s = now_s + POLL_S
            self._servers()
        if self._search_s is not None and now_s >= self._search_s:
            self._search(find)
        due_s = self.orphans.tick(now_s, in_use=in_use)
        if self.orphans.pids != before:
            self._changed()
        return earliest((due_s, self._search_s))

    def _search(self, find: FindProcesses) -> None:
        try:
            orphans = orphaned_servers(self._limits.plan.pipe_directory, find)
        except ShortageError as error:
            log.debug("%s", error)
            return
        self._search_s = None
        self.orphans.add(orphans, "its control daemon ended first")

    # -- limits

    @property
    def limits_in_effect(self) -> LimitsInEffect:
        """The plan in effect, and the servers that do not have the desired limits."""
        return self._limits

    def limits_found(self, limits: LimitsInEffect) -> None:
        """Note that these limits are in effect: the control daemon answered so, or it has no server yet."""
        self._limits = limits

    def note_ended(self, target: DomainPlan) -> None:
        """Note the end of servers with older limits; `target` is the plan of the next ones."""
        old_servers = self._limits.old_servers
        running = running_servers(old_servers)
        if running == old_servers:
            return
        self._limits = LimitsInEffect(self._limits.plan, running) if running else LimitsInEffect(target)
        if not running:
            cause = f"{describe_servers(old_servers, 'has')} ended"
            self._emit_limit_event("the new limits are in effect", cause)
        self._changed()

    def change_withdrawn(self) -> None:
        """Note that the pending change was withdrawn: its servers have the desired limits."""
        if self._limits.old_servers:
            self._emit_limit_event("the pending change was withdrawn", "the configuration was reloaded")
        self._limits = LimitsInEffect(self._limits.plan)

    def limits_overwritten(self, earlier: tuple[int, ...], cause: str) -> None:
        """Note that another program changed the limits.

        earlier: the PIDs of the servers that ran when the limits were last correct.
        """
        wrong = [pid for pid in self._servers() if pid not in earlier]
        consequence = "they are being set again"
        if wrong:
            consequence += (
                f"; {describe_servers(wrong)} may have started with the other limits, which a server keeps "
                "until it ends"
            )
            old_servers = tuple(sorted({*self._limits.old_servers, *wrong}))
            self._limits = self._limits._replace(old_servers=old_servers)
        text = "another program changed its limits"
        self._emit_limit_event(text, cause, consequence, "warning", reasons.LIMITS_OVERWRITTEN)

    def _emit_limit_event(
        self, text: str, cause: str, consequence: str = "", severity: str = "info", code: str = ""
    ) -> None:
        event = Event(
            severity=severity,
            kind="limit",
            subject=self._limits.plan.name,
            what=text,
            cause=cause,
            consequence=consequence,
            code=code,
            common=text if code == reasons.LIMITS_OVERWRITTEN else "",  # the cause has the limits
        )
        self._emit(event)

    # -- servers that must end

    def blocking_servers(self, *, every: bool) -> tuple[int, ...]:
        """Return the servers that a pending change waits for, including orphans.

        every: whether all servers of the current control daemon must end, not only those with old limits.
        """
        return (*self.own_blocking_servers(every=every), *self.orphans.pids)

    def own_blocking_servers(self, *, every: bool) -> tuple[int, ...]:
        """Return the servers of the current control daemon that a pending change waits for."""
        return self._servers() if every else self._limits.old_servers

    def drain(self, now_s: float) -> None:
        """Request the shutdown of blocking servers after their clients have ended.

        They are shut down by a command once the control daemon is reachable. Orphans, which get no new
        clients, are left to their jobs.
        """
        self._request_end(now_s, self._servers(), force=False)

    def end_at_once(self, now_s: float, servers: Collection[int]) -> None:
        """Request the shutdown of these servers (PIDs) with their clients, orphans among them.

        A command that cannot be sent within `FORCE_WITHIN_S` is given up, because new jobs may attach. A
        `ForcedEnd` shuts down the others.
        """
        self.orphans.end(now_s, "requested by reload --now", servers)
        self._request_end(now_s, [pid for pid in self._servers() if pid in servers], force=True)

    def _request_end(self, now_s: float, requested: Iterable[int], *, force: bool) -> None:
        self._end_requested_s = now_s
        self._end_requests = dict.fromkeys(requested, force)
        self.drains = True
        self._drained = set(self._servers())

    def end_drain(self) -> None:
        """Shut down no more servers that start from now on."""
        self.drains = False

    def commands(self, now_s: float, *, every: bool) -> list[str]:
        """Return the commands to send to the control daemon until they are delivered.

        every: whether all its servers must end.
        """
        awaited = self.own_blocking_servers(every=every)
        late = now_s > self._end_requested_s + FORCE_WITHIN_S
        if every and self.drains:  # clients that waited for a server get one more, as does a leased job
            started = {pid: False for pid in awaited if pid not in self._drained}
            self._end_requests |= started
            self._drained |= started.keys()
        for pid, force in list(self._end_requests.items()):
            if pid not in awaited or (force and late):
                del self._end_requests[pid]
        return [_shutdown_command(pid, force=force) for pid, force in self._end_requests.items()]

    def idle_servers(self, now_s: float, *, every: bool, in_use: bool | None) -> tuple[int, ...]:
        """Return the awaited servers that have no jobs, according to NVML, and so may be shut down now.

        NVML lists a job only some time after it has attached, and a server that is told to shut down accepts
        no new clients (535). So whether they have clients is to be asked immediately before.
        """
        if self._end_requests or in_use is not False or now_s < self._next_request_s:
            return ()
        return self.own_blocking_servers(every=every)

    def idle_servers_asked(self, now_s: float) -> None:
        """Note that the servers without clients have been shut down; the others are asked again later."""
        self._next_request_s = now_s + _END_REQUEST_INTERVAL_S

    def commands_delivered(self, commands: Collection[str]) -> None:
        """Forget requests whose commands were delivered."""
        for pid, force in list(self._end_requests.items()):
            if _shutdown_command(pid, force=force) in commands:
                del self._end_requests[pid]

    def pending(self, *, retiring: bool, awaits_restoration: bool) -> str:
        """Return the pending changes of the domain, and what they wait for; empty if there are none."""
        pending = []
        if retiring:
            text = "the configuration has changed: the control daemon"
            servers = self.blocking_servers(every=True)
            pending.append(_wait(text, servers) if servers else f"{text} is stopping")
        elif old := self._limits.old_servers:
            pending.append(_wait("the change of limits", old))
        if awaits_restoration and (servers := self._servers()):
            pending.append(_wait("the restoration of the compute modes", servers))
        if orphans := self.orphans.pids:
            runs = "still runs jobs" if len(orphans) == 1 else "still run jobs"
            text = f"{describe_servers(orphans)} of an earlier control daemon {runs}"
            pending.append(f"{text}; new jobs may have to wait")
        return "; ".join(pending)


def _wait(change: str, servers: tuple[int, ...]) -> str:
    return wait_reason(change, Users(servers=(Servers(servers),)), reasons.LIMITS_PENDING)


def _shutdown_command(pid: int, *, force: bool) -> str:
    return f"shutdown_server {pid}{' -f' if force else ''}"


class _Orphan:
    """One orphaned server: since when it is idle, when and why it will be ended, and if it was signalled."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.idle_s: float | None = None
        self.end_s: float | None = None
        self.why = ""
        self.signalled = False

    def end(self, at_s: float, why: str) -> None:
        if not self.signalled and (self.end_s is None or at_s < self.end_s):
            self.end_s = at_s
            self.why = why

    def note_use(self, now_s: float, *, in_use: bool | None) -> None:
        if in_use is not False:
            self.idle_s = None
        elif self.idle_s is None:
            self.idle_s = now_s
        elif now_s >= self.idle_s + IDLE_S:
            self.end(now_s, "no job uses its GPUs")


class OrphanedServers:
    """MPS servers whose control daemon has ended: they continue with their jobs and their original limits.

    They get no new jobs, cannot be controlled, and keep their GPUs, which no other server can use meanwhile
    in exclusive-process mode. So each is reported, and ended once no job uses its GPUs any more, or at the
    deadline of a stop. Nothing here blocks.

    domain: the name of their domain.
    emit: called with each event.

    Source: NVIDIA: Multi-Process Service, section "Limitations": exclusive modes apply to servers.
    """

    def __init__(self, domain: str, emit: Callable[[Event], None]) -> None:
        self._domain = domain
        self._emit = emit
        self._orphans: list[_Orphan] = []

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(orphan.pid for orphan in self._orphans)

    def add(self, pids: Iterable[int], cause: str, end_s: float | None = None, why: str = "") -> None:
        """Add the servers that still run and are not known yet; the caller knows that they are ours.

        cause: why they have no control daemon
        end_s: when they are to be ended; None if their clients are waited for
        why: why they are to be ended then
        """
        added = tuple(pid for pid in running_servers(pids) if pid not in self.pids)
        if added:
            orphans = [_Orphan(pid) for pid in added]
            if end_s is not None:
                for orphan in orphans:
                    orphan.end(end_s, why)
            self._orphans += orphans
            consequence = "its jobs continue with their limits; new jobs may have to wait until it ends"
            self._report(
                "warning",
                f"{describe_servers(added, 'is')} still running without its control daemon",
                cause,
                consequence,
            )

    def end(self, at_s: float, why: str, pids: Collection[int] | None = None) -> None:
        """End the current ones, or those with these `pids`, at this time, even with jobs."""
        for orphan in self._orphans:
            if pids is None or orphan.pid in pids:
                orphan.end(at_s, why)

    def detach(self) -> None:
        """Forget them, and log that they are left running."""
        if self._orphans:
            log.warning("domain %s: leaving %s running", self._domain, describe_servers(self.pids))
            self._orphans = []

    def tick(self, now_s: float, *, in_use: bool | None) -> float | None:
        """Do what is due; return when to be called again, None if there are no orphans.

        `in_use`: whether processes other than servers use their GPUs, None if unknown.
        """
        running = running_servers(self.pids)
        for orphan in [orphan for orphan in self._orphans if orphan.pid not in running]:
            self._orphans.remove(orphan)
            text = f"{describe_servers([orphan.pid])}, which had no control daemon, has ended"
            self._report("info", text, orphan.why)
        return earliest(self._tick(orphan, now_s, in_use=in_use) for orphan in self._orphans)

    def _tick(self, orphan: _Orphan, now_s: float, *, in_use: bool | None) -> float:
        orphan.note_use(now_s, in_use=in_use)
        if orphan.end_s is not None and now_s >= orphan.end_s:
            if orphan.signalled:
                self._signal(orphan, signal.SIGKILL)
                orphan.end_s = now_s + UNKILLABLE_S
            else:
                self._signal(orphan, signal.SIGTERM)
                orphan.end_s = now_s + GRACE_S
            orphan.signalled = True
        poll_s = _POLL_SOON_S if orphan.signalled else POLL_S
        soon_s = now_s + poll_s
        return soon_s if orphan.end_s is None else min(soon_s, orphan.end_s)

    def _signal(self, orphan: _Orphan, number: signal.Signals) -> None:
        try:
            if signal_server(orphan.pid, number):
                text = f"sent {number.name} to {describe_servers([orphan.pid])}, which has no control daemon"
                self._report("warning", text, orphan.why)
        except ShortageError as error:
            log.warning("domain %s: %s", self._domain, error)

    def _report(self, severity: str, text: str, cause: str, consequence: str = "") -> None:
        log.log(logging.INFO if severity == "info" else logging.WARNING, "domain %s: %s", self._domain, text)
        code = "" if severity == "info" else reasons.SERVERS_ORPHANED
        event = Event(
            severity=severity,
            kind="domain",  # no user can cause it
            subject=self._domain,
            what=text,
            cause=cause,
            consequence=consequence,
            code=code,
        )
        self._emit(event)
