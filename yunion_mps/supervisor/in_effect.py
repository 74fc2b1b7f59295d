"""The state in effect: the plan as clients get it now, perhaps of an earlier configuration. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from yunion_mps.core import reasons
from yunion_mps.core.models import Device, Gpu, Plan, Pool
from yunion_mps.core.reasons import Reason
from yunion_mps.core.waits import wait_reason
from yunion_mps.gpus.blockers import servers_of
from yunion_mps.mps.domain import Domain
from yunion_mps.planning.division import pools_of, with_memory
from yunion_mps.planning.plan import devices_of
from yunion_mps.planning.without_mps import direct_devices


def in_effect(
    desired: Plan, domains: Sequence[Domain], gpus: Sequence[Gpu], waiting: Mapping[str, str] = {}
) -> Plan:
    """Return the plan with the devices and pools that clients get now, perhaps of an earlier plan.

    `waiting` has the GPUs (UUIDs) whose control daemon is replaced after leases, each with a leased GPU.
    """
    gpus = [with_memory(gpu, desired) for gpu in gpus]
    served: set[str] = set()
    devices: list[Device] = []
    pools: list[Pool] = []
    for domain in domains:
        plan = domain.in_effect
        served.update(plan.gpu_uuids)
        devices += devices_of(desired.host_id, plan, gpus)
        pools += pools_of(plan, gpus)
    others = [gpu for gpu in gpus if gpu.uuid not in served]
    for plan in (*desired.domains, *desired.parked):
        devices += devices_of(desired.host_id, plan, others)
        pools += pools_of(plan, others)
    devices += direct_devices(desired.host_id, desired.direct, others)
    order = order_of(gpus)
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    pools.sort(key=lambda pool: order[pool.gpu_uuid])
    pending = dict(_leaving(desired, domains, gpus, waiting))
    pending.update(desired.pending)
    return desired._replace(devices=tuple(devices), pools=tuple(pools), pending=pending)


def _leaving(
    desired: Plan, domains: Iterable[Domain], gpus: Iterable[Gpu], waiting: Mapping[str, str]
) -> Iterator[tuple[str, Reason]]:
    """Yield the GPUs (UUIDs) that a control daemon serves until its servers have ended, and what follows.

    They get no new leases, which would delay that forever.
    """
    stay: set[str] = set()
    for plan in (*desired.domains, *desired.parked):
        stay.update(plan.gpu_uuids)
    changes: dict[str, str] = {}
    addresses: dict[str | None, str] = {}
    for gpu in gpus:
        addresses[gpu.uuid] = gpu.address
        if desired.has_layout(gpu):
            changes[str(gpu.uuid)] = "its MIG layout"
    for direct in desired.direct:
        changes[direct.uuid] = f"the change to {direct.sharing}"
    for domain in domains:
        users = servers_of(domain) or "its control daemon"
        for uuid in domain.in_effect.gpu_uuids:
            if uuid not in stay:
                change = changes.get(uuid, "the removal of its devices")
                yield uuid, wait_reason(change, users, reasons.LIMITS_PENDING)
            elif domain.is_draining and (other := waiting.get(uuid)):
                why = f"a pending change to GPU {addresses.get(other, other)}: {desired.pending[other]}"
                yield uuid, Reason(f"its control daemon is draining because of {why}", reasons.LEASES_PENDING)
            elif domain.is_draining:
                yield (
                    uuid,
                    wait_reason("the replacement of its control daemon", users, reasons.LIMITS_PENDING),
                )


def order_of(gpus: Iterable[Gpu]) -> dict[str | None, int]:
    return {gpu.uuid: place for place, gpu in enumerate(gpus)}
