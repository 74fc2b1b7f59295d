"""What is, put together for the snapshot: not what should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from yunion_mps.models import Config, DomainPlan, DomainStatus, Gpu, Plan
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import STOPPED
from yunion_mps.planning import devices_of, pools_of

_WAITS = "it waits for the end of the control daemon that serves its GPUs now"


def in_force(target: Plan, domains: Sequence[Domain], gpus: Sequence[Gpu]) -> Plan:
    """The plan with the devices and pools as clients get them now, which may still be of a plan before."""
    devices = []
    pools = []
    served: set[str | None] = set()
    for domain in domains:
        devices += devices_of(target.host_id, domain.plan, gpus)
        pools += pools_of(domain.plan, gpus)
        served |= set(domain.plan.gpu_uuids)
    rest = [gpu for gpu in gpus if gpu.uuid not in served]
    for plan in (*target.domains, *target.parked):
        devices += devices_of(target.host_id, plan, rest)
        pools += pools_of(plan, rest)
    order = _order(gpus)
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    pools.sort(key=lambda pool: order[pool.gpu_uuid])
    return target._replace(devices=tuple(devices), pools=tuple(pools))


def statuses(
    domains: Sequence[Domain], awaited: Iterable[DomainPlan], gpus: Sequence[Gpu]
) -> tuple[DomainStatus, ...]:
    """Of the domains that there are, and of those that wait for one of them, in the GPUs' order."""
    found = [domain.status() for domain in domains]
    names = {status.plan.name for status in found}
    found += [
        DomainStatus(plan, STOPPED, _WAITS, None, 0.0, 0, _WAITS)
        for plan in awaited
        if plan.name not in names
    ]
    order = _order(gpus)
    return tuple(sorted(found, key=lambda status: order.get(status.plan.gpu_uuids[0], 0)))


def notice(config: Config, target: Plan, host_conf: str, past: str) -> str:
    """Why the host offers no devices at all, where that is so, and what of `past` must still be known."""
    why = ""
    if not config.enable_cuda_mps:
        why = f"enable_cuda_mps is false in {host_conf}: this host offers no MPS devices"
    elif not target.domains:
        reasons = "; ".join(f"{address}: {reason}" for address, reason in target.unavailable.items())
        why = f"no GPU of this host can serve MPS devices ({reasons or 'it has none'})"
    return "; ".join(part for part in (why, past) if part)


def _order(gpus: Iterable[Gpu]) -> dict[str | None, int]:
    return {gpu.uuid: place for place, gpu in enumerate(gpus)}
