"""Forecasts of MIG layouts: what bringing them into effect would do, without changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.mig import MigInstance
from yunion_mps.core.reasons import MIG_FOREIGN_INSTANCE, MIG_RESET_REQUIRED, Reason
from yunion_mps.core.waits import AT_ONCE
from yunion_mps.gpus.mig_steps import LayoutTask, LayoutWork, Losses
from yunion_mps.gpus.originals import Originals
from yunion_mps.inventory.mig import Mig

#: GPUs since Hopper switch MIG mode without a reset (NVIDIA's MIG user guide).
_SWITCHES_WITHOUT_RESET = (9, 0)
#: When layouts that wait for the operator take effect, by reason code.
_EFFECTS = {
    MIG_RESET_REQUIRED: "after the next reset of the GPU",
    MIG_FOREIGN_INSTANCE: "once no instance of another program is in the way",
}
_IF_RESET_REQUIRED = "after a reset of the GPU, if the driver requires one"


class Forecast(NamedTuple):
    """What `reload --now` would remove, by GPU UUID; and when layouts take effect, by GPU address.

    `effects` leaves out layouts that wait for leases or processes.
    """

    losses: Mapping[str, Losses] = {}
    effects: Mapping[str, str] = {}


def make_forecast(tasks: Sequence[LayoutTask], mig: Mig, originals: Originals) -> Forecast:
    """Return what the layouts would do; raises DriverError.

    Nothing is known, and nothing done, on a GPU whose record cannot be read.
    """
    damaged = originals.unreadable_layouts()
    tasks = [task for task in tasks if task.layout.gpu_uuid not in damaged]
    losses = {task.layout.gpu_uuid: _LossForecast(task, mig, originals).losses() for task in tasks}
    effects = {task.gpu.address: _EffectForecast(task, mig, originals).effect() for task in tasks}
    return Forecast(losses, {address: effect for address, effect in effects.items() if effect})


def effects_of(pending: Iterable[tuple[str, Reason]]) -> dict[str, str]:
    """Return when pending layouts take effect, by GPU address, as in a forecast."""
    return {address: _EFFECTS[why.code] for address, why in pending if why.code in _EFFECTS}


class _EffectForecast(LayoutWork):
    """When a layout takes effect if everything that uses its GPU now keeps using it."""

    def effect(self) -> str:
        """Return when the layout takes effect; empty if it waits for leases or processes."""
        mode = self._mig.mode(self._uuid)
        existing = self._instances() if mode.enabled else ()
        if mode.enabled != self._layout.enabled:
            if why := self._why_not_switched(existing):
                return _EFFECTS.get(why.code, "")
            if mode.pending == self._layout.enabled:
                return _EFFECTS[MIG_RESET_REQUIRED]
            switches_at_once = (self._task.gpu.compute_capability or ()) >= _SWITCHES_WITHOUT_RESET
            return AT_ONCE if switches_at_once else _IF_RESET_REQUIRED
        if not self._layout.enabled:
            return AT_ONCE
        done = self._change(existing)
        stay = done.in_the_way or self._left(done, existing)
        return _EFFECTS.get(self._why_in_the_way(stay).code, "") if stay else AT_ONCE


class _LossForecast(LayoutWork):
    """What a layout removes once no process uses its GPU, if it does not wait for leases."""

    def losses(self) -> Losses:
        mode = self._mig.mode(self._uuid)
        if self._layout.enabled and not mode.enabled:
            return Losses(frozenset({self._uuid}), ())
        existing = self._instances() if mode.enabled else ()
        removed = self._change(existing).destroy if self._layout.enabled else existing
        others = tuple(one for one in removed if not self._is_ours(one))
        return Losses(frozenset(one.uuid for one in removed if one.uuid), others)

    def _is_confirmed(self, instance: MigInstance) -> bool:
        del instance
        return True

    def _pids(self, instance: MigInstance) -> set[int]:
        del instance
        return set()
