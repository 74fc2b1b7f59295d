"""The reconciler: brings the settings of GPUs to what the plan requires, or to what they were before.

A start, a restart, a reload, a stop and `--restore` are the same path with another plan. At a stop, the plan
is empty, so that every GPU should have what it had before our first change:

    reconciler.looks(…)         on the loop: which settings may have to change, as far as polls tell
    reconciler.due(…)           on the loop: without those that were refused, until they are tried again
    reconciler.unblocked(…)     on the loop: those that nothing keeps as they are
    observe(…)                  on a thread: what the GPUs have now, and which processes use them
    reconciler.decide(…)        on the loop: the steps
    reconciler.carry_out(…)     on a thread: each original recorded, each step made and read back
    reconciler.note(…)          on the loop: what has changed, as events

Threads only call the driver and write records; they return values, and decide nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import BusyError, DriverError, HostError, ShortageError, YunionError
from yunion_mps.core.models import Event, Gpu, Plan
from yunion_mps.core.reasons import (
    BUSY,
    COMPUTE_MODE_UNSUPPORTED,
    DRIVER_HUNG,
    GPU_ABSENT,
    MIG_ENABLED,
    NO_REASON,
    Reason,
)
from yunion_mps.core.text import list_of
from yunion_mps.gpus.absent import gpu_label
from yunion_mps.gpus.blockers import Blockers, KeptBy
from yunion_mps.gpus.kind import Kind, Step, StepOutcome
from yunion_mps.gpus.kinds import KINDS
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.refusals import Attempt, Refusals, SettingKey
from yunion_mps.host.log import Failures
from yunion_mps.inventory.nvml import Nvml

log = logging.getLogger(__name__)

#: The levels at which errors of a driver that may be expected are logged, by reason code.
_LEVELS = {COMPUTE_MODE_UNSUPPORTED: logging.WARNING, MIG_ENABLED: logging.INFO}
#: The cause of a step, unless a stop is.
REQUIRED = "the configuration requires it"
#: The plan of a stop: every setting should be as it was before our first change.
NOTHING_DESIRED = Plan("")

#: The original values, by the name of their kind and the UUID of their GPU.
OriginalValues = Mapping[str, Mapping[str, str]]


class Look(NamedTuple):
    """A setting of a GPU that may have to change."""

    kind: Kind
    uuid: str
    target: str
    #: Whether the target is what the GPU had before our first change.
    restores: bool = False
    #: The value at the last poll; None if polls do not read it.
    polled: str | None = None
    #: Whether the original value is recorded.
    is_recorded: bool = False
    #: Why the GPU is not there; empty if it is.
    absence: Reason = NO_REASON
    #: The error of the last attempt, which was logged then.
    last_error: str = ""

    @property
    def key(self) -> SettingKey:
        return self.kind.name, self.uuid

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.key, self.target, self.restores)


class Observed(NamedTuple):
    """What the driver said of the looks, and the PIDs of all processes by the UUID of their GPU."""

    values: Mapping[SettingKey, str] = {}
    errors: Mapping[SettingKey, YunionError] = {}
    processes: Mapping[str, Collection[int]] = {}
    #: Why the driver could not be asked at all; None if it was.
    error: DriverError | None = None


class Decision(NamedTuple):
    """What is to be done; everything by the look that it belongs to."""

    steps: Mapping[Look, Step] = {}
    #: Those that have their target already: it is recorded, or the record is deleted.
    unchanged: tuple[Look, ...] = ()
    pending: Mapping[Look, KeptBy] = {}
    failed: Mapping[Look, YunionError] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done, nor to be told."""
        return not (self.steps or self.unchanged or self.failed)


class Results(NamedTuple):
    """What was done: the steps that are in effect, and the errors of the others."""

    steps: Mapping[Look, Step] = {}
    errors: Mapping[Look, YunionError] = {}
    #: Why a value could not be recorded or, in a shortage, set, so that neither it nor what follows was.
    not_recorded: HostError | None = None
    #: Whether nothing was done, because a stop has begun.
    has_ended: bool = False

    def of(self, kind: Kind) -> dict[str, str]:
        """Return the values of a kind that are in effect now, by GPU UUID."""
        return {look.uuid: step.target for look, step in self.steps.items() if look.kind is kind}

    def refused(self, kind: Kind) -> dict[str, DriverError]:
        """Return the errors of GPUs (UUIDs) that refused the desired value of a kind."""
        refused = {}
        for look, error in self.errors.items():
            if look.kind is kind and not look.restores and isinstance(error, DriverError):
                refused[look.uuid] = error
        return refused

    def not_restored(self) -> dict[str, dict[str, YunionError]]:
        """Return why originals could not be restored, by the label of the kind and the GPU's UUID."""
        errors: dict[str, dict[str, YunionError]] = {}
        for look, error in self.errors.items():
            if look.restores:
                errors.setdefault(look.kind.label, {})[look.uuid] = error
        return errors


class Restoration(NamedTuple):
    """What became of the originals at a stop or `--restore`."""

    looks: tuple[Look, ...]
    results: Results
    pending: Mapping[Look, KeptBy]


#: For `--restore`, which nothing waits for.
UNLIMITED_S = math.inf
#: The results if there is nothing to carry out.
NOTHING_DONE = Results()


class TimeLimit:
    """How long a stop begins to restore something; what has begun is not interrupted."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + most_s

    def half_of_rest(self) -> TimeLimit:
        """Return the limit of what may take at most half of the time that is left."""
        return TimeLimit((self._end_s - self._clock()) / 2, self._clock)

    def is_over(self) -> bool:
        return self._clock() >= self._end_s


class Gate:
    """Lets one thread at a time make steps, and none but those of a stop once that has begun."""

    def __init__(self) -> None:
        #: Held while steps are made, and by a stop from its first look on.
        self.lock = threading.RLock()
        self.has_ended = False

    def end(self) -> None:
        """Make no more steps except those of a stop, which has begun."""
        self.has_ended = True


class Reconciler:
    """Decides what is due; the caller chooses the threads that ask the driver and carry it out."""

    def __init__(self, kinds: Sequence[Kind] | None = None, refusals: Refusals | None = None) -> None:
        self.kinds: tuple[Kind, ...] = tuple(KINDS if kinds is None else kinds)
        self.refusals = Refusals() if refusals is None else refusals
        #: The values that are in effect, of kinds that polls do not read.
        self._settled: dict[SettingKey, str] = {}
        #: What these kinds had when they were last read or set, as far as that differs from the plan.
        self._found: dict[SettingKey, str] = {}
        #: Those that were in effect and are compared again; and of these, those that a reload sets again.
        self._compared: dict[SettingKey, str] = {}
        self._reloaded: set[SettingKey] = set()
        #: What keeps settings as they are that should change.
        self.pending: dict[Look, KeptBy] = {}
        self.gate = Gate()
        #: Why the original values cannot be read; None if they can.
        self.unreadable: HostError | None = None
        self._unreadable_log = Failures(log, level=logging.ERROR)

    # -- decisions, on the loop

    def original_values(self, originals: Originals | None) -> OriginalValues:
        """Return what is recorded of all kinds; without a state file, nothing.

        If it cannot be read, nothing is known, which is logged once until it can be read again.
        """
        values = {}
        try:
            for kind in self.kinds:
                values[kind.name] = originals.of(kind.name) if originals else {}
        except HostError as error:
            labels = list_of([f"{kind.label}s" for kind in self.kinds])
            self._unreadable_log.report(
                f"{labels} cannot be restored: {error.message}", consequence=error.hint
            )
            self.unreadable = error
            return {}
        self._unreadable_log.clear()
        self.unreadable = None
        return values

    def looks(
        self,
        plan: Plan,
        gpus: Sequence[Gpu],
        originals: OriginalValues,
        *,
        kinds: Collection[Kind] | None = None,
        sets: bool = True,
        restores: bool = True,
        every: bool = False,
    ) -> list[Look]:
        """Return which settings may have to change, as far as that is known without the driver.

        plan: what the settings should be; where it says nothing, what they were before
        originals: what is recorded, as `original_values` returns it
        kinds: those that are looked at; None for all
        sets, restores: whether values are set, and original ones restored
        every: whether originals are restored, too, on GPUs that are not known to be there
        """
        looks: list[Look] = []
        for kind in self.kinds:
            if kinds is not None and kind not in kinds:
                continue
            values = originals.get(kind.name, {})
            if sets:
                looks += self._looks_to_set(kind, plan, gpus, values)
            if restores:
                looks += _looks_to_restore(kind, plan, gpus, values, every=every)
        return looks

    def _looks_to_set(
        self, kind: Kind, plan: Plan, gpus: Iterable[Gpu], originals: Collection[str]
    ) -> Iterator[Look]:
        usable: dict[str, Look] = {}
        for gpu in gpus:
            uuid, desired = str(gpu.uuid), kind.desired(plan, gpu)
            if desired is not None and kind.can_set(plan, gpu):
                polled, is_recorded = kind.polled(gpu), uuid in originals
                usable[uuid] = Look(kind, uuid, desired, polled=polled, is_recorded=is_recorded)
        self._forget_unusable(kind, usable.keys())
        for look in usable.values():
            if look.polled is None:
                is_due = self._settled.get(look.key) != look.target
            else:
                is_due = look.polled != look.target or not look.is_recorded
            if is_due:
                yield look

    def _forget_unusable(self, kind: Kind, usable: Collection[str]) -> None:
        """Forget what is known of GPUs that are lost or are not to have a value: it is set again later."""
        known = {*self._settled, *self._compared}
        for key in known:
            if key[0] == kind.name and key[1] not in usable:
                self._settled.pop(key, None)
                self._compared.pop(key, None)
                self._reloaded.discard(key)

    def due(self, looks: Iterable[Look], kinds: Iterable[Kind], now_s: float) -> list[Look]:
        """Return those that are tried now; a refused one has a pause, unless polls find it as it should be.

        Refusals of which nothing is left to do are forgotten.

        looks: all of these kinds
        """
        due: list[Look] = []
        attempts: set[Attempt] = set()
        for look in looks:
            attempts.add(look.attempt)
            if look.polled == look.target or self.refusals.is_due(look.attempt, now_s):
                due.append(look._replace(last_error=self.refusals.last_error(look.attempt)))
        self.refusals.keep_only(attempts, [kind.name for kind in kinds])
        return due

    def unblocked(
        self,
        looks: Iterable[Look],
        blockers: Blockers,
        processes: Mapping[str, Collection[int]] = {},
        kinds: Collection[Kind] | None = None,
    ) -> list[Look]:
        """Return those that nothing keeps as they are, and note what keeps the others.

        A value that no poll reads is assumed to differ. So that it is not read, which takes long, while it
        could not be changed, `processes` of the last poll (PIDs by GPU UUID) count for it, too.

        kinds: those that were looked at; None for all. What keeps others stays noted
        """
        looked_at = self.kinds if kinds is None else kinds
        for look in list(self.pending):
            if look.kind in looked_at:
                del self.pending[look]
        beside_processes = blockers.with_processes(processes)
        free = []
        for look in looks:
            step = look.kind.step(look.polled or "", look.target, restores=look.restores)
            known = beside_processes if look.polled is None else blockers
            kept_by = known.against(look.uuid, look.kind.needs(step)) if step else None
            if kept_by:
                self.pending[look] = kept_by
            else:
                free.append(look)
        return free

    def decide(self, looks: Iterable[Look], observed: Observed, blockers: Blockers) -> Decision:
        """Return what is to be done, now that it is known what the GPUs have.

        A value that cannot be read is no refusal if it had been in effect and was only to be compared.
        """
        errors = _errors_without_driver(looks, observed) if observed.error else observed.errors
        steps: dict[Look, Step] = {}
        pending: dict[Look, KeptBy] = {}
        failed: dict[Look, YunionError] = {}
        unchanged = []
        for look in looks:
            if look.polled is None and look.key in observed.values:
                self._found[look.key] = observed.values[look.key]
            if look.key in errors:
                if look.restores or look.key not in self._compared or look.key in self._reloaded:
                    failed[look] = errors[look.key]
                continue
            step = look.kind.step(observed.values[look.key], look.target, restores=look.restores)
            if step is None:
                unchanged.append(look)
            elif kept_by := blockers.against(look.uuid, look.kind.needs(step)):
                pending[look] = kept_by
            else:
                steps[look] = step
        self.pending.update(pending)
        return Decision(steps, tuple(unchanged), pending, failed)

    def corrections(
        self, plan: Plan, gpus: Iterable[Gpu], observed: Mapping[SettingKey, str], blockers: Blockers
    ) -> Iterator[tuple[Kind, str, Step]]:
        """Yield the kind, the GPU (UUID) and the step of what another program has changed.

        gpus: as they have just been scanned
        observed: the values that no poll reads, as far as they are in effect
        """
        for kind in self.kinds:
            for gpu in gpus:
                key, desired = (kind.name, str(gpu.uuid)), kind.desired(plan, gpu)
                actual = kind.polled(gpu) or observed.get(key)
                if desired is None or actual is None or not kind.can_set(plan, gpu):
                    continue
                if key[1] in self.refusals.to_set(kind.name):
                    continue
                step = kind.step(actual, desired)
                if step and not blockers.against(str(gpu.uuid), kind.needs(step)):
                    yield kind, str(gpu.uuid), step

    def looks_in_effect(self, plan: Plan, gpus: Iterable[Gpu]) -> list[Look]:
        """Return the values that no poll reads and that the GPUs should have, except refused ones."""
        looks = []
        for kind in self.kinds:
            for gpu in gpus:
                uuid, desired = str(gpu.uuid), kind.desired(plan, gpu)
                is_read = desired is not None and kind.polled(gpu) is None and kind.can_set(plan, gpu)
                if desired is not None and is_read and uuid not in self.refusals.to_set(kind.name):
                    looks.append(Look(kind, uuid, desired))
        return looks

    def differing(self, kind: Kind, plan: Plan, gpus: Iterable[Gpu], originals: OriginalValues) -> set[str]:
        """Return the GPUs (UUIDs) whose polled value is not the desired or, without one, the original one.

        One whose value cannot be changed now stays as it is, so it counts as equal.
        """
        values = originals.get(kind.name, {})
        differing = set(values)
        for gpu in gpus:
            uuid = str(gpu.uuid)
            differing.discard(uuid)
            desired, original = kind.desired(plan, gpu), values.get(uuid)
            if desired is not None:
                is_due = kind.can_set(plan, gpu) and kind.polled(gpu) != desired
            else:
                is_due = original is not None and kind.can_restore(gpu, original)
                is_due = is_due and kind.polled(gpu) != original
            if is_due:
                differing.add(uuid)
        return differing

    def in_effect(self, plan: Plan) -> Plan:
        """Return the plan without values that were refused, and with those that are not restored yet."""
        unrestored = {look.key for look in self.pending if look.restores}
        unrestored.update(refusal.attempt.key for refusal in self.refusals if refusal.attempt.restores)
        for kind in self.kinds:
            unrestored_values = {}
            for key in unrestored & self._found.keys():
                if key[0] == kind.name:
                    unrestored_values[key[1]] = self._found[key]
            plan = kind.with_values(plan, frozenset(self.refusals.to_set(kind.name)), unrestored_values)
        return plan

    def waiting_for_servers(self) -> set[str]:
        """Return the GPUs (UUIDs) whose original values are restored once their MPS servers have ended."""
        return {look.uuid for look, kept_by in self.pending.items() if kept_by.users.servers}

    # -- what is compared

    def compare(self) -> None:
        """Compare the values in effect that no poll reads, because another program may have changed them."""
        self._compared.update(self._settled)
        self._settled.clear()

    def check_again(self) -> None:
        """Compare all values, and try refused ones again, because the configuration was reloaded."""
        for kind in self.kinds:
            kind.try_again()
        self.compare()
        self._reloaded = set(self._compared)
        self.refusals.try_now()

    # -- on a thread

    def carry_out(
        self,
        decision: Decision,
        nvml: Nvml | None,
        originals: Originals,
        gpus: Collection[Gpu],
    ) -> Results:
        """Make the steps until a stop begins; it waits for the step that is being made.

        nvml: if it is None, because MPS is disabled, NVML is opened meanwhile
        gpus: for the names in messages
        """
        with self.gate.lock:
            if self.gate.has_ended:
                return Results(has_ended=True)
            results = self._make_steps(decision, nvml, originals, gpus, lambda: self.gate.has_ended)
        return results._replace(has_ended=self.gate.has_ended)

    def _make_steps(
        self,
        decision: Decision,
        nvml: Nvml | None,
        originals: Originals,
        gpus: Collection[Gpu],
        is_over: Callable[[], bool],
    ) -> Results:
        work = _StepsAtWork(decision, originals, gpus, is_over)
        if not (decision.steps or decision.unchanged):
            return work.results()
        try:
            with _opened(nvml) as driver:
                for kind in self.kinds:
                    work.carry_out(kind, driver)
        except DriverError as error:
            work.note_no_driver(error)
        except HostError as error:
            return work.results(error)
        return work.results()

    def restore(
        self,
        originals: Originals,
        gpus: Sequence[Gpu],
        nvml: Nvml | None,
        blockers: Blockers,
        limit: TimeLimit,
    ) -> Restoration:
        """Bring every GPU to what it had before our first change, at once and on this thread.

        The step that a thread still makes ends before the first look: otherwise what it changes would be
        missed. What is not restored within the `limit` stays recorded.
        """
        with self.gate.lock:
            values = self.original_values(originals)
            looks = self.looks(NOTHING_DESIRED, gpus, values, sets=False, every=True)
            observed = observe(looks, nvml, limit.half_of_rest().is_over)
            decision = self.decide(looks, observed, blockers.with_processes(observed.processes))
            results = self._make_steps(decision, nvml, originals, gpus, limit.is_over)
        return Restoration(tuple(looks), results, decision.pending)

    # -- what has become of it, on the loop

    def note(
        self,
        looks: Iterable[Look],
        pending: Collection[Look],
        results: Results,
        gpus: Iterable[Gpu],
        now_s: float,
        cause: str = REQUIRED,
    ) -> list[Event]:
        """Remember what was set or refused; return the events.

        looks: those that were observed
        pending: those of them that something keeps as they are
        gpus: as they were before the steps
        now_s: when they ended
        """
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        events: list[Event | None] = []
        for look in looks:
            if results.has_ended and look not in results.steps:
                continue
            if look in pending:
                self.refusals.forget(look.key)
                continue
            compared = self._compared.pop(look.key, None)
            self._reloaded.discard(look.key)
            error, step = results.errors.get(look), results.steps.get(look)
            outcome = StepOutcome(
                gpu=by_uuid.get(look.uuid, Gpu("", uuid=look.uuid)),
                step=step or Step("", look.target, look.restores),
                cause=cause,
                was_compared=compared == look.target,
                error=error,
            )
            if error:
                self.refusals.note(look.attempt, error, look.kind.warning(outcome), now_s)
            elif step or not results.not_recorded:
                self.refusals.forget(look.key)
                if look.polled is None:
                    self._note_value(look)
            if step and look.uuid in by_uuid:
                events.append(look.kind.event(outcome))
        return [event for event in events if event]

    def _note_value(self, look: Look) -> None:
        """Note that the GPU has the target, which no poll reads."""
        self._found[look.key] = look.target
        if not look.restores:
            self._settled[look.key] = look.target


def _looks_to_restore(
    kind: Kind, plan: Plan, gpus: Iterable[Gpu], originals: Mapping[str, str], *, every: bool
) -> Iterator[Look]:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for uuid, value in originals.items():
        gpu = by_uuid.get(uuid)
        known = gpu or Gpu("", uuid=uuid)
        if kind.desired(plan, known) is not None:
            continue
        if every or (gpu and kind.can_restore(gpu, value)):
            absence = known.reason if known.reason.code in GPU_ABSENT else NO_REASON
            polled = kind.polled(gpu) if gpu else None
            yield Look(kind, uuid, value, restores=True, polled=polled, is_recorded=True, absence=absence)


def observe(looks: Collection[Look], nvml: Nvml | None, is_over: Callable[[], bool] = bool) -> Observed:
    """Return what the GPUs have now; call it on a thread, because it asks the driver.

    Values to set that polls read are not read again. Once `is_over`, nothing more is read.
    """
    values: dict[SettingKey, str] = {}
    errors: dict[SettingKey, YunionError] = {}
    processes: Mapping[str, Collection[int]] = {}
    for look in looks:
        if look.absence:
            errors[look.key] = DriverError(look.absence, code=look.absence.code)
        elif look.polled is not None and not look.restores:
            values[look.key] = look.polled
    unread = [look for look in looks if look.key not in errors and look.key not in values]
    if not unread and not any(_waits_for_processes(look, values.get(look.key)) for look in looks):
        return Observed(values, errors)
    try:
        with _opened(nvml) as driver:
            errors.update(_read_values(unread, driver, is_over, values))
            if any(_waits_for_processes(look, values.get(look.key)) for look in looks):
                # Last, because values may take long to read, and a process may begin meanwhile.
                with contextlib.suppress(DriverError, ShortageError):  # then only the leases are known
                    processes = driver.processes()
    except DriverError as error:
        return Observed(values, errors, error=error)
    return Observed(values, errors, processes)


def _read_values(
    looks: Iterable[Look], driver: Nvml, is_over: Callable[[], bool], values: dict[SettingKey, str]
) -> dict[SettingKey, YunionError]:
    """Add what the GPUs have to the `values`; return why others could not be read."""
    errors: dict[SettingKey, YunionError] = {}
    hung: dict[str, YunionError] = {}
    for look in looks:
        error = _late_error() if is_over() else hung.get(look.kind.name)
        if error is None:
            try:
                values[look.key] = look.kind.observe(driver, look.uuid)
            except YunionError as raised:
                error = raised
                _note_hang(look.kind, error, hung)
        if error:
            errors[look.key] = error
    return errors


def _waits_for_processes(look: Look, actual: str | None) -> bool:
    """Whether the processes on the GPU matter to the step from the actual value."""
    if actual is None:
        return False
    step = look.kind.step(actual, look.target, restores=look.restores)
    return step is not None and look.kind.needs(step).processes


def _note_hang(kind: Kind, error: YunionError, hung: dict[str, YunionError]) -> None:
    """Note if a kind's call did not return in time: the next ones would keep polls waiting, too."""
    if error.code == DRIVER_HUNG:
        hung[kind.name] = error


def _late_error() -> BusyError:
    return BusyError("the stop has no time left for it", "run: yunion-mps-daemon --restore")


@contextlib.contextmanager
def _opened(nvml: Nvml | None) -> Iterator[Nvml]:
    if nvml is not None:
        yield nvml
        return
    with Nvml() as own:
        yield own


def _errors_without_driver(looks: Iterable[Look], observed: Observed) -> dict[SettingKey, YunionError]:
    """Return that nothing can be set or restored now; a GPU that is not there has its own error."""
    errors = dict(observed.errors)
    for look in looks:
        if observed.error and look.key not in errors:
            errors[look.key] = observed.error
    return errors


class _StepsAtWork:
    """The steps of a decision while they are carried out, on a thread."""

    def __init__(
        self,
        decision: Decision,
        originals: Originals,
        gpus: Collection[Gpu],
        is_over: Callable[[], bool],
    ) -> None:
        """Make no more steps once `is_over`."""
        self._is_over = is_over
        #: The kinds (names) of which a call did not return in time.
        self._hung: dict[str, YunionError] = {}
        self._decision = decision
        self._originals = originals
        self._gpus = gpus
        self._steps_made: dict[Look, Step] = {}
        self._errors: dict[Look, YunionError] = {}
        for look, error in decision.failed.items():
            self._note_error(look, error)

    def results(self, not_recorded: HostError | None = None) -> Results:
        return Results(self._steps_made, self._errors, not_recorded)

    def carry_out(self, kind: Kind, nvml: Nvml) -> None:
        """Make the steps of one kind.

        Raises HostError if the values from before cannot be recorded, or in a shortage none can be set.
        """
        self._remember(kind)
        for look, step in self._decision.steps.items():
            if look.kind is not kind:
                continue
            if self._is_over():
                if look.restores:
                    self._note_error(look, _late_error())
            elif kind.name in self._hung:
                self._note_error(look, self._hung[kind.name])
            else:
                self._make(look, step, nvml)
        for look in self._decision.unchanged:
            if look.kind is kind and look.restores:
                self._forget(look)

    def _remember(self, kind: Kind) -> None:
        before = {}
        for look, step in self._decision.steps.items():
            if look.kind is kind and not look.restores:
                before[look.uuid] = step.actual
        for look in self._decision.unchanged:
            if look.kind is kind and not look.restores and not look.is_recorded:
                before[look.uuid] = look.target  # another program may change it
        if before:
            self._originals.remember(kind.name, before)

    def _make(self, look: Look, step: Step, nvml: Nvml) -> None:
        name, label = gpu_label(look.uuid, self._gpus), look.kind.label
        try:
            look.kind.carry_out(nvml, look.uuid, step)
        except YunionError as error:
            if isinstance(error, HostError) and not look.restores:
                raise  # a shortage: the next GPU would not get its value either, and jobs must not start now
            self._note_error(look, error)
            _note_hang(look.kind, error, self._hung)
            return
        self._steps_made[look] = step
        if look.restores:
            log.info("%s: %s %s was restored", name, label, step.target)
            self._forget(look)
        else:
            log.info("%s: %s %s -> %s", name, label, step.actual, step.target)

    def note_no_driver(self, error: DriverError) -> None:
        """Note that NVML could not be opened, so that no step was made."""
        for look in self._decision.steps:
            self._note_error(look, error)

    def _note_error(self, look: Look, error: YunionError) -> None:
        """Log the error, unless it was before, or the GPU is not there: `report_absent` tells that."""
        name, kind = gpu_label(look.uuid, self._gpus), look.kind
        hint = error.hint
        problem = f"{kind.label} cannot be set"
        if look.restores:
            problem = f"{kind.label} {look.target} cannot be restored"
            if error.code != BUSY:
                hint = kind.hint_if_not_restored(look.uuid) or error.hint
        self._errors[look] = error
        is_told = error.message == look.last_error or (look.restores and error.code in GPU_ABSENT)
        if not is_told:
            text = f"{name}: {problem}: {error.message}; {hint}"
            log.log(_LEVELS.get(error.code, logging.ERROR), "%s", text)

    def _forget(self, look: Look) -> None:
        try:
            self._originals.forget(look.kind.name, look.uuid)
        except HostError as error:
            setting = f"{gpu_label(look.uuid, self._gpus)}: {look.kind.label} {look.target}"
            means = "its record could not be deleted, so the next start restores it again"
            log.warning("%s was restored, but %s: %s", setting, means, error.message)
