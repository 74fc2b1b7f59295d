"""MIG layouts from before our first change: restored where their entries say so, or said so at last."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError, HostError
from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import Reason
from yunion_mps.core.waits import NO_USERS, Users, all_of
from yunion_mps.gpus.absent import once_back
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_layout import LayoutLook
from yunion_mps.gpus.mig_record import MigRecord
from yunion_mps.gpus.mig_steps import LayoutResult, bring_into_effect
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Hold, Ledger
from yunion_mps.planning.mig import Placement

log = logging.getLogger(__name__)


#: By reason code, what has to be done before the layout can be restored.
_FIRST_STEPS = {
    reasons.MIG_RESET_REQUIRED: "reset it: nvidia-smi --gpu-reset -i {gpu}; then",
    reasons.GPU_LOST: "reset it, or reboot the host; then",
    reasons.MIG_FOREIGN_INSTANCE: "destroy it: nvidia-smi mig -i {gpu} -dci -gi ID, then -dgi -gi ID; then",
    reasons.MIG_IN_USE: "once nothing uses it",
}
_OTHERWISE = "once the cause is removed"


def restore_layouts(
    layouts: Iterable[MigLayout],
    gpus: Collection[Gpu],
    nvml: Nvml | None,
    originals: Originals,
    *,
    left: Iterable[str],
    ledger: Ledger,
    keeps_requests: bool,
    is_over: Callable[[], bool] = bool,
) -> LayoutResult:
    """Restore the layouts from before our first change, if their entries say so.

    layouts: of the configuration, and `former_layouts`
    Nothing changes if a GPU whose mode would change, or an instance that would be destroyed, is leased, has
    processes, or MPS processes that were left running (`left`, UUIDs).
    With `keeps_requests`, a change of the mode that waits for the GPU's next reset is not cancelled.
    Restored instances stay recorded as ours. No step is begun once `is_over`.
    """
    if nvml is None:
        return LayoutResult({}, {})
    mig = Mig(nvml)
    by_uuid = {str(gpu.uuid): gpu for gpu in gpus}
    holds = ledger.holds()
    blockers = Blockers(holds=holds, leases=_described(holds), gpus=gpus, left={*left})
    restored = [layout for layout in layouts if layout.restore and layout.gpu_uuid in by_uuid]
    damaged = _damaged(restored, by_uuid, originals)
    looks: dict[str, LayoutLook] = {}
    for layout in restored:
        if layout.gpu_uuid in damaged:
            continue
        gpu, record = by_uuid[layout.gpu_uuid], originals.layout(layout.gpu_uuid)
        is_kept = keeps_requests and _is_requested(layout, record, mig)
        look = _look_at(layout, gpu, record, is_kept=is_kept)
        if look:
            looks[layout.gpu_uuid] = look
    result = bring_into_effect([*looks.values()], mig, originals, blockers, is_over)
    _forget_restored(result, looks, nvml, originals, holds)
    return result._replace(reasons={**result.reasons, **damaged})


def _look_at(layout: MigLayout, gpu: Gpu, record: MigRecord, *, is_kept: bool) -> LayoutLook | None:
    """Return the layout from before, and log if it is not restored; None if nothing is to be restored.

    is_kept: whether the mode that was requested for the next reset is not cancelled
    """
    if record.before is None:
        return None
    if gpu.reason.code in (reasons.GPU_GONE, reasons.GPU_OTHER_DRIVER):
        message = f"its MIG layout cannot be restored now: {gpu.reason}"
        log.warning("GPU %s: %s; %s", gpu.address, message, once_back(gpu.reason.code, layout.gpu_uuid))
        return None
    if is_kept:
        message = f"MIG mode will be {'on' if layout.enabled else 'off'} after its next reset, as configured"
        log.info("GPU %s: %s; cancel this: yunion-mps-daemon --restore", gpu.address, message)
        return None
    former = MigLayout(layout.gpu_uuid, record.enabled_before)
    return LayoutLook(former, gpu, places=_places(record, gpu))


def former_layouts(layouts: Iterable[MigLayout], originals: Originals) -> list[MigLayout]:
    """Return, beside those of the configuration, layouts to restore on GPUs that have none anymore.

    What an entry said of the restoration when it had a layout still counts.
    """
    configured = {layout.gpu_uuid for layout in layouts}
    former = []
    for uuid in sorted(originals.layouts_to_restore() - configured):
        was_enabled = originals.layout(uuid).enabled_before
        former.append(MigLayout(uuid, was_enabled, restore=True))
    return former


def _forget_restored(
    result: LayoutResult,
    looks: Mapping[str, LayoutLook],
    nvml: Nvml,
    originals: Originals,
    holds: Collection[Hold],
) -> None:
    """Delete the records of GPUs whose layouts were restored, and log the others; `looks` by GPU UUID."""
    for uuid, why in result.reasons.items():
        look, record = looks[uuid], originals.layout(uuid)
        if why:
            problem = f"the MIG layout of GPU {look.gpu.address} is not restored: {why}"
            log.error("%s; %s", problem, how_to_restore(why, look.gpu, holds))
            continue
        if record.compute_mode and look.layout.enabled != look.gpu.mig_enabled:
            _restore_compute_mode(nvml, look.gpu, record.compute_mode)
        if record.created and look.layout.enabled:
            originals.write_layout(uuid, MigRecord(created=record.created))
        else:
            originals.forget_layout(uuid)


def _damaged(
    layouts: Iterable[MigLayout], gpus: Mapping[str, Gpu], originals: Originals
) -> dict[str, Reason]:
    """Return, and log, why layouts cannot be restored whose records cannot be read; by GPU UUID."""
    errors = originals.unreadable_layouts()
    damaged = {}
    for layout in layouts:
        error = errors.get(layout.gpu_uuid)
        if error:
            address = gpus[layout.gpu_uuid].address
            problem = f"the MIG layout of GPU {address} is not restored: {error.message}"
            log.error("%s; %s", problem, error.hint)
            damaged[layout.gpu_uuid] = error.reason
    return damaged


def _restore_compute_mode(nvml: Nvml, gpu: Gpu, mode: str) -> None:
    """Restore the compute mode that the change of the MIG mode has reset, also if it is to be kept."""
    try:
        nvml.restore_compute_mode(str(gpu.uuid), mode)
    except DriverError as error:
        problem = f"GPU {gpu.address}: compute mode {mode} cannot be restored"
        log.error("%s: %s; %s", problem, error.message, error.hint)


def withdrawn(
    layouts: Iterable[MigLayout], gpus: Iterable[Gpu], originals: Callable[[], Originals]
) -> tuple[LayoutLook, ...]:
    """Return what cancels the mode changes that only we have requested, for GPUs without a layout.

    A mode from before our first change is not cancelled: the GPU then is as it was.
    """
    configured = {layout.gpu_uuid for layout in layouts}
    looks = []
    for gpu in gpus:
        is_lost = gpu.reason and gpu.reason.code != reasons.MIG_ENABLED
        if is_lost or gpu.uuid in configured or gpu.mig_pending in (None, gpu.mig_enabled):
            continue
        try:
            record = originals().layout(str(gpu.uuid))
        except HostError:
            continue  # which the status reports since the start
        if record.before is not None and record.enabled_before == gpu.mig_enabled:
            as_it_is = MigLayout(str(gpu.uuid), record.enabled_before)
            looks.append(LayoutLook(as_it_is, gpu, withdrawn=True))
    return tuple(looks)


def _is_requested(layout: MigLayout, record: MigRecord, mig: Mig) -> bool:
    """Whether a change of the mode waits for the GPU's next reset, and nothing else has changed."""
    with contextlib.suppress(DriverError):  # the restoration reports it
        mode = mig.mode(layout.gpu_uuid)
        return mode.enabled == record.enabled_before and mode.pending == layout.enabled != mode.enabled
    return False


def _places(record: MigRecord, gpu: Gpu) -> tuple[Placement, ...]:
    profiles = {profile.name: profile for profile in gpu.mig_profiles}
    places = []
    for instance in record.before or ():
        if instance.profile in profiles:
            is_whole = bool(instance.uuid)
            places.append(Placement(profiles[instance.profile], instance.start, is_whole))
    return tuple(places)


def _described(holds: Iterable[Hold]) -> dict[str, Users]:
    """Return the leases as an operator can release them, by the UUID of the GPU or instance."""
    users: dict[str, Users] = {}
    for hold in holds:
        lease = Users((f"lease {hold.lease} (device {hold.device})",))
        users[hold.gpu_uuid] = all_of([users.get(hold.gpu_uuid, NO_USERS), lease])
    return users


def how_to_restore(why: Reason, gpu: Gpu, holds: Iterable[Hold] = ()) -> str:
    """Return the steps after which a restoration that failed succeeds."""
    parts = {str(gpu.uuid), *[instance.uuid for instance in gpu.mig_instances]}
    names = sorted({hold.lease for hold in holds if hold.gpu_uuid in parts})
    if why.code == reasons.MIG_IN_USE and names:
        release = "; ".join([f"yunion-mps lease release {name}" for name in names])
        start = "systemctl start yunion-mps-daemon"
        stop = "systemctl stop yunion-mps-daemon"
        return f"release what is leased: {start}; {release}; {stop}"
    return f"{_FIRST_STEPS.get(why.code, _OTHERWISE).format(gpu=gpu.uuid)}: yunion-mps-daemon --restore"
