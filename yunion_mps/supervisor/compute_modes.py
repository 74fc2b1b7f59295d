"""The GPUs' compute modes and time slices: what is due, and the record of what was done."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import DriverError, ShortageError, YunionError
from yunion_mps.gpus.blockers import WITHOUT_MPS, Blockers, Needs, gpus_of
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import DEFAULT, EXCLUSIVE_PROCESS, Event, Gpu, Plan
from yunion_mps.planning.plan import ModeChange, mode_changes
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpu_settings import (
    Setting,
    SettingResult,
    SettingWork,
    carry_out,
    name_of,
    originals,
    report_absent,
    restore_unused,
    with_parents,
)
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.preflight import left_running
from yunion_mps.supervisor.time_slices import NO_SLICES, TIME_SLICE, SliceWork, TimeSlices, time_slice_differs

log = logging.getLogger(__name__)

COMPUTE_MODE = Setting("compute_mode", "compute mode", Nvml.set_compute_mode, Nvml.restore_compute_mode)


_IN_ITS_MODE = "its devices serve; a process that bypasses the control daemon could use it without limits"


class ModeWork(NamedTuple):
    """Compute modes to set, original modes to restore, by GPU UUID, and the same of time slices.

    `unchanged` modes are already as planned; they are recorded as the original ones.
    """

    changes: tuple[ModeChange, ...] = ()
    restore: Mapping[str, str] = {}
    time_slices: SliceWork | tuple[()] = ()
    unchanged: Mapping[str, str] = {}
    leased: frozenset[str] = frozenset()


class ModeResult(NamedTuple):
    """The modes that were set or restored, the errors of other GPUs, by GPU UUID, and the time slices."""

    modes: Mapping[str, str]
    errors: Mapping[str, DriverError]
    #: Why modes could not be restored.
    not_restored: Mapping[str, YunionError] = {}
    #: The modes that the GPUs had before.
    before: Mapping[str, str] = {}
    time_slices: SettingResult = NO_SLICES


def held_by_jobs(nvml: Nvml | None, store: Store, leased: Collection[str], gpus: Collection[Gpu]) -> set[str]:
    """Return the UUIDs of the GPUs whose original modes would keep out processes of jobs without MPS.

    Existing contexts continue in such a mode, but a job that starts, or creates another context, fails. So
    these modes wait until the GPU, or each of its MIG instances, is not `leased` and has no process; `gpus`
    has the instances. A GPU whose mode is not Default now has no such jobs: what uses it is an MPS server.
    """
    strict = {uuid for uuid, mode in originals(COMPUTE_MODE, Originals(store)).items() if mode != DEFAULT}
    if leased and not gpus:  # the driver has failed, so the GPUs of leased instances are not known
        return strict
    if not strict or nvml is None:
        return strict & with_parents(leased, gpus)
    with contextlib.suppress(DriverError, ShortageError):
        now = nvml.compute_modes()
        strict = {uuid for uuid in strict if now.get(uuid, DEFAULT) == DEFAULT}
    return strict & with_parents(_used(nvml, leased), gpus) if strict else set()


def slices_held_by_jobs(nvml: Nvml | None, store: Store, leased: Collection[str]) -> set[str]:
    """Return the UUIDs of the GPUs whose original time slices wait, because time-sliced jobs use them."""
    recorded = originals(TIME_SLICE, Originals(store)).keys()
    return recorded & _used(nvml, leased) if recorded else set()


def changed_slices_held_by_jobs(nvml: Nvml | None, store: Store, leased: Collection[str]) -> set[str]:
    """Return those of `slices_held_by_jobs` whose time slices differ from the original; runs nvidia-smi."""
    held = slices_held_by_jobs(nvml, store, leased)
    recorded = originals(TIME_SLICE, Originals(store)) if held else {}
    return {uuid for uuid in held if time_slice_differs(uuid, recorded[uuid])}


def _used(nvml: Nvml | None, leased: Collection[str]) -> set[str]:
    """Return the UUIDs of the GPUs that are `leased` or have a process."""
    with contextlib.suppress(DriverError, ShortageError):
        return {uuid for uuid, pids in (nvml.processes() if nvml else {}).items() if pids} | set(leased)
    return set(leased)


def leased_without_mps(ledger: Ledger) -> frozenset[str]:
    """Return the GPUs (UUIDs) with leases that need no control daemon."""
    return frozenset(hold.gpu_uuid for hold in ledger.holds() if hold.sharing in WITHOUT_MPS)


class ComputeModes:
    """Decides which compute modes to set and restore; the caller chooses the thread that does so."""

    def __init__(self, gpus: Gpus, fleet: Fleet, emit: Callable[[Event], None]) -> None:
        self._gpus = gpus
        self._fleet = fleet
        self._emit = emit
        self.time_slices = TimeSlices(gpus, emit)
        self._lock = threading.Lock()
        self._ended = False

    def due(self, target: Plan, store: Store | None, ledger: Ledger) -> ModeWork:
        """Return the modes to set, and those to restore because we no longer use their GPUs.

        Without a store there is nothing to restore. Modes that wait for servers are pending in their domains.
        """
        gpus = self._gpus.inventory.gpus
        changes = self._changes(target, gpus)
        recorded = {} if store is None else originals(COMPUTE_MODE, Originals(store))
        in_mig_mode = {gpu.uuid for gpu in gpus if gpu.mig_enabled}
        reachable = {
            gpu.uuid for gpu in gpus if not (gpu.mode_is_fixed or gpu.reason.code in reasons.GPU_ABSENT)
        }
        restore = {
            uuid: mode
            for uuid, mode in recorded.items()
            if uuid not in target.compute_modes and uuid in reachable
            if mode != EXCLUSIVE_PROCESS or uuid not in in_mig_mode  # the driver would refuse
        }
        leased, left = ledger.ways_kept().keys(), set[str]()
        if restore:
            left = gpus_of(left_running(store, self._fleet.known_directories(), leased))
        blockers = Blockers.of(ledger, domains=self._fleet.domains, gpus=gpus, left=left)
        kept_by = {uuid: blockers.against(uuid, Needs(servers=True)) for uuid in restore}
        held = {uuid for uuid, keepers in kept_by.items() if keepers.users}
        for domain in self._fleet.domains:
            domain.hold_modes(holds=not held.isdisjoint(with_parents(domain.in_effect.gpu_uuids, gpus)))
        restore = {uuid: mode for uuid, mode in restore.items() if not kept_by[uuid]}
        known = {*recorded, *(change.gpu_uuid for change in changes)}
        unchanged = {
            str(gpu.uuid): gpu.compute_mode
            for gpu in gpus
            if gpu.compute_mode and not gpu.reason and gpu.uuid not in known
            if gpu.compute_mode == target.compute_modes.get(str(gpu.uuid))
        }
        return ModeWork(
            changes, restore, self.time_slices.due(target, store), unchanged, leased_without_mps(ledger)
        )

    def for_layouts(self, target: Plan, used: Collection[str]) -> ModeWork:
        """Return the modes to set before MIG mode is switched, which resets them.

        GPUs that are `used` (UUIDs) are left out.
        """
        switched = {(one.gpu_uuid, not one.enabled) for one in target.layouts if one.gpu_uuid not in used}
        gpus = [gpu for gpu in self._gpus.inventory.gpus if (gpu.uuid, bool(gpu.mig_enabled)) in switched]
        return ModeWork(self._changes(target, gpus))

    def gpus_in_wrong_mode(self, target: Plan, store: Store | None) -> set[str]:
        """Return the GPUs (UUIDs) whose mode is not the planned or, without one, the original one."""
        recorded = {} if store is None else originals(COMPUTE_MODE, Originals(store))
        modes = {gpu.uuid: gpu.compute_mode for gpu in self._gpus.inventory.gpus}
        desired = {**recorded, **target.compute_modes}
        return {uuid for uuid, mode in desired.items() if modes.get(uuid) != mode}

    def find_corrections(
        self, target: Plan, gpus: Iterable[Gpu], slices: Mapping[str, str]
    ) -> Iterator[tuple[Setting, ModeChange]]:
        """Yield the corrections of settings that another program has changed.

        `gpus` have just been scanned, and `slices` has their current time slices by UUID.
        """
        for change in self._changes(target, gpus):
            yield COMPUTE_MODE, change
        for change in self.time_slices.find_corrections(target, slices):
            yield TIME_SLICE, change

    def _changes(self, target: Plan, gpus: Iterable[Gpu]) -> tuple[ModeChange, ...]:
        through_mps = {uuid for domain in self._fleet.domains for uuid in domain.in_effect.gpu_uuids}
        loose = {uuid for uuid, mode in target.compute_modes.items() if mode == DEFAULT}
        held = through_mps & loose  # until its control daemon has ended
        changeable = [gpu for gpu in gpus if not (gpu.reason or gpu.mode_is_fixed) and gpu.uuid not in held]
        return mode_changes(target, changeable)

    def set(self, work: ModeWork, nvml: Nvml | None, store: Store) -> ModeResult:
        """Do the work, unless `end()` was called; run it on a thread, because it calls the driver."""
        with self._lock:
            if self._ended:
                return ModeResult({}, {})
            gpus, restore = self._gpus.inventory.gpus, work.restore
            if restore:
                held = held_by_jobs(nvml, store, work.leased, gpus)
                restore = {uuid: mode for uuid, mode in restore.items() if uuid not in held}
            todo = SettingWork(work.changes, restore, work.unchanged)
            modes = carry_out(COMPUTE_MODE, todo, nvml, Originals(store), gpus)
            slices = work.time_slices
            if slices and slices.restore:
                through_mps = {uuid for domain in self._fleet.domains for uuid in domain.in_effect.gpu_uuids}
                held = slices_held_by_jobs(nvml, store, work.leased) - through_mps
                kept = {uuid: value for uuid, value in slices.restore.items() if uuid not in held}
                slices = slices._replace(restore=kept)
            return ModeResult(*modes, self.time_slices.set(slices, nvml, store))

    def end(self) -> None:
        self._ended = True

    def restore(self, nvml: Nvml | None, store: Store, left: Collection[str], ledger: Ledger) -> bool:
        """Restore all modes except those of GPUs in `left` or with jobs; return whether there were any."""
        with self._lock:  # wait for work that is under way
            gpus = self._gpus.inventory.gpus
            leased = leased_without_mps(ledger)
            held = held_by_jobs(nvml, store, leased, gpus) - set(left)
            held_slices = changed_slices_held_by_jobs(nvml, store, leased) - set(left)
            for label, uuids in ((COMPUTE_MODE.label, held), (TIME_SLICE.label, held_slices)):
                for uuid in uuids:
                    what = f"{name_of(uuid, gpus)} keeps its {label}, because jobs without MPS use it"
                    log.warning("%s; %s", what, "once they have ended: yunion-mps-daemon --restore")
            left = {*left, *held}
            slices = restore_unused(TIME_SLICE, Originals(store), nvml, held_slices, gpus)
            modes = restore_unused(COMPUTE_MODE, Originals(store), nvml, left, gpus)
            report_absent({COMPUTE_MODE: modes, TIME_SLICE: slices}, gpus)
            result = ModeResult(*modes, slices)
            return self.note(result, "the original mode was restored")

    def note(self, result: ModeResult, why: str) -> bool:
        """Record modes that were set or restored, and GPUs that refused; return whether there were any."""
        has_slices = self.time_slices.note(result.time_slices)
        for gpu in self._gpus.inventory.gpus:
            after = result.modes.get(gpu.uuid or "")
            if after and after != gpu.compute_mode:
                self._emit(_event("info", gpu, f"{gpu.compute_mode} -> {after}", why))
            error = result.errors.get(gpu.uuid or "")
            if error and error.code == reasons.COMPUTE_MODE_UNSUPPORTED:
                event = _event("warning", gpu, f"stays {gpu.compute_mode}", error.message)
                self._emit(event._replace(consequence=_IN_ITS_MODE, code=error.code))
        if result.modes or result.errors:
            self._gpus.note_modes(result.modes, result.errors)
            return True
        return has_slices

    def record_external_changes(self, before: Iterable[Gpu], target: Plan) -> None:
        """Record modes that were as planned `before` and were changed by another program."""
        modes = {gpu.uuid: gpu.compute_mode for gpu in before}
        for gpu in self._gpus.inventory.gpus:
            planned = target.compute_modes.get(gpu.uuid or "")
            if planned and modes.get(gpu.uuid) == planned != gpu.compute_mode and not gpu.reason:
                what = f"{planned} -> {gpu.compute_mode}"
                event = _event("warning", gpu, what, "another program changed it")
                consequence = f"it is set to {planned} again"
                self._emit(event._replace(consequence=consequence, code=reasons.COMPUTE_MODE_CHANGED))

    def refuse_if_none_can_be_set(self, target: Plan) -> None:
        """Raise DriverError if every GPU has refused its mode."""
        errors = self._gpus.mode_errors
        gpus = [gpu for gpu in self._gpus.inventory.gpus if gpu.pci_address not in target.unavailable]
        if errors and all(gpu.uuid in errors for gpu in gpus if gpu.uuid in target.gpu_uuids):
            first = next(iter(errors.values()))
            what = f"no GPU's compute mode can be set: {first.message}"
            raise DriverError(what, first.hint, reasons.COMPUTE_MODE_REFUSED)


def _event(severity: str, gpu: Gpu, what: str, cause: str) -> Event:
    return Event(severity, "compute_mode", gpu.address, what, cause)
