"""The compute modes of the host's GPUs: which are to be set, which were, and which go back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from yunion_mps.errors import DriverError
from yunion_mps.host.store import Store
from yunion_mps.inventory import Nvml
from yunion_mps.models import Event, Plan
from yunion_mps.planning import mode_changes
from yunion_mps.supervisor.compute_modes import ModeResult, ModeWork, carry_out, noted
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.past import gpus_of, left_running


class Modes:
    """Knows what is to be done; who does it, and on which thread, is the caller's choice."""

    def __init__(self, gpus: Gpus, tell: Callable[[Event], None]) -> None:
        self._gpus = gpus
        self._tell = tell
        self._lock = threading.Lock()
        self._ended = False

    def work(
        self,
        target: Plan,
        store: Store | None,
        used: Collection[str] = (),
        watched: Collection[str] = (),
    ) -> ModeWork:
        """What is to be set, and what put back, where nothing of ours uses the GPU any more.

        Nothing is known to put back without a store. `used` are UUIDs of GPUs, and `watched` pipe directories
        with control daemons of which we know.
        """
        changes = mode_changes(target, [gpu for gpu in self._gpus.inventory.gpus if not gpu.reason])
        if store is None:
            return ModeWork(changes)
        modes = {u: mode for u, mode in noted(store).items() if u not in {*target.compute_modes, *used}}
        if modes:
            left = gpus_of(left_running(store, watched))
            modes = {uuid: mode for uuid, mode in modes.items() if uuid not in left}
        return ModeWork(changes, modes)

    def held(self, target: Plan, store: Store | None, used: Collection[str]) -> set[str]:
        """The UUIDs of the `used` GPUs whose mode goes back once nothing of ours uses them any more."""
        return set() if store is None else ({*noted(store)} & {*used}) - {*target.compute_modes}

    def set(self, work: ModeWork, nvml: Nvml | None, store: Store) -> ModeResult:
        """Do the work, or nothing once the end has begun; for threads, as it calls the driver."""
        with self._lock:
            return ModeResult({}, {}) if self._ended else carry_out(work, nvml, store)

    def end(self) -> None:
        """Nothing is set any more."""
        self._ended = True

    def put_back(self, nvml: Nvml | None, store: Store, left: Collection[str]) -> bool:
        """Put the modes back to what they were before us, but those of the GPUs in `left`."""
        modes = {uuid: mode for uuid, mode in noted(store).items() if uuid not in left}
        with self._lock:  # what was begun before the end is done first
            return self.note(carry_out(ModeWork(put_back=modes), nvml, store), "as before")

    def note(self, result: ModeResult, why: str) -> bool:
        """Take note of modes that were set or put back, and of GPUs that refused; whether there were any."""
        for gpu in self._gpus.inventory.gpus:
            after = result.modes.get(gpu.uuid or "")
            if after and after != gpu.compute_mode:
                self._tell(Event("info", "compute_mode", gpu.address, f"{gpu.compute_mode} -> {after}", why))
        if result.modes or result.errors:
            self._gpus.note_modes(result)
            return True
        return False

    def tell_of_others(self, before: Mapping[str | None, str | None], target: Plan) -> None:
        """Tell where a mode was as wanted `before` (by GPU UUID) and is not now: that was not our doing."""
        for gpu in self._gpus.inventory.gpus:
            wanted = target.compute_modes.get(gpu.uuid or "")
            if wanted and before.get(gpu.uuid) == wanted != gpu.compute_mode and not gpu.reason:
                what = f"{wanted} -> {gpu.compute_mode}"
                event = Event("warning", "compute_mode", gpu.address, what, "somebody else has changed it")
                self._tell(event._replace(consequence=f"it is set to {wanted} again"))

    def refuse_if_none_can_be_set(self, target: Plan) -> None:
        """Raise DriverError where every GPU has refused."""
        errors = self._gpus.mode_errors
        if errors and all(uuid in errors for domain in target.domains for uuid in domain.gpu_uuids):
            first = next(iter(errors.values()))
            raise DriverError(f"no GPU's compute mode can be set: {first.message}", first.hint)
