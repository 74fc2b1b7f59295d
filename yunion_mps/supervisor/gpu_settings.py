"""The settings of the host's GPUs: what the reconciler is asked, and what is told of what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import REFUSED
from yunion_mps.core.models import Event, Gpu, Plan
from yunion_mps.core.reasons import (
    GPU_ABSENT,
    SETTING_IN_USE,
    SETTING_NOT_RESTORED,
    SETTING_PENDING,
    Reason,
    hint_of,
)
from yunion_mps.core.waits import AT_ONCE, Users, wait_reason
from yunion_mps.gpus.absent import gpu_label, report_absent
from yunion_mps.gpus.blockers import KeptBy, gpus_of
from yunion_mps.gpus.compute_mode import COMPUTE_MODE, external_changes
from yunion_mps.gpus.kind import Kind, Step
from yunion_mps.gpus.reconciler import (
    NOTHING_DONE,
    REQUIRED,
    Decision,
    Look,
    Observed,
    OriginalValues,
    Reconciler,
    Restoration,
    Results,
    observe,
)
from yunion_mps.gpus.refusals import Refusals
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.mps.domain import Domain
from yunion_mps.supervisor.changes import Change, SettingFacts
from yunion_mps.supervisor.desired import DesiredState
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.host_conditions import PendingSetting, gpu_name
from yunion_mps.supervisor.preflight import left_running
from yunion_mps.supervisor.state_file import StateFile

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """Settings that may have to change, and the GPUs (UUIDs) of MPS processes that no domain supervises."""

    looks: tuple[Look, ...]
    left: frozenset[str]


def _reason_of_wait(look: Look, kept_by: KeptBy) -> Reason:
    """Return why a setting does not change yet.

    Its code says whether `reload --drain` waits for it: leases and MPS servers end, but other processes, such
    as a display server, and control daemons of an earlier run may never do so.
    """
    change = f"its {look.kind.label} {look.target}"
    if look.restores:
        change = f"the restoration of {change}"
    users: Users | str = kept_by.users
    if not kept_by.users:
        users = "its control daemon" if kept_by.control_daemon else "a control daemon of an earlier run"
    ends = kept_by.users.leases or kept_by.users.servers or kept_by.control_daemon
    return wait_reason(change, users, SETTING_PENDING if ends else SETTING_IN_USE)


class GpuSettings:
    """Brings the settings of GPUs to what the plan requires; the caller chooses the threads.

    `observe` and `carry_out` call the driver, so they are run on a thread once the event loop runs.
    """

    label = "settings of GPUs"

    def __init__(
        self,
        gpus: Gpus,
        fleet: Fleet,
        desired: DesiredState,
        *,
        refusals: Refusals,
        emit: Callable[[Event], None],
        changed: Callable[[], None],
        follow: Callable[[float], None],
        state_file: StateFile,
    ) -> None:
        """Tell `emit` of events, and call `changed` when the state has changed.

        follow: plans again, at this time, because a GPU that refused its compute mode has it now
        """
        self._gpus = gpus
        self._fleet = fleet
        self._desired = desired
        self._emit = emit
        self._changed = changed
        self._follow = follow
        self._state_file = state_file
        #: The PIDs of all processes that used each GPU (UUID) at the last poll.
        self._processes: Mapping[str, Collection[int]] = {}
        self.reconciler = Reconciler(refusals=refusals)
        #: Those that wait, as of the last time that all were looked at.
        self.pending: tuple[PendingSetting, ...] = ()

    def note_processes(self, processes: Mapping[str, Collection[int]]) -> None:
        """Note the processes (PIDs by GPU UUID) that a poll has found; none if the driver did not answer."""
        self._processes = processes

    def facts(self) -> SettingFacts:
        """Return what decides when settings of GPUs change, as of the last poll."""
        blockers = self._desired.blockers(processes=self._processes)
        return SettingFacts(blockers, self.original_values())

    def effects(self) -> dict[tuple[str, str], str]:
        """Return when settings change that wait, by the label of their kind and the GPU's address."""
        addresses = {gpu.uuid: gpu.address for gpu in self._gpus.inventory.gpus}
        effects = {}
        for look, kept_by in self.reconciler.pending.items():
            if kept_by.users and look.uuid in addresses:
                effects[look.kind.label, addresses[look.uuid]] = kept_by.users.effect
        return effects

    # -- what is due

    def original_values(self) -> OriginalValues:
        """Return what is recorded of the values before our first change; nothing if it cannot be read."""
        return self.reconciler.original_values(self._state_file.opened_originals())

    def due(self, originals: OriginalValues, now_s: float, *, before_layouts: bool = False) -> Due | None:
        """Return the settings that may have to change now; None if none has.

        originals: as `original_values` has returned them
        before_layouts: whether only those are meant that are set before MIG layouts, too
        """
        kinds = [kind for kind in self.reconciler.kinds if kind.precedes_layouts or not before_layouts]
        gpus = self._gpus.inventory.gpus
        looks = self.reconciler.looks(self._desired.plan, gpus, originals, kinds=kinds)
        due = self._unblocked(self._without_refused(looks, kinds, now_s), kinds)
        if due is None:
            self._note_pending()
        return due

    def _without_refused(self, looks: Iterable[Look], kinds: Collection[Kind], now_s: float) -> list[Look]:
        """Return those that are tried now; what is no longer to be done is no longer shown as refused."""
        before = len(self._refused())
        due = self.reconciler.due(looks, kinds, now_s)
        if len(self._refused()) != before:
            self._changed()
        return due

    def check_again(self) -> None:
        """Compare all values, and try refused ones again at once, because the configuration was reloaded."""
        self.reconciler.check_again()
        plan, gpus = self._desired.plan, self._gpus.inventory.gpus
        looks = self.reconciler.looks(plan, gpus, self.original_values())
        self.reconciler.due(looks, self.reconciler.kinds, 0.0)

    def to_set(self, originals: OriginalValues) -> Due | None:
        """Return the settings that may have to be set, without those to restore."""
        plan, gpus = self._desired.plan, self._gpus.inventory.gpus
        return self._unblocked(self.reconciler.looks(plan, gpus, originals, restores=False))

    def to_set_before_layouts(self, originals: OriginalValues, used: Collection[str]) -> Due | None:
        """Return the settings to change before MIG mode is switched, which resets them.

        used: the GPUs (UUIDs) that are left out
        """
        plan = self._desired.plan
        modes = {layout.gpu_uuid: layout.enabled for layout in plan.layouts if layout.gpu_uuid not in used}
        switched = []
        for gpu in self._gpus.inventory.gpus:
            if gpu.uuid in modes and modes[gpu.uuid] != bool(gpu.mig_enabled):
                switched.append(gpu)
        kinds = [kind for kind in self.reconciler.kinds if kind.precedes_layouts]
        looks = self.reconciler.looks(plan, switched, originals, kinds=kinds, restores=False)
        return self._unblocked([look for look in looks if look.polled != look.target], kinds)

    def to_restore(self, originals: OriginalValues, left: Collection[str]) -> Due | None:
        """Return the settings that the plan does not have, also on GPUs that are not known to be there.

        left: the GPUs (UUIDs) of our processes that an earlier daemon left running
        """
        plan, gpus = self._desired.plan, self._gpus.inventory.gpus
        looks = self.reconciler.looks(plan, gpus, originals, sets=False, every=True)
        free = self.reconciler.unblocked(looks, self._desired.blockers(left=left))
        return Due(tuple(free), frozenset(left)) if free else None

    def _unblocked(self, looks: list[Look], kinds: Collection[Kind] | None = None) -> Due | None:
        """Return those that nothing keeps as they are; a domain may have to end its servers for others.

        kinds: those that were looked at; None for all
        """
        left: set[str] = set()
        free = self.reconciler.unblocked(looks, self._desired.blockers(), self._processes, kinds)
        if any(look.restores for look in free):  # otherwise no process of an earlier daemon matters
            store, leased = self._state_file.opened, self._desired.ledger.ways_kept().keys()
            left = gpus_of(left_running(store, self._fleet.known_directories(), leased))
            blockers = self._desired.blockers(left=left)
            free = self.reconciler.unblocked(looks, blockers, self._processes, kinds)
        waiting = self.reconciler.waiting_for_servers()
        for domain in self._fleet.domains:
            domain.await_restoration(is_awaited=not waiting.isdisjoint(self._whole_gpus(domain)))
        return Due(tuple(free), frozenset(left)) if free else None

    def _whole_gpus(self, domain: Domain) -> set[str]:
        """Return the UUIDs of the domain's GPUs and MIG instances, and of the instances' GPUs."""
        served = set(domain.in_effect.gpu_uuids)
        parents = {gpu.parent for gpu in self._gpus.inventory.gpus if gpu.parent and gpu.uuid in served}
        return served | parents

    # -- what is done about it

    def observe(self, due: Due, nvml: Nvml | None) -> Observed:
        """Return what the GPUs have now; run it on a thread."""
        gate = self.reconciler.gate
        return observe(due.looks, nvml, lambda: gate.has_ended)

    def decide(self, due: Due, observed: Observed) -> Decision:
        """Return the steps to carry out."""
        blockers = self._desired.blockers(left=due.left, processes=observed.processes)
        decision = self.reconciler.decide(due.looks, observed, blockers)
        self._note_pending()
        return decision

    def _note_pending(self) -> None:
        """Note what waits, now that it is known of all settings that were looked at."""
        pending = []
        for look, kept_by in self.reconciler.pending.items():
            pending.append(PendingSetting(look.kind.about, look.uuid, _reason_of_wait(look, kept_by)))
        if tuple(pending) != self.pending:
            self.pending = tuple(pending)
            self._changed()

    def forget_pending(self) -> None:
        """Forget what settings wait for: without the driver, it is not known whether that still holds."""
        if self.pending:
            self.pending = ()
            self._changed()

    def changes_gpus(self, steps: Decision) -> bool:
        """Whether a value is set or restored."""
        return bool(steps.steps)

    def gpus_changing_mig(self, steps: Decision) -> tuple[str, ...]:
        """Return nothing: no setting changes the MIG mode or instances of a GPU."""
        del steps
        return ()

    def carry_out(self, steps: Decision, nvml: Nvml | None) -> Results:
        """Make the steps, unless a stop has begun; run it on a thread. Raises HostError."""
        if steps.is_empty:
            return NOTHING_DONE
        originals, gpus = self._state_file.originals(), self._gpus.inventory.gpus
        return self.reconciler.carry_out(steps, nvml, originals, gpus)

    def note(self, due: Due, steps: Decision, results: Results, now_s: float) -> list[Change]:
        """Record what was done, and return it; raises HostError if an original could not be recorded."""
        changes = self._note(due.looks, steps.pending.keys(), results, now_s)
        if results.not_recorded:
            raise results.not_recorded
        return changes

    def note_restored(self, restoration: Restoration, now_s: float) -> None:
        """Record the original values that a stop has restored, and those that it has not."""
        gpus = self._gpus.inventory.gpus
        for look, kept_by in restoration.pending.items():
            if not kept_by.left:
                problem = f"{gpu_label(look.uuid, gpus)} keeps its {look.kind.label}"
                how = "once they have ended: yunion-mps-daemon --restore"
                log.warning("%s, because jobs without MPS use it; %s", problem, how)
        report_absent(restoration.results.not_restored(), gpus)
        cause = "the original value was restored"
        self._note(restoration.looks, restoration.pending.keys(), restoration.results, now_s, cause)
        addresses = {gpu.uuid: gpu.address for gpu in gpus}
        for look, error in restoration.results.errors.items():
            if error.code not in GPU_ABSENT:  # which another event says
                event = Event(
                    severity="warning",
                    kind="compute_mode" if look.kind is COMPUTE_MODE else "gpu",
                    subject=addresses.get(look.uuid, look.uuid),
                    what=f"the original {look.kind.label} {look.target} was not restored",
                    cause=error.message,
                    code=SETTING_NOT_RESTORED,
                )
                self._emit(event)

    def _note(
        self,
        looks: Iterable[Look],
        pending: Collection[Look],
        results: Results,
        now_s: float,
        cause: str = REQUIRED,
    ) -> list[Change]:
        gpus = self._gpus.inventory.gpus
        before = self._refused()
        events = self.reconciler.note(looks, pending, results, gpus=gpus, now_s=now_s, cause=cause)
        for event in events:
            self._emit(event)
        are_new_usable = self._gpus.note_modes(results.of(COMPUTE_MODE), results.refused(COMPUTE_MODE))
        if results.steps or self._refused() != before:
            self._changed()
        if are_new_usable and not self.reconciler.gate.has_ended:
            self._follow(now_s)
        addresses = {gpu.uuid: gpu.address for gpu in gpus}
        changes = []
        for look, step in results.steps.items():
            address = addresses.get(look.uuid, look.uuid)
            changes.append(Change(look.kind.label, address, step.actual, step.target, AT_ONCE))
        return changes

    # -- what other programs change

    def note_external_changes(self, before: Iterable[Gpu]) -> None:
        """Record the compute modes that another program has changed since `before`, the poll before."""
        for event in external_changes(before, self._gpus.inventory.gpus, self._desired.plan):
            self._emit(event)

    def looks_in_effect(self) -> list[Look]:
        """Return the values that no poll reads, as they should be."""
        return self.reconciler.looks_in_effect(self._desired.plan, self._gpus.inventory.gpus)

    def corrections(self, gpus: Sequence[Gpu], observed: Observed) -> Iterator[tuple[Kind, str, Step]]:
        """Yield what another program has changed: the kind, the GPU (UUID), and the step that corrects it.

        gpus: as they have just been scanned
        """
        plan, blockers = self._desired.plan, self._desired.blockers(processes=self._processes)
        return self.reconciler.corrections(plan, gpus, observed.values, blockers)

    # -- what is shown

    def in_effect(self, plan: Plan) -> Plan:
        """Return the plan without values that were refused."""
        return self.reconciler.in_effect(plan)

    def _refused(self) -> list[Reason]:
        return [refusal.reason for refusal in self.reconciler.refusals]

    def refused(self) -> dict[str, set[str]]:
        """Return the GPUs (UUIDs) that have refused a value, by the label of the kind of setting."""
        refusals = self.reconciler.refusals
        return {kind.label: refusals.of_kind(kind.name) for kind in self.reconciler.kinds}

    def conditions(self) -> Iterator[Condition]:
        """Yield what the driver refuses to set or to restore, except what makes a GPU unusable."""
        gpus = {gpu.uuid: gpu for gpu in self._gpus.inventory.gpus}
        kinds = {kind.name: kind for kind in self.reconciler.kinds}
        for refusal in self.reconciler.refusals:
            (name, uuid), target = refusal.attempt.key, refusal.attempt.target
            gpu, kind = gpus.get(uuid), kinds[name]
            if not refusal.reason:
                continue
            advice = hint_of(refusal.reason.code, gpu=uuid)
            if refusal.attempt.restores:
                advice = f"{advice}: {kind.command(uuid, target)}"
            yield Condition(
                kind=kind.about,
                subject=gpu.address if gpu else uuid,
                status=REFUSED,
                reason=refusal.reason,
                advice=advice,
                name=gpu_name(gpu) if gpu else uuid,
                gpu=gpu.address if gpu else "",
            )

    def in_wrong_mode(self, originals: OriginalValues) -> set[str]:
        """Return the GPUs (UUIDs) whose compute mode is not the planned or, without one, the original one."""
        plan, gpus = self._desired.plan, self._gpus.inventory.gpus
        return self.reconciler.differing(COMPUTE_MODE, plan, gpus, originals)
