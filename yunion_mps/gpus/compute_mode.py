"""The compute mode: Exclusive_Process where MPS serves, so that no process bypasses the control daemon.

Source: NVIDIA: Multi-Process Service, section "GPU Compute Modes"; for GPUs in MIG mode, NVIDIA:
Multi-Instance GPU User Guide, section "MIG with CUDA MPS".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from yunion_mps.core import reasons
from yunion_mps.core.enums import ABOUT_COMPUTE_MODE
from yunion_mps.core.models import DEFAULT, EXCLUSIVE_PROCESS, Event, Gpu, Plan
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.gpus.blockers import WITHOUT_MPS, Needs
from yunion_mps.gpus.kind import Kind, Step, StepOutcome
from yunion_mps.inventory.nvml import Nvml


class ComputeMode(Kind):
    name = "compute_mode"
    label = "compute mode"
    about = ABOUT_COMPUTE_MODE
    refused_code = reasons.COMPUTE_MODE_REFUSED
    changed_code = reasons.COMPUTE_MODE_CHANGED
    precedes_layouts = True

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        return plan.compute_modes.get(gpu.uuid or "")

    def polled(self, gpu: Gpu) -> str | None:
        return gpu.compute_mode or DEFAULT

    def can_set(self, plan: Plan, gpu: Gpu) -> bool:
        """Whether the mode can be set now; one that was refused is tried again."""
        del plan
        is_usable = not gpu.reason or gpu.reason.code == reasons.COMPUTE_MODE_REFUSED
        return is_usable and not gpu.mode_is_fixed

    def can_restore(self, gpu: Gpu, value: str) -> bool:
        if gpu.mode_is_fixed or (value == EXCLUSIVE_PROCESS and gpu.mig_enabled):  # the driver would refuse
            return False
        return super().can_restore(gpu, value)

    def needs(self, step: Step) -> Needs:
        """Return what keeps the mode.

        The mode of a control daemon stays until that has ended, and an original mode is not restored while
        servers run. Contexts that exist continue in a mode stricter than Default, but a job without MPS that
        starts, or creates another context, fails. So such a mode also waits for leases and processes. If the
        mode is stricter now, there are no such jobs: what uses the GPU is an MPS server.
        """
        if not step.restores:
            return Needs(control_daemons=step.target == DEFAULT)
        if step.target == DEFAULT or step.actual != DEFAULT:
            return Needs(servers=True)
        return Needs(servers=True, leases=WITHOUT_MPS, processes=True)

    def observe(self, nvml: Nvml, uuid: str) -> str:
        return nvml.compute_mode_of(uuid)

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        if step.restores:
            nvml.restore_compute_mode(uuid, step.target)
        else:
            nvml.set_compute_mode(uuid, step.target)

    def command(self, uuid: str, value: str) -> str:
        return f"nvidia-smi -i {uuid} -c {value.upper()}"

    def hint_if_not_restored(self, uuid: str) -> str:
        return f"see why: nvidia-smi -i {uuid} -q; then run: yunion-mps-daemon --restore"

    def event(self, outcome: StepOutcome) -> Event | None:
        """Return the event of a mode that was set; a refusal is a condition."""
        gpu, target = outcome.gpu, outcome.step.target
        if outcome.error or target == gpu.compute_mode:
            return None
        return Event("info", "compute_mode", gpu.address, f"{gpu.compute_mode} -> {target}", outcome.cause)

    def warning(self, outcome: StepOutcome) -> Reason:
        """Return what the status says; if a desired mode is refused, the reason of the unusable GPU does."""
        return super().warning(outcome) if outcome.step.restores else NO_REASON


COMPUTE_MODE = ComputeMode()


def external_changes(before: Iterable[Gpu], polled: Iterable[Gpu], plan: Plan) -> Iterator[Event]:
    """Yield an event for each mode that was as planned before a poll, and that another program changed."""
    modes = {gpu.uuid: gpu.compute_mode for gpu in before}
    for gpu in polled:
        planned = COMPUTE_MODE.desired(plan, gpu)
        if planned and modes.get(gpu.uuid) == planned != gpu.compute_mode and not gpu.reason:
            yield Event(
                severity="warning",
                kind="compute_mode",
                subject=gpu.address,
                what=f"{planned} -> {gpu.compute_mode}",
                cause="another program changed it",
                consequence=f"it is set to {planned} again",
                code=COMPUTE_MODE.changed_code,
            )
