"""What can be given: the devices and pools as they are now, out of the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.models import Device, DomainPlan, Pool, Snapshot
from yunion_mps.planning import enforces_budgets, pool_device, why_not_honoured


class Offer(NamedTuple):
    """A device as it is now: `reason` says why it is not served, empty where it is.

    `sliced`: it is one of a GPU's unequal slices, so a request for memory may get it.
    """

    device: Device
    reason: str = ""
    sliced: bool = False


class PoolOffer(NamedTuple):
    """A GPU's memory in units, as it is now: `make` makes the device of so many units in a slot."""

    pool: Pool
    gpu: str  # its address
    make: Callable[[int, int], Device]
    reason: str = ""


def _no_reason(devices: Sequence[Device]) -> str:
    del devices
    return ""


class Offers(NamedTuple):
    """All that can be given; `unenforced` names, by UUID, the GPUs that hold nobody to a budget.

    `why_apart` says why several devices cannot be one budget, empty where they can.
    """

    devices: Sequence[Offer] = ()
    pools: Sequence[PoolOffer] = ()
    unenforced: Mapping[str, str] = {}
    why_apart: Callable[[Sequence[Device]], str] = _no_reason


def offers_of(snapshot: Snapshot, reasons: Mapping[str, str]) -> Offers:
    """The devices and pools; `reasons` says, by GPU UUID, why they cannot be used, empty where they can."""
    plan, gpus = snapshot.plan, snapshot.inventory.gpus
    sliced = {gpu.uuid for status in snapshot.domains for gpu in status.plan.gpus if gpu.slices}
    devices = [Offer(one, reasons[one.gpu_uuid], one.gpu_uuid in sliced) for one in plan.devices]
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    pools = [
        PoolOffer(
            pool,
            addresses[pool.gpu_uuid],
            lambda units, slot, pool=pool: pool_device(plan.host_id, pool, units, slot, gpus),  # type: ignore[misc]
            reasons[pool.gpu_uuid],
        )
        for pool in plan.pools
    ]
    unenforced = {
        gpu.uuid: f"{gpu.address} ({gpu.name})" for gpu in gpus if gpu.uuid and not enforces_budgets(gpu)
    }
    domains = domain_plans(snapshot)

    def why_apart(some: Sequence[Device]) -> str:
        return why_not_honoured(some, domains[some[0].domain])

    return Offers(devices, pools, unenforced, why_apart)


def domain_plans(snapshot: Snapshot) -> dict[str, DomainPlan]:
    """By name the domains of all devices: as they serve, or as they are to where nobody serves them now."""
    to_be = {plan.name: plan for plan in (*snapshot.plan.parked, *snapshot.plan.domains)}
    return {**to_be, **{status.plan.name: status.plan for status in snapshot.domains}}
