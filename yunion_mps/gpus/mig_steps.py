"""The steps to a MIG layout, carried out on a thread, each recorded before it is made.

Before each step, the instances that are ours are recorded, and which one is about to be created. So if a
daemon is killed, the next one continues, and never destroys an instance that another program created.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import BusyError, DriverError, YunionError
from yunion_mps.core.mig import MigInstance
from yunion_mps.core.models import Inventory
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_layout import FoundLayout, LayoutLook, LayoutStep, decide, find_layout, noted
from yunion_mps.gpus.mig_record import MigIntent, MigRecord
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig
from yunion_mps.planning.mig import Placement

log = logging.getLogger(__name__)


class LayoutObservation(NamedTuple):
    """By GPU UUID: what the GPUs have, and why that cannot be known or changed."""

    found: Mapping[str, FoundLayout] = {}
    refused: Mapping[str, Reason] = {}


class LayoutResult(NamedTuple):
    """By GPU UUID: why layouts are not in effect (an empty reason if they are), and what was changed.

    `settled` has the instances with which layouts are in effect, other programs' changes meanwhile not
    included. `inventory` are the GPUs afterwards, None if they have not been scanned.
    """

    reasons: Mapping[str, Reason]
    changes: Mapping[str, str]
    settled: Mapping[str, tuple[MigInstance, ...]] = {}
    inventory: Inventory | None = None


def observe_layouts(looks: Iterable[LayoutLook], mig: Mig, originals: Originals) -> LayoutObservation:
    """Return what the GPUs have, by driver calls that may be slow."""
    found_layouts: dict[str, FoundLayout] = {}
    refused: dict[str, Reason] = {}
    for look in looks:
        try:
            found_layouts[look.uuid] = find_layout(look, mig, originals)
        except YunionError as error:
            refused[look.uuid] = _refusal(error)
    return LayoutObservation(found_layouts, refused)


def decide_layouts(
    looks: Iterable[LayoutLook],
    observation: LayoutObservation,
    blockers: Blockers | None,
    offered: Collection[str] = (),
) -> list[LayoutStep]:
    """Return the steps to the layouts of the GPUs that could be observed; see `decide` of `mig_layout`."""
    steps = []
    for look in looks:
        if look.uuid in observation.found:
            steps.append(decide(look, observation.found[look.uuid], blockers, offered))
    return steps


def carry_out_layouts(
    steps: Iterable[LayoutStep],
    refused: Mapping[str, Reason],
    mig: Mig,
    originals: Originals,
    is_ended: Callable[[], bool] = bool,
) -> LayoutResult:
    """Make the steps, by driver calls that may be slow; none once `is_ended`.

    refused: why the layouts of other GPUs (UUIDs) could not be decided
    """
    why = dict(refused)
    changes: dict[str, str] = {}
    settled: dict[str, tuple[MigInstance, ...]] = {}
    for step in steps:
        uuid, work = step.look.uuid, _StepAtWork(step, mig, originals, is_ended)
        try:
            why[uuid] = work.carry_out()
            settled[uuid] = work.settled
        except YunionError as error:
            why[uuid] = _refusal(error)
        if work.done:
            changes[uuid] = ", ".join(work.done)
            log.info("GPU %s: MIG: %s", step.look.gpu.address, changes[uuid])
    return LayoutResult(why, changes, settled)


def bring_into_effect(
    looks: Sequence[LayoutLook],
    mig: Mig,
    originals: Originals,
    blockers: Blockers | None,
    is_over: Callable[[], bool] = bool,
) -> LayoutResult:
    """Observe, decide and carry out on this thread, as a stop and `--restore` do; no step once `is_over`."""
    observation = observe_layouts(looks, mig, originals)
    steps = decide_layouts(looks, observation, blockers)
    return carry_out_layouts(steps, observation.refused, mig, originals, is_over)


#: Codes of the driver's errors that say what an operator can do.
_KNOWN = (
    reasons.MIG_IN_USE, reasons.MIG_RESET_REQUIRED, reasons.MIG_NO_PERMISSION, reasons.MIG_NOT_SUPPORTED,
    reasons.MIG_INSUFFICIENT_RESOURCES, reasons.DRIVER_HUNG, reasons.GPU_LOST,
)  # fmt: skip


_CHANGED_MEANWHILE = "its MIG instances, or what uses them, have changed meanwhile; they are looked at again"
#: Refusals after which it is certain that the driver has created no instance.
_NOTHING_CREATED = (
    reasons.MIG_NO_PERMISSION, reasons.MIG_NOT_SUPPORTED, reasons.MIG_INSUFFICIENT_RESOURCES,
)  # fmt: skip


def _refusal(error: YunionError) -> Reason:
    is_other = isinstance(error, DriverError) and error.code not in _KNOWN
    code = reasons.MIG_REFUSED if is_other else error.code
    return Reason(f"its MIG layout cannot be changed: {error.message}", code)


class _StepAtWork:
    """A step while it is carried out: the mode first, then the instances, as NVIDIA's mig-parted does."""

    def __init__(
        self, step: LayoutStep, mig: Mig, originals: Originals, is_ended: Callable[[], bool]
    ) -> None:
        self._step = step
        self._uuid = step.look.uuid
        self._mig = mig
        self._originals = originals
        self._is_ended = is_ended
        self._record = step.found.record
        self._created: list[MigInstance] = []
        #: What was changed, as text.
        self.done: list[str] = [*step.late]
        #: The instances with which the layout is in effect.
        self.settled: tuple[MigInstance, ...] = ()

    def carry_out(self) -> Reason:
        """Return why the layout is not in effect; empty if it is. Raises YunionError."""
        step = self._step
        if step.changes_layout and self._has_changed():
            return Reason(_CHANGED_MEANWHILE, reasons.MIG_IN_USE)
        self._write(step.record)
        if step.changes_layout:
            self._remember_before()
        for instance in step.destroy:
            self._destroy(instance)
        if step.mode is not None:
            why = self._set_mode(step.mode)
            if why:
                return why
        if step.forgets:
            self._write(MigRecord(created=self._record.created))
        for place in step.create:
            self._create(place)
        for instance in step.complete:
            self._complete(instance)
        self._read_back()
        return step.why

    def _has_changed(self) -> bool:
        """Whether the GPU is not as it was found, or has new users: other GPUs may have taken minutes."""
        before = self._step.found
        current = find_layout(self._step.look, self._mig, self._originals)
        if (current.mode, current.instances) != (before.mode, before.instances):
            return True
        has_new = bool(current.processes - before.processes)
        for number, processes in current.by_instance.items():
            has_new = has_new or bool(processes - before.by_instance.get(number, frozenset()))
        return has_new

    def _set_mode(self, mode: bool) -> Reason:  # noqa: FBT001 - as NVML's call
        """Return why the mode is not in effect; empty if it is."""
        self._begin_step()
        in_effect = self._mig.set_mode(self._uuid, mode)
        shown = "on" if mode else "off"
        if not self._step.switches_mode:
            self.done.append(f"MIG mode will not be switched {'off' if mode else 'on'}")
            return NO_REASON
        if in_effect.enabled == mode:
            self.done.append(f"switched MIG mode {shown}")
            return NO_REASON
        if in_effect.in_use:
            text = f"MIG mode cannot be switched {shown} while a process uses the GPU"
            return Reason(text, reasons.MIG_IN_USE)
        text = f"MIG mode will be {shown} after the next reset of the GPU"
        return Reason(text, reasons.MIG_RESET_REQUIRED)

    def _destroy(self, instance: MigInstance) -> None:
        self._begin_step()
        remaining = tuple(created for created in self._record.created if created.id != instance.id)
        self._mig.destroy(self._uuid, instance.id)
        self._write(self._record._replace(created=remaining))
        self.done.append(f"destroyed g{instance.id} ({instance.profile})")

    def _create(self, place: Placement) -> None:
        self._begin_step()
        profile = place.profile
        ids_before = [existing.id for existing in self._instances()]
        intent = MigIntent(profile.name, place.start, tuple(ids_before))
        self._write(self._record._replace(intent=intent))
        try:
            number = self._mig.create(self._uuid, profile, place.start)
        except DriverError as error:
            if error.code in _NOTHING_CREATED:
                self._write(self._record._replace(intent=None))
            raise
        instance = MigInstance(
            id=number,
            profile=profile.name,
            start=place.start,
            size=profile.size,
            compute_instances=0,
        )
        self._note_created(instance)
        self._created.append(instance)
        if place.is_whole:
            self._mig.create_compute(self._uuid, number)
        self.done.append(f"created g{number} ({profile.name})")

    def _complete(self, instance: MigInstance) -> None:
        """Create the compute instance that the instance lacks."""
        self._begin_step()
        self._note_created(instance)
        self._mig.create_compute(self._uuid, instance.id)
        self.done.append(f"completed g{instance.id} ({instance.profile})")

    def _read_back(self) -> None:
        """Note what the GPU has now, and record our instances with their UUIDs."""
        step = self._step
        remaining = [instance for instance in step.found.instances if instance not in step.destroy]
        self.settled = (*remaining, *self._created)
        if self.done and step.look.layout.enabled:
            existing = self._instances()
            self._write(noted(self._record, existing))
            self.settled = tuple(sorted(_with_uuid(instance, existing) for instance in self.settled))

    # -- records

    def _remember_before(self) -> None:
        if self._record.before is None:
            look, found_layout = self._step.look, self._step.found
            self._write(
                self._record._replace(
                    enabled_before=found_layout.mode.enabled,
                    before=found_layout.instances,
                    compute_mode=look.gpu.compute_mode or "",
                    restores=look.layout.restore,
                )
            )

    def _note_created(self, instance: MigInstance) -> None:
        """Record the instance, or its new compute instance, before it has a UUID."""
        others = [other for other in self._record.created if other.place != instance.place]
        self._write(self._record._replace(created=(*others, instance), intent=None))

    def _write(self, record: MigRecord) -> None:
        if record != self._record:
            self._originals.write_layout(self._uuid, record)
            self._record = record

    # -- the driver

    def _instances(self) -> tuple[MigInstance, ...]:
        return self._mig.instances(self._uuid, self._step.look.gpu.mig_profiles)

    def _begin_step(self) -> None:
        if self._is_ended():
            raise BusyError("the daemon is stopping")


def _with_uuid(instance: MigInstance, existing: Iterable[MigInstance]) -> MigInstance:
    """Return the instance with its UUID, unless another one has taken its place meanwhile."""
    for other in existing:
        if instance.is_same(other):
            return other
    return instance
