"""MIG layouts: brought into effect step by step.

Before each step, the instances that are ours are recorded, and which one is about to be created. So if a
daemon is killed, the next one continues, and never destroys an instance that another program created.
An instance that a lease, a server or a process uses is not destroyed either, and no MIG mode changes on a GPU
in use; then nothing changes, and the reason says what the layout waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import BusyError, DriverError, HostError, YunionError
from yunion_mps.core.mig import MigInstance, MigLayout
from yunion_mps.core.models import Gpu, Inventory
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import NO_USERS, Users, wait_reason
from yunion_mps.gpus.blockers import UNUSED, Blockers
from yunion_mps.gpus.mig_record import MigIntent, MigRecord
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig, MigMode
from yunion_mps.planning.mig import LayoutChange, Placement, change, change_to

log = logging.getLogger(__name__)

_LAYOUT = "its MIG layout"
MODE_ON = "the switch to MIG mode"
#: The text for the users of a GPU if they are not known.
ITS_USERS = "the GPU's leases and control daemon"


class Losses(NamedTuple):
    """What `reload --now` removes: GPUs and MIG devices (UUIDs), and instances of other programs."""

    uuids: frozenset[str] = frozenset()
    others: tuple[MigInstance, ...] = ()


NO_LOSSES = Losses()


class ConfirmedLosses:
    """What the operator has confirmed with `reload --now`, until the layouts are in effect.

    `MigLayouts` of the supervisor writes it; the desired state reads which leases no longer count.
    """

    def __init__(self) -> None:
        self.by_layout: Mapping[MigLayout, Losses] = {}

    def replace(self, by_layout: Mapping[MigLayout, Losses]) -> None:
        """Forget what was confirmed before, and count what is confirmed for each of these layouts."""
        self.by_layout = by_layout

    @property
    def uuids(self) -> set[str]:
        """The GPUs and MIG devices (UUIDs) whose leases no layout waits for."""
        uuids: set[str] = set()
        for losses in self.by_layout.values():
            uuids |= losses.uuids
        return uuids


class LayoutTask(NamedTuple):
    """A layout to bring into effect on a GPU."""

    layout: MigLayout
    gpu: Gpu
    #: What keeps GPUs and MIG devices; None if the leases are not known yet, so that nothing is removed.
    blockers: Blockers | None
    #: The GPUs and MIG devices (UUIDs) that can be leased while the layout is brought into effect.
    offered: frozenset[str] = frozenset()
    #: What waits neither for leases nor for other programs, because the operator has confirmed it.
    confirmed: Losses = NO_LOSSES
    #: Why the layout was not in effect before.
    last: Reason = NO_REASON
    #: Where its instances are restored, while our others are destroyed; None if that is to be found.
    places: tuple[Placement, ...] | None = None
    #: Whether the configuration has no layout anymore, so that only a requested mode is cancelled.
    withdrawn: bool = False


class LayoutResult(NamedTuple):
    """By GPU UUID: why layouts are not in effect (an empty reason if they are), and what was changed.

    `settled` has the instances with which layouts are in effect, other programs' changes meanwhile not
    included. `inventory` are the GPUs afterwards, None if they have not been scanned.
    """

    reasons: Mapping[str, Reason]
    changes: Mapping[str, str]
    settled: Mapping[str, tuple[MigInstance, ...]] = {}
    inventory: Inventory | None = None


def bring_into_effect(
    tasks: Iterable[LayoutTask], mig: Mig, originals: Originals, is_ended: Callable[[], bool] = bool
) -> LayoutResult:
    """Bring the layouts into effect as far as possible, by driver calls that may be slow.

    No step is made once `is_ended`.
    """
    why: dict[str, Reason] = {}
    changes: dict[str, str] = {}
    settled: dict[str, tuple[MigInstance, ...]] = {}
    for task in tasks:
        uuid, name = task.layout.gpu_uuid, f"GPU {task.gpu.address}"
        try:
            work = LayoutWork(task, mig, originals, is_ended)
        except HostError as error:
            why[uuid] = _cannot_be_changed(error, error.code)
            continue
        try:
            why[uuid] = work.apply()
            settled[uuid] = work.settled
        except YunionError as error:
            is_other = isinstance(error, DriverError) and error.code not in _CODES
            why[uuid] = _cannot_be_changed(error, reasons.MIG_REFUSED if is_other else error.code)
        if work.done:
            changes[uuid] = ", ".join(work.done)
            log.info("%s: MIG: %s", name, changes[uuid])
    return LayoutResult(why, changes, settled)


def _cannot_be_changed(error: YunionError, code: str) -> Reason:
    return Reason(f"its MIG layout cannot be changed: {error.message}", code)


_CODES = (
    reasons.MIG_IN_USE, reasons.MIG_RESET_REQUIRED, reasons.MIG_NO_PERMISSION, reasons.MIG_NOT_SUPPORTED,
    reasons.MIG_INSUFFICIENT_RESOURCES, reasons.DRIVER_HUNG, reasons.GPU_LOST,
)  # fmt: skip


#: Refusals after which it is certain that the driver has created no instance.
_NOTHING_CREATED = (
    reasons.MIG_NO_PERMISSION, reasons.MIG_NOT_SUPPORTED, reasons.MIG_INSUFFICIENT_RESOURCES,
)  # fmt: skip


class LayoutWork:
    """One GPU on its way to its layout: the mode first, then the instances, as NVIDIA's mig-parted does."""

    def __init__(
        self, task: LayoutTask, mig: Mig, originals: Originals, is_ended: Callable[[], bool] = bool
    ) -> None:
        self._task = task
        self._is_ended = is_ended
        self._uuid = task.layout.gpu_uuid
        self._layout = task.layout
        self._mig = mig
        self._originals = originals
        #: Raises HostError if it cannot be read.
        self._record = originals.layout(self._uuid)
        self._made: list[MigInstance] = []
        #: What was changed, as text.
        self.done: list[str] = []
        #: The instances with which the layout is in effect.
        self.settled: tuple[MigInstance, ...] = ()

    def apply(self) -> Reason:
        """Return why the layout is not in effect; empty if it is."""
        mode = self._mig.mode(self._uuid)
        existing = self._instances() if mode.enabled else ()
        self._note_ours(existing)
        if mode.enabled != self._layout.enabled:
            why = self._switch(mode, existing)
            if why or not self._layout.enabled:
                return why
            existing = self._instances()
        elif mode.pending != mode.enabled:  # another program has requested the other mode
            self._mig.set_mode(self._uuid, mode.enabled)
            self.done.append(f"MIG mode will not be switched {'on' if mode.pending else 'off'}")
        if self._task.withdrawn:
            self._write(MigRecord(created=self._record.created))
            return NO_REASON
        return self._apply_instances(existing) if self._layout.enabled else NO_REASON

    # -- the mode

    def _switch(self, mode: MigMode, existing: Sequence[MigInstance]) -> Reason:
        to = self._layout.enabled
        if why := self._why_not_switched(existing):
            return why
        if mode.pending == to and self._task.last.code == reasons.MIG_RESET_REQUIRED:
            return self._task.last
        self._remember_before(mode, existing)
        for instance in existing:
            self._destroy(instance)
        self._begin_step()
        mode = self._mig.set_mode(self._uuid, to)
        shown = "on" if to else "off"
        if mode.enabled == to:
            self.done.append(f"switched MIG mode {shown}")
            return NO_REASON
        if mode.in_use:
            what = f"MIG mode cannot be switched {shown} while a process uses the GPU"
            return Reason(what, reasons.MIG_IN_USE)
        what = f"MIG mode will be {shown} after the next reset of the GPU"
        return Reason(what, reasons.MIG_RESET_REQUIRED)

    def _why_not_switched(self, existing: Sequence[MigInstance]) -> Reason:
        if self._layout.enabled:
            return self._why_gpu_is_busy()
        stay = [one for one in existing if one.id in self._fixed(existing)]
        stay = [one for one in stay if self._pids(one) or not self._is_confirmed(one)]
        return self._why_in_the_way(stay) if stay else NO_REASON

    def _why_gpu_is_busy(self) -> Reason:
        if self._task.blockers is None:
            return Reason(f"{MODE_ON} waits until the leases are known", reasons.MIG_PENDING)
        pids = self._mig.processes(self._uuid)
        is_confirmed = self._uuid in self._task.confirmed.uuids
        if not pids and (is_confirmed or not self._is_kept(self._uuid)):
            return NO_REASON
        return self._in_use(MODE_ON, self._users(self._uuid, pids) or ITS_USERS)

    # -- the instances

    def _apply_instances(self, existing: Sequence[MigInstance]) -> Reason:
        done = self._change(existing)
        if done.in_the_way:
            return self._why_in_the_way(done.in_the_way)
        if done.is_due:
            self._remember_before(MigMode(enabled=True, pending=True), existing)
        for instance in done.destroy:
            self._destroy(instance)
        for place in done.create:
            self._create(place)
        for instance in done.complete:
            self._begin_step()
            self._note_created(instance)
            self._mig.create_compute(self._uuid, instance.id)
            self.done.append(f"completed g{instance.id} ({instance.profile})")
        self.settled = (*(one for one in existing if one not in done.destroy), *self._made)
        if self.done:
            found = self._instances()
            self._note_ours(found)
            self.settled = tuple(sorted(_as_found(one, found) for one in self.settled))
        left = self._left(done, existing)
        return self._why_in_the_way(left) if left else NO_REASON

    def _change(self, existing: Sequence[MigInstance]) -> LayoutChange:
        places, fixed = self._task.places, self._fixed(existing)
        if places is not None:
            done = change_to(places, existing, fixed)
            left = self._left(done, existing)
            return LayoutChange(in_the_way=left) if left and not done.in_the_way else done
        desired, empty = self._layout.profiles, self._empty(existing)
        used = {one.id for one in existing if self._is_used(one)}
        done = change(desired, existing, fixed, empty, used)
        if done.in_the_way:
            unused = {one.id for one in done.in_the_way if self._can_be_lost(one)}
            done = change(desired, existing, fixed - unused, empty, used) if unused else done
        leased = tuple(one for one in self._left(done, existing) if self._can_be_lost(one))
        return done._replace(destroy=(*done.destroy, *leased))

    def _left(self, done: LayoutChange, existing: Iterable[MigInstance]) -> tuple[MigInstance, ...]:
        """Return our instances that the layout does not have, but that are in use."""
        if done.in_the_way:
            return ()
        return tuple(one for one in existing if self._is_ours(one) and one not in (*done.keep, *done.destroy))

    def _empty(self, existing: Iterable[MigInstance]) -> set[int]:
        """Return the ids of other programs' instances that have no compute instance yet."""
        return {one.id for one in existing if not (one.compute_instances or self._is_ours(one))}

    def _fixed(self, existing: Iterable[MigInstance]) -> set[int]:
        """Return the ids of the instances that must not be destroyed."""
        return {
            one.id for one in existing if not self._is_ours(one) or self._is_kept(one.uuid) or self._pids(one)
        }

    def _is_ours(self, instance: MigInstance) -> bool:
        return self._record.owns(self._recorded(instance))

    def _recorded(self, instance: MigInstance) -> MigInstance:
        """Return the instance as it was before another program destroyed its compute instance, if one did."""
        before = (one for one in self._record.created if one.place == instance.place)
        return instance if instance.compute_instances else next(before, instance)

    def _is_kept(self, uuid: str) -> bool:
        """Whether a lease or MPS server keeps the GPU or instance, or one might while the layout changes."""
        blockers = self._task.blockers
        return blockers is None or uuid in self._task.offered or bool(blockers.against(uuid, UNUSED))

    def _is_used(self, instance: MigInstance) -> bool:
        return self._is_kept(instance.uuid) or bool(self._mig.processes(self._uuid, instance.id))

    def _can_be_lost(self, instance: MigInstance) -> bool:
        return self._is_confirmed(instance) and not self._pids(instance)

    def _is_confirmed(self, instance: MigInstance) -> bool:
        return instance.uuid in self._task.confirmed.uuids or instance in self._task.confirmed.others

    def _pids(self, instance: MigInstance) -> set[int]:
        return self._mig.processes(self._uuid, instance.id)

    def _users(self, uuid: str, pids: Collection[int]) -> Users:
        """Return the leases and MPS servers of the GPU or instance, or its processes if that has none."""
        known = NO_USERS
        if self._task.blockers and uuid not in self._task.confirmed.uuids:
            known = self._task.blockers.of_gpu(uuid)
        return known or Users(processes=tuple(sorted(pids)))

    def _why_in_the_way(self, instances: Iterable[MigInstance]) -> Reason:
        users = {one: self._users(one.uuid, self._pids(one)) for one in instances}
        for one, its_users in users.items():
            if self._is_ours(one) or self._is_confirmed(one):
                continue
            if its_users.processes and self._task.places is not None:
                continue  # the process has to end before the operator can destroy the instance by hand
            use = f" and {its_users} use{'' if len(its_users.processes) > 1 else 's'}" if its_users else ""
            what = f"{_name(one)}, which another program {_what_was_done(one)}{use}, is in the way"
            return Reason(f"{what} of its MIG layout", reasons.MIG_FOREIGN_INSTANCE)
        if self._task.blockers is None and not any(users.values()):
            return Reason(f"{_LAYOUT} waits until the leases are known", reasons.MIG_PENDING)
        used = (f"{some or 'leases and MPS servers'} on {_name(one)}" for one, some in users.items())
        return self._in_use(_LAYOUT, ", ".join(used))

    def _in_use(self, what: str, users: Users | str) -> Reason:
        if self._task.places is not None:
            return Reason(f"that would end {users}", reasons.MIG_IN_USE)
        return wait_reason(what, users, reasons.MIG_IN_USE)

    # -- steps, each recorded

    def _instances(self) -> tuple[MigInstance, ...]:
        return self._mig.instances(self._uuid, self._task.gpu.mig_profiles)

    def _remember_before(self, mode: MigMode, existing: Iterable[MigInstance]) -> None:
        if self._record.before is None:
            compute_mode = self._task.gpu.compute_mode or ""
            before = self._record._replace(enabled_before=mode.enabled, before=tuple(existing))
            self._write(before._replace(compute_mode=compute_mode))

    def _note_ours(self, existing: Sequence[MigInstance]) -> None:
        """Record our instances with their UUIDs, and forget those that are gone, and the intent.

        A later one of another program with the same id is then not taken for ours. The driver call of an
        intent has ended, because no call is made while an earlier one hangs.
        """
        intent = self._record.intent
        made = [one for one in existing if intent and intent.is_for(one)]
        self.done += [f"created g{one.id} ({one.profile}) by a step that was interrupted" for one in made]
        ours = tuple(self._recorded(one) for one in existing if self._is_ours(one))
        if self._task.last.code == reasons.DRIVER_HUNG:
            there = {one.id for one in ours}
            late = (one for one in self._record.created if one.id not in there)
            self.done += [f"destroyed g{one.id} ({one.profile}) by a call that hung" for one in late]
        if ours != self._record.created or intent:
            self._write(self._record._replace(created=ours, intent=None))

    def _destroy(self, instance: MigInstance) -> None:
        self._begin_step()
        kept = tuple(one for one in self._record.created if one.id != instance.id)
        self._mig.destroy(self._uuid, instance.id)
        self._write(self._record._replace(created=kept))
        self.done.append(f"destroyed g{instance.id} ({instance.profile})")

    def _create(self, place: Placement) -> None:
        self._begin_step()
        profile = place.profile
        intent = MigIntent(profile.name, place.start, tuple(one.id for one in self._instances()))
        self._write(self._record._replace(intent=intent))
        try:
            number = self._mig.create(self._uuid, profile, place.start)
        except DriverError as error:
            if error.code in _NOTHING_CREATED:
                self._write(self._record._replace(intent=None))
            raise
        made = MigInstance(
            id=number,
            profile=profile.name,
            start=place.start,
            size=profile.size,
            compute_instances=0,
        )
        self._note_created(made)
        self._made.append(made)
        if place.is_whole:
            self._mig.create_compute(self._uuid, number)
        self.done.append(f"created g{number} ({profile.name})")

    def _note_created(self, made: MigInstance) -> None:
        """Record the instance, or its new compute instance, before it has a UUID."""
        others = (one for one in self._record.created if one.place != made.place)
        self._write(self._record._replace(created=(*others, made), intent=None))

    def _begin_step(self) -> None:
        if self._is_ended():
            raise BusyError("the daemon is stopping")

    def _write(self, record: MigRecord) -> None:
        self._originals.write_layout(self._uuid, record)
        self._record = record


def _what_was_done(instance: MigInstance) -> str:
    """Return what another program did; without a UUID, the GPU instance itself may have been ours."""
    if instance.uuid:
        return "created"
    divided = "divided into compute instances"
    return divided if instance.compute_instances else "left without a compute instance"


def _as_found(one: MigInstance, found: Iterable[MigInstance]) -> MigInstance:
    """Return the instance with its UUID, unless another one has taken its place meanwhile."""
    return next((other for other in found if one.is_same(other)), one)


def _name(instance: MigInstance) -> str:
    return f"instance g{instance.id} ({instance.profile})"
