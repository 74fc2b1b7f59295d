"""The GPUs' compute modes: noted before they are changed, set and read back, and put back at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.errors import DriverError, HostError, YunionError
from yunion_mps.host.store import Store
from yunion_mps.inventory import Nvml
from yunion_mps.planning import ModeChange

log = logging.getLogger(__name__)


class ModeWork(NamedTuple):
    """What is to be done: modes to set, and former modes to put back, by GPU UUID."""

    changes: tuple[ModeChange, ...] = ()
    put_back: Mapping[str, str] = {}


class ModeResult(NamedTuple):
    """What was done: the modes that are in force now, and why it failed, by GPU UUID."""

    modes: Mapping[str, str]
    errors: Mapping[str, DriverError]


def carry_out(work: ModeWork, nvml: Nvml | None, store: Store) -> ModeResult:
    """Do the work; it calls the driver, which may take long. Raises HostError when modes cannot be noted.

    Without an `nvml` (MPS is not enabled) one is opened for it.
    """
    if not any(work):
        return ModeResult({}, {})
    if nvml is None:
        try:
            with Nvml() as own:
                return carry_out(work, own, store)
        except DriverError as error:
            log.error("compute modes cannot be put back: %s. %s", error.message, error.hint)
            return ModeResult({}, {})
    modes, errors = _set(work.changes, nvml, store)
    for uuid, mode in work.put_back.items():
        if _put_back(uuid, mode, nvml, store):
            modes[uuid] = mode
    return ModeResult(modes, errors)


def _set(
    changes: tuple[ModeChange, ...], nvml: Nvml, store: Store
) -> tuple[dict[str, str], dict[str, DriverError]]:
    modes: dict[str, str] = {}
    errors: dict[str, DriverError] = {}
    if changes:
        store.remember_modes({change.gpu_uuid: change.before for change in changes})
    for change in changes:
        name = change.gpu_uuid
        try:
            nvml.set_compute_mode(name, change.after)
            log.info("GPU %s: compute mode %s -> %s", name, change.before, change.after)
            modes[name] = change.after
        except DriverError as error:
            log.error("GPU %s: compute mode cannot be set: %s. %s", name, error.message, error.hint)
            errors[name] = error
    return modes, errors


def _put_back(uuid: str, mode: str, nvml: Nvml, store: Store) -> bool:
    try:
        if nvml.compute_mode(uuid) != mode:
            nvml.set_compute_mode(uuid, mode)
            log.info("GPU %s: compute mode is %s again, as before", uuid, mode)
    except YunionError as error:
        what = error.message
        log.error("GPU %s: compute mode %s cannot be put back: %s. %s", uuid, mode, what, error.hint)
        return False
    try:
        store.forget_mode(uuid)
    except HostError as error:
        what = "its record could not be deleted, so the next start sets it again"
        log.warning("GPU %s: compute mode %s was restored, but %s: %s", uuid, mode, what, error.message)
    return True


def noted(store: Store) -> dict[str, str]:
    """The former modes by GPU UUID; nothing where the note cannot be read, which is said."""
    try:
        return store.former_modes()
    except HostError as error:
        log.error("compute modes cannot be put back: %s. %s", error.message, error.hint)
        return {}
