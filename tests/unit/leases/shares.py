"""Devices of made-up GPUs, for the ledger."""

from __future__ import annotations

from yunion_mps.leases.ledger import Offer
from yunion_mps.models import Device, Holder, Lease

GPU_MIB = 1200
HOLDER = Holder("process", 1000, 4260, 77)


def device(gpu: int, slot: int, number: int = 4) -> Device:
    """The `slot`-th of `number` equal shares of a GPU."""
    return Device(
        id=f"id-{gpu}-{number}-{slot}",
        addr=f"0{gpu}:00.0-{slot}",
        gpu_uuid=f"GPU-{gpu}",
        slot=slot,
        memory_limit_mib=GPU_MIB // number,
        memory_total_mib=GPU_MIB,
        thread_percentage=100 / number,
        budget_enforced=True,
        domain="host",
    )


def offers(gpus: int, number: int = 4) -> list[Offer]:
    return [Offer(device(gpu, slot, number)) for gpu in range(gpus) for slot in range(number)]


def lease(name: str, *devices: Device) -> Lease:
    return Lease(name, devices, HOLDER, 1.5)
