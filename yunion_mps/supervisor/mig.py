"""MIG layouts: brought into effect step by step, and restored.

Before each step it is recorded what is ours, so that the daemon after one that was killed continues where it
was, and never destroys an instance that another program created: only those whose creation was recorded are
ours. An instance that a lease, a server or a process uses is not destroyed either, and no MIG mode changes on
a GPU in use; then nothing changes, and the reason says what the layout waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import BusyError, DriverError, YunionError
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig, MigMode
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.mig import MigInstance, MigLayout, MigProfile
from yunion_mps.models import Gpu, Inventory
from yunion_mps.planning.mig import LayoutChange, change
from yunion_mps.reasons import NO_REASON, Reason

log = logging.getLogger(__name__)


class MigRecord(NamedTuple):
    """What the state file says of a GPU: its mode and layout before our first change, and what we created.

    `before` has the profile's name of each instance, None while nothing was changed.
    """

    enabled_before: bool = False
    before: tuple[str, ...] | None = None
    created: tuple[MigInstance, ...] = ()

    @classmethod
    def read(cls, store: Store, gpu_uuid: str) -> MigRecord:
        """Return the record; an empty one, which owns no instance, if there is none."""
        value = store.recorded_mig(gpu_uuid)
        try:
            before = None if value["before"] is None else tuple(map(str, value["before"]))
            created = tuple(MigInstance(*instance) for instance in value["created"])
            return cls(bool(value["enabled_before"]), before, created)
        except (TypeError, KeyError, ValueError):
            return cls()

    def write(self, store: Store, gpu_uuid: str) -> None:
        store.record_mig(gpu_uuid, self._asdict())

    def owns(self, instance: MigInstance) -> bool:
        """Whether we created it."""
        return any(one.is_same(instance) for one in self.created)


class LayoutTask(NamedTuple):
    """A layout to bring into effect on `gpu`; `busy` has the UUIDs of GPUs and MIG devices that must stay.

    They are leased, or can be leased while the layout is brought into effect. If `busy` is None, because the
    leases are not known yet, nothing is taken away. With `force`, instances of other programs are destroyed
    too, and leases do not count. `last` is why it was not in effect before, and `users` describes the leases
    and MPS servers of GPUs and MIG devices (UUIDs).
    """

    layout: MigLayout
    gpu: Gpu
    busy: frozenset[str] | None
    force: bool = False
    last: Reason = NO_REASON
    users: Mapping[str, str] = {}


class Losses(NamedTuple):
    """What a forced layout takes away: the UUIDs of GPUs and MIG devices, and instances of other programs."""

    uuids: frozenset[str]
    others: tuple[MigInstance, ...]


class LayoutResult(NamedTuple):
    """By GPU UUID: why layouts are not in effect (an empty reason if they are), and what was changed.

    `settled` has the instances with which layouts are in effect, other programs' changes meanwhile not
    included. `inventory` are the GPUs afterwards, None if they have not been scanned.
    """

    reasons: Mapping[str, Reason]
    changes: Mapping[str, str]
    settled: Mapping[str, tuple[MigInstance, ...]] = {}
    inventory: Inventory | None = None


def carry_out(
    tasks: Iterable[LayoutTask], mig: Mig, store: Store, is_ended: Callable[[], bool] = bool
) -> LayoutResult:
    """Bring the layouts into effect as far as possible, by driver calls that may be slow.

    No step is made once `is_ended`.
    """
    why: dict[str, Reason] = {}
    changes: dict[str, str] = {}
    settled: dict[str, tuple[MigInstance, ...]] = {}
    for task in tasks:
        uuid, name = task.layout.gpu_uuid, f"GPU {task.gpu.address}"
        work = _LayoutWork(task, mig, store, is_ended)
        try:
            why[uuid] = work.apply()
            settled[uuid] = work.settled
        except DriverError as error:
            code = error.code if error.code in _CODES else reasons.MIG_REFUSED
            why[uuid] = Reason(f"its MIG layout cannot be changed: {error.message}", code)
        except YunionError as error:
            why[uuid] = Reason(f"its MIG layout cannot be changed: {error.message}", error.code)
        if work.done:
            changes[uuid] = ", ".join(work.done)
            log.info("%s: MIG: %s", name, changes[uuid])
    return LayoutResult(why, changes, settled)


def find_losses(tasks: Iterable[LayoutTask], mig: Mig, store: Store) -> dict[str, Losses]:
    """Return by GPU UUID what would be lost if the layouts were forced; changes nothing.

    Raises DriverError.
    """
    return {task.layout.gpu_uuid: _Forecast(task._replace(force=True), mig, store).losses() for task in tasks}


_CODES = (reasons.MIG_IN_USE, reasons.MIG_RESET_REQUIRED, reasons.DRIVER_HUNG, reasons.GPU_LOST)


class _LayoutWork:
    """One GPU on its way to its layout: the mode first, then the instances, as NVIDIA's mig-parted does."""

    def __init__(self, task: LayoutTask, mig: Mig, store: Store, is_ended: Callable[[], bool] = bool) -> None:
        self._task = task
        self._is_ended = is_ended
        self._uuid = task.layout.gpu_uuid
        self._layout = task.layout
        self._mig = mig
        self._store = store
        self._record = MigRecord.read(store, self._uuid)
        self._made: list[MigInstance] = []
        #: What was changed, as text.
        self.done: list[str] = []
        #: The instances with which the layout is in effect.
        self.settled: tuple[MigInstance, ...] = ()

    def apply(self) -> Reason:
        """Return why the layout is not in effect; empty if it is."""
        mode = self._mig.mode(self._uuid)
        existing = self._instances() if mode.enabled else ()
        if mode.enabled != self._layout.enabled:
            why = self._switch(mode, existing)
            if why or not self._layout.enabled:
                return why
            existing = self._instances()
        elif mode.pending != mode.enabled:  # another program has asked for what the layout does not want
            self._mig.set_mode(self._uuid, mode.enabled)
        return self._apply_instances(existing) if self._layout.enabled else NO_REASON

    # -- the mode

    def _switch(self, mode: MigMode, existing: Sequence[MigInstance]) -> Reason:
        to = self._layout.enabled
        stay = [one for one in existing if one.id in self._fixed(existing)]
        if self._task.force:
            stay = [one for one in stay if self._pids(one)]
        why = self._why_gpu_is_busy() if to else (self._why_in_the_way(stay) if stay else NO_REASON)
        if why:
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

    def _why_gpu_is_busy(self) -> Reason:
        task = self._task
        if task.busy is None:
            return Reason(
                "MIG mode is switched on once it is known that no lease is in the way", reasons.MIG_PENDING
            )
        pids = self._mig.processes(self._uuid)
        if pids:
            what = f"MIG mode cannot be switched on while processes use the GPU ({_pids(pids)})"
            return Reason(what, reasons.MIG_IN_USE)
        if self._uuid in task.busy and not task.force:
            return mode_waits(task.users.get(self._uuid, ""))
        return NO_REASON

    # -- the instances

    def _apply_instances(self, existing: Sequence[MigInstance]) -> Reason:
        self._note_ours(existing)
        done = self._change(existing)
        if done.in_the_way:
            return self._why_in_the_way(done.in_the_way)
        if done.is_due:
            self._remember_before(MigMode(enabled=True, pending=True), existing)
        for instance in done.destroy:
            self._destroy(instance)
        for place in done.create:
            self._create(place.profile, place.start)
        for instance in done.keep:
            if not instance.compute_instances:
                self._mig.create_compute(self._uuid, instance.id)
                self.done.append(f"completed g{instance.id} ({instance.profile})")
        self.settled = (*(one for one in existing if one not in done.destroy), *self._made)
        if self.done:
            found = self._instances()
            self._note_ours(found)
            self.settled = tuple(sorted(_as_found(one, found) for one in self.settled))
        return NO_REASON

    def _change(self, existing: Sequence[MigInstance]) -> LayoutChange:
        desired, fixed = self._layout.profiles, self._fixed(existing)
        done = change(desired, existing, fixed)
        if done.in_the_way and self._task.force:
            unused = {one.id for one in done.in_the_way if not self._pids(one)}
            return change(desired, existing, fixed - unused)
        return done

    def _fixed(self, existing: Iterable[MigInstance]) -> set[int]:
        """Return the ids of the instances that must not be destroyed."""
        return {one.id for one in existing if not self._is_ours(one) or self._is_busy(one) or self._pids(one)}

    def _is_ours(self, instance: MigInstance) -> bool:
        return self._record.owns(instance)

    def _is_busy(self, instance: MigInstance) -> bool:
        busy = self._task.busy
        return busy is None or instance.uuid in busy

    def _pids(self, instance: MigInstance) -> set[int]:
        return self._mig.processes(self._uuid, instance.id)

    def _why_in_the_way(self, instances: Iterable[MigInstance]) -> Reason:
        for instance in instances:
            name = f"instance g{instance.id} ({instance.profile})"
            pids = self._pids(instance)
            if pids:
                what = f"{name} is in the way of its MIG layout, but processes use it ({_pids(pids)})"
                return Reason(what, reasons.MIG_IN_USE)
            if not self._is_ours(instance) and not self._task.force:
                what = f"{name}, which another program created, is in the way of its MIG layout"
                return Reason(what, reasons.MIG_FOREIGN_INSTANCE)
        users, known = self._task.users, "leases and MPS servers"
        waits = [f"{users.get(one.uuid, known)} on instance g{one.id} ({one.profile})" for one in instances]
        return Reason(f"its MIG layout waits for {', '.join(waits)} to end", reasons.MIG_IN_USE)

    # -- steps, each recorded

    def _instances(self) -> tuple[MigInstance, ...]:
        return self._mig.instances(self._uuid, self._task.gpu.mig_profiles)

    def _remember_before(self, mode: MigMode, existing: Iterable[MigInstance]) -> None:
        if self._record.before is None:
            before = tuple(one.profile for one in existing)
            self._write(self._record._replace(enabled_before=mode.enabled, before=before))

    def _note_ours(self, existing: Sequence[MigInstance]) -> None:
        """Record our instances with their UUIDs, and forget those that are gone.

        A later one of another program with the same id is then not taken for ours.
        """
        ours = tuple(one for one in existing if self._is_ours(one))
        if self._task.last.code == reasons.DRIVER_HUNG:
            there = {one.id for one in ours}
            late = (one for one in self._record.created if one.id not in there)
            self.done += [f"destroyed g{one.id} ({one.profile}) by a call that hung" for one in late]
        if ours != self._record.created:
            self._write(self._record._replace(created=ours))

    def _destroy(self, instance: MigInstance) -> None:
        self._begin_step()
        # Without its compute instance, it has no UUID: should this be interrupted there, it is still ours.
        without = (one._replace(uuid="") if one.id == instance.id else one for one in self._record.created)
        self._write(self._record._replace(created=tuple(without)))
        self._mig.destroy(self._uuid, instance.id)
        kept = tuple(one for one in self._record.created if one.id != instance.id)
        self._write(self._record._replace(created=kept))
        self.done.append(f"destroyed g{instance.id} ({instance.profile})")

    def _create(self, profile: MigProfile, start: int) -> None:
        self._begin_step()
        number = self._mig.create(self._uuid, profile, start)
        made = MigInstance(number, profile.name, start, profile.size, "", 0)
        self._write(self._record._replace(created=(*self._record.created, made)))
        self._made.append(made)
        self._mig.create_compute(self._uuid, number)
        self.done.append(f"created g{number} ({profile.name})")

    def _begin_step(self) -> None:
        if self._is_ended():
            raise BusyError("the daemon is stopping")

    def _write(self, record: MigRecord) -> None:
        record.write(self._store, self._uuid)
        self._record = record


def _as_found(one: MigInstance, found: Iterable[MigInstance]) -> MigInstance:
    """Return the instance with its UUID, unless another one has taken its place meanwhile."""
    return next((other for other in found if one.is_same(other)), one)


class _Forecast(_LayoutWork):
    """What a layout leads to once no process uses its GPU."""

    def losses(self) -> Losses:
        mode = self._mig.mode(self._uuid)
        if self._layout.enabled and not mode.enabled:
            return Losses(frozenset({self._uuid}), ())
        existing = self._instances() if mode.enabled else ()
        goes = self._change(existing).destroy if self._layout.enabled else existing
        others = tuple(one for one in goes if not self._is_ours(one))
        return Losses(frozenset(one.uuid for one in goes if one.uuid), others)

    def _pids(self, instance: MigInstance) -> set[int]:
        del instance
        return set()


def mode_waits(users: str) -> Reason:
    """Return why MIG mode is not switched on yet: because of these leases and MPS servers of the GPU."""
    what = f"MIG mode is switched on after the end of {users or 'its leases and its control daemon'}"
    return Reason(what, reasons.MIG_IN_USE)


def _pids(pids: Iterable[int]) -> str:
    return f"PID {', '.join(map(str, sorted(pids)))}"


def restore(
    layouts: Iterable[MigLayout],
    gpus: Collection[Gpu],
    nvml: Nvml | None,
    store: Store,
    used: Iterable[str],
) -> LayoutResult:
    """Restore the layouts from before our first change, where that is desired, and forget those restored.

    Where a GPU or instance that would have to go is `used` (UUIDs) or has processes, nothing changes.
    """
    if nvml is None:
        return LayoutResult({}, {})
    mig, by_uuid, busy = Mig(nvml), {gpu.uuid: gpu for gpu in gpus}, frozenset(used)
    tasks = []
    for layout in layouts:
        gpu, record = by_uuid.get(layout.gpu_uuid), MigRecord.read(store, layout.gpu_uuid)
        if layout.restore and gpu and record.before is not None:
            profiles = {profile.name: profile for profile in gpu.mig_profiles}
            before = tuple(profiles[name] for name in record.before if name in profiles)
            former = MigLayout(layout.gpu_uuid, record.enabled_before, before)
            tasks.append(LayoutTask(former, gpu, busy))
    result = carry_out(tasks, mig, store)
    for uuid, why in result.reasons.items():
        if why:
            needs_reset = why.code == reasons.MIG_RESET_REQUIRED
            how = f"; reset it: nvidia-smi --gpu-reset -i {uuid}" if needs_reset else ""
            what = f"the MIG layout of GPU {by_uuid[uuid].address} is not restored: {why}{how}"
            log.error("%s; then: yunion-mps-daemon --restore", what)
        else:
            store.forget_mig(uuid)
    return result
