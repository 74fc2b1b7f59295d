"""The current state as the snapshot reports it, in contrast to the desired state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from yunion_mps import reasons
from yunion_mps.models import Config, DomainPlan, DomainStatus, Gpu, Plan, Snapshot
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import STOPPED
from yunion_mps.planning.division import enforces_budgets, pools_of
from yunion_mps.planning.plan import devices_of
from yunion_mps.reasons import Reason

_WAITS = Reason(
    "waiting for the control daemon that currently serves its GPUs to end", reasons.LIMITS_PENDING
)


def in_effect(desired: Plan, domains: Sequence[Domain], gpus: Sequence[Gpu]) -> Plan:
    """Return the plan with the devices and pools that clients get now, perhaps of an earlier plan."""
    served = {uuid for domain in domains for uuid in domain.in_effect.gpu_uuids}
    rest = [gpu for gpu in gpus if gpu.uuid not in served]
    shown = [(domain.in_effect, gpus) for domain in domains]
    shown += [(plan, rest) for plan in (*desired.domains, *desired.parked)]
    devices = [device for plan, its in shown for device in devices_of(desired.host_id, plan, its)]
    pools = [pool for plan, its in shown for pool in pools_of(plan, its)]
    order = _order(gpus)
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    pools.sort(key=lambda pool: order[pool.gpu_uuid])
    return desired._replace(devices=tuple(devices), pools=tuple(pools))


def statuses(
    domains: Sequence[Domain], blocked: Iterable[DomainPlan], gpus: Sequence[Gpu]
) -> tuple[DomainStatus, ...]:
    """Return the status of each domain, and of those that wait for the end of another, in the GPUs' order."""
    found = [domain.status() for domain in domains]
    names = {status.plan.name for status in found}
    waiting = (plan for plan in blocked if plan.name not in names)
    found += [DomainStatus(plan, STOPPED, _WAITS, None, 0.0, 0, _WAITS) for plan in waiting]
    order = _order(gpus)
    return tuple(sorted(found, key=lambda status: order.get(status.plan.gpu_uuids[0], 0)))


def notice(config: Config, desired: Plan, host_conf: str, leftovers: str) -> Reason:
    """Return why the host offers no devices, if so, and the notice about `leftovers`."""
    why, code = "", reasons.CONTROL_DAEMON_LEFT
    if not config.enable_cuda_mps:
        why = f"MPS is disabled: enable_cuda_mps is false in {host_conf}"
        code = reasons.DISABLED
    elif not desired.domains:
        each = "; ".join(f"{address}: {reason}" for address, reason in desired.unavailable.items())
        why = f"no GPU on this host can serve MPS devices ({each or 'there is none'})"
        code = reasons.NO_USABLE_GPU
    text = "; ".join(part for part in (why, leftovers) if part)
    return Reason(text, code if text else "")


def warnings(snapshot: Snapshot) -> Iterator[tuple[Reason, Gpu | None]]:
    """Yield what an operator must know although all runs, such as budgets that are not enforced."""
    for warning in snapshot.warnings:
        yield warning, None
    served = {uuid for domain in snapshot.domains for uuid in domain.plan.gpu_uuids}
    for gpu in snapshot.inventory.gpus:
        if gpu.uuid in served and not gpu.reason and not enforces_budgets(gpu):
            what = (
                f"GPU {gpu.address} ({gpu.name}): budgets are not enforced because it is older than Volta; "
                "its clients can use all of its memory and threads"
            )
            yield Reason(what, reasons.BUDGET_NOT_ENFORCED), gpu
        planned = snapshot.plan.compute_modes.get(gpu.uuid or "")
        if planned and not gpu.reason and gpu.compute_mode != planned:
            what = (
                f"GPU {gpu.address} ({gpu.name}): its compute mode is {gpu.compute_mode}, not {planned}; "
                "a process that bypasses the control daemon could use it without limits"
            )
            yield Reason(what, reasons.COMPUTE_MODE_CHANGED), gpu


def _order(gpus: Iterable[Gpu]) -> dict[str | None, int]:
    return {gpu.uuid: place for place, gpu in enumerate(gpus)}
