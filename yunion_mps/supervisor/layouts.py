"""MIG layouts: which are due, because they differ from what a GPU has, and which are pending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.mig import MigInstance, MigLayout
from yunion_mps.core.models import Event, Gpu, Inventory, Plan
from yunion_mps.core.reasons import LAYOUT_WAITS, NO_REASON, Reason
from yunion_mps.core.waits import Users, wait_reason
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_forecast import Forecast, make_forecast
from yunion_mps.gpus.mig_restore import restore_layouts
from yunion_mps.gpus.mig_steps import (
    ITS_USERS,
    MODE_ON,
    NO_LOSSES,
    ConfirmedLosses,
    LayoutResult,
    LayoutTask,
    Losses,
    bring_into_effect,
)
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.planning.mig import describe
from yunion_mps.supervisor.changes import DesiredState
from yunion_mps.supervisor.gpus import Gpus

log = logging.getLogger(__name__)


class MigLayouts:
    """Decides which layouts are due; the caller chooses the thread that brings them into effect."""

    def __init__(
        self,
        gpus: Gpus,
        desired: DesiredState,
        emit: Callable[[Event], None],
        confirmed: ConfirmedLosses,
    ) -> None:
        self._gpus = gpus
        self._desired = desired
        self._emit = emit
        #: What was found after a layout had come into effect, by GPU UUID.
        self._settled: dict[str, _State] = {}
        self._confirmed = confirmed
        self._lock = threading.Lock()
        self._ended = False
        #: Why layouts are not in effect, by GPU UUID, and which of these reasons were reported.
        self._reasons: dict[str, Reason] = {}
        self._reported: dict[str, Reason] = {}

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
        layouts = self._desired.plan.layouts
        found = [gpus.get(one.gpu_uuid) for one in layouts if self._is_in_effect(one, gpus.get(one.gpu_uuid))]
        return {gpu.address for gpu in found if gpu}

    def _is_in_effect(self, layout: MigLayout, gpu: Gpu | None) -> bool:
        settled = self._settled.get(layout.gpu_uuid)
        if settled is None or gpu is None:
            return False
        return settled == _State.of(layout._replace(restore=settled.layout.restore), gpu)

    def withdraw(self) -> None:
        """Forget, and report, the pending layouts that an accepted configuration no longer requires."""
        layouts = {layout.gpu_uuid: layout for layout in self._desired.plan.layouts}
        for gpu in self._gpus.inventory.gpus:
            uuid = str(gpu.uuid)
            layout = layouts.get(uuid)
            if layout and self._settled.get(uuid) != _State.of(layout, gpu):
                continue
            self._reasons.pop(uuid, None)
            if self._reported.pop(uuid, None):
                what, cause = "the pending layout was withdrawn", "the configuration was reloaded"
                self._emit(Event("info", "mig", gpu.address, what, cause))

    def due(
        self, offered: frozenset[str], in_wrong_mode: Collection[str], *, are_leases_known: bool
    ) -> tuple[LayoutTask, ...]:
        """Return the layouts of GPUs that have changed since theirs came into effect.

        None is due on a lost GPU, nor on one that is not in MIG mode until its compute mode is as planned,
        because the switch resets that mode.

        offered: the GPUs and MIG devices (UUIDs) whose devices can be leased now
        in_wrong_mode: the GPUs (UUIDs) whose compute mode is not as planned
        """
        blockers = self._desired.blockers()
        known = blockers if are_leases_known else None
        gpus = {gpu.uuid: gpu for gpu in self._gpus.inventory.gpus}
        tasks = []
        for layout in self._desired.plan.layouts:
            gpu = gpus.get(layout.gpu_uuid)
            last = self._reasons.get(layout.gpu_uuid, NO_REASON)
            if gpu is None or gpu.reason:
                continue
            if layout.gpu_uuid in in_wrong_mode and not gpu.mig_enabled:
                if layout.enabled:
                    is_offered = are_leases_known and layout.gpu_uuid in offered
                    unknown = ITS_USERS if is_offered else ""
                    self._note_wait_for_mode(gpu, blockers.of_gpu(layout.gpu_uuid) or unknown)
                continue
            state = _State.of(layout, gpu)
            settled = self._settled.get(layout.gpu_uuid)
            if settled != state:
                self._note_external_change(settled, state, gpu)
                confirmed = self._confirmed.by_layout.get(layout, NO_LOSSES)
                tasks.append(LayoutTask(layout, gpu, known, offered, confirmed, last))
        return tuple(tasks)

    def _note_wait_for_mode(self, gpu: Gpu, users: Users | str) -> None:
        """Note what its compute mode waits for: `users`; if there are none, it is about to be set."""
        if users:
            why = wait_reason(MODE_ON, users, reasons.MIG_IN_USE)
            self._report(gpu, why)
        else:
            why = Reason(f"{MODE_ON} waits until the compute mode is set", reasons.MIG_PENDING)
        self._reasons[str(gpu.uuid)] = why

    def apply(self, tasks: Iterable[LayoutTask], nvml: Nvml, originals: Originals) -> LayoutResult:
        """Do the tasks until a stop begins; run it on a thread, because it calls the driver."""
        with self._lock:
            return bring_into_effect(tasks, Mig(nvml), originals, lambda: self._ended)

    def end(self) -> None:
        """Make no more changes except to restore layouts: a stop has begun."""
        self._ended = True

    def restore(self, nvml: Nvml | None, originals: Originals, left: Collection[str], ledger: Ledger) -> None:
        """Restore the layouts whose entries say so, except of GPUs that are leased or have processes.

        left: the GPUs and instances (UUIDs) of MPS processes that are left running
        """
        with self._lock:  # wait for work that is under way
            layouts, gpus = self._desired.plan.layouts, self._gpus.inventory.gpus
            result = restore_layouts(layouts, gpus, nvml, originals, left, ledger, keeps_requests=True)
            self.note(result, cause="the original layout was restored")

    def forecast(
        self, plan: Plan, inventory: Inventory, blockers: Blockers, nvml: Nvml, originals: Originals
    ) -> Forecast:
        """Return what a reload to this plan would do; raises DriverError.

        Run it on a thread, because it calls the driver.
        """
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus if not gpu.reason}
        layouts = (layout for layout in plan.layouts if layout.gpu_uuid in gpus)
        tasks = [LayoutTask(one, gpus[one.gpu_uuid], blockers, plan.offered) for one in layouts]
        return make_forecast(tasks, Mig(nvml), originals)

    def note(
        self, result: LayoutResult, *, is_final: bool = True, cause: str = "the configuration requires it"
    ) -> None:
        """Record what was changed, and why layouts are not in effect; the caller applies the inventory.

        What another program changed before the GPUs were scanned makes a layout due again.

        If it is not final, because the leases were unknown, the layouts are due once more.
        """
        gpus = {gpu.uuid: gpu for gpu in (result.inventory or self._gpus.inventory).gpus}
        configured = {layout.gpu_uuid for layout in self._desired.plan.layouts}
        for uuid, what in result.changes.items():
            address = gpus[uuid].address if uuid in gpus else uuid
            removed = "the configuration no longer has a MIG layout for this GPU"
            self._emit(Event("info", "mig", address, what, cause if uuid in configured else removed))
        for layout in self._desired.plan.layouts:
            if layout.gpu_uuid not in result.reasons or layout.gpu_uuid not in gpus:
                continue
            why = result.reasons[layout.gpu_uuid]
            if is_final and not why:
                instances = result.settled[layout.gpu_uuid]
                self._settled[layout.gpu_uuid] = _State(layout, layout.enabled, layout.enabled, instances)
            if is_final or why.code not in LAYOUT_WAITS:
                self._report(gpus[layout.gpu_uuid], why)
        self._reasons = {uuid: why for uuid, why in {**self._reasons, **result.reasons}.items() if why}
        waiting = self._confirmed.by_layout.items()
        kept = {one: losses for one, losses in waiting if one.gpu_uuid in self._reasons}
        self._confirmed.replace(kept)

    def _report(self, gpu: Gpu, why: Reason) -> None:
        """Report that the layout is pending, or finally in effect; waiting for jobs is not a problem."""
        before = self._reported.pop(str(gpu.uuid), NO_REASON)
        if not why:
            if before:
                log.info("the MIG layout of GPU %s is in effect", gpu.address)
                self._emit(Event("info", "mig", gpu.address, "in effect", f"it was pending: {before}"))
            return
        self._reported[str(gpu.uuid)] = why
        if why != before:
            is_wrong = why.code not in (*LAYOUT_WAITS, reasons.BUSY)
            severity = "warning" if is_wrong else "info"
            log.log(logging.getLevelName(severity.upper()), "GPU %s: %s", gpu.address, why)
            self._emit(
                Event(
                    severity=severity,
                    kind="mig",
                    subject=gpu.address,
                    what="pending",
                    cause=why,
                    consequence="instances of the layout that already exist keep serving",
                    code=why.code,
                )
            )

    def _note_external_change(self, settled: _State | None, state: _State, gpu: Gpu) -> None:
        """Record that another program has changed what we had brought into effect."""
        if settled is None or settled.layout != state.layout:
            return
        del self._settled[state.layout.gpu_uuid]
        if settled.enabled == state.enabled and set(settled.instances) <= set(state.instances):
            return  # another program created an instance beside ours
        what = f"{settled} -> {state}"
        if str(settled) == str(state):
            what = "; ".join(_instance_changes(settled.instances, state.instances))
        self._emit(
            Event(
                severity="warning",
                kind="mig",
                subject=gpu.address,
                what=what,
                cause="another program changed it",
                consequence="the layout is brought into effect again, unless something uses the GPU",
                code=reasons.MIG_CHANGED,
            )
        )


def _instance_changes(before: Iterable[MigInstance], now: Iterable[MigInstance]) -> Iterator[str]:
    """Yield what was done to each instance, for example that its compute instance was destroyed."""
    found = {one.place: one for one in now}
    for one in sorted(set(before).difference(found.values())):
        after, name = found.get(one.place), f"instance g{one.id} ({one.profile})"
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
