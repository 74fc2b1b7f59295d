"""The time slice of a GPU that is shared without MPS, as nvidia-smi compute-policy sets it.

Source: nvidia-smi compute-policy --help.
"""

from __future__ import annotations

from collections.abc import Mapping

from yunion_mps.core import reasons
from yunion_mps.core.enums import ABOUT_TIME_SLICE, TIME_SLICES
from yunion_mps.core.models import Gpu, Plan
from yunion_mps.gpus.blockers import WITHOUT_MPS, Needs
from yunion_mps.gpus.kind import Kind, Step
from yunion_mps.inventory.compute_policy import NVIDIA_SMI, set_time_slice, time_slice_of
from yunion_mps.inventory.nvml import Nvml


class TimeSlice(Kind):
    """No poll reads it, because that runs nvidia-smi for each GPU, one after the other."""

    name = "time_slice"
    label = "time slice"
    about = ABOUT_TIME_SLICE
    refused_code = reasons.TIME_SLICE_REFUSED
    changed_code = reasons.TIME_SLICE_CHANGED

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        return plan.time_slices.get(gpu.uuid or "")

    def can_set(self, plan: Plan, gpu: Gpu) -> bool:
        return not gpu.reason and any(gpu.uuid == shared.uuid for shared in plan.direct)

    def try_again(self) -> None:
        NVIDIA_SMI.try_again()

    def needs(self, step: Step) -> Needs:
        """Return what keeps an original time slice from being restored: jobs that share the GPU by it."""
        if not step.restores:
            return Needs()
        return Needs(leases=WITHOUT_MPS, processes=True, spares_mps=True)

    def observe(self, nvml: Nvml, uuid: str) -> str:
        del nvml
        return time_slice_of(uuid)

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        del nvml
        set_time_slice(uuid, step.target)

    def command(self, uuid: str, value: str) -> str:
        return f"nvidia-smi compute-policy -i {uuid} --set-timeslice {TIME_SLICES.index(value)}"

    def hint_if_not_restored(self, uuid: str) -> str:
        see = f"nvidia-smi compute-policy -i {uuid} --list"
        return f"see why: {see}; then run: yunion-mps-daemon --restore"

    def with_values(self, plan: Plan, refused: frozenset[str], unrestored_values: Mapping[str, str]) -> Plan:
        slices = dict(unrestored_values)
        for gpu in plan.direct:
            if gpu.uuid in plan.time_slices and gpu.uuid not in refused:
                slices[gpu.uuid] = plan.time_slices[gpu.uuid]
        return plan._replace(time_slices=slices)


TIME_SLICE = TimeSlice()
