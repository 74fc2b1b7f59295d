"""The time slices of time-sliced GPUs, as nvidia-smi compute-policy sets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import DriverError
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.inventory.compute_policy import restore_time_slice, set_time_slice, time_slice_of
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Event, Plan
from yunion_mps.planning.plan import ModeChange
from yunion_mps.reasons import Reason
from yunion_mps.supervisor.gpu_settings import Setting, SettingResult, SettingWork, carry_out, originals
from yunion_mps.supervisor.gpus import Gpus

TIME_SLICE = Setting(
    "time_slice",
    "time slice",
    lambda _, uuid, value: set_time_slice(uuid, value),
    lambda _, uuid, value: restore_time_slice(uuid, value),
)

NO_SLICES = SettingResult({}, {})


class SliceWork(NamedTuple):
    """Time slices to set, and original ones to restore, by GPU UUID."""

    desired: Mapping[str, str]
    restore: Mapping[str, str]


def read_time_slices(plan: Plan) -> dict[str, str]:
    """Return the current time slices of the GPUs (UUIDs) for which the plan has one; runs nvidia-smi."""
    found = {}
    for uuid in plan.time_slices:
        with contextlib.suppress(DriverError):  # a lost GPU, or one that refuses them
            found[uuid] = time_slice_of(uuid)
    return found


def time_slice_differs(uuid: str, value: str) -> bool:
    """Whether the GPU's time slice is not `value`, or cannot be read; runs nvidia-smi."""
    try:
        return time_slice_of(uuid) != value
    except DriverError:
        return True


class TimeSlices:
    """Decides which time slices to set and restore.

    They are set at the start, after a reload and after a GPU was lost. They are compared only every few
    minutes, because that runs nvidia-smi for each GPU.
    """

    def __init__(self, gpus: Gpus, emit: Callable[[Event], None]) -> None:
        self._gpus = gpus
        self._emit = emit
        #: The time slices that were set or refused, and those that are about to be set, by GPU UUID.
        self._done: dict[str, str] = {}
        self._requested: Mapping[str, str] = {}
        #: Those that were in effect and are being compared, and whether a reload is the reason.
        self._compared: Mapping[str, str] = {}
        self._reloaded = False
        #: Why time slices were refused, by GPU UUID.
        self.refusals: dict[str, Reason] = {}

    def due(self, target: Plan, store: Store | None) -> SliceWork | tuple[()]:
        """Return what is due, empty if nothing is; without a store, there is nothing to restore."""
        usable = self._usable(target)
        self._done = {uuid: value for uuid, value in self._done.items() if uuid in usable}
        self._compared = {uuid: value for uuid, value in self._compared.items() if uuid in usable}
        self.refusals = {uuid: why for uuid, why in self.refusals.items() if uuid in usable}
        desired = {uuid: value for uuid, value in usable.items() if self._done.get(uuid) != value}
        recorded = {} if store is None else originals(TIME_SLICE, Originals(store))
        reachable = {
            gpu.uuid for gpu in self._gpus.inventory.gpus if gpu.reason.code not in reasons.GPU_ABSENT
        }
        restore = {
            uuid: value
            for uuid, value in recorded.items()
            if uuid not in target.time_slices and uuid in reachable
        }
        self._requested = desired
        return SliceWork(desired, restore) if desired or restore else ()

    def find_corrections(self, target: Plan, found: Mapping[str, str]) -> Iterator[ModeChange]:
        """Yield the corrections of time slices `found` (by GPU UUID) that are not as planned."""
        for uuid, desired in self._usable(self.in_effect(target)).items():
            if found.get(uuid, desired) != desired:
                yield ModeChange(uuid, found[uuid], desired)

    def _usable(self, target: Plan) -> dict[str, str]:
        usable = self._gpus.healthy & {gpu.uuid for gpu in target.direct}
        return {uuid: value for uuid, value in target.time_slices.items() if uuid in usable}

    def set(self, work: SliceWork | tuple[()], nvml: Nvml | None, store: Store) -> SettingResult:
        """Do the work; run it on a thread, because it runs programs."""
        if not work:
            return NO_SLICES
        changes: list[ModeChange] = []
        unchanged: dict[str, str] = {}
        errors: dict[str, DriverError] = {}
        for uuid, after in work.desired.items():
            try:
                before = time_slice_of(uuid)
            except DriverError as error:
                if self._reloaded or uuid not in self._compared:
                    errors[uuid] = error
                continue
            if before != after:
                changes.append(ModeChange(uuid, before, after))
            else:
                unchanged[uuid] = before
        if unchanged:
            recorded = originals(TIME_SLICE, Originals(store))
            unchanged = {uuid: value for uuid, value in unchanged.items() if uuid not in recorded}
        todo = SettingWork(tuple(changes), work.restore, unchanged)
        result = carry_out(TIME_SLICE, todo, nvml, Originals(store), self._gpus.inventory.gpus)
        return result._replace(errors={**errors, **result.errors})

    def note(self, result: SettingResult) -> bool:
        """Record time slices that were set, and GPUs that refused; return whether there were any."""
        requested, self._requested = self._requested, {}
        compared, self._compared, self._reloaded = self._compared, {}, False
        self._done.update(requested)
        for gpu in self._gpus.inventory.gpus:
            uuid = str(gpu.uuid)
            if uuid in requested and uuid in result.values:
                what, cause = f"time slice {result.values[uuid]}", "the configuration requires it"
                event = Event("info", "gpu", gpu.address, what, cause)
                if compared.get(uuid) == result.values[uuid]:
                    code, cause = reasons.TIME_SLICE_CHANGED, "another program had changed it"
                    event = event._replace(severity="warning", cause=cause, code=code)
                self._emit(event)
            if uuid in requested and uuid in result.errors:
                cause = result.errors[uuid].message
                what = f"the time slice {requested[uuid]} cannot be set"
                means, code = "its devices have the one that it had before", reasons.TIME_SLICE_REFUSED
                self._emit(Event("warning", "gpu", gpu.address, what, cause, means, code))
                name = f"GPU {gpu.address} ({gpu.name})"
                self.refusals[uuid] = Reason(f"{name}: {what}: {cause}; {means}", code)
        return bool(result.values or result.errors)

    def in_effect(self, plan: Plan) -> Plan:
        """Return the plan without time slices that were refused."""
        slices = {uuid: value for uuid, value in plan.time_slices.items() if uuid not in self.refusals}
        return plan._replace(time_slices=slices)

    def check_again(self) -> None:
        """Compare all time slices again, because the configuration was reloaded."""
        self.compare()
        self._reloaded = True
        self._done.clear()
        self.refusals.clear()

    def compare(self) -> None:
        """Compare those that are in effect, because another program may have changed them."""
        in_effect = {uuid: value for uuid, value in self._done.items() if uuid not in self.refusals}
        self._compared = {**self._compared, **in_effect}
        self._done = {uuid: value for uuid, value in self._done.items() if uuid in self.refusals}
