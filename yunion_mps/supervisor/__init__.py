"""The supervisor: brings the plan into effect, keeps it in effect, and restores what it changed.

Like a domain it takes the time as a parameter and never waits, so one loop can drive it before asyncio is
loaded, and asyncio afterwards. Calls to the driver may take long, so `reconciliation` makes them on threads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from yunion_mps.core import reasons
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_EVENT_LOG, ABOUT_RECORD, IMPAIRED
from yunion_mps.core.errors import BusyError, DriverError, HostError, ShortageError
from yunion_mps.core.models import Event, Inventory, Plan, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.settings import Config
from yunion_mps.gpus.absent import gpu_label
from yunion_mps.gpus.blockers import gpus_of
from yunion_mps.gpus.mig_layout import ConfirmedLosses
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.refusals import Refusals
from yunion_mps.host.processes import Watchable, earliest
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.storage import add_recorded, recorded_ledger
from yunion_mps.mps.directory_record import DirectoryRecord
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.processes import find_control_program
from yunion_mps.supervisor.changes import Change
from yunion_mps.supervisor.condition_log import ConditionLog
from yunion_mps.supervisor.desired import DesiredState
from yunion_mps.supervisor.event_log import RECORDS_LOST, EventLog
from yunion_mps.supervisor.fleet import Fleet, Jobs
from yunion_mps.supervisor.gpu_settings import GpuSettings
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.layouts import MigLayouts
from yunion_mps.supervisor.pipe_access import PipeAccess
from yunion_mps.supervisor.preflight import (
    RESTORED_LATER,
    Leftovers,
    Preflight,
    find_leftovers,
    left_running,
)
from yunion_mps.supervisor.reconciliation import Reconciliation
from yunion_mps.supervisor.snapshots import Snapshots
from yunion_mps.supervisor.state_file import StateFile

__all__ = ["Change", "Supervisor"]

log = logging.getLogger(__name__)

#: Codes of errors of a driver that no call reaches.
_NO_DRIVER = {reasons.DRIVER_NOT_LOADED, reasons.DRIVER_MISMATCH, reasons.DRIVER_MISSING}

_RESERVE_BYTES = 2 << 20


class Supervisor:
    def __init__(
        self, paths: Paths, preflight: Preflight, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`preflight` must have no problems; its NVML must stay open as long as the supervisor is used.

        clock: monotonic, in s
        """
        self._paths = paths
        self.nvml = preflight.nvml
        refusals = Refusals()
        self._gpus = Gpus(preflight.inventory, preflight.plan, paths, refusals)
        self.state_file = StateFile(paths)
        self.event_log = EventLog(self.state_file.open, paths.events_copy, self._changed)
        self.fleet = Fleet(
            self.state_file.open,
            self._gpus,
            emit=self.event_log.record,
            changed=self._changed,
            directory_record=DirectoryRecord(paths.directory_record),
        )
        confirmed = ConfirmedLosses()
        #: The leases, which keep GPUs as they are: at first as the state file has them, then as the lease
        #: service has restored and changed them.
        self.ledger = Ledger()
        self.desired = DesiredState(
            paths,
            preflight,
            gpus=self._gpus,
            fleet=self.fleet,
            ledger=self.ledger,
            confirmed=confirmed,
        )
        self.jobs = Jobs(self.fleet, self._gpus, self.desired)
        self.settings = GpuSettings(
            self._gpus,
            self.fleet,
            self.desired,
            refusals=refusals,
            emit=self.event_log.record,
            changed=self._changed,
            follow=self._follow_plan,
            state_file=self.state_file,
        )
        self.layouts = MigLayouts(
            self._gpus,
            self.desired,
            confirmed,
            self.settings.reconciler.gate,
            emit=self.event_log.record,
            state_file=self.state_file,
            scan=lambda nvml: Scanner(paths).scan(nvml),
            use=self._use_scan,
            changed=self._changed,
        )
        self.reconciliation = Reconciliation(
            self._gpus,
            self.desired,
            self.settings,
            self.layouts,
            changed=self._changed,
            clock=clock,
        )
        self.pipe_access = PipeAccess(self.fleet, paths.root, self._changed)
        self._snapshots = Snapshots(
            desired=self.desired,
            gpus=self._gpus,
            fleet=self.fleet,
            layouts=self.layouts,
            settings=self.settings,
            reported=self._reported,
        )
        #: Whether a start has come to the domains, so that they follow what a scan of the GPUs finds.
        self._has_domains = False
        #: Whether a stop has begun.
        self.stopping = False
        #: Address space to release at a stop in case none is left; never written to, so it takes no memory.
        self._reserve: bytes | None = bytes(_RESERVE_BYTES)
        #: What the last poll found, and for what: if nothing of it changes, neither does anything else.
        self._polled: tuple[Inventory, Config, Plan, Inventory] | None = None
        self._condition_log = ConditionLog(self.event_log.record)
        #: The conditions that other parts of the daemon have found, by kind and subject.
        self._conditions: dict[tuple[str, str], Condition] = {}
        #: The GPUs (UUIDs) whose MIG records could not be read at the start, as long as that is so.
        self._damaged: Mapping[str, HostError] = {}
        self._note_driver(preflight.driver_error)

    # -- from start to stop

    def start(self, now_s: float) -> None:
        """Set the compute modes and begin to start the domains.

        A control daemon from an earlier run that the configuration has no place for is supervised until it
        has no jobs. Raises YunionError and changes nothing if no domain can work: there is no control
        program, or no domain's directory is available.
        """
        self._check_records()
        self._keep_leased_gpus()
        self._gpus.save(self.desired.plan)
        self.record_conditions()
        leftovers = self._find_leftovers()
        self.reconciliation.begin(self.nvml, gpus_of(leftovers.running), now_s)
        self._has_domains = True
        needs_mps = bool(self.desired.plan.domains or leftovers.known)
        if not needs_mps and not self.desired.plan.direct:
            return
        program = find_control_program() if needs_mps else ""
        self._make_fleet(program, leftovers)
        self.fleet.refuse_if_none_can_start(leftovers.running)
        self.reconciliation.set_here(self.nvml, now_s)
        self._gpus.refuse_if_no_mode_can_be_set(self.desired.plan)
        self._replan()
        self._make_fleet(program, leftovers)
        self.fleet.start(now_s, leftovers.running)
        self._leave_unsafe_directories(now_s)
        self._changed()

    def _leave_unsafe_directories(self, now_s: float) -> bool:
        """Use other directories for domains that other users keep from starting; return if any."""
        if not self.desired.refuse_directories(self.fleet.take_refused()):
            return False
        self._changed()
        self._follow_plan(now_s)
        return True

    def refuse_if_unsafe(self) -> None:
        """Refuse a change if nothing may change now.

        Raises BusyError if a stop has begun, and HostError if nothing can be recorded.
        """
        if self.stopping:
            raise BusyError("the daemon is stopping", "start it again: systemctl start yunion-mps-daemon")
        self.fleet.refuse_if_not_recorded()

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest.

        `readable` are those of `watched()` that have become readable, None if that is unknown.
        """
        domains_s = self.fleet.tick(now_s, readable)
        if self._leave_unsafe_directories(now_s):
            domains_s = now_s
        return earliest((domains_s, self.jobs.tick(now_s), self.event_log.tick(now_s)))

    def watched(self) -> list[Watchable]:
        """Return what to watch for reading; ask again after every tick."""
        watched: list[Watchable] = []
        for domain in self.domains:
            watched += domain.watched()
        return watched

    def stop(self, now_s: float, *, spare_adopted: bool = False) -> None:
        """Begin to stop every domain; `spare_adopted` leaves adopted control daemons running."""
        if not self.stopping:
            self._reserve = None
            self.jobs.end_within(self.config.cuda_mps_stop_timeout_s, now_s)
        self.stopping = True
        self.settings.reconciler.gate.end()
        self.fleet.stop(now_s, spare_adopted=spare_adopted)

    def report_late_jobs(self) -> None:
        for event in self.jobs.report_late():
            self.event_log.record(event)

    def close(self) -> bool:
        """Restore what GPUs had before our first change; return whether that is known.

        These are compute modes, time slices and MIG layouts. What a control daemon of ours that is left
        running or a stored lease needs stays as it is, with its records, for the next daemon.
        """
        store = self.state_file.opened
        if store is None:
            return True
        try:
            is_known = self._is_original_known(store)
            ledger = recorded_ledger(store)
            left = left_running(store, leased=ledger.ways_kept().keys())
        except ShortageError as error:
            problem = "compute modes are not restored, because a job may still need them"
            log.error("%s: %s; %s", problem, error.message, "restore them: yunion-mps-daemon --restore")
            self.release()
            return False
        except HostError as error:
            problem = "compute modes, time slices and MIG layouts are not restored"
            log.error("%s: %s; %s", problem, error.message, error.hint)
            self.release()
            return False
        if self.nvml:
            with contextlib.suppress(DriverError):  # each setting that cannot be restored is reported
                self.nvml.ensure_initialised()
            # What is known suffices to restore the GPUs that have neither come nor gone.
            with contextlib.suppress(DriverError, ShortageError, MemoryError):
                self._gpus.find_again(self.nvml, self._gpus_to_restore(store))
        self.reconciliation.restore(self.nvml, store, gpus_of(left), ledger)
        for process in left:
            log.warning("%s is still running in %s; %s", process, process.pipe_directory, RESTORED_LATER)
        self.release()
        return is_known

    def _is_original_known(self, store: Store) -> bool:
        """Whether it is known what to restore; raises HostError if no record can be read."""
        originals = Originals(store)
        for kind in self.settings.reconciler.kinds:
            originals.of(kind.name)
        restored = {layout.gpu_uuid for layout in self.desired.plan.layouts if layout.restore}
        if store.has_lost_records and restored:
            text = "MIG layouts from before the state file was damaged are unknown, so they are not restored"
            log.error("%s; %s", text, "see and change them by hand: nvidia-smi mig -lgi")
            return False
        return restored.isdisjoint(originals.unreadable_layouts())

    def _gpus_to_restore(self, store: Store) -> set[str]:
        """Return the UUIDs of the GPUs of which we have changed something."""
        with contextlib.suppress(HostError):  # which the restoration reports
            return Originals(store).gpus()
        return set()

    def release(self) -> None:
        """Close files without changing the host, so that another program can continue."""
        self.event_log.flush()
        self.state_file.close()

    # -- state

    @property
    def domains(self) -> list[Domain]:
        return self.fleet.domains

    @property
    def stop_within_s(self) -> int:
        """How long a stop may take: the time for jobs, for control daemons and for driver calls."""
        return self.config.cuda_mps_stop_timeout_s + 80

    @property
    def config(self) -> Config:
        return self.desired.config

    def snapshot(self) -> Snapshot:
        """Return the current state; the same object as long as nothing changes."""
        return self._snapshots.get()

    def set_condition(self, condition: Condition) -> None:
        """Show what another part of the daemon has found, in place of what it has found before."""
        if self._conditions.get((condition.kind, condition.subject)) != condition:
            self._conditions[condition.kind, condition.subject] = condition
            self._changed()
            self.record_conditions()

    def end_condition(self, kind: str, subject: str = "") -> None:
        """Show a condition that was set no longer."""
        if self._conditions.pop((kind, subject), None):
            self._changed()
            self.record_conditions()

    def _reported(self) -> Iterator[Condition]:
        """Yield the conditions that follow neither from the plan nor from GPUs and domains."""
        yield from self.pipe_access.conditions
        yield from self._conditions.values()
        gpus = self._gpus.inventory.gpus
        yield from self.settings.conditions()
        yield from self.reconciliation.conditions()
        if not self._gpus.is_saved:
            text = f"which GPUs the entries mean cannot be recorded in {self._paths.served_gpus}; "
            text += "if render nodes have other numbers after a reboot, other GPUs would be divided"
            yield Condition(ABOUT_RECORD, "GPUs", IMPAIRED, Reason(text, reasons.RECORD_DAMAGED))
        store = self.state_file.opened
        if store and store.has_lost_records:
            text = f"the state file was damaged; {RECORDS_LOST}"
            yield Condition(ABOUT_RECORD, "state file", IMPAIRED, Reason(text, reasons.STATE_FILE_DAMAGED))
        for uuid, error in self._damaged.items():
            if uuid not in self.layouts.pending:
                text = f"{gpu_label(uuid, gpus)}: {error.message}"
                yield Condition(ABOUT_RECORD, uuid, IMPAIRED, Reason(text, error.code))
        if self.event_log.write_error:
            means = "events are kept in a temporary copy for now, and changes are refused"
            text = f"{self.event_log.write_error}; {means}"
            yield Condition(ABOUT_EVENT_LOG, "", IMPAIRED, Reason(text, reasons.EVENTS_NOT_WRITTEN))

    # -- GPUs

    def update_gpus(
        self,
        inventory: Inventory,
        now_s: float,
        *,
        during_steps: bool = False,
        changing_mig: Collection[str] = (),
    ) -> None:
        """Apply the result of a poll; a GPU that has become usable gets its place in the plan.

        during_steps: whether steps changed settings of GPUs while these were read, so that only which GPUs
            answer is used
        changing_mig: the GPUs (UUIDs) whose MIG mode or instances these steps changed; of them, nothing that
            was read is used
        """
        if during_steps:
            inventory = self._gpus.with_known_settings(inventory, changing_mig)
        self.keep_record()
        self._check_damaged()
        if self.desired.plan.pending:
            self._follow_plan(now_s)
        before = self._gpus.inventory
        if self._polled == (inventory, self.config, self.desired.plan, before):
            return
        for event in self._gpus.update(inventory, self.desired.plan):
            self.event_log.record(event)
        self.settings.note_external_changes(before.gpus)
        self._polled = (inventory, self.config, self.desired.plan, self._gpus.inventory)
        if self._gpus.inventory is before:
            return
        self._changed()
        self._follow_plan(now_s)

    def keep_record(self) -> None:
        """Write the record of what the entries mean again if it was removed, or could not be written."""
        was_saved = self._gpus.is_saved
        self._gpus.save(self.desired.plan)
        if self._gpus.is_saved != was_saved:
            self._changed()

    def _follow_plan(self, now_s: float) -> None:
        """Plan again for the GPUs and leases as they are now, and apply what has changed."""
        before = self.desired.plan
        self.desired.replan()
        after = self.desired.plan
        shown = (after.pending, after.warnings, after.missing)
        if shown != (before.pending, before.warnings, before.missing):
            self._changed()
        self.record_conditions()
        if (after.domains, after.direct) == (before.domains, before.direct):
            return
        try:
            self.apply(now_s)
        except HostError as error:
            log.error("%s; %s", error.message, error.hint)

    def driver_failed(self, error: DriverError, now_s: float) -> None:
        for domain in self.domains:
            domain.note_use(in_use=None)  # its jobs are unknown from now on
        self.settings.note_processes({})
        self.settings.forget_pending()
        gpus = tuple(gpu._replace(reason=error.reason) for gpu in self._gpus.inventory.gpus)
        self.update_gpus(self._gpus.inventory._replace(gpus=gpus), now_s)

    @property
    def lacks_driver(self) -> bool:
        """Whether this program does without the driver, which is not loaded, not installed or not needed.

        A driver that hangs or is broken otherwise may still be used.
        """
        if self.nvml is None:
            reason = self._snapshots.driver_reason
            return not reason or reason.code in _NO_DRIVER
        codes = {gpu.reason.code for gpu in self._gpus.inventory.gpus}
        return bool(codes) and codes <= _NO_DRIVER

    @property
    def waits_for_driver(self) -> bool:
        """Whether the driver has not worked since the daemon started; then `driver_found` is awaited."""
        return self.nvml is None and bool(self._snapshots.driver_reason)

    def driver_found(self, nvml: Nvml) -> None:
        """Use the driver, which works now; a poll of the GPUs follows."""
        log.info("the NVIDIA driver works now")
        self.nvml = nvml
        self._note_driver(None)

    def driver_still_fails(self, error: DriverError) -> None:
        known = self._snapshots.driver_reason
        if (error.message, error.code) != (known, known.code):
            log.error("waiting for the NVIDIA driver: %s; %s", error.message, error.hint)
            self._note_driver(error)

    def _note_driver(self, error: DriverError | None) -> None:
        self._snapshots.note_driver(error.reason if error else NO_REASON)

    def check_pipe_directories(self) -> None:
        """Check whether users can reach the pipe directories, and others cannot change them."""
        self.pipe_access.check()
        self.record_conditions()

    def record_conditions(self, *, is_settled: bool = False) -> None:
        """Record which conditions are new or have ended, compared with the last time.

        is_settled: whether all that is due has been tried (see `ConditionLog`)
        """
        self._condition_log.note(self.snapshot(), is_settled=is_settled)

    def note_xid(self, pci_address: str, xid: int) -> None:
        event = self._gpus.note_xid(pci_address, xid)
        if event:
            log.warning("GPU %s: %s; %s", event.subject, event.what, event.consequence)
            self.event_log.record(event)
            self._changed()
            self.record_conditions()

    @property
    def is_urgent(self) -> bool:
        """Whether a GPU cannot serve its devices now, or waits for leases or servers before it changes."""
        plan = self.desired.plan
        if plan.pending or plan.missing or self.layouts.pending or self.waits_for_driver:
            return True
        if any(setting.reason.code == reasons.SETTING_PENDING for setting in self.settings.pending):
            return True
        if any(domain.awaits_servers for domain in self.domains):
            return True
        return not self.desired.plan.gpu_uuids <= self._gpus.healthy

    def _use_scan(self, inventory: Inventory, now_s: float) -> None:
        """Use the MIG instances that there are now."""
        if self._has_domains:
            self.update_gpus(inventory, now_s)
        else:
            self._gpus.update(inventory, self.desired.plan)
            self.desired.replan()
            self._changed()

    # -- reload

    def plan_for(self, preflight: Preflight) -> tuple[Plan, list[Change]]:
        """Return the plan for a reloaded configuration, and its changes; raises YunionError if refused."""
        driver_worked, facts = self.nvml is not None, self.settings.facts()
        return self.desired.plan_for(preflight, driver_worked=driver_worked, settings=facts)

    def accept(self, preflight: Preflight) -> list[Change]:
        """Make the reloaded configuration the desired one; then `reconciliation` and `apply` bring it about.

        Raises YunionError, with nothing changed, if it is refused.
        """
        plan, changes = self.plan_for(preflight)
        self.fleet.refuse_if_any_cannot_start(self.desired.domains(plan))
        self.layouts.confirm({})  # before leases are considered
        self._gpus.set_meant(preflight.inventory.meant)
        differs = self.desired.accept(preflight, plan)
        self.nvml = preflight.nvml or self.nvml
        self._note_driver(None if self.nvml else preflight.driver_error)
        self._gpus.clear_faults()
        self.settings.check_again()
        events = self._gpus.update(preflight.inventory, plan) if preflight.nvml else []
        if differs:  # what is pending was recorded before
            # Settings of GPUs are recorded once they are set, because the driver may refuse them.
            settings = {kind.label for kind in self.settings.reconciler.kinds}
            events += [change.event() for change in changes if change.kind not in settings]
        for event in events:
            self.event_log.record(event)
        self.layouts.withdraw()
        self._changed()
        return changes

    def apply(self, now_s: float) -> None:
        """Bring the accepted configuration into effect, as far as running jobs allow."""
        self._replan()
        domains = self.desired.domains()
        program = find_control_program() if domains else ""
        timeout_s, waiting = self.config.cuda_mps_stop_timeout_s, self.desired.waiting()
        self.fleet.apply(domains, program, timeout_s, now_s, waiting)
        self._changed()

    # -- internals

    def store(self) -> Store:
        """Return the state file, opened on first use; raises HostError."""
        return self.state_file.open()

    def _changed(self) -> None:
        self._snapshots.changed()

    def _replan(self) -> None:
        """Plan for the GPUs as they are known now, and remember which of them serve."""
        self.desired.replan()
        self._changed()
        self.record_conditions()
        self._gpus.set_served(self.desired.plan)

    def _make_fleet(self, program: str, leftovers: Leftovers) -> None:
        domains = self.desired.domains()
        self.fleet.create_domains(domains, leftovers.known, program, self.config.cuda_mps_stop_timeout_s)

    def _check_records(self) -> None:
        """Report that the state file was rebuilt, and which records cannot be read; raises HostError."""
        store = self.state_file.open_if_exists()
        if store is None:
            return
        self.event_log.note_rebuilt(store)
        self._damaged = Originals(store).unreadable_layouts()
        for uuid, error in self._damaged.items():
            name = gpu_label(uuid, self._gpus.inventory.gpus)
            log.error("%s: %s; %s", name, error.message, error.hint)
            self.event_log.record(
                Event(
                    severity="error",
                    kind="mig",
                    subject=name,
                    what="its MIG record is damaged",
                    cause=error.message,
                    consequence="its MIG layout is neither changed nor restored",
                    code=error.code,
                )
            )

    def _check_damaged(self) -> None:
        """Look whether the MIG records that could not be read can be read now, or are gone."""
        if not self._damaged:
            return
        with contextlib.suppress(HostError):  # which the reconciliation reports
            unreadable = Originals(self.store()).unreadable_layouts()
            damaged = {uuid: error for uuid, error in self._damaged.items() if uuid in unreadable}
            if damaged.keys() != self._damaged.keys():
                self._damaged = damaged
                self._changed()

    def _keep_leased_gpus(self) -> None:
        """Keep GPUs with leases of an earlier daemon as they are, until the leases are restored."""
        store = self.state_file.open_if_exists()
        if store:
            add_recorded(self.ledger, store)
            if self.ledger.holds() or Originals(store).gpus():
                self.nvml = self.nvml or self._gpus.scan()
            self.desired.keep_leased(store)

    def _find_leftovers(self) -> Leftovers:
        """Find what an earlier daemon left behind; then the state file is opened if there is one."""
        store = self.state_file.open_if_exists()
        leftovers = find_leftovers(store, self.desired.domains())
        self._snapshots.note_leftovers(leftovers.notice)
        return leftovers
