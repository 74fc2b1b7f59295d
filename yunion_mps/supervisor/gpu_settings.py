"""Settings of GPUs: recorded before a change, set and read back, and restored at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from yunion_mps.addresses import physical_gpu
from yunion_mps.errors import DriverError, HostError, YunionError
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Gpu
from yunion_mps.planning.plan import ModeChange
from yunion_mps.reasons import COMPUTE_MODE_UNSUPPORTED, GPU_ABSENT, MIG_ENABLED

log = logging.getLogger(__name__)


class Setting(NamedTuple):
    """A setting of GPUs: the name of its records, what messages call it, and how it is set and restored.

    Both read it back. Restoring changes it only if it differs, and returns whether it did.
    """

    name: str
    label: str
    set: Callable[[Nvml, str, str], None]
    restore: Callable[[Nvml, str, str], bool]


class SettingWork(NamedTuple):
    """Values to set, and original values to restore, by GPU UUID.

    `unchanged` values are already as planned; they are recorded, because another program may change them.
    """

    changes: tuple[ModeChange, ...] = ()
    restore: Mapping[str, str] = {}
    unchanged: Mapping[str, str] = {}


class SettingResult(NamedTuple):
    """The values that were set or restored, and the errors of other GPUs, by GPU UUID."""

    values: Mapping[str, str]
    errors: Mapping[str, DriverError]
    #: Why values could not be restored.
    not_restored: Mapping[str, YunionError] = {}
    #: The values that the GPUs had before.
    before: Mapping[str, str] = {}


def name_of(uuid: str, gpus: Iterable[Gpu]) -> str:
    """Return `GPU 00:06.0` if it or one of its instances is in `gpus`, otherwise its UUID (`GPU-…`)."""
    return next((f"GPU {physical_gpu(gpu.address)}" for gpu in gpus if uuid in (gpu.uuid, gpu.parent)), uuid)


def with_parents(uuids: Iterable[str], gpus: Iterable[Gpu]) -> set[str]:
    """Return the UUIDs and, for those of MIG instances, the UUIDs of their GPUs."""
    some = set(uuids)
    return some | {gpu.parent for gpu in gpus if gpu.parent and gpu.uuid in some}


def carry_out(
    setting: Setting, work: SettingWork, nvml: Nvml | None, store: Store, gpus: Collection[Gpu]
) -> SettingResult:
    """Set and restore values, by driver calls that may be slow; raises HostError if they cannot be recorded.

    If `nvml` is None because MPS is disabled, NVML is opened for this call. `gpus` give the GPUs' addresses.
    """
    if not any(work):
        return SettingResult({}, {})
    if nvml is None:
        try:
            with Nvml() as own:
                return carry_out(setting, work, own, store, gpus)
        except DriverError as error:
            log.error("%ss cannot be restored: %s; %s", setting.label, error.message, error.hint)
            return SettingResult({}, {})
    values: dict[str, str] = {}
    errors: dict[str, DriverError] = {}
    before = {change.gpu_uuid: change.before for change in work.changes}
    if before or work.unchanged:
        store.remember(setting.name, {**before, **work.unchanged})
    for uuid, old, after in work.changes:
        name = name_of(uuid, gpus)
        try:
            setting.set(nvml, uuid, after)
            log.info("%s: %s %s -> %s", name, setting.label, old, after)
            values[uuid] = after
        except DriverError as error:
            level = logging.WARNING if error.code == COMPUTE_MODE_UNSUPPORTED else logging.ERROR
            log.log(level, "%s: %s cannot be set: %s; %s", name, setting.label, error.message, error.hint)
            errors[uuid] = error
    restored, not_restored = _restore(setting, work.restore, nvml, store, gpus)
    return SettingResult({**values, **restored}, errors, not_restored, before)


def _restore(
    setting: Setting, values: Mapping[str, str], nvml: Nvml, store: Store, gpus: Collection[Gpu]
) -> tuple[dict[str, str], dict[str, YunionError]]:
    """Restore the values and delete their records; return those that differed, and the errors."""
    restored: dict[str, str] = {}
    errors: dict[str, YunionError] = {}
    for uuid, value in values.items():
        what = f"{name_of(uuid, gpus)}: {setting.label} {value}"
        try:
            if setting.restore(nvml, uuid, value):
                log.info("%s was restored", what)
                restored[uuid] = value
        except YunionError as error:
            level = logging.INFO if error.code == MIG_ENABLED else logging.ERROR
            level = logging.WARNING if error.code in GPU_ABSENT else level
            log.log(level, "%s cannot be restored: %s; %s", what, error.message, error.hint)
            errors[uuid] = error
        else:
            _forget(setting, uuid, what, store)
    return restored, errors


def _forget(setting: Setting, uuid: str, what: str, store: Store) -> None:
    try:
        store.forget(setting.name, uuid)
    except HostError as error:
        means = "its record could not be deleted, so the next start restores it again"
        log.warning("%s was restored, but %s: %s", what, means, error.message)


def originals(setting: Setting, store: Store) -> dict[str, str]:
    """Return the recorded values by GPU UUID; empty, after logging an error, if they cannot be read."""
    try:
        return store.former(setting.name)
    except HostError as error:
        log.error("%ss cannot be restored: %s; %s", setting.label, error.message, error.hint)
        return {}


def restore_unused(
    setting: Setting, store: Store, nvml: Nvml | None, used: Collection[str], gpus: Collection[Gpu]
) -> SettingResult:
    """Restore the values of all GPUs except those `used` (UUIDs); `gpus` give their addresses."""
    kept = with_parents(used, gpus)
    values = {uuid: value for uuid, value in originals(setting, store).items() if uuid not in kept}
    return carry_out(setting, SettingWork(restore=values), nvml, store, gpus)
