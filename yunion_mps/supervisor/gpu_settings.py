"""Settings of GPUs: recorded before a change, set and read back, and restored at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from yunion_mps.addresses import physical_gpu
from yunion_mps.errors import DriverError, HostError, YunionError
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Gpu
from yunion_mps.planning.plan import ModeChange
from yunion_mps.reasons import (
    COMPUTE_MODE_UNSUPPORTED,
    GPU_ABSENT,
    GPU_GONE,
    GPU_LOST,
    GPU_OTHER_DRIVER,
    MIG_ENABLED,
)
from yunion_mps.text import list_of

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


def _absent(uuids: Collection[str], gpus: Iterable[Gpu]) -> dict[str, YunionError]:
    """Return why no driver call can reach those GPUs (`uuids`) that are not there, as a scan found them."""
    return {
        gpu.uuid: DriverError(gpu.reason, code=gpu.reason.code)
        for gpu in gpus
        if gpu.uuid and gpu.uuid in uuids and gpu.reason.code in GPU_ABSENT
    }


#: What has to be done before the settings of a GPU that is not there can be restored, by reason code.
_ONCE_BACK = {
    GPU_GONE: "if it comes back, run",
    GPU_OTHER_DRIVER: "once it is bound to the NVIDIA driver again, run",
    GPU_LOST: "reset it (nvidia-smi --gpu-reset -i {uuid}) or reboot the host, then run",
}


def report_absent(results: Mapping[Setting, SettingResult], gpus: Collection[Gpu]) -> None:
    """Log which settings were not restored because the GPU is not there, and why; one line for each GPU."""
    labels: dict[str, list[str]] = {}
    causes: dict[str, YunionError] = {}
    for setting, result in results.items():
        for uuid, error in result.not_restored.items():
            if error.code in _ONCE_BACK:
                labels.setdefault(uuid, []).append(setting.label)
                causes[uuid] = error
    for uuid, error in causes.items():
        cause = error.message
        if not any(gpu.uuid == uuid for gpu in gpus):
            cause += _candidates(gpus)
        what = f"its {list_of(labels[uuid])} cannot be restored now: {cause}"
        log.warning("%s: %s; %s", name_of(uuid, gpus), what, once_back(error.code, uuid))


def once_back(code: str, uuid: str) -> str:
    """Return what restores the settings of a GPU that is not there for the reason of this code."""
    return f"{_ONCE_BACK[code].format(uuid=uuid)}: yunion-mps-daemon --restore"


def _candidates(gpus: Iterable[Gpu]) -> str:
    """Return which GPUs of unknown UUID an unknown UUID may belong to: `; it may be GPU 01:00.0: …`."""
    named = [f"GPU {gpu.address}: {gpu.reason}" for gpu in gpus if gpu.uuid is None and gpu.reason]
    return "".join(f"; it may be {one}" for one in named)


def with_parents(uuids: Iterable[str], gpus: Iterable[Gpu]) -> set[str]:
    """Return the UUIDs and, for those of MIG instances, the UUIDs of their GPUs."""
    some = set(uuids)
    return some | {gpu.parent for gpu in gpus if gpu.parent and gpu.uuid in some}


def carry_out(
    setting: Setting, work: SettingWork, nvml: Nvml | None, records: Originals, gpus: Collection[Gpu]
) -> SettingResult:
    """Set and restore values, by driver calls that may be slow; raises HostError if they cannot be recorded.

    If `nvml` is None because MPS is disabled, NVML is opened for this call. `gpus` give the GPUs' addresses.
    """
    if not any(work):
        return SettingResult({}, {})
    if nvml is None:
        try:
            with Nvml() as own:
                return carry_out(setting, work, own, records, gpus)
        except DriverError as error:
            absent = _absent(work.restore, gpus)
            if work.changes or absent.keys() != work.restore.keys():
                log.error("%ss cannot be restored: %s; %s", setting.label, error.message, error.hint)
            return SettingResult({}, {}, absent)
    values: dict[str, str] = {}
    errors: dict[str, DriverError] = {}
    before = {change.gpu_uuid: change.before for change in work.changes}
    if before or work.unchanged:
        records.remember(setting.name, {**before, **work.unchanged})
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
    restored, not_restored = _restore(setting, work.restore, nvml, records, gpus)
    return SettingResult({**values, **restored}, errors, not_restored, before)


def _restore(
    setting: Setting, values: Mapping[str, str], nvml: Nvml, records: Originals, gpus: Collection[Gpu]
) -> tuple[dict[str, str], dict[str, YunionError]]:
    """Restore the values and delete their records; return those that differed, and the errors.

    GPUs that are not there are not tried: `report_absent` reports them.
    """
    restored: dict[str, str] = {}
    errors = _absent(values, gpus)
    for uuid, value in values.items():
        if uuid in errors:
            continue
        what = f"{name_of(uuid, gpus)}: {setting.label} {value}"
        try:
            if setting.restore(nvml, uuid, value):
                log.info("%s was restored", what)
                restored[uuid] = value
        except YunionError as error:
            errors[uuid] = error
            if error.code not in GPU_ABSENT:
                level = logging.INFO if error.code == MIG_ENABLED else logging.ERROR
                log.log(level, "%s cannot be restored: %s; %s", what, error.message, error.hint)
        else:
            _forget(setting, uuid, what, records)
    return restored, errors


def _forget(setting: Setting, uuid: str, what: str, records: Originals) -> None:
    try:
        records.forget(setting.name, uuid)
    except HostError as error:
        means = "its record could not be deleted, so the next start restores it again"
        log.warning("%s was restored, but %s: %s", what, means, error.message)


def originals(setting: Setting, records: Originals) -> dict[str, str]:
    """Return the recorded values by GPU UUID; empty, after logging an error, if they cannot be read."""
    try:
        return records.of(setting.name)
    except HostError as error:
        log.error("%ss cannot be restored: %s; %s", setting.label, error.message, error.hint)
        return {}


def restore_unused(
    setting: Setting, records: Originals, nvml: Nvml | None, used: Collection[str], gpus: Collection[Gpu]
) -> SettingResult:
    """Restore the values of all GPUs except those `used` (UUIDs); `gpus` give their addresses."""
    kept = with_parents(used, gpus)
    values = {uuid: value for uuid, value in originals(setting, records).items() if uuid not in kept}
    return carry_out(setting, SettingWork(restore=values), nvml, records, gpus)
