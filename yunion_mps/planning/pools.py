"""Memory in units: the devices that are made out of a pool when somebody asks for them.

Invariant, held by property tests: as long as every client gets at most `free_units`, the memory of a pool's
devices, each with its reserve, never adds up to more than the GPU has.
"""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.errors import NotFoundError
from yunion_mps.identity import uuid5
from yunion_mps.models import Device, DomainPlan, Gpu, Pool
from yunion_mps.planning.capabilities import enforces_budgets
from yunion_mps.planning.dividing import share_percentage


def pools_of(domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Pool]:
    """The pools that the domain serves; one whose GPU is not among `gpus` is none of them."""
    there = {gpu.uuid for gpu in gpus}
    return [gpu.pool for gpu in domain.gpus if gpu.pool and gpu.uuid in there]


def units_for(pool: Pool, memory_mib: int) -> int:
    """How many units of the pool hold so much memory."""
    return -(-memory_mib // pool.unit_mib)


def free_units(pool: Pool, taken_mib: int = 0, clients: int = 0) -> int:
    """How many units one more client can get of the GPU, 0 where none fits.

    `clients` have `taken_mib` of it already, each with its reserve: also those of a division before the pool.
    """
    if clients >= pool.clients:
        return 0
    return max(0, pool.memory_total_mib - taken_mib - pool.reserve_mib) // pool.unit_mib


def pool_device(host_id: str, pool: Pool, units: int, slot: int, gpus: Iterable[Gpu]) -> Device:
    """The device of so many units: the same slot has the same id and address whenever it is made.

    Raises NotFoundError where the pool's GPU is not among `gpus`, ValueError for what the pool never has.
    """
    memory_mib = units * pool.unit_mib
    if not 0 < memory_mib <= pool.memory_mib:
        raise ValueError(f"{units} units of {pool.unit_mib} MiB out of a pool of {pool.memory_mib} MiB")
    gpu = next((gpu for gpu in gpus if gpu.uuid == pool.gpu_uuid), None)
    if gpu is None:
        raise NotFoundError(f"GPU {pool.gpu_uuid} is not there any more", "see which are: yunion-mps gpus")
    return Device(
        id=uuid5(host_id, f"{pool.gpu_uuid}/m{slot}"),
        addr=f"{gpu.address}-m{slot}",
        gpu_uuid=pool.gpu_uuid,
        slot=slot,
        memory_limit_mib=memory_mib,
        memory_total_mib=pool.memory_total_mib,
        thread_percentage=share_percentage(memory_mib, pool.memory_total_mib, pool.thread_overcommit),
        budget_enforced=enforces_budgets(gpu),
        domain=pool.domain,
        reserve_mib=pool.reserve_mib,
    )
