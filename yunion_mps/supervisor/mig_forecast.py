"""What MIG layouts would do, decided as if they were brought into effect, but without a change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.mig import MigInstance
from yunion_mps.supervisor.mig import LayoutTask, LayoutWork, Losses

#: GPUs since Hopper switch MIG mode without a reset (NVIDIA's MIG user guide).
_SWITCHES_WITHOUT_RESET = (9, 0)


class Forecast(NamedTuple):
    """What `reload --now` would remove, by GPU UUID; and GPUs (addresses) whose layouts wait for nothing."""

    losses: Mapping[str, Losses] = {}
    at_once: Collection[str] = ()


def make_forecast(tasks: Sequence[LayoutTask], mig: Mig, store: Store) -> Forecast:
    """Return what the layouts would do; raises DriverError."""
    losses = {task.layout.gpu_uuid: _Forced(task, mig, store).losses() for task in tasks}
    at_once = {task.gpu.address for task in tasks if _Unforced(task, mig, store).is_at_once()}
    return Forecast(losses, at_once)


class _Unforced(LayoutWork):
    """What a layout leads to while its GPU is used as it is."""

    def is_at_once(self) -> bool:
        """Whether the layout waits for nothing; false if the driver may require a reset for the mode."""
        mode = self._mig.mode(self._uuid)
        existing = self._instances() if mode.enabled else ()
        if mode.enabled != self._layout.enabled:
            switches_at_once = (self._task.gpu.compute_capability or ()) >= _SWITCHES_WITHOUT_RESET
            return switches_at_once and not self._why_not_switched(existing)
        if not self._layout.enabled:
            return True
        done = self._change(existing)
        return not (done.in_the_way or self._left(done, existing))


class _Forced(LayoutWork):
    """What a layout leads to once no process uses its GPU, if it does not wait for leases."""

    def losses(self) -> Losses:
        mode = self._mig.mode(self._uuid)
        if self._layout.enabled and not mode.enabled:
            return Losses(frozenset({self._uuid}), ())
        existing = self._instances() if mode.enabled else ()
        goes = self._change(existing).destroy if self._layout.enabled else existing
        others = tuple(one for one in goes if not self._is_ours(one))
        return Losses(frozenset(one.uuid for one in goes if one.uuid), others)

    def _is_confirmed(self, instance: MigInstance) -> bool:
        del instance
        return True

    def _pids(self, instance: MigInstance) -> set[int]:
        del instance
        return set()
