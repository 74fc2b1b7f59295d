"""Snapshots of the GPUs and domains, from which the daemon answers, and warnings for the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from yunion_mps import reasons
from yunion_mps.addresses import short_address
from yunion_mps.enums import STOPPED
from yunion_mps.models import EXCLUSIVE_PROCESS, Condition, DomainPlan, DomainStatus, Gpu, Plan, Snapshot
from yunion_mps.mps.domain import Domain
from yunion_mps.planning.division import enforces_budgets
from yunion_mps.reasons import NO_REASON, Reason
from yunion_mps.supervisor.changes import DesiredState, order_of
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.layouts import MigLayouts
from yunion_mps.users import wait_reason

_WAITS = wait_reason("its control daemon", "the one that now serves its GPUs", reasons.LIMITS_PENDING)


class Snapshots:
    """Makes a snapshot of the current state whenever that has changed."""

    def __init__(
        self,
        desired: DesiredState,
        gpus: Gpus,
        fleet: Fleet,
        layouts: MigLayouts,
        plan: Callable[[], Plan],
        warnings: Callable[[], Iterable[Reason]],
        conditions: Callable[[], tuple[Condition, ...]],
    ) -> None:
        """`plan` returns the plan in effect, the others what other parts of the supervisor have found."""
        self._desired = desired
        self._gpus = gpus
        self._fleet = fleet
        self._layouts = layouts
        self._plan = plan
        self._others = warnings
        self._conditions = conditions
        #: What the operator has to do about a control daemon of an earlier run.
        self.leftovers = ""
        #: Why the driver has not worked since the daemon started; empty if it has.
        self.driver_reason = NO_REASON
        self._warnings: dict[str, Reason] = {}
        self._version = 0
        self._snapshot: Snapshot | None = None

    def changed(self) -> None:
        self._snapshot = None

    def get(self) -> Snapshot:
        """Return the current state; the same object as long as nothing changes."""
        if self._snapshot is None:
            self._version += 1
            desired, gpus, pending = self._desired, self._gpus.inventory, self._layouts.pending
            waiting = [(gpu, pending[gpu.uuid]) for gpu in gpus.gpus if gpu.uuid in pending]
            plan = self._plan()
            unavailable = {**plan.unavailable, **{gpu.pci_address: why for gpu, why in waiting}}
            plan = plan._replace(pending={**plan.pending, **pending}, unavailable=unavailable)
            noted = (reason for reason in self._warnings.values() if reason)
            self._snapshot = Snapshot(
                self._version,
                desired.config.enable_cuda_mps,
                self._notice(plan, waiting),
                plan,
                gpus,
                _statuses(self._fleet.domains, self._fleet.blocked, gpus.gpus),
                (*desired.warnings, *plan.warnings, *noted, *self._others()),
                self._conditions(),
            )
        return self._snapshot

    def _notice(self, plan: Plan, layouts: Sequence[tuple[Gpu, Reason]]) -> Reason:
        """Return why the host offers no devices, if so, and the notice about `leftovers`.

        `layouts` has the GPUs whose MIG layouts are not in effect, and why. A control daemon may serve GPUs
        that have to go.
        """
        why, code = "", reasons.CONTROL_DAEMON_LEFT
        if not self._desired.config.enable_cuda_mps:
            config = self._desired.config
            at = config.sources["enable_cuda_mps"]
            file = next(iter(config.files), "host.conf") if at.line is None else at.file
            why = f"MPS is disabled: enable_cuda_mps is false in {file}{config.also_disabled}"
            code = reasons.DISABLED
        elif self.driver_reason:
            why, code = f"waiting for the NVIDIA driver: {self.driver_reason}", self.driver_reason.code
        elif not (plan.domains or plan.direct or self._fleet.domains):
            pending = [f"GPU {gpu.address}: {reason}" for gpu, reason in layouts]
            named = {gpu.pci_address for gpu, _ in layouts}
            others = [
                f"{short_address(address)}: {reason}"
                for address, reason in plan.unavailable.items()
                if address not in named
            ]
            others += [f"{entry.path}: {entry.reason}" for entry in plan.missing]
            if pending:
                why = "; ".join([*pending, *(f"GPU {other}" for other in others)])
                code = layouts[0][1].code
            else:
                each = "; ".join(others) or "no GPU was found"
                why, code = f"no GPU on this host can serve devices ({each})", reasons.NO_USABLE_GPU
        text = "; ".join(part for part in (why, self.leftovers) if part)
        return Reason(text, code if text else "")

    def set_warning(self, about: str, reason: Reason) -> None:
        """Add a warning to the status; an empty reason removes it."""
        if self._warnings.get(about, NO_REASON) != reason:
            self._warnings[about] = reason
            self.changed()


def _statuses(
    domains: Sequence[Domain], blocked: Iterable[DomainPlan], gpus: Sequence[Gpu]
) -> tuple[DomainStatus, ...]:
    """Return the status of each domain, and of those that wait for the end of another, in the GPUs' order."""
    active = [domain.status() for domain in domains]
    names = {status.plan.name for status in active}
    waiting = (plan for plan in blocked if plan.name not in names)
    active += [DomainStatus(plan, STOPPED, _WAITS, None, 0.0, 0, _WAITS) for plan in waiting]
    order = order_of(gpus)
    return tuple(sorted(active, key=lambda status: order.get(status.plan.gpu_uuids[0], 0)))


def warnings(snapshot: Snapshot) -> Iterator[tuple[Reason, Gpu | None]]:
    """Yield what an operator must know although everything runs, such as budgets that are not enforced."""
    for warning in snapshot.warnings:
        yield warning, None
    served = {uuid for domain in snapshot.domains for uuid in domain.plan.gpu_uuids}
    leaving = {gpu.uuid for gpu in snapshot.plan.direct}  # MPS still has the mode that it needs
    for gpu in snapshot.inventory.gpus:
        if gpu.uuid in served and not gpu.reason and not enforces_budgets(gpu):
            what = (
                f"GPU {gpu.address} ({gpu.name}): budgets are not enforced because it is older than Volta; "
                "its clients can use all of its memory and threads"
            )
            if gpu.compute_capability is None:
                what = (
                    f"GPU {gpu.address} ({gpu.name}): its budgets may not be enforced, because the driver "
                    "does not report its compute capability; if it is older than Volta, its clients can use "
                    "all of its memory and threads"
                )
            yield Reason(what, reasons.BUDGET_NOT_ENFORCED), gpu
        if gpu.uuid in served - leaving and not gpu.reason and _lacks_mode(gpu, snapshot.plan):
            yield _unsupported_mode(gpu), gpu
        planned = snapshot.plan.compute_modes.get(gpu.uuid or "") if gpu.uuid in served - leaving else None
        if planned and not gpu.reason and gpu.compute_mode != planned:
            what = (
                f"GPU {gpu.address} ({gpu.name}): its compute mode is {gpu.compute_mode}, not {planned}; "
                "a process that bypasses the control daemon could use it without limits"
            )
            yield Reason(what, reasons.COMPUTE_MODE_CHANGED), gpu


def _lacks_mode(gpu: Gpu, plan: Plan) -> bool:
    """Whether the GPU has another mode than MPS should have, because the driver does not support a change."""
    is_kept = gpu.physical_address in plan.kept_modes
    return gpu.mode_is_fixed and not (is_kept or gpu.parent) and gpu.compute_mode != EXCLUSIVE_PROCESS


def _unsupported_mode(gpu: Gpu) -> Reason:
    name = f"GPU {gpu.address} ({gpu.name})"
    what = f"its compute mode stays {gpu.compute_mode}, because the driver does not support changing it"
    if gpu.compute_mode is None:
        what = "its compute mode is not changed, because the driver does not report it"
    means = "a process that bypasses the control daemon could use it without limits"
    return Reason(f"{name}: {what}; {means}", reasons.COMPUTE_MODE_UNSUPPORTED)
