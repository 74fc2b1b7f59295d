"""What can be given now, out of the snapshot."""

from __future__ import annotations

from collections.abc import Mapping

from yunion_mps.leases.ledger import Offer, Offers, PoolOffer
from yunion_mps.models import Snapshot
from yunion_mps.planning import pool_device


def offers_of(snapshot: Snapshot, reasons: Mapping[str, str]) -> Offers:
    """The devices and pools; `reasons` says, by GPU UUID, why they cannot be used, empty where they can."""
    plan, gpus = snapshot.plan, snapshot.inventory.gpus
    sliced = {one.gpu_uuid for status in snapshot.domains for one in status.plan.slices}
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
    return Offers(devices, pools)
