"""All steps, the most wanted first: what the time does not suffice for is left out at the end."""

from __future__ import annotations

from gpu_check import (
    steps_ends,
    steps_faults,
    steps_look,
    steps_memory,
    steps_ours,
    steps_recovery,
    steps_sharing,
    steps_users,
)
from gpu_check.values import Step

STEPS: tuple[Step, ...] = (
    *steps_look.STEPS,
    *steps_memory.STEPS,
    *steps_sharing.STEPS,
    *steps_ends.STEPS,
    *steps_faults.STEPS,
    *steps_users.STEPS,
    *steps_recovery.STEPS,
    *steps_ours.STEPS,
)
