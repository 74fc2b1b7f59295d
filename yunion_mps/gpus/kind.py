"""A kind of setting of GPUs, such as the compute mode: what it should be, is, and what a change needs.

Another kind is a module with a subclass of `Kind`, and a line in `kinds`. The reconciler does the rest: it
sets the values at a start and after a reload, records the original ones before, and restores them. What the
configuration says of it, and how it gets into the plan, is that of any key of an entry (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from yunion_mps.core.enums import ABOUT_SETTING
from yunion_mps.core.errors import UnsupportedError, YunionError
from yunion_mps.core.models import Event, Gpu, Plan
from yunion_mps.core.reasons import GPU_ABSENT, NO_REASON, SETTING_NOT_RESTORED, Reason
from yunion_mps.gpus.blockers import Needs
from yunion_mps.inventory.nvml import Nvml


class Step(NamedTuple):
    """A change of a setting of one GPU."""

    #: The value that the GPU has; empty if that is not known yet.
    actual: str
    target: str
    #: Whether the target is what the GPU had before our first change.
    restores: bool = False


class StepOutcome(NamedTuple):
    """What became of a step, for those who tell of it."""

    gpu: Gpu
    step: Step
    #: Why the step was made.
    cause: str
    #: Whether the value had been in effect, and was compared with what the GPU has.
    was_compared: bool = False
    #: Why the value could not be set; None if it is in effect.
    error: YunionError | None = None


class Kind(Protocol):
    """A kind of setting; its methods other than `observe` and `carry_out` call no driver.

    Values are texts. A GPU is the whole GPU, whose setting is that of its MIG instances, too.
    """

    #: The name of its records, and how messages call it, in the singular.
    name: str
    label: str
    #: What the condition is about if a value waits or the driver refuses it, one of `CONDITION_KINDS`. The
    #: GPU serves with the value that it has then.
    about: str = ABOUT_SETTING
    #: The reason codes of a value that the driver refuses, and of one that another program has changed.
    refused_code: str
    changed_code: str
    #: Whether it is set before MIG layouts, too: a switch of the MIG mode waits for it, and resets it.
    precedes_layouts: bool = False

    # -- decisions

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        """Return the value that the plan requires; None if it requires none, and the GPU keeps its own."""
        ...

    def polled(self, gpu: Gpu) -> str | None:
        """Return the value at the last poll; None if polls do not read it, because that takes too long."""
        del gpu
        return None

    def can_set(self, plan: Plan, gpu: Gpu) -> bool:
        """Whether the desired value can be set now, as far as that is known without asking the driver."""
        del plan
        return not gpu.reason

    def can_restore(self, gpu: Gpu, value: str) -> bool:
        """Whether the original value can be restored now, as far as that is known."""
        del value
        return gpu.reason.code not in GPU_ABSENT

    def step(self, actual: str, target: str, *, restores: bool = False) -> Step | None:
        """Return the step from the actual value to the target; None if the GPU has that already."""
        return None if actual == target else Step(actual, target, restores)

    def needs(self, step: Step) -> Needs:
        """Return what the step waits for."""
        ...

    # -- the driver

    def observe(self, nvml: Nvml, uuid: str) -> str:
        """Return the value that the GPU has now; raises DriverError."""
        ...

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        """Set the value and read it back; raises DriverError if it is not in effect."""
        ...

    def try_again(self) -> None:
        """Ask the driver again, although what asks it has hung: a reload or a stop has begun."""
        return

    # -- words

    def command(self, uuid: str, value: str) -> str:
        """Return the command by which an operator sets the value."""
        ...

    def hint_if_not_restored(self, uuid: str) -> str:
        """Return what an operator does if the original value cannot be restored; empty: the error says it."""
        del uuid
        return ""

    def event(self, outcome: StepOutcome) -> Event | None:
        """Return the event of a step; None if it is not worth one."""
        address, step = outcome.gpu.address, outcome.step
        if step.restores or outcome.error:  # a refusal is a condition
            return None
        setting = f"{self.label} {step.target}"
        if outcome.was_compared:
            cause, code = "another program had changed it", self.changed_code
            return Event("warning", "gpu", address, setting, cause, code=code)
        return Event("info", "gpu", address, setting, outcome.cause)

    def warning(self, outcome: StepOutcome) -> Reason:
        """Return what the status says while the driver refuses the step; empty for nothing."""
        error, target = outcome.error, outcome.step.target
        if error is None:
            return NO_REASON
        again = "" if isinstance(error, UnsupportedError) else f"; {TRIED_AGAIN}"
        if outcome.step.restores:
            problem = f"its original {self.label} {target} cannot be restored: {error.message}"
            return Reason(f"{problem}{again}", SETTING_NOT_RESTORED)
        problem = f"the {self.label} {target} cannot be set: {error.message}"
        return Reason(f"{problem}; {_KEEPS}{again}", self.refused_code)

    def with_values(self, plan: Plan, refused: frozenset[str], unrestored_values: Mapping[str, str]) -> Plan:
        """Return the plan in effect.

        refused: the GPUs (UUIDs) that have refused the value that the plan has for them
        unrestored_values: the values (by GPU UUID) that the plan no longer has, and that are not restored yet
        """
        del refused, unrestored_values
        return plan


#: Said of what the driver refuses, unless it does not support it.
TRIED_AGAIN = "it is tried again"
_KEEPS = "its devices have the one that it had before"
