"""The GPUs' compute modes: noted before they are changed, set and read back, and put back at the end."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from yunion_mps.errors import DriverError, YunionError
from yunion_mps.inventory import Nvml
from yunion_mps.planning import ModeChange
from yunion_mps.store import Store

log = logging.getLogger(__name__)


def set_modes(changes: Sequence[ModeChange], nvml: Nvml, store: Store) -> dict[str, DriverError]:
    """Make the changes; return why it failed for which GPU. Raises HostError when they cannot be noted."""
    store.remember_modes({change.gpu_uuid: change.before for change in changes})
    errors = {}
    for change in changes:
        try:
            nvml.set_compute_mode(change.gpu_uuid, change.after)
            log.info("GPU %s: compute mode %s -> %s", change.gpu_uuid, change.before, change.after)
        except DriverError as error:
            name = change.gpu_uuid
            log.error("GPU %s: compute mode cannot be set: %s. %s", name, error.message, error.hint)
            errors[name] = error
    return errors


def put_back(nvml: Nvml | None, store: Store, *, spare: Collection[str] = ()) -> None:
    """Put back every mode that is noted, except those of the GPUs to `spare`; what fails stays noted.

    Without an `nvml` (MPS is not enabled) one is opened for it.
    """
    modes = {uuid: mode for uuid, mode in store.former_modes().items() if uuid not in spare}
    if modes and nvml is None:
        try:
            with Nvml() as own:
                put_back(own, store, spare=spare)
        except DriverError as error:
            log.error("compute modes cannot be put back: %s. %s", error.message, error.hint)
    elif nvml:
        for uuid, mode in modes.items():
            _put_back(uuid, mode, nvml, store)


def _put_back(uuid: str, mode: str, nvml: Nvml, store: Store) -> None:
    try:
        if nvml.compute_mode(uuid) != mode:
            nvml.set_compute_mode(uuid, mode)
            log.info("GPU %s: compute mode is %s again, as before", uuid, mode)
        store.forget_mode(uuid)
    except YunionError as error:
        what = error.message
        log.error("GPU %s: compute mode %s cannot be put back: %s. %s", uuid, mode, what, error.hint)
