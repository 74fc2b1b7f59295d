"""MIG layouts: which are due, because they differ from what a GPU has, and which are pending."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError, ShortageError
from yunion_mps.core.mig import MigInstance, MigLayout
from yunion_mps.core.models import Event, Gpu, Inventory, Plan
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import AT_ONCE, Users, wait_reason
from yunion_mps.gpus.mig_layout import (
    ITS_USERS,
    MODE_ON,
    NO_LOSSES,
    ConfirmedLosses,
    LayoutLook,
    LayoutStep,
    Losses,
    effect_of,
    losses_of,
)
from yunion_mps.gpus.mig_restore import withdrawn
from yunion_mps.gpus.mig_steps import (
    LayoutObservation,
    LayoutResult,
    carry_out_layouts,
    decide_layouts,
    observe_layouts,
)
from yunion_mps.gpus.reconciler import Gate
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.planning.mig import describe
from yunion_mps.supervisor.changes import Change
from yunion_mps.supervisor.desired import DesiredState
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.state_file import StateFile

log = logging.getLogger(__name__)


class LayoutsDue(NamedTuple):
    """Layouts that may have to be brought into effect."""

    looks: tuple[LayoutLook, ...]
    #: Whether it is known what is leased; otherwise, nothing is removed.
    are_leases_known: bool = True
    #: Whether the layouts are due once more afterwards, because the leases will be known only then.
    is_first: bool = False


class LayoutSteps(NamedTuple):
    """The steps to layouts, and by GPU UUID why the layouts of other GPUs cannot be decided."""

    steps: tuple[LayoutStep, ...]
    refused: Mapping[str, Reason]


class LayoutForecast(NamedTuple):
    """What `reload --now` would remove, by GPU UUID; and when layouts take effect, by GPU address."""

    losses: Mapping[str, Losses] = {}
    effects: Mapping[str, str] = {}


class MigLayouts:
    """Brings MIG layouts into effect by the same cycle as `GpuSettings`; the caller chooses the threads.

    `observe` and `carry_out` call the driver, so they are run on a thread once the event loop runs.
    """

    label = "MIG layouts"

    def __init__(
        self,
        gpus: Gpus,
        desired: DesiredState,
        confirmed: ConfirmedLosses,
        gate: Gate,
        *,
        emit: Callable[[Event], None],
        state_file: StateFile,
        scan: Callable[[Nvml], Inventory],
        use: Callable[[Inventory, float], None],
        changed: Callable[[], None],
    ) -> None:
        """Tell `emit` of events, and call `changed` when the state has changed.

        scan: scans the GPUs, on a thread; raises DriverError
        use: is told the GPUs as they have been scanned, and the time
        """
        self._gpus = gpus
        self._desired = desired
        self._emit = emit
        self._state_file = state_file
        self._scan = scan
        self._use = use
        self._changed = changed
        self._confirmed = confirmed
        self._gate = gate
        #: What was found after a layout had come into effect, by GPU UUID.
        self._settled: dict[str, _State] = {}
        #: Why layouts are not in effect, by GPU UUID.
        self._reasons: dict[str, Reason] = {}

    @property
    def pending(self) -> dict[str, Reason]:
        """Why the layouts of working GPUs are not in effect, by GPU UUID."""
        working = self._gpus.healthy & {layout.gpu_uuid for layout in self._desired.plan.layouts}
        return {uuid: why for uuid, why in self._reasons.items() if uuid in working}

    def confirm(self, losses: Mapping[str, Losses]) -> None:
        """Let layouts remove, without waiting for leases, what the operator has confirmed, by GPU UUID.

        Earlier confirmations are forgotten. Layouts that are already in effect lose nothing: later changes of
        their GPUs, such as another program's, do not belong to this reload.
        """
        gpus = {gpu.uuid: gpu for gpu in self._gpus.inventory.gpus}
        confirmed = {}
        for layout in self._desired.plan.layouts:
            is_due = not self._is_in_effect(layout, gpus.get(layout.gpu_uuid))
            if layout.gpu_uuid in losses and is_due:
                confirmed[layout] = losses[layout.gpu_uuid]
        self._confirmed.replace(confirmed)

    def in_effect(self) -> set[str]:
        """Return the GPUs (addresses) whose layouts are in effect."""
        gpus = {gpu.uuid: gpu for gpu in self._gpus.inventory.gpus}
        addresses = set()
        for layout in self._desired.plan.layouts:
            gpu = gpus.get(layout.gpu_uuid)
            if gpu and self._is_in_effect(layout, gpu):
                addresses.add(gpu.address)
        return addresses

    def _is_in_effect(self, layout: MigLayout, gpu: Gpu | None) -> bool:
        settled = self._settled.get(layout.gpu_uuid)
        if settled is None or gpu is None:
            return False
        return settled == _State.of(layout._replace(restore=settled.layout.restore), gpu)

    def withdraw(self) -> None:
        """Forget the pending layouts that an accepted configuration no longer requires."""
        layouts = {layout.gpu_uuid: layout for layout in self._desired.plan.layouts}
        for gpu in self._gpus.inventory.gpus:
            uuid = str(gpu.uuid)
            layout = layouts.get(uuid)
            if layout and self._settled.get(uuid) != _State.of(layout, gpu):
                continue
            self._reasons.pop(uuid, None)

    # -- the cycle

    def due(self, in_wrong_mode: Collection[str], *, is_start: bool = False) -> LayoutsDue | None:
        """Return the layouts of GPUs that have changed since theirs came into effect; None if there are none.

        None is due on a lost GPU, nor on one that is not in MIG mode until its compute mode is as planned,
        because the switch resets that mode. A mode that was requested without a layout is cancelled.

        in_wrong_mode: the GPUs (UUIDs) whose compute mode is not as planned
        is_start: whether the leases of an earlier daemon are not known yet, if it has left any
        """
        ledger, plan = self._desired.ledger, self._desired.plan
        are_leases_known = not (ledger.unknown or (is_start and ledger.leases))
        gpus = {gpu.uuid: gpu for gpu in self._gpus.inventory.gpus}
        looks = []
        for layout in plan.layouts:
            gpu = gpus.get(layout.gpu_uuid)
            if gpu is None or gpu.reason:
                continue
            if layout.gpu_uuid in in_wrong_mode and not gpu.mig_enabled:
                if layout.enabled:
                    self._note_wait_for_mode(gpu, are_leases_known=are_leases_known)
                continue
            state = _State.of(layout, gpu)
            settled = self._settled.get(layout.gpu_uuid)
            if settled != state:
                self._note_external_change(settled, state, gpu)
                confirmed = self._confirmed.by_layout.get(layout, NO_LOSSES)
                looks.append(LayoutLook(layout, gpu, confirmed, self._last(layout)))
        looks += withdrawn(plan.layouts, self._gpus.inventory.gpus, self._state_file.originals)
        if not looks:
            return None
        return LayoutsDue(
            looks=tuple(looks),
            are_leases_known=are_leases_known,
            is_first=is_start and not are_leases_known,
        )

    def _last(self, layout: MigLayout) -> Reason:
        return self._reasons.get(layout.gpu_uuid, NO_REASON)

    def _note_wait_for_mode(self, gpu: Gpu, *, are_leases_known: bool) -> None:
        """Note what the compute mode of a GPU waits for; without any users, it is about to be set."""
        uuid = str(gpu.uuid)
        users: Users | str = self._desired.blockers().of_gpu(uuid)
        if not users and are_leases_known and uuid in self._desired.in_effect().offered:
            users = ITS_USERS
        if users:
            why = wait_reason(MODE_ON, users, reasons.MIG_IN_USE)
        else:
            why = Reason(f"{MODE_ON} waits until the compute mode is set", reasons.MIG_PENDING)
        if self._reasons.get(uuid) != why:
            self._reasons[uuid] = why
            self._changed()

    def observe(self, due: LayoutsDue, nvml: Nvml | None) -> LayoutObservation:
        """Return what the GPUs have now; run it on a thread. Raises HostError."""
        if nvml is None:
            return LayoutObservation()
        return observe_layouts(due.looks, Mig(nvml), self._state_file.originals())

    def decide(self, due: LayoutsDue, observed: LayoutObservation) -> LayoutSteps:
        """Return the steps; what can be leased while they are made counts as leased."""
        blockers = self._desired.blockers() if due.are_leases_known else None
        steps = decide_layouts(due.looks, observed, blockers, self._desired.in_effect().offered)
        return LayoutSteps(tuple(steps), observed.refused)

    def changes_gpus(self, steps: LayoutSteps) -> bool:
        """Whether MIG modes or instances change, so that compute modes and domains may have to follow."""
        return bool(self.gpus_changing_mig(steps))

    def gpus_changing_mig(self, steps: LayoutSteps) -> set[str]:
        """Return the GPUs (UUIDs) whose MIG mode or instances the steps change."""
        return {step.look.uuid for step in steps.steps if step.changes_layout or step.complete}

    def carry_out(self, steps: LayoutSteps, nvml: Nvml | None) -> LayoutResult:
        """Make the steps until a stop begins, and scan the GPUs; run it on a thread. Raises HostError."""
        if nvml is None:
            return LayoutResult({}, {})
        with self._gate.lock:
            if self._gate.has_ended:  # the stop has restored what was there, and its records
                return LayoutResult({}, {})
            mig, originals = Mig(nvml), self._state_file.originals()
            result = carry_out_layouts(
                steps.steps, steps.refused, mig, originals, lambda: self._gate.has_ended
            )
        try:
            return result._replace(inventory=self._scan(nvml))
        except (DriverError, ShortageError):  # which the next poll reports
            return result

    def note(self, due: LayoutsDue, steps: LayoutSteps, results: LayoutResult, now_s: float) -> list[Change]:
        """Record what was changed, and why layouts are not in effect; return the changes.

        What another program changed before the GPUs were scanned makes a layout due again.
        """
        del steps
        self._note(results, is_final=not due.is_first)
        self._changed()
        if results.inventory:
            self._use(results.inventory, now_s)
        addresses = {gpu.uuid: gpu.address for gpu in self._gpus.inventory.gpus}
        changes = []
        for uuid, description in results.changes.items():
            changes.append(Change("MIG layout", addresses.get(uuid, uuid), "", description, AT_ONCE))
        return changes

    def _note(
        self, result: LayoutResult, *, is_final: bool = True, cause: str = "the configuration requires it"
    ) -> None:
        gpus = {gpu.uuid: gpu for gpu in (result.inventory or self._gpus.inventory).gpus}
        configured = {layout.gpu_uuid for layout in self._desired.plan.layouts}
        for uuid, description in result.changes.items():
            address = gpus[uuid].address if uuid in gpus else uuid
            removed = "the configuration no longer has a MIG layout for this GPU"
            self._emit(Event("info", "mig", address, description, cause if uuid in configured else removed))
        for layout in self._desired.plan.layouts:
            if layout.gpu_uuid not in result.reasons or layout.gpu_uuid not in gpus:
                continue
            why = result.reasons[layout.gpu_uuid]
            if is_final and not why:
                instances = result.settled[layout.gpu_uuid]
                self._settled[layout.gpu_uuid] = _State(layout, layout.enabled, layout.enabled, instances)
        self._reasons = {uuid: why for uuid, why in {**self._reasons, **result.reasons}.items() if why}
        waiting = {}
        for layout, losses in self._confirmed.by_layout.items():
            if layout.gpu_uuid in self._reasons:
                waiting[layout] = losses
        self._confirmed.replace(waiting)

    # -- at a stop, and before a reload

    def note_restored(self, result: LayoutResult) -> None:
        """Record the original layouts that a stop has restored, and those that it has not."""
        self._note(result, cause="the original layout was restored")
        addresses = {gpu.uuid: gpu.address for gpu in self._gpus.inventory.gpus}
        for uuid, why in result.reasons.items():
            if why:
                event = Event(
                    severity="warning",
                    kind="mig",
                    subject=addresses.get(uuid, uuid),
                    what="the original layout was not restored",
                    cause=why,
                    code=why.code,
                )
                self._emit(event)

    def looks_for(self, plan: Plan, inventory: Inventory) -> LayoutsDue:
        """Return the layouts of a plan, for `forecast`, whether or not they are in effect."""
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus if not gpu.reason}
        looks = []
        for layout in plan.layouts:
            if layout.gpu_uuid in gpus:
                looks.append(LayoutLook(layout, gpus[layout.gpu_uuid], last=self._last(layout)))
        return LayoutsDue(tuple(looks))

    def forecast(self, plan: Plan, due: LayoutsDue, observed: LayoutObservation) -> LayoutForecast:
        """Return what a reload to this plan would do, as `decide` says; nothing is carried out."""
        blockers = self._desired.blockers()
        steps = decide_layouts(due.looks, observed, blockers, plan.offered)
        losses: dict[str, Losses] = {}
        effects: dict[str, str] = {}
        for step in steps:
            losses[step.look.uuid] = losses_of(step.look, step.found, blockers, plan.offered)
            effects[step.look.gpu.address] = step.effect
        for look in due.looks:
            if look.uuid in observed.refused:
                effects[look.gpu.address] = effect_of(observed.refused[look.uuid])
        return LayoutForecast(losses, effects)

    # -- what is told

    def _note_external_change(self, settled: _State | None, state: _State, gpu: Gpu) -> None:
        """Record that another program has changed what we had brought into effect."""
        if settled is None or settled.layout != state.layout:
            return
        del self._settled[state.layout.gpu_uuid]
        if settled.enabled == state.enabled and set(settled.instances) <= set(state.instances):
            return  # another program created an instance beside ours
        difference = f"{settled} -> {state}"
        if str(settled) == str(state):
            difference = "; ".join(_instance_changes(settled.instances, state.instances))
        self._emit(
            Event(
                severity="warning",
                kind="mig",
                subject=gpu.address,
                what=difference,
                cause="another program changed it",
                consequence="the layout is brought into effect again, unless something uses the GPU",
                code=reasons.MIG_CHANGED,
            )
        )


def _instance_changes(before: Iterable[MigInstance], current: Iterable[MigInstance]) -> Iterator[str]:
    """Yield what was done to each instance, for example that its compute instance was destroyed."""
    by_place = {instance.place: instance for instance in current}
    for instance in sorted(set(before).difference(by_place.values())):
        name = f"instance g{instance.id} ({instance.profile})"
        after = by_place.get(instance.place)
        if after is None:
            yield f"{name} was destroyed"
        elif not after.compute_instances:
            yield f"the compute instance of {name} was destroyed"
        elif after.is_whole:
            yield f"{name} was created again"
        else:
            yield f"{name} was divided into compute instances"


class _State(NamedTuple):
    """A layout, and the mode and instances with which it is in effect."""

    layout: MigLayout
    enabled: bool | None
    pending: bool | None
    instances: tuple[MigInstance, ...]

    @classmethod
    def of(cls, layout: MigLayout, gpu: Gpu) -> _State:
        return cls(layout, gpu.mig_enabled, gpu.mig_pending, gpu.mig_instances)

    def __str__(self) -> str:
        return (describe(self.instances) or "no instances") if self.enabled else "MIG mode off"
