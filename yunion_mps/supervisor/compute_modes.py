"""The GPUs' compute modes: recorded before a change, set and read back, and restored at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import DriverError, HostError, YunionError
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Event, Gpu, Plan
from yunion_mps.planning.plan import ModeChange, mode_changes
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.preflight import gpus_of, left_running

log = logging.getLogger(__name__)


class ModeWork(NamedTuple):
    """Compute modes to set, and original modes to restore, by GPU UUID."""

    changes: tuple[ModeChange, ...] = ()
    restore: Mapping[str, str] = {}


class ModeResult(NamedTuple):
    """The modes that were set or restored, and the errors of other GPUs, by GPU UUID."""

    modes: Mapping[str, str]
    errors: Mapping[str, DriverError]
    #: Why modes could not be restored.
    not_restored: Mapping[str, YunionError] = {}


def name_of(uuid: str, gpus: Iterable[Gpu]) -> str:
    """Return `GPU 00:06.0` if it is among `gpus`, otherwise its UUID, which begins with `GPU-`."""
    return next((f"GPU {gpu.address}" for gpu in gpus if gpu.uuid == uuid), uuid)


def carry_out(work: ModeWork, nvml: Nvml | None, store: Store, gpus: Collection[Gpu]) -> ModeResult:
    """Set and restore modes, by driver calls that may be slow; raises HostError if they cannot be recorded.

    If `nvml` is None because MPS is disabled, NVML is opened for this call. `gpus` give the GPUs' addresses.
    """
    if not any(work):
        return ModeResult({}, {})
    if nvml is None:
        try:
            with Nvml() as own:
                return carry_out(work, own, store, gpus)
        except DriverError as error:
            log.error("compute modes cannot be restored: %s; %s", error.message, error.hint)
            return ModeResult({}, {})
    modes: dict[str, str] = {}
    errors: dict[str, DriverError] = {}
    if work.changes:
        store.remember_modes({change.gpu_uuid: change.before for change in work.changes})
    for uuid, before, after in work.changes:
        name = name_of(uuid, gpus)
        try:
            nvml.set_compute_mode(uuid, after)
            log.info("%s: compute mode %s -> %s", name, before, after)
            modes[uuid] = after
        except DriverError as error:
            log.error("%s: compute mode cannot be set: %s; %s", name, error.message, error.hint)
            errors[uuid] = error
    not_restored = _restore(work.restore, nvml, store, gpus)
    modes |= {uuid: mode for uuid, mode in work.restore.items() if uuid not in not_restored}
    return ModeResult(modes, errors, not_restored)


def _restore(
    modes: Mapping[str, str], nvml: Nvml, store: Store, gpus: Collection[Gpu]
) -> dict[str, YunionError]:
    """Restore the modes and delete their records; return the errors by GPU UUID."""
    errors: dict[str, YunionError] = {}
    for uuid, mode in modes.items():
        name = name_of(uuid, gpus)
        try:
            if nvml.restore_compute_mode(uuid, mode):
                log.info("%s: compute mode %s was restored", name, mode)
        except YunionError as error:
            what = error.message
            log.error("%s: compute mode %s cannot be restored: %s; %s", name, mode, what, error.hint)
            errors[uuid] = error
        else:
            _forget(uuid, mode, name, store)
    return errors


def _forget(uuid: str, mode: str, name: str, store: Store) -> None:
    try:
        store.forget_mode(uuid)
    except HostError as error:
        what = "its record could not be deleted, so the next start restores it again"
        log.warning("%s: compute mode %s was restored, but %s: %s", name, mode, what, error.message)


def original_modes(store: Store) -> dict[str, str]:
    """Return the recorded modes by GPU UUID; empty, after logging an error, if they cannot be read."""
    try:
        return store.former_modes()
    except HostError as error:
        log.error("compute modes cannot be restored: %s; %s", error.message, error.hint)
        return {}


def restore_unused(
    store: Store, nvml: Nvml | None, used: Collection[str], gpus: Collection[Gpu]
) -> ModeResult:
    """Restore the modes of all GPUs except those `used` (UUIDs); `gpus` give their addresses."""
    modes = {uuid: mode for uuid, mode in original_modes(store).items() if uuid not in used}
    return carry_out(ModeWork(restore=modes), nvml, store, gpus)


class ComputeModes:
    """Decides which compute modes to set and restore; the caller chooses the thread that does so."""

    def __init__(self, gpus: Gpus, fleet: Fleet, emit: Callable[[Event], None]) -> None:
        self._gpus = gpus
        self._fleet = fleet
        self._emit = emit
        self._lock = threading.Lock()
        self._ended = False

    def due(self, target: Plan, store: Store | None) -> ModeWork:
        """Return the modes to set, and those to restore because we no longer use their GPUs.

        Without a store there is nothing to restore. Modes that wait for servers are pending in their domains.
        """
        through_mps = {uuid for domain in self._fleet.domains for uuid in domain.in_effect.gpu_uuids}
        held = through_mps & {gpu.uuid for gpu in target.direct}  # until its control daemon has ended
        gpus = [gpu for gpu in self._gpus.inventory.gpus if not gpu.reason and gpu.uuid not in held]
        changes = mode_changes(target, gpus)
        originals = {} if store is None else original_modes(store)
        restore = {uuid: mode for uuid, mode in originals.items() if uuid not in target.compute_modes}
        used = self._fleet.gpus_in_use() if restore else set()
        for domain in self._fleet.domains:
            domain.hold_modes(holds=not (used & set(restore)).isdisjoint(domain.in_effect.gpu_uuids))
        restore = {uuid: mode for uuid, mode in restore.items() if uuid not in used}
        if restore:
            left = gpus_of(left_running(store, self._fleet.known_directories()))
            restore = {uuid: mode for uuid, mode in restore.items() if uuid not in left}
        return ModeWork(changes, restore)

    def set(self, work: ModeWork, nvml: Nvml | None, store: Store) -> ModeResult:
        """Do the work, unless `end()` was called; run it on a thread, because it calls the driver."""
        with self._lock:
            if self._ended:
                return ModeResult({}, {})
            return carry_out(work, nvml, store, self._gpus.inventory.gpus)

    def end(self) -> None:
        self._ended = True

    def restore(self, nvml: Nvml | None, store: Store, left: Collection[str]) -> bool:
        """Restore the modes of all GPUs except those in `left`; return whether there were any."""
        with self._lock:  # wait for work that is under way
            result = restore_unused(store, nvml, left, self._gpus.inventory.gpus)
            return self.note(result, "the original mode was restored")

    def note(self, result: ModeResult, why: str) -> bool:
        """Record modes that were set or restored, and GPUs that refused; return whether there were any."""
        for gpu in self._gpus.inventory.gpus:
            after = result.modes.get(gpu.uuid or "")
            if after and after != gpu.compute_mode:
                self._emit(_event("info", gpu, f"{gpu.compute_mode} -> {after}", why))
        if result.modes or result.errors:
            self._gpus.note_modes(result.modes, result.errors)
            return True
        return False

    def record_external_changes(self, before: Mapping[str | None, str | None], target: Plan) -> None:
        """Record modes that were as planned `before` (by GPU UUID) and were changed by another program."""
        for gpu in self._gpus.inventory.gpus:
            planned = target.compute_modes.get(gpu.uuid or "")
            if planned and before.get(gpu.uuid) == planned != gpu.compute_mode and not gpu.reason:
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
