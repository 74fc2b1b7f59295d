"""Brings the plan into force, keeps it, puts back what it changed, and tells what is.

Like a domain it is told the time and never waits, so that one loop can drive it before the event loop is
loaded and another afterwards. What calls the driver is handed out as work (`ModeWork`), for the caller to do
where it may take long.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from yunion_mps.compute_modes import ModeResult, ModeWork, carry_out, noted
from yunion_mps.errors import BusyError, ConfigError, DriverError, HostError, YunionError
from yunion_mps.examination import Examination
from yunion_mps.journal import Journal
from yunion_mps.models import Config, DomainPlan, Inventory, Plan, Snapshot
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.control import find_control_program
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import READY, STOPPED
from yunion_mps.paths import Paths
from yunion_mps.planning import make_plan
from yunion_mps.store import Store
from yunion_mps.supervisor.changes import Change, changes_to, events_of, settings_changed
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.illness import Illness
from yunion_mps.supervisor.jobs import Jobs, Processes
from yunion_mps.supervisor.modes import Modes
from yunion_mps.supervisor.past import AFTERWARDS, find_past, gpus_of, left_running
from yunion_mps.supervisor.view import in_force, notice, statuses

__all__ = ["Change", "Supervisor"]

log = logging.getLogger(__name__)


class Supervisor:
    """Moves the host from what is to what the plan says, and tells what is."""

    def __init__(self, paths: Paths, examined: Examination) -> None:
        """`examined` is without problems; its NVML stays open for as long as this is used."""
        self._paths = paths
        self._config = examined.config
        self._remarks = examined.remarks
        self._machine_id = examined.machine_id
        self.nvml = examined.nvml
        self._target = examined.plan
        self._gpus = Gpus(examined.inventory, examined.config, examined.plan, Illness(paths.ill_gpus))
        self._store: Store | None = None
        self.journal = Journal(self.store, paths.events_copy, self._changed)
        self._fleet = Fleet(self.store, self.journal.record, self._changed)
        self._jobs = Jobs()
        self._modes = Modes(self._gpus, self.journal.record)
        self._stopping = False
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
        left = self._settle_the_past()
        if not self._target.domains and not left:
            return
        program = find_control_program()
        self._make_fleet(program, left)
        obstacles = [error for domain in self.domains if (error := domain.obstacle())]
        if len(obstacles) == len(self.domains) and obstacles:
            raise obstacles[0]
        work = self._modes.work(self._target, None)
        if work.changes:
            self.note_modes(self.set_modes(work))
            self._modes.refuse_if_none_can_be_set(self._target)
        self._replan()
        self._gpus.remember(self._target, self._paths)
        self._make_fleet(program, left)
        self._fleet.start(now_s)
        self._changed()

    def refuse_if_unsafe(self) -> None:
        """Raise HostError where nothing may change now: nothing can be written down, or a stop has begun."""
        if self._stopping:
            raise BusyError("the daemon is stopping", "start it again: systemctl start yunion-mps-daemon")
        self._fleet.note_all()

    def tick(self, now_s: float) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest."""
        times = (self._fleet.tick(now_s), self._jobs.tick(now_s))
        return min((due_s for due_s in times if due_s is not None), default=None)

    def descriptors(self) -> list[int]:
        """What to watch for reading, to be asked for again after every tick."""
        return [descriptor for domain in self.domains for descriptor in domain.descriptors()]

    def stop(self, now_s: float, *, spare_found: bool = False) -> None:
        """Begin to stop every domain; `spare_found` leaves control daemons that were running before us."""
        if not self._stopping:
            self._jobs.end_within(self._config.cuda_mps_stop_timeout_s, now_s)
        self._stopping = True
        self._modes.end()
        self._fleet.stop(now_s, spare_found=spare_found)

    def say_whom_it_ended(self) -> None:
        """Name the jobs that did not end in time."""
        for event in self._jobs.ended_by_force():
            self.journal.record(event)

    def close(self) -> None:
        """Put the compute modes back to what they were before we first touched them.

        Where a control daemon of ours is left running, its GPUs' modes stay, and so do the notes of them:
        they are for the daemon that takes it over, or is started after its end.
        """
        if self._store is None:
            return
        left = left_running(self._store, self._watched())
        if self._modes.put_back(self.nvml, self._store, gpus_of(left)):
            self._changed()
        for place, one in left.items():
            log.warning("a control daemon (PID %d) is left running in %s; %s", one.pid, place, AFTERWARDS)
        self.release()

    def release(self) -> None:
        """Give back what is held, and leave everything as it is, for the program that takes over."""
        self.journal.flush()
        if self._store:
            self._store.close()
            self._store = None

    # -- what it is at

    @property
    def domains(self) -> list[Domain]:
        """The domains that there are now."""
        return self._fleet.domains

    @property
    def stop_within_s(self) -> int:
        """How long a stop may take: the jobs' time, the control daemons', and that of calls of the driver."""
        return self._config.cuda_mps_stop_timeout_s + 80

    @property
    def config(self) -> Config:
        """What both files said when they were last accepted."""
        return self._config

    @property
    def stopping(self) -> bool:
        """Whether a stop has begun."""
        return self._stopping

    @property
    def started(self) -> bool:
        """Whether every domain is ready or has said why it is not."""
        return all(
            domain.state == READY or domain.error or domain.waits_for_somebody for domain in self.domains
        )

    @property
    def stopped(self) -> bool:
        """Whether every domain has stopped."""
        return all(domain.state == STOPPED for domain in self.domains)

    @property
    def serving(self) -> int:
        """The number of domains that serve."""
        return sum(domain.state == READY for domain in self.domains)

    @property
    def took_over(self) -> bool:
        """Whether a control daemon is watched that ran before us, serving or not."""
        return any(domain.took_over for domain in self.domains)

    def first_error(self) -> YunionError | None:
        """Why a domain does not serve, None where all do."""
        return next((domain.error for domain in self.domains if domain.error), None)

    def snapshot(self) -> Snapshot:
        """What is now; the same object for as long as nothing changes."""
        if self._snapshot is None:
            self._version += 1
            self._snapshot = Snapshot(
                self._version,
                self._config.enable_cuda_mps,
                notice(self._config, self._target, self._paths.host_conf, self._past),
                in_force(self._target, self.domains, self._gpus.inventory.gpus),
                self._gpus.inventory,
                statuses(self.domains, self._fleet.awaited, self._gpus.inventory.gpus),
                (*self._remarks, *self._troubles()),
            )
        return self._snapshot

    def remark(self, about: str, words: str) -> None:
        """Have the status warn of something; empty words take that back."""
        if self._remarked.get(about, "") != words:
            self._remarked[about] = words
            self._changed()

    def _troubles(self) -> list[str]:
        found = [words for words in self._remarked.values() if words]
        if self.journal.trouble:
            means = "events are kept elsewhere meanwhile, and nothing can be changed"
            found.append(f"{self.journal.trouble}; {means}")
        return found

    # -- GPUs

    def rescan(self, inventory: Inventory, now_s: float) -> None:
        """Take note of what the GPUs are like now, and of one that can serve only now."""
        before = {gpu.uuid: gpu.compute_mode for gpu in self._gpus.inventory.gpus}
        for event in self._gpus.look(inventory, self._config, self._target):
            self.journal.record(event)
        self._modes.tell_of_others(before, self._target)
        if self._gpus.changed:
            self._fleet.healthy_gpus = self._gpus.healthy
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
            self.journal.record(event)
            self._changed()

    def note_processes(self, processes: Processes, looked_s: float) -> None:
        """Take note of who uses the GPUs (by UUID: PID and MiB), by a look that began at `looked_s`."""
        self._jobs.note(self.domains, processes, self._gpus.inventory.gpus, looked_s)

    @property
    def jobs(self) -> Mapping[int, int]:
        """Processes on our GPUs at the last look, by PID, with their start in ticks; no MPS servers."""
        return self._jobs.started

    def take_wants_look(self) -> bool:
        """Whether a look at the GPUs is wanted at once; said only once for each cause."""
        wanted = [domain for domain in self.domains if domain.wants_look]
        for domain in wanted:
            domain.wants_look = False
        return bool(wanted)

    # -- compute modes

    def mode_work(self) -> ModeWork:
        """The compute modes that are to be set or put back now; what waits for servers is pending."""
        held = self._modes.held(self._target, self._store, self._fleet.gpus_in_use())
        for domain in self.domains:
            holds = not held.isdisjoint(domain.plan.gpu_uuids)
            if domain.holds_modes != holds:
                domain.holds_modes = holds
                self._changed()
        return self._modes.work(self._target, self._store, self._fleet.gpus_in_use(), self._watched())

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
        examined.check()
        plan = self._plan_for(examined.config, examined.inventory)
        if plan.domains:
            find_control_program()
        settings = settings_changed(self._config, examined.config)
        placed = plan._replace(domains=tuple(self._placed(domain) for domain in plan.domains))
        changes = changes_to(
            placed,
            in_force(self._target, self.domains, self._gpus.inventory.gpus),
            self._gpus.inventory,
            self.domains,
            settings,
        )
        return plan, changes

    def accept(self, examined: Examination) -> list[Change]:
        """Aim at what was read anew; the modes are set next (`mode_work`), then it is to be `aim`ed at.

        Raises YunionError, with nothing changed, where it cannot be.
        """
        plan, changes = self.examine(examined)
        for wanted in plan.domains:
            placed = self._placed(wanted)
            if not any(placed.pipe_directory == domain.plan.pipe_directory for domain in self.domains):
                obstacle = Domain(placed, "", self.journal.record, self._changed).obstacle()
                if obstacle:
                    raise obstacle
        is_other = (examined.config, plan) != (self._config, self._target)
        self._config, self._target, self._remarks = examined.config, plan, examined.remarks
        self.nvml = examined.nvml or self.nvml
        self._gpus.forgive()
        if examined.nvml:
            for event in self._gpus.look(examined.inventory, examined.config, plan):
                self.journal.record(event)
        for event in events_of(changes) if is_other else ():  # what is pending was recorded before
            self.journal.record(event)
        self._changed()
        return changes

    def aim(self, now_s: float) -> None:
        """Bring what was accepted into force, as far as no job is in its way."""
        self._replan()
        self._gpus.remember(self._target, self._paths)
        program = find_control_program() if self._target.domains else ""
        plans = [self._placed(plan) for plan in self._target.domains]
        self._fleet.aim(plans, program, self._config.cuda_mps_stop_timeout_s, now_s)
        self._changed()

    def renew(self, now_s: float, *, force: bool) -> None:
        """Have the servers that a pending change waits for end: after their jobs, with `force` at once."""
        for domain in self.domains:
            domain.renew(now_s, force=force)

    # -- its own

    def _plan_for(self, config: Config, inventory: Inventory) -> Plan:
        plan, problems = make_plan(config, self._gpus.for_planning(inventory, self._target), self._machine_id)
        if problems:
            raise ConfigError(problems)
        return plan

    def _replan(self) -> None:
        """Plan anew with the GPUs as they are known now; what cannot be planned is left as it was."""
        try:
            self._target = self._plan_for(self._config, self._gpus.inventory)
        except ConfigError as error:
            log.error("the GPUs that came do not fit the configuration: %s", error.message)

    def _use_what_came(self, now_s: float) -> None:
        """A GPU that could not serve before and can now gets its place in the plan."""
        before = self._target
        self._replan()
        if self._target.domains != before.domains:
            try:
                self.aim(now_s)
            except HostError as error:
                log.error("%s. %s", error.message, error.hint)
        if self._target != before:
            self._changed()

    def _changed(self) -> None:
        self._snapshot = None

    def _placed(self, plan: DomainPlan) -> DomainPlan:
        """The domain with its directories below the root that everything of ours lies under."""
        return plan._replace(
            pipe_directory=self._paths.under(plan.pipe_directory),
            log_directory=self._paths.under(plan.log_directory),
        )

    def _make_fleet(self, program: str, left: Sequence[InForce]) -> None:
        self._fleet.healthy_gpus = self._gpus.healthy
        plans = [self._placed(plan) for plan in self._target.domains]
        self._fleet.make(plans, left, program, self._config.cuda_mps_stop_timeout_s)

    def store(self) -> Store:
        """The state file, opened when it is first needed; raises HostError."""
        if self._store is None:
            self._store = Store(self._paths)
        return self._store

    def _watched(self) -> set[str]:
        return {d.plan.pipe_directory for d in self.domains if d.status().pid is not None}

    def _settle_the_past(self) -> list[InForce]:
        """See to what an earlier daemon left; returns what is to be looked after until it has no jobs."""
        if not Store.exists(self._paths):
            return []
        store = self.store()
        past = find_past(store, [self._placed(plan) for plan in self._target.domains])
        self._past = past.notice
        spare = {*self._target.compute_modes, *past.gpu_uuids}
        modes = {uuid: mode for uuid, mode in noted(store).items() if uuid not in spare}
        carry_out(ModeWork(put_back=modes), self.nvml, store)
        return past.known
