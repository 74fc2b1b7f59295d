"""The reconciler: brings the settings of GPUs to what the plan requires, or to what they were before.

A start, a restart, a reload, a stop and `--restore` are the same path with another plan. At a stop, the plan
is empty, so that every GPU should have what it had before our first change:

    reconciler.looks(…)         on the loop: which settings may have to change, as far as polls tell
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
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import DriverError, HostError, ShortageError, YunionError
from yunion_mps.core.models import Event, Gpu, Plan
from yunion_mps.core.reasons import COMPUTE_MODE_UNSUPPORTED, GPU_ABSENT, MIG_ENABLED, NO_REASON, Reason
from yunion_mps.core.text import list_of
from yunion_mps.gpus.absent import gpu_label
from yunion_mps.gpus.blockers import Blockers, KeptBy
from yunion_mps.gpus.kind import Kind, Step, StepOutcome
from yunion_mps.gpus.kinds import KINDS
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.log import Failures
from yunion_mps.inventory.nvml import Nvml

log = logging.getLogger(__name__)

#: The levels at which errors of a driver that may be expected are logged, by reason code.
_LEVELS = {COMPUTE_MODE_UNSUPPORTED: logging.WARNING, MIG_ENABLED: logging.INFO}
#: The cause of a step, unless a stop is.
REQUIRED = "the configuration requires it"
#: The plan of a stop: every setting should be as it was before our first change.
NOTHING_DESIRED = Plan("")

#: The name of a kind, and the UUID of a GPU.
SettingKey = tuple[str, str]
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

    @property
    def key(self) -> SettingKey:
        return self.kind.name, self.uuid


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


#: The results if there is nothing to carry out.
NOTHING_DONE = Results()


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

    def __init__(self, kinds: Sequence[Kind] | None = None) -> None:
        self.kinds: tuple[Kind, ...] = tuple(KINDS if kinds is None else kinds)
        #: The values that were set or refused, of kinds that polls do not read.
        self._settled: dict[SettingKey, str] = {}
        #: Those that were in effect and are compared again; and of these, those that a reload sets again.
        self._compared: dict[SettingKey, str] = {}
        self._reloaded: set[SettingKey] = set()
        #: Why desired values were refused, until a reload or another value.
        self.refusals: dict[SettingKey, Reason] = {}
        #: What keeps settings as they are that should change.
        self.pending: dict[Look, KeptBy] = {}
        self.gate = Gate()
        #: Why the original values cannot be read.
        self._unreadable = Failures(log, level=logging.ERROR)

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
            self._unreadable.report(f"{labels} cannot be restored: {error.message}", consequence=error.hint)
            return {}
        self._unreadable.clear()
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
        known = {*self._settled, *self._compared, *self.refusals}
        for key in known:
            if key[0] == kind.name and key[1] not in usable:
                self._settled.pop(key, None)
                self._compared.pop(key, None)
                self._reloaded.discard(key)
                self.refusals.pop(key, None)

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
        if observed.error:
            return _without_driver(looks, observed)
        steps: dict[Look, Step] = {}
        pending: dict[Look, KeptBy] = {}
        failed: dict[Look, YunionError] = {}
        unchanged = []
        for look in looks:
            if look.key in observed.errors:
                if look.restores or look.key not in self._compared or look.key in self._reloaded:
                    failed[look] = observed.errors[look.key]
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
                if desired is None or actual is None or key in self.refusals or not kind.can_set(plan, gpu):
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
                if desired is not None and is_read and (kind.name, uuid) not in self.refusals:
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
        """Return the plan without values that were refused."""
        for kind in self.kinds:
            plan = kind.without_refused(plan, frozenset(self.refused(kind)))
        return plan

    def refused(self, kind: Kind) -> set[str]:
        """Return the GPUs (UUIDs) that have refused a value that no poll reads."""
        return {uuid for name, uuid in self.refusals if name == kind.name}

    def waiting_for_servers(self) -> set[str]:
        """Return the GPUs (UUIDs) whose original values are restored once their MPS servers have ended."""
        return {look.uuid for look, kept_by in self.pending.items() if kept_by.users.servers}

    # -- what is compared

    def compare(self) -> None:
        """Compare the values in effect that no poll reads, because another program may have changed them."""
        in_effect = {key: value for key, value in self._settled.items() if key not in self.refusals}
        self._compared.update(in_effect)
        self._settled = {key: value for key, value in self._settled.items() if key in self.refusals}

    def check_again(self) -> None:
        """Compare all values, and try refused ones again, because the configuration was reloaded."""
        for kind in self.kinds:
            kind.try_again()
        self.compare()
        self._reloaded = set(self._compared)
        self._settled.clear()
        self.refusals.clear()

    # -- on a thread

    def carry_out(
        self,
        decision: Decision,
        nvml: Nvml | None,
        originals: Originals,
        gpus: Collection[Gpu],
        *,
        is_stop: bool = False,
    ) -> Results:
        """Make the steps; once a stop has begun, only those of the stop.

        nvml: if it is None, because MPS is disabled, NVML is opened meanwhile
        gpus: for the names in messages
        """
        with self.gate.lock:  # a stop waits for work that is under way
            if self.gate.has_ended and not is_stop:
                return Results(has_ended=True)
            work = _StepsAtWork(decision, originals, gpus)
            if not (decision.steps or decision.unchanged):
                return work.results()
            try:
                with _opened(nvml) as driver:
                    for kind in self.kinds:
                        work.carry_out(kind, driver)
            except DriverError as error:
                log.error("settings of GPUs cannot be changed: %s; %s", error.message, error.hint)
            except HostError as error:
                return work.results(error)
            return work.results()

    def restore(
        self, originals: Originals, gpus: Sequence[Gpu], nvml: Nvml | None, blockers: Blockers
    ) -> Restoration:
        """Bring every GPU to what it had before our first change, at once and on this thread.

        Steps that a thread still makes end before the first look: otherwise what they change would be missed.
        """
        with self.gate.lock:
            values = self.original_values(originals)
            looks = self.looks(NOTHING_DESIRED, gpus, values, sets=False, every=True)
            observed = observe(looks, nvml)
            decision = self.decide(looks, observed, blockers.with_processes(observed.processes))
            results = self.carry_out(decision, nvml, originals, gpus, is_stop=True)
        return Restoration(tuple(looks), results, decision.pending)

    # -- what has become of it, on the loop

    def note(
        self,
        looks: Iterable[Look],
        pending: Collection[Look],
        results: Results,
        gpus: Iterable[Gpu],
        cause: str = REQUIRED,
    ) -> list[Event]:
        """Remember what was set or refused; return the events.

        looks: those that were observed
        pending: those of them that something keeps as they are
        gpus: as they were before the steps
        """
        if results.has_ended:
            return []
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        events: list[Event | None] = []
        for look in looks:
            if look in pending:
                continue
            compared = self._compared.pop(look.key, None)
            self._reloaded.discard(look.key)
            if look.polled is None and not look.restores and not results.not_recorded:
                self._settled[look.key] = look.target
            error, step = results.errors.get(look), results.steps.get(look)
            gpu = by_uuid.get(look.uuid)
            if gpu is None or (step is None and (error is None or look.restores)):
                continue
            outcome = StepOutcome(
                gpu=gpu,
                step=step or Step("", look.target),
                cause=cause,
                was_compared=compared == look.target,
                error=error,
            )
            events.append(look.kind.event(outcome))
            if warning := look.kind.warning(outcome):
                self.refusals[look.key] = warning
        return [event for event in events if event]


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


def observe(looks: Collection[Look], nvml: Nvml | None) -> Observed:
    """Return what the GPUs have now; call it on a thread, because it asks the driver.

    Values to set that polls read are not read again.
    """
    values: dict[SettingKey, str] = {}
    errors: dict[SettingKey, YunionError] = {}
    processes: Mapping[str, Collection[int]] = {}
    for look in looks:
        if look.absence:
            errors[look.key] = DriverError(look.absence, code=look.absence.code)
        elif look.polled is not None and not look.restores:
            values[look.key] = look.polled
    left = [look for look in looks if look.key not in errors and look.key not in values]
    if not left:
        return Observed(values, errors)
    try:
        with _opened(nvml) as driver:
            for look in left:
                try:
                    values[look.key] = look.kind.observe(driver, look.uuid)
                except YunionError as error:
                    errors[look.key] = error
            if any(_waits_for_processes(look, values.get(look.key)) for look in left):
                # Last, because values may take long to read, and a process may begin meanwhile.
                with contextlib.suppress(DriverError, ShortageError):  # then only the leases are known
                    processes = driver.processes()
    except DriverError as error:
        return Observed(values, errors, error=error)
    return Observed(values, errors, processes)


def _waits_for_processes(look: Look, actual: str | None) -> bool:
    """Whether the processes on the GPU matter to the restoration from the actual value."""
    if not look.restores or actual is None:
        return False
    step = look.kind.step(actual, look.target, restores=True)
    return step is not None and look.kind.needs(step).processes


@contextlib.contextmanager
def _opened(nvml: Nvml | None) -> Iterator[Nvml]:
    if nvml is not None:
        yield nvml
        return
    with Nvml() as own:
        yield own


def _without_driver(looks: Iterable[Look], observed: Observed) -> Decision:
    """Log that nothing can be set or restored now; a GPU that is not there has its own reason."""
    failed = {look: observed.errors[look.key] for look in looks if look.key in observed.errors}
    kinds = {look.kind.label: look for look in looks if look not in failed}
    error = observed.error
    assert error
    for label in kinds:
        log.error("%ss cannot be restored: %s; %s", label, error.message, error.hint)
    return Decision(failed=failed)


class _StepsAtWork:
    """The steps of a decision while they are carried out, on a thread."""

    def __init__(self, decision: Decision, originals: Originals, gpus: Collection[Gpu]) -> None:
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
            if look.kind is kind:
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
            return
        self._steps_made[look] = step
        if look.restores:
            log.info("%s: %s %s was restored", name, label, step.target)
            self._forget(look)
        else:
            log.info("%s: %s %s -> %s", name, label, step.actual, step.target)

    def _note_error(self, look: Look, error: YunionError) -> None:
        """Log the error, unless the GPU is not there: `report_absent` tells that."""
        name, kind = gpu_label(look.uuid, self._gpus), look.kind
        hint = error.hint
        what = f"{kind.label} cannot be set"
        if look.restores:
            hint = kind.hint_if_not_restored(look.uuid) or error.hint
            what = f"{kind.label} {look.target} cannot be restored"
        self._errors[look] = error
        if not (look.restores and error.code in GPU_ABSENT):
            text = f"{name}: {what}: {error.message}; {hint}"
            log.log(_LEVELS.get(error.code, logging.ERROR), "%s", text)

    def _forget(self, look: Look) -> None:
        try:
            self._originals.forget(look.kind.name, look.uuid)
        except HostError as error:
            what = f"{gpu_label(look.uuid, self._gpus)}: {look.kind.label} {look.target}"
            means = "its record could not be deleted, so the next start restores it again"
            log.warning("%s was restored, but %s: %s", what, means, error.message)
