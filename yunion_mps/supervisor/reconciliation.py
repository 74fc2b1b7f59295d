"""The cycle by which GPUs get what they should have, and the order of its stages.

Of a stage, what is due, the steps and what is told of them are decided on the loop. Threads only ask the
driver, make steps and write records:

    due             which settings or MIG layouts may have to change, as far as polls tell
    observe         on a thread: what the GPUs have now, and which processes use them
    decide          the steps that nothing keeps from being made
    carry_out       on a thread: each original and intent recorded, each step made and read back
    note            what has changed, as events and conditions

The order is: compute modes, MIG layouts, compute modes, time slices. A switch of the MIG mode waits for the
compute mode, and resets it. While the daemon runs, such a round is repeated until nothing changes; a start
makes the first one. Restoring originals begins with the layouts (`restore_originals`): what their switch
resets is recorded then, so it waits for no compute mode.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_RECORD, IMPAIRED
from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import Reason
from yunion_mps.gpus.kind import TRIED_AGAIN
from yunion_mps.gpus.mig_restore import former_layouts
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.reconciler import OriginalValues
from yunion_mps.gpus.restoration import BEGIN_STEPS_S, restore_originals
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

#: The most rounds of one call, if each one changes something.
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

    def changes_gpus(self, steps: StepsT) -> bool:
        """Whether the steps change anything on a GPU."""
        ...

    def gpus_changing_mig(self, steps: StepsT) -> Collection[str]:
        """Return the GPUs (UUIDs) whose MIG mode or instances the steps change."""
        ...

    def carry_out(self, steps: StepsT, nvml: Nvml | None) -> ResultsT:
        """Make the steps, on a thread; raises HostError if they cannot be recorded."""
        ...

    def note(self, due: DueT, steps: StepsT, results: ResultsT, now_s: float) -> list[Change]:
        """Record what was done, and return it; raises HostError if an original could not be recorded."""
        ...


class _StageRun(NamedTuple):
    """What a stage has done."""

    #: Whether it had steps that change GPUs, even if they have failed.
    tried: bool = False
    changes: Sequence[Change] = ()
    #: Why it could not be run to its end.
    error: YunionError | None = None


class Reconciliation:
    """Runs the stages in their order: at a start, at each poll and reload, and at a stop."""

    def __init__(
        self,
        gpus: Gpus,
        desired: DesiredState,
        settings: GpuSettings,
        layouts: MigLayouts,
        *,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Call `changed` when what cannot be recorded has changed.

        clock: monotonic, in s
        """
        self._changed = changed
        self._clock = clock
        #: Why stages cannot be run, because of the host or the state file, by their labels.
        self._errors: dict[str, YunionError] = {}
        self._gpus = gpus
        self._desired = desired
        self._settings = settings
        self._layouts = layouts
        #: How many runs of a stage have begun, and how many have ended.
        self._begun = 0
        self.ended_runs = 0
        #: The number of the last run that changed the MIG mode or instances of a GPU (UUID).
        self._mig_runs: dict[str, int] = {}

    def has_run_since(self, ended_runs: int) -> bool:
        """Whether a stage has been at work since so many runs had ended.

        Settings that were read meanwhile may be those of a step half-way, or older than its result.
        """
        return self._begun > ended_runs

    def gpus_changing_mig_since(self, ended_runs: int) -> set[str]:
        """Return the GPUs (UUIDs) with a MIG step at work since so many runs had ended.

        A call for such a GPU may have failed because an instance came or went between two calls.
        """
        return {uuid for uuid, run in self._mig_runs.items() if run > ended_runs}

    # -- what is due

    def settings_due(self) -> Due | None:
        """Return the settings that may have to change; None if none has."""
        return self._settings.due(self._settings.original_values(), self._clock())

    def layouts_due(
        self, nvml: Nvml | None, originals: OriginalValues | None = None, *, is_start: bool = False
    ) -> LayoutsDue | None:
        """Return the MIG layouts that may have to change; None if none has.

        originals: what is recorded of settings; None to read it
        is_start: whether the leases of an earlier daemon are not known yet, if it has left any
        """
        if nvml is None or self._settings.reconciler.gate.has_ended:
            return None
        values = self._settings.original_values() if originals is None else originals
        return self._layouts.due(self._settings.in_wrong_mode(values), is_start=is_start)

    # -- at a start, on this thread

    def begin(self, nvml: Nvml | None, left: Collection[str], now_s: float) -> None:
        """Restore what the plan no longer has, and bring MIG layouts into effect; raises HostError.

        If there may be leases, no layout removes anything.

        left: the GPUs (UUIDs) of our processes that an earlier daemon left running
        """
        settings = self._settings
        originals = settings.original_values()
        if self._run_here(settings, settings.to_restore(originals, left), nvml, now_s):
            originals = settings.original_values()
        self._run_here(settings, settings.to_set_before_layouts(originals, left), nvml, now_s)
        self._run_here(self._layouts, self.layouts_due(nvml, originals, is_start=True), nvml, now_s)

    def set_here(self, nvml: Nvml | None, now_s: float) -> None:
        """Set what the plan requires; raises HostError if the originals cannot be recorded."""
        due = self._settings.to_set(self._settings.original_values())
        self._run_here(self._settings, due, nvml, now_s)

    # -- while the daemon runs

    async def bring_about(self, nvml: Nvml | None, settle: Callable[[], Awaitable[None]]) -> list[Change]:
        """Bring all that is due into effect as far as possible; return what was done.

        settle: waits until the control daemons of new MIG instances serve; then more may be due
        """
        changes: list[Change] = []
        for _ in range(_MOST_ROUNDS):
            changes_of_round = await self._run_round(nvml, settle)
            if not changes_of_round:
                break
            changes += changes_of_round
        return changes

    async def _run_round(self, nvml: Nvml | None, settle: Callable[[], Awaitable[None]]) -> list[Change]:
        """Run each stage once, in their order; what is recorded is read again only after a change."""
        originals = self._settings.original_values()
        settings, layouts = self._settings, self._layouts

        def modes_due() -> Due | None:
            return settings.due(originals, self._clock(), before_layouts=True)

        modes = await self._run(settings, modes_due, nvml)
        if modes.changes:
            originals = settings.original_values()
        instances = await self._run(layouts, lambda: self.layouts_due(nvml, originals), nvml)
        # Whatever was reported of the layouts: a step that has failed may have reset a compute mode.
        values = await self._run(settings, lambda: settings.due(originals, self._clock()), nvml)
        self._note_error(settings.label, modes.error or values.error)
        self._note_error(layouts.label, instances.error)
        if instances.tried:
            await settle()
        return [*modes.changes, *instances.changes, *values.changes]

    async def set_values(self, nvml: Nvml | None) -> list[Change]:
        """Set and restore the settings that are due; return what was done."""
        run = await self._run(self._settings, self.settings_due, nvml)
        self._note_error(self._settings.label, run.error)
        return [*run.changes]

    # -- at a stop, on this thread

    def restore(self, nvml: Nvml | None, store: Store, left: Collection[str], ledger: Ledger) -> None:
        """Restore what the GPUs had before our first change, except what is still needed.

        left: the GPUs (UUIDs) of our processes that are left running
        ledger: the leases that the state file has
        """
        originals, layouts = Originals(store), [*self._desired.plan.layouts]
        if self._desired.config.enable_cuda_mps:  # otherwise it is not known which entries have layouts
            layouts += former_layouts(layouts, originals)
        restored = restore_originals(
            self._settings.reconciler,
            originals,
            self._gpus.inventory.gpus,
            nvml,
            layouts=layouts,
            ledger=ledger,
            left=left,
            keeps_requests=True,
            most_s=BEGIN_STEPS_S,
        )
        self._layouts.note_restored(restored.layouts)
        self._settings.note_restored(restored.settings, self._clock())

    # -- one stage

    async def _run(
        self,
        stage: Stage[DueT, ObservedT, StepsT, ResultsT],
        find_due: Callable[[], DueT | None],
        nvml: Nvml | None,
    ) -> _StageRun:
        """Run a stage; what fails is due again in the next round."""
        tried = False
        self._begun += 1
        try:
            due = find_due()
            if due is None:
                return _StageRun()
            observed = await on_thread(functools.partial(stage.observe, due, nvml))
            steps = stage.decide(due, observed)
            tried = stage.changes_gpus(steps)
            self._mig_runs.update(dict.fromkeys(stage.gpus_changing_mig(steps), self._begun))
            results = await on_thread(functools.partial(stage.carry_out, steps, nvml))
            return _StageRun(tried, stage.note(due, steps, results, self._clock()))
        except YunionError as error:
            return _StageRun(tried, error=error)
        finally:
            self.ended_runs += 1

    def _note_error(self, label: str, error: YunionError | None) -> None:
        """Note why a stage cannot be run now; None if it can. It is logged when it changes."""
        before = self._errors.pop(label, None)
        if error:
            self._errors[label] = error
        message = error.message if error else ""
        if message == (before.message if before else ""):
            return
        self._changed()
        if error:
            log.error("%s cannot be changed: %s; %s", label, error.message, error.hint)

    def conditions(self) -> Iterator[Condition]:
        """Yield what keeps stages from being run at all."""
        for label, error in self._errors.items():
            text = f"{label} cannot be changed: {error.message}; {TRIED_AGAIN}"
            yield Condition(ABOUT_RECORD, label, IMPAIRED, Reason(text, error.code), error.hint)
        unreadable = self._settings.reconciler.unreadable
        if unreadable:
            text = f"what GPUs had before the daemon's first change cannot be read: {unreadable.message}"
            yield Condition(
                ABOUT_RECORD, "originals", IMPAIRED, Reason(text, unreadable.code), unreadable.hint
            )

    def _run_here(
        self,
        stage: Stage[DueT, ObservedT, StepsT, ResultsT],
        due: DueT | None,
        nvml: Nvml | None,
        now_s: float,
    ) -> list[Change]:
        if due is None:
            return []
        steps = stage.decide(due, stage.observe(due, nvml))
        return stage.note(due, steps, stage.carry_out(steps, nvml), now_s)
