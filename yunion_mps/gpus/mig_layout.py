"""The MIG layout of a GPU as a kind of setting: what it is, which step brings it about, and what that needs.

`find_layout` is called on a thread. `decide` is pure: no instance that a lease, a server or a process uses is
destroyed, nor one that another program created, and no MIG mode is switched on while the GPU is in use. Then
nothing changes, and the reason says what the layout waits for. `mig_steps` carries the step out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.mig import MigInstance, MigLayout
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import AT_ONCE, NO_USERS, Users, Wait, all_of, users_awaited, wait_reason
from yunion_mps.gpus.blockers import UNUSED, Blockers
from yunion_mps.gpus.mig_record import MigRecord
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig, MigMode
from yunion_mps.planning.mig import LayoutChange, Placement, change, change_to

_LAYOUT = "its MIG layout"
MODE_ON = "the switch to MIG mode"
#: The text for the users of a GPU if they are not known.
ITS_USERS = "the GPU's leases and control daemon"
#: GPUs since Hopper switch MIG mode without a reset (NVIDIA's MIG user guide).
_SWITCHES_WITHOUT_RESET = (9, 0)
_IF_RESET_REQUIRED = "after a reset of the GPU, if the driver requires one"


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


class LayoutLook(NamedTuple):
    """A layout that may have to be brought into effect on a GPU."""

    layout: MigLayout
    gpu: Gpu
    #: What waits neither for leases nor for other programs, because the operator has confirmed it.
    confirmed: Losses = NO_LOSSES
    #: Why the layout was not in effect before.
    last: Reason = NO_REASON
    #: Where the original instances were, which are restored while our others are destroyed; None if the
    #: layout is not to be restored, so that places are to be found.
    places: tuple[Placement, ...] | None = None
    #: Whether the configuration has no layout anymore, so that only a requested mode is cancelled.
    withdrawn: bool = False

    @property
    def uuid(self) -> str:
        return self.layout.gpu_uuid

    @property
    def is_configured(self) -> bool:
        """Whether the configuration requires the layout, which then also says if that before is restored."""
        return self.places is None and not self.withdrawn


class FoundLayout(NamedTuple):
    """What a GPU has, and what uses it."""

    mode: MigMode
    instances: tuple[MigInstance, ...] = ()
    record: MigRecord = MigRecord()
    #: The PIDs on the whole GPU; they are only asked for if the GPU is not in MIG mode.
    processes: frozenset[int] = frozenset()
    #: The PIDs on each instance, by its id.
    by_instance: Mapping[int, frozenset[int]] = {}


class LayoutStep(NamedTuple):
    """What is to be done on a GPU, as one sequence, and why the layout is not in effect after it."""

    look: LayoutLook
    found: FoundLayout
    #: The record, with our instances as they were found.
    record: MigRecord
    #: The MIG mode to set: another one, or the same one if the request for the other is cancelled.
    mode: bool | None = None
    destroy: tuple[MigInstance, ...] = ()
    create: tuple[Placement, ...] = ()
    #: The instances that get the compute instance that they lack.
    complete: tuple[MigInstance, ...] = ()
    #: What the layout waits for; empty if it is in effect after the step.
    why: Reason = NO_REASON
    #: Whether the GPU then is as it was before our first change, so that the record of that is deleted.
    forgets: bool = False
    #: What earlier steps have done, although their calls were interrupted.
    late: tuple[str, ...] = ()

    @property
    def switches_mode(self) -> bool:
        return self.mode is not None and self.mode != self.found.mode.enabled

    @property
    def changes_layout(self) -> bool:
        """Whether what the GPU had before has to be recorded first."""
        return bool(self.switches_mode or self.destroy or self.create)

    @property
    def effect(self) -> str:
        """When the layout takes effect, as far as that is known."""
        if self.why:
            return effect_of(self.why)
        capability = self.look.gpu.compute_capability or ()
        if self.switches_mode and capability < _SWITCHES_WITHOUT_RESET:
            return _IF_RESET_REQUIRED
        return AT_ONCE


def effect_of(why: Reason) -> str:
    """Return when a layout takes effect that is not in effect for this reason."""
    users = users_awaited(why)
    return users.effect if users else f"later: {why}"


def find_layout(look: LayoutLook, mig: Mig, originals: Originals) -> FoundLayout:
    """Return what the GPU has; call it on a thread. Raises DriverError, or HostError without a record."""
    record = originals.layout(look.uuid)
    mode = mig.mode(look.uuid)
    if not mode.enabled:
        processes = mig.processes(look.uuid) if look.layout.enabled else set[int]()
        return FoundLayout(mode, record=record, processes=frozenset(processes))
    instances = mig.instances(look.uuid, look.gpu.mig_profiles)
    by_instance = {instance.id: frozenset(mig.processes(look.uuid, instance.id)) for instance in instances}
    return FoundLayout(mode, instances, record, by_instance=by_instance)


def decide(
    look: LayoutLook,
    found_layout: FoundLayout,
    blockers: Blockers | None,
    offered: Collection[str] = (),
) -> LayoutStep:
    """Return the step to the layout, as far as nothing keeps the GPU as it is.

    blockers: what keeps GPUs and MIG devices; None if the leases are not known, so that nothing is removed
    offered: the GPUs and MIG devices (UUIDs) that can be leased while the layout is brought into effect
    """
    return _Choice(look, found_layout, blockers, offered).step()


def losses_of(
    look: LayoutLook,
    found_layout: FoundLayout,
    blockers: Blockers | None,
    offered: Collection[str] = (),
) -> Losses:
    """Return what the layout removes once no process uses its GPU, if it does not wait for leases."""
    if look.layout.enabled and not found_layout.mode.enabled:
        return Losses(frozenset({look.uuid}))
    uuids = frozenset(instance.uuid for instance in found_layout.instances)
    asks = look._replace(confirmed=Losses(uuids, found_layout.instances))
    choice = _Choice(asks, found_layout._replace(by_instance={}), blockers, offered)
    removed = choice.change().destroy if look.layout.enabled else found_layout.instances
    others = tuple(instance for instance in removed if not choice.is_ours(instance))
    return Losses(frozenset(instance.uuid for instance in removed if instance.uuid), others)


def noted(record: MigRecord, existing: Sequence[MigInstance]) -> MigRecord:
    """Return the record with our instances as they are now, without those that are gone, and the intent.

    A later one of another program with the same id is then not taken for ours. The driver call of an intent
    has ended, because no call is made while an earlier one hangs.
    """
    ours = tuple(_recorded(record, instance) for instance in existing if _owns(record, instance))
    return record._replace(created=ours, intent=None)


def _owns(record: MigRecord, instance: MigInstance) -> bool:
    return record.owns(_recorded(record, instance))


def _recorded(record: MigRecord, instance: MigInstance) -> MigInstance:
    """Return the instance as it was before another program destroyed its compute instance, if one did."""
    if not instance.compute_instances:
        for created in record.created:
            if created.place == instance.place:
                return created
    return instance


class _Choice:
    """The choice of the step to a layout."""

    def __init__(
        self,
        look: LayoutLook,
        found_layout: FoundLayout,
        blockers: Blockers | None,
        offered: Collection[str],
    ) -> None:
        self._look = look
        self._layout = look.layout
        self._found = found_layout
        self._existing = found_layout.instances
        self._record = noted(found_layout.record, found_layout.instances)
        if look.is_configured and self._record.before is not None:
            self._record = self._record._replace(restores=look.layout.restore)
        self._blockers = blockers
        self._offered = offered

    def step(self) -> LayoutStep:
        mode, layout = self._found.mode, self._layout
        step = LayoutStep(self._look, self._found, self._record, late=tuple(self._late()))
        if mode.enabled != layout.enabled:
            return step if self._look.withdrawn else self._switched(step)
        if mode.pending != mode.enabled:  # another program has requested the other mode
            step = step._replace(mode=mode.enabled)
        if self._look.withdrawn:
            return step._replace(forgets=True)
        return self._divided(step) if layout.enabled else step

    def _late(self) -> list[str]:
        """Return what calls have done that were interrupted or given up, in words."""
        intent = self._found.record.intent
        late = []
        for instance in self._existing:
            if intent and intent.is_for(instance):
                late.append(f"created g{instance.id} ({instance.profile}) by a step that was interrupted")
        if self._look.last.code == reasons.DRIVER_HUNG:
            there = {instance.id for instance in self._record.created}
            for instance in self._found.record.created:
                if instance.id not in there:
                    late.append(f"destroyed g{instance.id} ({instance.profile}) by a call that hung")
        return late

    # -- the mode

    def _switched(self, step: LayoutStep) -> LayoutStep:
        to, last = self._layout.enabled, self._look.last
        why = self._why_gpu_is_busy() if to else self._why_not_switched_off()
        if not why and self._found.mode.pending == to and last.code == reasons.MIG_RESET_REQUIRED:
            why = last
        if why:
            return step._replace(why=why)
        create = self.change().create if to else ()
        return step._replace(mode=to, destroy=self._existing, create=create)

    def _why_gpu_is_busy(self) -> Reason:
        if self._blockers is None:
            return Reason(f"{MODE_ON} waits until the leases are known", reasons.MIG_PENDING)
        uuid, pids = self._look.uuid, self._found.processes
        is_confirmed = uuid in self._look.confirmed.uuids
        if not pids and (is_confirmed or not self._is_kept(uuid)):
            return NO_REASON
        return self._in_use(MODE_ON, self._users(uuid, pids) or ITS_USERS)

    def _why_not_switched_off(self) -> Reason:
        fixed, stay = self._fixed(), []
        for instance in self._existing:
            if instance.id in fixed and (self._pids(instance) or not self._is_confirmed(instance)):
                stay.append(instance)
        return self._why_in_the_way(stay) if stay else NO_REASON

    # -- the instances

    def _divided(self, step: LayoutStep) -> LayoutStep:
        needed = self.change()
        if needed.in_the_way:
            return step._replace(why=self._why_in_the_way(needed.in_the_way))
        left = self._left(needed)
        return step._replace(
            destroy=needed.destroy,
            create=needed.create,
            complete=needed.complete,
            why=self._why_in_the_way(left) if left else NO_REASON,
        )

    def change(self) -> LayoutChange:
        """Return the instances to keep, to destroy and to create."""
        places = self._look.places
        existing = self._existing
        fixed = self._fixed()
        if places is not None:
            needed = change_to(places, existing, fixed)
            left = self._left(needed)
            return LayoutChange(in_the_way=left) if left and not needed.in_the_way else needed
        desired, empty = self._layout.profiles, self._empty()
        used = {instance.id for instance in existing if self._is_kept(instance.uuid) or self._pids(instance)}
        needed = change(desired, existing, fixed, empty, used)
        unused = {instance.id for instance in needed.in_the_way if self._can_be_lost(instance)}
        if unused:
            needed = change(desired, existing, fixed - unused, empty, used)
        leased = tuple(instance for instance in self._left(needed) if self._can_be_lost(instance))
        return needed._replace(destroy=(*needed.destroy, *leased))

    def _left(self, needed: LayoutChange) -> tuple[MigInstance, ...]:
        """Return our instances that the layout does not have, but that are in use."""
        if needed.in_the_way:
            return ()
        known = (*needed.keep, *needed.destroy)
        left = []
        for instance in self._existing:
            if self.is_ours(instance) and instance not in known:
                left.append(instance)
        return tuple(left)

    def _empty(self) -> set[int]:
        """Return the ids of other programs' instances that have no compute instance yet."""
        others = [instance for instance in self._existing if not self.is_ours(instance)]
        return {instance.id for instance in others if not instance.compute_instances}

    def _fixed(self) -> set[int]:
        """Return the ids of the instances that must not be destroyed."""
        fixed = set()
        for instance in self._existing:
            if not self.is_ours(instance) or self._is_kept(instance.uuid) or self._pids(instance):
                fixed.add(instance.id)
        return fixed

    # -- who uses what

    def is_ours(self, instance: MigInstance) -> bool:
        """Whether we created the instance."""
        return _owns(self._record, instance)

    def _is_kept(self, uuid: str) -> bool:
        """Whether a lease or MPS server keeps the GPU or instance, or one might while the layout changes."""
        blockers = self._blockers
        return blockers is None or uuid in self._offered or bool(blockers.against(uuid, UNUSED))

    def _can_be_lost(self, instance: MigInstance) -> bool:
        return self._is_confirmed(instance) and not self._pids(instance)

    def _is_confirmed(self, instance: MigInstance) -> bool:
        confirmed = self._look.confirmed
        return instance.uuid in confirmed.uuids or instance in confirmed.others

    def _pids(self, instance: MigInstance) -> frozenset[int]:
        return self._found.by_instance.get(instance.id, frozenset())

    def _users(self, uuid: str, pids: Collection[int]) -> Users:
        """Return the leases and MPS servers of the GPU or instance, or its processes if that has none."""
        known = NO_USERS
        if self._blockers and uuid not in self._look.confirmed.uuids:
            known = self._blockers.of_gpu(uuid)
        return known or Users(processes=tuple(sorted(pids)))

    # -- what it waits for

    def _why_in_the_way(self, instances: Iterable[MigInstance]) -> Reason:
        users = {instance: self._users(instance.uuid, self._pids(instance)) for instance in instances}
        for instance, its_users in users.items():
            if self.is_ours(instance) or self._is_confirmed(instance):
                continue
            if its_users.processes and self._look.places is not None:
                continue  # the process has to end before the operator can destroy the instance by hand
            use = f" and {its_users} use{'' if len(its_users.processes) > 1 else 's'}" if its_users else ""
            relation = f"which another program {_what_was_done(instance)}{use}"
            obstacle = f"{_name(instance)}, {relation}, is in the way of its MIG layout"
            return Reason(obstacle, reasons.MIG_FOREIGN_INSTANCE)
        if self._blockers is None and not any(users.values()):
            return Reason(f"{_LAYOUT} waits until the leases are known", reasons.MIG_PENDING)
        used = []
        for instance, its_users in users.items():
            used.append(f"{its_users or 'leases and MPS servers'} on {_name(instance)}")
        text = self._in_use(_LAYOUT, ", ".join(used))
        return Wait(text, text.code, all_of(users.values()))

    def _in_use(self, waiting_change: str, users: Users | str) -> Reason:
        if self._look.places is not None:
            return Reason(f"that would end {users}", reasons.MIG_IN_USE)
        return wait_reason(waiting_change, users, reasons.MIG_IN_USE)


def _what_was_done(instance: MigInstance) -> str:
    """Return what another program did; without a UUID, the GPU instance itself may have been ours."""
    if instance.uuid:
        return "created"
    divided = "divided into compute instances"
    return divided if instance.compute_instances else "left without a compute instance"


def _name(instance: MigInstance) -> str:
    return f"instance g{instance.id} ({instance.profile})"
