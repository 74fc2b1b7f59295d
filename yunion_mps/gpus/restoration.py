"""What GPUs had before our first change: restored at a stop and by `--restore`, in one order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import NamedTuple

from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import DRIVER_HUNG
from yunion_mps.gpus.absent import gpu_label
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_restore import restore_layouts
from yunion_mps.gpus.mig_steps import LayoutResult
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.reconciler import UNLIMITED_S, Reconciler, Restoration, TimeLimit
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger

log = logging.getLogger(__name__)

#: How long a stop begins steps that restore something.
BEGIN_STEPS_S = 120.0
#: How long the restoration at a stop may take. A driver call that hangs takes 60 s: the one that is made when
#: the stop begins, the first one after NVML is opened again, and the last one.
RESTORE_WITHIN_S = int(BEGIN_STEPS_S) + 3 * 60


class Restored(NamedTuple):
    """What became of the MIG layouts, and of the other settings."""

    layouts: LayoutResult
    settings: Restoration
    #: Whether settings that a later version has changed are left as they are.
    has_unknown: bool = False


def restore_originals(
    reconciler: Reconciler,
    originals: Originals,
    gpus: Collection[Gpu],
    nvml: Nvml | None,
    *,
    layouts: Iterable[MigLayout],
    ledger: Ledger,
    left: Collection[str],
    keeps_requests: bool,
    most_s: float = UNLIMITED_S,
) -> Restored:
    """Bring every GPU to what it had before our first change, as far as nothing needs what it has.

    The MIG layouts come first: the driver may refuse the original compute mode of a GPU in MIG mode, and a
    switch of the MIG mode resets it. The step that a thread still makes ends before. Raises HostError if the
    records cannot be read.

    nvml: if it is None, NVML is opened for the settings, and no layout is restored. It is also opened for
        them if a call hangs while layouts are restored
    layouts: those that say whether the original ones are restored: of the configuration, and former ones
    ledger: the leases that the state file has
    left: the GPUs and instances (UUIDs) of MPS processes that are left running
    keeps_requests: whether a change of the MIG mode that waits for the GPU's next reset is not cancelled
    most_s: how long steps are begun; what is not restored then stays recorded
    """
    with reconciler.gate.lock:
        for kind in reconciler.kinds:
            kind.try_again()  # only now: the step that has just ended may have hung
        limit = TimeLimit(most_s)
        result = restore_layouts(
            layouts,
            gpus,
            nvml,
            originals,
            left=left,
            ledger=ledger,
            keeps_requests=keeps_requests,
            is_over=limit.is_over,
        )
        blockers = Blockers.of(ledger, gpus=gpus, left=left)
        if any(reason.code == DRIVER_HUNG for reason in result.reasons.values()):
            nvml = None  # while a call hangs, all others through it are refused
        restoration = reconciler.restore(originals, [*gpus], nvml, blockers, limit)
    unknown = originals.of_other_kinds([kind.name for kind in reconciler.kinds])
    for original in unknown:
        problem = f"{gpu_label(original.gpu_uuid, gpus)}: {original.kind} {original.value} is not restored"
        why = "a later version has changed it, and this one does not know it"
        log.error("%s: %s; run with that version: yunion-mps-daemon --restore", problem, why)
    return Restored(result, restoration, has_unknown=bool(unknown))
