"""Brings the plan into force, keeps it, puts back what it changed, and tells what is.

Like a domain it is told the time and never waits, so that one loop can drive it before the event loop is
loaded and another afterwards. What calls the driver is handed out as work (`ModeWork`), for the caller to do
where it may take long.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from yunion_mps.errors import BusyError, DriverError, HostError, ShortageError
from yunion_mps.host.store import Store
from yunion_mps.models import Config, Inventory, Plan, Snapshot
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.control import find_control_program
from yunion_mps.mps.domain import Domain
from yunion_mps.paths import Paths
from yunion_mps.supervisor.changes import Change, FindLeaseWaits, events_of
from yunion_mps.supervisor.compute_modes import ModeResult, ModeWork
from yunion_mps.supervisor.event_log import EventLog
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.illness import Illness
from yunion_mps.supervisor.jobs import Jobs, Processes
from yunion_mps.supervisor.modes import Modes
from yunion_mps.supervisor.past import AFTERWARDS, Past, find_past, gpus_of, left_running, settle_modes
from yunion_mps.supervisor.preflight import Examination
from yunion_mps.supervisor.target import Target
from yunion_mps.supervisor.view import notice, statuses

__all__ = ["Change", "Supervisor"]

log = logging.getLogger(__name__)

_RESERVE_BYTES = 2 << 20


class Supervisor:
    """Moves the host from what is to what the plan says, and tells what is."""

    def __init__(self, paths: Paths, examined: Examination) -> None:
        """`examined` is without problems; its NVML stays open for as long as this is used."""
        self._paths = paths
        self.nvml = examined.nvml
        self._gpus = Gpus(examined.inventory, examined.config, examined.plan, Illness(paths.ill_gpus))
        self._target = Target(paths, examined, self._gpus)
        self._store: Store | None = None
        self.event_log = EventLog(self.store, paths.events_copy, self._changed)
        #: The domains that there are now.
        self.fleet = Fleet(self.store, self.event_log.record, self._changed)
        self._jobs = Jobs()
        self._modes = Modes(self._gpus, self.event_log.record)
        #: Which devices of a plan wait for leases; set by the event loop, which has the ledger.
        self.find_lease_waits: FindLeaseWaits = lambda _: {}
        #: Whether a stop has begun.
        self.stopping = False
        #: Address space that a stop can use when there is no more; without pages, as nothing writes to it.
        self._reserve: bytes | None = bytes(_RESERVE_BYTES)
        self._version = 0
        self._past = ""
        self._remarked: dict[str, str] = {}
        self._snapshot: Snapshot | None = None

    # -- its life

    def start(self, now_s: float) -> None:
        """Set the compute modes and begin to start the domains.

        A control daemon of an earlier daemon that the configuration has no place for is looked after until
        it has no jobs. Raises YunionError, with nothing changed, when nothing of it can work: there is no
        control program, or every domain's place is taken.
        """
        past = self._settle_the_past()
        left = past.known
        if not self._target.plan.domains and not left:
            return
        program = find_control_program()
        self._make_fleet(program, left)
        self.fleet.refuse_if_none_can_start(past.running)
        work = self._modes.work(self._target.plan, None)
        if work.changes:
            self.note_modes(self.set_modes(work))
            self._modes.refuse_if_none_can_be_set(self._target.plan)
        self._plan_anew()
        self._make_fleet(program, left)
        self.fleet.start(now_s, past.running)
        self._changed()

    def refuse_if_unsafe(self) -> None:
        """Raise HostError where nothing may change now: nothing can be written down, or a stop has begun."""
        if self.stopping:
            raise BusyError("the daemon is stopping", "start it again: systemctl start yunion-mps-daemon")
        self.fleet.refuse_if_not_noted()

    def tick(self, now_s: float) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest."""
        times = (self.fleet.tick(now_s), self._jobs.tick(now_s))
        return min((due_s for due_s in times if due_s is not None), default=None)

    def descriptors(self) -> list[int]:
        """What to watch for reading, to be asked for again after every tick."""
        return [descriptor for domain in self.domains for descriptor in domain.descriptors()]

    def stop(self, now_s: float, *, spare_found: bool = False) -> None:
        """Begin to stop every domain; `spare_found` leaves control daemons that were running before us."""
        if not self.stopping:
            self._reserve = None
            self._jobs.end_within(self.config.cuda_mps_stop_timeout_s, now_s)
        self.stopping = True
        self._modes.end()
        self.fleet.stop(now_s, spare_found=spare_found)

    def say_whom_it_ended(self) -> None:
        """Name the jobs that did not end in time."""
        for event in self._jobs.ended_by_force():
            self.event_log.record(event)

    def close(self) -> None:
        """Put the compute modes back to what they were before we first touched them.

        Where a control daemon of ours is left running, its GPUs' modes stay, and so do the notes of them:
        they are for the daemon that takes it over, or is started after its end.
        """
        if self._store is None:
            return
        if self.nvml:
            self.nvml.deadline.may_hang = True  # rather than not to restore a mode
        try:
            left = left_running(self._store)
        except ShortageError as error:
            what = "compute modes are not restored, because it is not known whether a job still needs them"
            log.error("%s: %s. %s", what, error.message, "restore them: yunion-mps-daemon --put-back")
            self.release()
            return
        if self._modes.put_back(self.nvml, self._store, gpus_of(left)):
            self._changed()
        for one in left:
            log.warning("%s is left running in %s; %s", one, one.pipe_directory, AFTERWARDS)
        self.release()

    def release(self) -> None:
        """Give back what is held, and leave everything as it is, for the program that takes over."""
        self.event_log.flush()
        if self._store:
            self._store.close()
            self._store = None

    # -- what it is at

    @property
    def domains(self) -> list[Domain]:
        """The domains that there are now."""
        return self.fleet.domains

    @property
    def stop_within_s(self) -> int:
        """How long a stop may take: the jobs' time, the control daemons', and that of calls of the driver."""
        return self.config.cuda_mps_stop_timeout_s + 80

    @property
    def config(self) -> Config:
        """What both files said when they were last accepted."""
        return self._target.config

    def snapshot(self) -> Snapshot:
        """What is now; the same object for as long as nothing changes."""
        if self._snapshot is None:
            self._version += 1
            self._snapshot = Snapshot(
                self._version,
                self.config.enable_cuda_mps,
                notice(self.config, self._target.plan, self._paths.host_conf, self._past),
                self._target.in_force(self.domains),
                self._gpus.inventory,
                statuses(self.domains, self.fleet.awaited, self._gpus.inventory.gpus),
                (*self._target.remarks, *self._troubles()),
            )
        return self._snapshot

    def remark(self, about: str, words: str) -> None:
        """Have the status warn of something; empty words take that back."""
        if self._remarked.get(about, "") != words:
            self._remarked[about] = words
            self._changed()

    def _troubles(self) -> list[str]:
        found = [words for words in self._remarked.values() if words]
        if self.event_log.trouble:
            means = "events are kept elsewhere meanwhile, and nothing can be changed"
            found.append(f"{self.event_log.trouble}; {means}")
        return found

    # -- GPUs

    def rescan(self, inventory: Inventory, now_s: float) -> None:
        """Take note of what the GPUs are like now, and of one that can serve only now."""
        before = {gpu.uuid: gpu.compute_mode for gpu in self._gpus.inventory.gpus}
        for event in self._gpus.look(inventory, self.config, self._target.plan):
            self.event_log.record(event)
        self._modes.tell_of_others(before, self._target.plan)
        if self._gpus.changed:
            self.fleet.healthy_gpus = self._gpus.healthy
            self._changed()
            self._use_what_came(now_s)

    def lose_driver(self, error: DriverError, now_s: float) -> None:
        """Take note that the driver as a whole does not answer any more."""
        self._jobs.forget(self.domains)
        inventory = self._gpus.inventory
        gpus = tuple(gpu._replace(reason=error.message) for gpu in inventory.gpus)
        self.rescan(inventory._replace(gpus=gpus), now_s)

    def note_xid(self, pci_address: str, xid: int) -> None:
        """Take note of an error that the driver reported."""
        event = self._gpus.mark_ill(pci_address, xid)
        if event:
            log.warning("GPU %s: %s; %s", event.subject, event.what, event.consequence)
            self.event_log.record(event)
            self._changed()

    @property
    def has_unavailable_gpus(self) -> bool:
        """Whether a GPU that should serve devices cannot do so now."""
        plan = self._target.plan
        planned = {uuid for domain in (*plan.domains, *plan.parked) for uuid in domain.gpu_uuids}
        return not planned <= self._gpus.healthy

    def note_processes(self, processes: Processes, looked_s: float) -> None:
        """Take note of who uses the GPUs (by UUID: PID and MiB), by a look that began at `looked_s`."""
        self._jobs.note(self.domains, processes, self._gpus.inventory.gpus, looked_s)

    @property
    def jobs(self) -> Mapping[int, int]:
        """Processes on our GPUs at the last look, by PID, with their start in ticks; no MPS servers."""
        return self._jobs.started

    # -- compute modes

    def mode_work(self) -> ModeWork:
        """The compute modes that are to be set or put back now; what waits for servers is pending."""
        target, used = self._target.plan, self.fleet.gpus_in_use()
        held = self._modes.held(target, self._store, used)
        for domain in self.domains:
            holds = not held.isdisjoint(domain.plan.gpu_uuids)
            if domain.holds_modes != holds:
                domain.holds_modes = holds
                self._changed()
        return self._modes.work(target, self._store, used, self.fleet.watched())

    def set_modes(self, work: ModeWork) -> ModeResult:
        """Do the work, or nothing once a stop has begun; for threads, as it calls the driver."""
        return self._modes.set(work, self.nvml, self.store())

    def note_modes(self, result: ModeResult) -> None:
        """Take note of modes that were set or put back, and of GPUs that refused."""
        if self._modes.note(result, "the plan asks for it"):
            self._changed()

    # -- another configuration

    def examine(self, examined: Examination) -> tuple[Plan, list[Change]]:
        """The plan for what was read anew and its changes; raises YunionError where it cannot be."""
        return self._target.examine(examined, self.domains, self.find_lease_waits)

    def accept(self, examined: Examination) -> list[Change]:
        """Aim at what was read anew; the modes are set next (`mode_work`), then it is to be `aim`ed at.

        Raises YunionError, with nothing changed, where it cannot be.
        """
        plan, changes = self.examine(examined)
        self.fleet.refuse_if_any_cannot_start(self._target.domains(plan))
        is_other = self._target.accept(examined, plan)
        self.nvml = examined.nvml or self.nvml
        self._gpus.forgive()
        if examined.nvml:
            for event in self._gpus.look(examined.inventory, examined.config, plan):
                self.event_log.record(event)
        for event in events_of(changes) if is_other else ():  # what is pending was recorded before
            self.event_log.record(event)
        self._changed()
        return changes

    def aim(self, now_s: float) -> None:
        """Bring what was accepted into force, as far as no job is in its way."""
        self._plan_anew()
        domains = self._target.domains()
        program = find_control_program() if domains else ""
        self.fleet.aim(domains, program, self.config.cuda_mps_stop_timeout_s, now_s)
        self._changed()

    # -- its own

    def _plan_anew(self) -> None:
        """Plan for the GPUs as they are known now, and remember who serves."""
        self._target.plan_anew()
        self._gpus.remember(self._target.plan, self._paths)

    def _use_what_came(self, now_s: float) -> None:
        """A GPU that could not serve before and can now gets its place in the plan."""
        before = self._target.plan
        self._target.plan_anew()
        if self._target.plan.domains != before.domains:
            try:
                self.aim(now_s)
            except HostError as error:
                log.error("%s. %s", error.message, error.hint)
        if self._target.plan != before:
            self._changed()

    def _changed(self) -> None:
        self._snapshot = None

    def _make_fleet(self, program: str, left: Sequence[InForce]) -> None:
        self.fleet.healthy_gpus = self._gpus.healthy
        self.fleet.make(self._target.domains(), left, program, self.config.cuda_mps_stop_timeout_s)

    def store(self) -> Store:
        """The state file, opened when it is first needed; raises HostError."""
        if self._store is None:
            self._store = Store(self._paths)
        return self._store

    def _settle_the_past(self) -> Past:
        """Find what an earlier daemon left, and restore the modes that none of it needs."""
        store = self.store() if Store.exists(self._paths) else None
        past = find_past(store, self._target.domains())
        self._past = past.notice
        if store:
            settle_modes(past, self._target.plan, self.nvml, store)
        return past
