"""Which MPS servers a domain has, and which of them must end before what is wanted counts for every job.

A server keeps the limits that it was started with, stays when its last client is gone, and may outlive its
control daemon. So a change of limits is in force only when the servers from before it have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from yunion_mps.errors import ShortageError
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.orphans import Orphans
from yunion_mps.mps.servers import named, orphans_in, server_pids, still_serving

log = logging.getLogger(__name__)

#: How soon after a start all processes are searched for orphans; at once, it would delay the start.
SEARCH_AFTER_S = 1.0
#: How often at most it is looked which servers there are, and whether those ended that something waits for.
LOOK_AGAIN_S = 1.0
_STOP = "the time that its jobs had to end is over"
#: How often servers without clients are asked to end, where something waits for that.
_ASK_AGAIN_S = 10.0
#: For how long it is remembered that servers are to end with their jobs, where nobody hears that now.
FORCE_WITHIN_S = 60.0
#: The end of an order to a server that ends its jobs with it.
FORCED = " -f"


class Succession:
    """The servers of one domain; nothing here waits."""

    def __init__(
        self,
        in_force: InForce,
        control_pid: Callable[[], int | None],
        tell: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        """`in_force` is what is remembered of an earlier daemon, or is to be.

        `control_pid` tells the PID of the control daemon, None while there is none.
        """
        self.in_force = in_force
        self._control_pid = control_pid
        self.orphans = Orphans(in_force.plan.name, tell)
        self._tell = tell
        self._changed = changed
        self._children: tuple[int, ...] = ()
        self._look_s = 0.0
        self._search_s: float | None = None
        self._stop_s: float | None = None
        self._ask_s = self._asked_s = 0.0
        #: The servers that are to be asked to end where they are in the way, and whether also with clients.
        self._to_ask: dict[int, bool] = {}

    def begin(self, now_s: float) -> None:
        """A control daemon is being started or taken over: there may be servers of one before it."""
        self._search_s = now_s + SEARCH_AFTER_S
        self._stop_s = None

    def end(self, at_s: float) -> None:
        """Everything is to stop: orphans have as long as clients, also those that there will be."""
        self._stop_s = at_s
        self.orphans.end(at_s, _STOP)

    def bereave(self, cause: str, end_s: float | None = None) -> None:
        """The control daemon is gone; its servers may not be: those without jobs are ended at `end_s`."""
        why = "it has no jobs"
        if self._stop_s is not None:
            end_s, why = self._stop_s, _STOP
        self.orphans.add(self._children, cause, end_s, why)
        self._children = ()
        self._changed()

    def children(self) -> tuple[int, ...]:
        """The PIDs of the control daemon's servers; those known last where they cannot be read now."""
        known, control_pid = self._children, self._control_pid()
        try:
            now = tuple(server_pids(control_pid)) if control_pid else ()
        except ShortageError as error:
            log.debug("%s", error)
            return known
        # One that runs and is no child any more has lost its control daemon: nobody has noticed that yet.
        lost = still_serving(pid for pid in known if pid not in now)
        self._children = (*now, *lost)
        return self._children

    def tick(self, now_s: float, *, in_use: bool | None) -> float | None:
        """Take note of servers that came and ended; when to be called again."""
        before = self.orphans.pids
        if now_s >= self._look_s:  # not at every tick, of which there are many while dozens of domains start
            self._look_s = now_s + LOOK_AGAIN_S
            self.children()
        if self._search_s is not None and now_s >= self._search_s:
            self._search()
        due_s = self.orphans.tick(now_s, in_use=in_use)
        if self.orphans.pids != before:
            self._changed()
        times = [time_s for time_s in (due_s, self._search_s) if time_s is not None]
        return min(times, default=None)

    def _search(self) -> None:
        try:
            found = orphans_in(self.in_force.plan.pipe_directory)
        except ShortageError as error:
            log.debug("%s", error)
            return
        self._search_s = None
        self.orphans.add(found, "an earlier control daemon has ended without it")

    def look_after_old(self, target: DomainPlan) -> None:
        """Take note of the end of servers with older limits; `target` is what the next ones have."""
        old = self.in_force.old_servers
        left = still_serving(old)
        if left == old:
            return
        self.in_force = InForce(self.in_force.plan, left) if left else InForce(target)
        if not left:
            name, what = self.in_force.plan.name, "the new limits are in force"
            self._tell(Event("info", "limit", name, what, f"{named(old)} has ended"))
        self._changed()

    def take_back(self) -> None:
        """What is wanted is what its servers have after all."""
        if self.in_force.old_servers:
            name, what = self.in_force.plan.name, "the change that was pending is taken back"
            self._tell(Event("info", "limit", name, what, "the configuration was read again"))
        self.in_force = InForce(self.in_force.plan)

    def note_strangers(self, servers: tuple[int, ...], known: tuple[int, ...], cause: str) -> None:
        """Somebody else changed the limits; the `known` servers are from when they were last right."""
        strange = [pid for pid in servers if pid not in known]
        means = "they are set again"
        if strange:
            means += f"; {named(strange)} may have the others, and keeps them until it ends"
            old = tuple(sorted({*self.in_force.old_servers, *strange}))
            self.in_force = self.in_force._replace(old_servers=old)
        name, what = self.in_force.plan.name, "somebody else has changed its limits"
        self._tell(Event("warning", "limit", name, what, cause, means))

    def in_the_way(self, *, every: bool) -> tuple[int, ...]:
        """The servers that something waits for, those without a control daemon among them."""
        own = self.children() if every else self.in_force.old_servers
        return (*own, *self.orphans.pids)

    def ask_to_end(self, now_s: float, *, force: bool) -> None:
        """Have those in the way asked to end: once their clients have, with `force` at once.

        Those without a control daemon can only be forced. The others are asked when their control daemon
        hears us, with `force` within a minute: later, nobody would expect jobs to end any more.
        """
        if force:
            self.orphans.end(now_s, "its end was asked for")
        self._asked_s = now_s
        self._to_ask = dict.fromkeys(self.children(), force)

    def orders(self, now_s: float, *, every: bool, in_use: bool | None) -> list[str]:
        """What the control daemon, which hears us, is to be told now; whether `every` server is to end."""
        late = now_s > self._asked_s + FORCE_WITHIN_S
        to_ask = {pid: force for pid, force in self._to_ask.items() if not (force and late)}
        self._to_ask = {}
        in_the_way = self.children() if every else self.in_force.old_servers
        # Without -f, for a job may have come since NVML was asked: a server with clients goes on with them
        # (535 ends it after them, 550 asks it again and again), and one without ends at once.
        if in_the_way and not to_ask and in_use is False and now_s >= self._ask_s:
            self._ask_s = now_s + _ASK_AGAIN_S
            to_ask = dict.fromkeys(in_the_way, False)
        return [
            f"shutdown_server {pid}{FORCED if to_ask[pid] else ''}" for pid in in_the_way if pid in to_ask
        ]

    def pending(self, *, retiring: bool, holds_modes: bool) -> str:
        """What is to become of the domain, and what that waits for; empty for nothing."""
        waits = []
        if retiring:
            waits.append("it ends when its MPS servers have ended, for the configuration has changed")
        elif self.in_force.old_servers:
            old = named(self.in_force.old_servers)
            waits.append(f"other limits come into force when {old} has ended")
        if holds_modes and self._children:
            waits.append(f"compute modes are put back when {named(self._children)} has ended")
        if self.orphans.pids:
            orphans = named(self.orphans.pids)
            waits.append(
                f"{orphans} of a control daemon before goes on with its jobs; new ones may have to wait"
            )
        return "; ".join(waits)
