"""Snapshots of the GPUs and domains with their conditions, from which the daemon answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from yunion_mps.core import reasons
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import STOPPED
from yunion_mps.core.models import DomainPlan, DomainStatus, Gpu, Snapshot
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import wait_reason
from yunion_mps.mps.domain import Domain
from yunion_mps.supervisor.desired import DesiredState
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpu_settings import GpuSettings
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.host_conditions import ConditionFacts, conditions_of, warnings_of_configuration
from yunion_mps.supervisor.in_effect import order_of
from yunion_mps.supervisor.layouts import MigLayouts

_WAITS = wait_reason("its control daemon", "the one that now serves its GPUs", reasons.LIMITS_PENDING)


class Snapshots:
    """Makes a snapshot of the current state whenever that has changed."""

    def __init__(
        self,
        *,
        desired: DesiredState,
        gpus: Gpus,
        fleet: Fleet,
        layouts: MigLayouts,
        settings: GpuSettings,
        reported: Callable[[], Iterable[Condition]],
    ) -> None:
        """`reported` returns what other parts of the supervisor have found."""
        self._desired = desired
        self._gpus = gpus
        self._fleet = fleet
        self._layouts = layouts
        self._settings = settings
        self._reported = reported
        self._leftovers = ""
        #: Why the driver has not worked since the daemon started; empty if it has.
        self.driver_reason = NO_REASON
        self._version = 0
        self._snapshot: Snapshot | None = None

    def changed(self) -> None:
        self._snapshot = None

    def note_driver(self, reason: Reason) -> None:
        """Note why the driver has not worked since the daemon started; empty if it has."""
        self.driver_reason = reason
        self.changed()

    def note_leftovers(self, notice: str) -> None:
        """Note what the operator has to do about a control daemon of an earlier run."""
        self._leftovers = notice
        self.changed()

    def get(self) -> Snapshot:
        """Return the current state; the same object as long as nothing changes."""
        if self._snapshot is None:
            self._version += 1
            self._snapshot = self._take()
        return self._snapshot

    def _take(self) -> Snapshot:
        plan, inventory = self._settings.in_effect(self._desired.in_effect()), self._gpus.inventory
        domains = _statuses(self._fleet.domains, self._fleet.blocked, inventory.gpus)
        warnings = warnings_of_configuration([*self._desired.warnings, *plan.warnings])
        facts = ConditionFacts(
            plan=plan,
            inventory=inventory,
            domains=domains,
            layouts=self._layouts.pending,
            disabled=self._why_disabled(),
            driver=self.driver_reason,
            leftovers=self._leftovers,
            settings=self._settings.pending,
            reported=(*warnings, *self._reported()),
        )
        return Snapshot(
            version=self._version,
            enabled=self._desired.config.enable_cuda_mps,
            plan=plan,
            inventory=inventory,
            domains=domains,
            conditions=conditions_of(facts),
        )

    def _why_disabled(self) -> Reason:
        config = self._desired.config
        if config.enable_cuda_mps:
            return NO_REASON
        at = config.sources["enable_cuda_mps"]
        file = next(iter(config.files), "host.conf") if at.line is None else at.file
        text = f"MPS is disabled: enable_cuda_mps is false in {file}{config.also_disabled}"
        return Reason(text, reasons.DISABLED)


def _statuses(
    domains: Sequence[Domain], blocked: Iterable[DomainPlan], gpus: Sequence[Gpu]
) -> tuple[DomainStatus, ...]:
    """Return the status of each domain, and of those that wait for the end of another, in the GPUs' order."""
    active = [domain.status() for domain in domains]
    names = {status.plan.name for status in active}
    waiting = (plan for plan in blocked if plan.name not in names)
    for plan in waiting:
        status = DomainStatus(
            plan=plan,
            state=STOPPED,
            reason=_WAITS,
            pid=None,
            since_s=0.0,
            restarts=0,
            pending=_WAITS,
        )
        active.append(status)
    order = order_of(gpus)
    return tuple(sorted(active, key=lambda status: order.get(status.plan.gpu_uuids[0], 0)))
