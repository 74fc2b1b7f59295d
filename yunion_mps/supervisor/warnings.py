"""What an operator must know although everything runs."""

from __future__ import annotations

from collections.abc import Sequence

from yunion_mps.models import Snapshot
from yunion_mps.planning import enforces_budgets


def warnings(snapshot: Snapshot) -> Sequence[str]:
    """Budgets that are not enforced, compute modes that differ, what cannot be written down."""
    found = list(snapshot.remarks)
    for gpu in snapshot.inventory.gpus:
        served = any(gpu.uuid in domain.plan.gpu_uuids for domain in snapshot.domains)
        if served and not gpu.reason and not enforces_budgets(gpu):
            found.append(
                f"GPU {gpu.address} ({gpu.name}): budgets are not enforced, for it is older than Volta; "
                "its clients can use all of its memory and threads"
            )
        wanted = snapshot.plan.compute_modes.get(gpu.uuid or "")
        if wanted and not gpu.reason and gpu.compute_mode != wanted:
            found.append(
                f"GPU {gpu.address} ({gpu.name}): its compute mode is {gpu.compute_mode}, not {wanted}; "
                "a process that misses the control daemon would use it without limits"
            )
    return found
