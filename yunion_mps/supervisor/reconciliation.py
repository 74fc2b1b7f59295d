"""The cycle by which GPUs get what they should have, and the order of its stages.

Of a stage, what is due, the steps and what is told of them are decided on the loop. Threads only ask the
driver, make steps and write records:

    due             which settings or MIG layouts may have to change, as far as polls tell
    observe         on a thread: what the GPUs have now, and which processes use them
    decide          the steps that nothing keeps from being made
    carry_out       on a thread: each original and intent recorded, each step made and read back
    note            what has changed, as events and conditions

The order is: settings, MIG layouts, settings. A switch of the MIG mode waits for the compute mode, and resets
it. The order in which originals are restored is that of `restore_originals`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, TypeVar

from yunion_mps.core.errors import YunionError
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.restoration import restore_originals
from yunion_mps.host.store import Store
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.supervisor.changes import Change
from yunion_mps.supervisor.desired import DesiredState
from yunion_mps.supervisor.gpu_settings import Due, GpuSettings
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.layouts import LayoutsDue, MigLayouts

log = logging.getLogger(__name__)

#: How often a round is repeated until nothing changes.
_MOST_ROUNDS = 3

DueT = TypeVar("DueT", contravariant=True)
ObservedT = TypeVar("ObservedT")
StepsT = TypeVar("StepsT")
ResultsT = TypeVar("ResultsT")


class Stage(Protocol[DueT, ObservedT, StepsT, ResultsT]):
    """What is observed, decided and carried out together."""

    #: How messages call it, in the plural.
    label: str

    def observe(self, due: DueT, nvml: Nvml | None) -> ObservedT:
        """Return what the GPUs have now, asked on a thread; raises HostError."""
        ...

    def decide(self, due: DueT, observed: ObservedT) -> StepsT:
        """Return the steps that nothing keeps from being made."""
        ...

    def carry_out(self, steps: StepsT, nvml: Nvml | None) -> ResultsT:
        """Make the steps, on a thread; raises HostError if they cannot be recorded."""
        ...

    def note(self, due: DueT, steps: StepsT, results: ResultsT, now_s: float) -> list[Change]:
        """Record what was done, and return it; raises HostError if an original could not be recorded."""
        ...


class Reconciliation:
    """Runs the stages in their order: at a start, at each poll and reload, and at a stop."""

    def __init__(
        self,
        gpus: Gpus,
        desired: DesiredState,
        settings: GpuSettings,
        layouts: MigLayouts,
        *,
        find_nvml: Callable[[], Nvml | None],
        known_store: Callable[[], Store | None],
    ) -> None:
        """Use the driver of `find_nvml`, and the state file of `known_store` if there is one."""
        self._gpus = gpus
        self._desired = desired
        self._settings = settings
        self._layouts = layouts
        self._find_nvml = find_nvml
        self._known_store = known_store

    # -- what is due

    def settings_due(self) -> Due | None:
        """Return the settings that may have to change; None if none has."""
        return self._settings.due(self._known_store())

    def layouts_due(self, *, is_start: bool = False) -> LayoutsDue | None:
        """Return the MIG layouts that may have to change; None if none has.

        is_start: whether the leases of an earlier daemon are not known yet, if it has left any
        """
        if self._find_nvml() is None or self._settings.reconciler.gate.has_ended:
            return None
        in_wrong_mode = self._settings.in_wrong_mode(self._known_store())
        return self._layouts.due(in_wrong_mode, is_start=is_start)

    # -- at a start, on this thread

    def begin(self, left: Collection[str], now_s: float) -> None:
        """Restore what the plan no longer has, and bring MIG layouts into effect; raises HostError.

        If there may be leases, no layout removes anything.

        left: the GPUs (UUIDs) of our processes that an earlier daemon left running
        """
        store = self._known_store()
        if store:
            self._run_here(self._settings, self._settings.to_restore(store, left), now_s)
        self._run_here(self._settings, self._settings.to_set_before_layouts(store, left), now_s)
        self._run_here(self._layouts, self.layouts_due(is_start=True), now_s)

    def set_here(self, now_s: float) -> None:
        """Set what the plan requires; raises HostError if the originals cannot be recorded."""
        self._run_here(self._settings, self._settings.to_set(self._known_store()), now_s)

    # -- while the daemon runs

    async def bring_about(self, settle: Callable[[], Awaitable[None]]) -> list[Change]:
        """Bring all that is due into effect as far as possible; return what was done.

        settle: waits until the control daemons of new MIG instances serve; then more may be due
        """
        changes: list[Change] = []
        for _ in range(_MOST_ROUNDS):
            made = await self.set_values()
            layouts = await self._run(self._layouts, self.layouts_due)
            if layouts:
                made += layouts
                made += await self.set_values()
                await settle()
            if not made:
                break
            changes += made
        return changes

    async def set_values(self) -> list[Change]:
        """Set and restore the settings that are due; return what was done."""
        return await self._run(self._settings, self.settings_due)

    # -- at a stop, on this thread

    def restore(self, store: Store, left: Collection[str], ledger: Ledger) -> None:
        """Restore what the GPUs had before our first change, except what is still needed.

        left: the GPUs (UUIDs) of our processes that are left running
        ledger: the leases that the state file has
        """
        restored = restore_originals(
            self._settings.reconciler,
            Originals(store),
            self._gpus.inventory.gpus,
            self._find_nvml(),
            layouts=self._desired.plan.layouts,
            ledger=ledger,
            left=left,
            keeps_requests=True,
        )
        self._layouts.note_restored(restored.layouts)
        self._settings.note_restored(restored.settings)

    # -- one stage

    async def _run(
        self, stage: Stage[DueT, ObservedT, StepsT, ResultsT], find_due: Callable[[], DueT | None]
    ) -> list[Change]:
        """Run a stage, and return what was done; what fails is logged, and due again in the next cycle."""
        nvml = self._find_nvml()
        try:
            due = find_due()
            if due is None:
                return []
            work = due
            observed = await on_thread(lambda: stage.observe(work, nvml))
            steps = stage.decide(work, observed)
            results = await on_thread(lambda: stage.carry_out(steps, nvml))
            return stage.note(work, steps, results, time.monotonic())
        except YunionError as error:
            log.error("%s cannot be changed: %s; %s", stage.label, error.message, error.hint)
        return []

    def _run_here(
        self, stage: Stage[DueT, ObservedT, StepsT, ResultsT], due: DueT | None, now_s: float
    ) -> list[Change]:
        if due is None:
            return []
        nvml = self._find_nvml()
        steps = stage.decide(due, stage.observe(due, nvml))
        return stage.note(due, steps, stage.carry_out(steps, nvml), now_s)
