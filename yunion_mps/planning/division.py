"""What MPS can do on a GPU, and how an entry divides it.

An entry divides a GPU into equal devices, slices or a pool.

Thread percentages are counted in tenths of a percent, as integers: NVIDIA's programs are no more precise
(measured with 535).
Invariant, held by property tests: as long as every client gets at most `free_units`, the memory of a pool's
devices, each with its reserve, never exceeds the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from yunion_mps.core import reasons
from yunion_mps.core.enums import KEEP, MPS, NORMAL, NOT_SHARED, TIME_SLICING, WHY_UNENFORCED
from yunion_mps.core.errors import NotFoundError
from yunion_mps.core.identity import uuid5
from yunion_mps.core.models import (
    DEFAULT,
    EXCLUSIVE_PROCESS,
    PROHIBITED,
    Device,
    DomainPlan,
    Driver,
    Gpu,
    Plan,
    PlannedGpu,
    Pool,
    Slice,
    gpus_by_uuid,
)
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.settings import Config, DeviceEntry, Mistake, SliceEntry

#: From this compute capability on, MPS limits the memory and the threads of clients.
#: Source: nvidia-cuda-mps-control(1), "Commands available to Volta MPS control daemon".
VOLTA = (7, 0)
#: MPS needs compute capability 3.5 (nvidia-cuda-mps-control(1), section "DESCRIPTION").
_FIRST_WITH_MPS = (3, 5)

#: Clients that MPS serves on one GPU, by minimum compute capability and driver release. The first matching
#: row applies.
#: Source: nvidia-cuda-mps-control(1), section "DESCRIPTION", for 16 and 48; NVIDIA: Multi-Process Service,
#: section "Client-Server Connection Limits", for 60.
MPS_CLIENTS = ((VOLTA, 590, 60), (VOLTA, 0, 48), (_FIRST_WITH_MPS, 0, 16))

#: Measured with 535: a control daemon keeps memory limits of devices 0 to 31, and ignores others silently.
MAX_GPUS_PER_DOMAIN = 32

_ALL_TENTHS = 1000

#: How many times the policies of `cuda_mps_thread_percentage` hand out the threads; None: no limit.
_OVERCOMMIT = {"equal": 1.0, "double": 2.0, "none": None}


def max_clients(gpu: Gpu, driver: Driver, override: int | None) -> int:
    """Return how many clients, and so devices, MPS allows on the GPU; the fewest if that is unknown.

    The operator's override is for newer drivers, none of which raises the limit of a GPU older than Volta.
    """
    if override and enforces_budgets(gpu):
        return override
    major = driver.version.partition(".")[0]
    release = int(major) if major.isdigit() else 0
    capability = gpu.compute_capability or _FIRST_WITH_MPS
    for lowest, first_release, clients in MPS_CLIENTS:
        if capability >= lowest and release >= first_release:
            return clients
    return MPS_CLIENTS[-1][2]


def enforces_budgets(gpu: Gpu) -> bool:
    """Return whether memory limits and percentages are enforced: on Volta and later GPUs (`VOLTA`)."""
    return gpu.compute_capability is not None and gpu.compute_capability >= VOLTA


def why_unenforced(gpu: Gpu, sharing: str) -> str:
    """Return what the GPU is, so that it enforces no budgets; empty if it is shared in another way."""
    if sharing != MPS:
        return WHY_UNENFORCED.get(sharing, "")
    return "older than Volta" if gpu.compute_capability else "of unknown compute capability"


def with_memory(gpu: Gpu, plan: Plan) -> Gpu:
    """Return the GPU with the memory that the plan divides, if it is configured."""
    return gpu._replace(memory_mib=plan.memory_mib.get(gpu.pci_address, gpu.memory_mib))


def keeps_mode(entry: DeviceEntry, config: Config) -> bool:
    """Return whether the compute mode of the entry's GPU is left as it is."""
    return (entry.cuda_mps_compute_mode or config.cuda_mps_compute_mode) == KEEP


def unusable_reason(gpu: Gpu, sharing: str = MPS, *, keeps_mode: bool = False) -> Reason:
    """Return why the GPU cannot be shared in this way; empty if it can.

    keeps_mode: its compute mode is left as it is, as configured.

    Source: NVIDIA: Multi-Instance GPU User Guide, sections "MIG with CUDA MPS", for the compute mode, and
    "Creating GPU Instances": no program can use a GPU in MIG mode as a whole; nvidia-smi(1), Compute Mode.
    """
    if gpu.reason:
        return gpu.reason
    if gpu.uuid is None:
        return Reason("the driver does not report the GPU's UUID", reasons.GPU_ERROR)
    if gpu.mig_enabled:
        text = "the GPU is in MIG mode, so MPS cannot serve it as a whole"
        if sharing == TIME_SLICING:
            text = "the GPU is in MIG mode, so it cannot be time-sliced as a whole"
        return Reason(text, reasons.MIG_ENABLED)
    stays = keeps_mode or gpu.mode_is_fixed
    why = "the driver does not support changing it" if gpu.mode_is_fixed else "cuda_mps_compute_mode is keep"
    is_strict = stays and gpu.compute_mode in (EXCLUSIVE_PROCESS, PROHIBITED)
    if is_strict and (gpu.parent or sharing == TIME_SLICING):
        text = "MIG requires" if gpu.parent else "time-slicing requires"
        text += f" compute mode Default, but it is {gpu.compute_mode}, and {why}"
        return Reason(
            text, reasons.COMPUTE_MODE_FIXED if gpu.mode_is_fixed else reasons.COMPUTE_MODE_EXCLUSIVE
        )
    if sharing == TIME_SLICING:
        return NO_REASON
    if gpu.memory_mib is None:
        text = "the driver does not report the memory of this GPU, which shares the host's memory"
        return Reason(f"{text}, so MPS cannot limit it", reasons.MEMORY_UNKNOWN)
    capability = gpu.compute_capability
    if capability is not None and capability < _FIRST_WITH_MPS:
        text = f"MPS requires compute capability 3.5, but the GPU has {capability[0]}.{capability[1]}"
        return Reason(text, reasons.MPS_UNSUPPORTED)
    if gpu.compute_mode == PROHIBITED and stays:
        text = f"the GPU's compute mode is Prohibited, and {why}"
        return Reason(
            text, reasons.COMPUTE_MODE_FIXED if gpu.mode_is_fixed else reasons.COMPUTE_MODE_PROHIBITED
        )
    return NO_REASON


def mode_for(gpu: Gpu, way: str) -> tuple[str, str]:
    """Return the UUID of the whole GPU, and the compute mode that this way of sharing requires of it.

    Under MPS, only its server should create contexts, for which NVIDIA recommends EXCLUSIVE_PROCESS. Time
    slices are shared in the mode Default, and so are MIG instances: MIG does not support EXCLUSIVE_PROCESS.

    Source: NVIDIA: Multi-Process Service, section "GPU Compute Modes"; Multi-Instance GPU User Guide, section
    "MIG with CUDA MPS".
    """
    is_exclusive = way == MPS and not gpu.parent
    return gpu.parent or str(gpu.uuid), EXCLUSIVE_PROCESS if is_exclusive else DEFAULT


def divide(entry: DeviceEntry, gpu: Gpu, config: Config, domain: str, clients: int) -> PlannedGpu:
    """Divide the GPU by a valid entry.

    domain: the name of the GPU's domain
    clients: how many clients MPS allows on the GPU
    """
    uuid = str(gpu.uuid)
    total_mib = gpu.memory_mib or 0
    overcommit = overcommit_of(entry, config)
    if entry.slices:
        slices = []
        for item in entry.slices:
            percentage = _tenths(item, total_mib, overcommit) / 10
            slices.append(Slice(item.memory_mib, percentage, item.priority))
        return PlannedGpu(
            uuid=uuid,
            memory_limit_mib=max(share.memory_limit_mib for share in slices),
            device_count=len(slices),
            thread_percentage=max(share.thread_percentage for share in slices),
            slices=tuple(slices),
        )
    if entry.memory_unit_mib:
        reserve_mib = entry.memory_reserve_mib
        unit_mib = entry.memory_unit_mib
        most_mib = max(0, total_mib - reserve_mib) // unit_mib * unit_mib
        pool = Pool(
            gpu_uuid=uuid,
            domain=domain,
            unit_mib=unit_mib,
            memory_mib=most_mib,
            memory_total_mib=total_mib,
            reserve_mib=reserve_mib,
            clients=clients,
            thread_overcommit=overcommit,
            thread_percentage=entry.thread_percentage,
        )
        most_percentage = 100.0
        if not pool.thread_percentage:
            most_percentage = share_percentage(most_mib, total_mib, overcommit)
        return PlannedGpu(uuid=uuid, memory_limit_mib=most_mib, thread_percentage=most_percentage, pool=pool)
    count = entry.virtual_number
    percentage = share_percentage(1, count, overcommit)
    share_mib = total_mib // count
    combined = min(config.cuda_mps_combine, count)
    planned = PlannedGpu(
        uuid=uuid, memory_limit_mib=share_mib, device_count=count, thread_percentage=percentage
    )
    if combined == 1:
        return planned
    return planned._replace(
        memory_limit_mib=share_mib * combined,
        thread_percentage=min(100.0, round(percentage * combined, 1)),
        slices=(Slice(share_mib, percentage),) * count,
    )


def share_percentage(part: int, whole: int, overcommit: float | None) -> float:
    """Return the percentage of SM threads for a part of a GPU, rounded down to one decimal; at least 0.1.

    That is 100/n for one of n equal devices, and with an `overcommit` of 2 twice as much; None: 100. NVIDIA
    suggests the first for clients that are always busy, the second to let them use idle time.

    Source: NVIDIA: Multi-Process Service, section "Dynamic Execution Resource Provisioning".
    """
    return _share_tenths(part, whole, overcommit) / 10


def overcommit_of(entry: DeviceEntry, config: Config) -> float | None:
    """Return how many times the GPU's threads may be handed out; None: no limit."""
    if entry.thread_overcommit is not None:
        return entry.thread_overcommit
    return _OVERCOMMIT[config.cuda_mps_thread_percentage]


def slices_mistakes(entry: DeviceEntry, gpu: Gpu, config: Config) -> list[Mistake]:
    """Return in which ways the slices exceed the GPU."""
    total_mib = gpu.memory_mib
    if total_mib is None:
        return []
    mistakes = []
    taken_mib = sum(item.memory_mib for item in entry.slices)
    if taken_mib > total_mib:
        text = f"the slices add up to {taken_mib} MiB, more than the {total_mib} MiB of {_gpu_name(gpu)}"
        mistakes.append(Mistake(text, f"reduce them by {taken_mib - total_mib} MiB"))
    overcommit = overcommit_of(entry, config)
    by_share = all(item.thread_percentage is None for item in entry.slices)
    if overcommit is None or by_share:
        return mistakes
    tenths = sum(_tenths(item, total_mib, overcommit) for item in entry.slices)
    if tenths > round(_ALL_TENTHS * overcommit):
        limit = f"more than {100 * overcommit:g} %"
        text = f"the slices add up to {tenths / 10:g} % of the threads of {_gpu_name(gpu)}, {limit}"
        more = -(-tenths // 10) / 100
        hint = f"lower their thread_percentage, or overcommit the threads: thread_overcommit: {more:g}"
        mistakes.append(Mistake(text, hint))
    return mistakes


def pool_mistake(entry: DeviceEntry, gpu: Gpu) -> Mistake | None:
    """Return why no client could get anything from the pool; None if a client can."""
    if gpu.memory_mib is None or gpu.memory_mib >= entry.memory_unit_mib + entry.memory_reserve_mib:
        return None
    text = f"memory_unit is {entry.memory_unit_mib} MiB,"
    smaller = "a smaller one"
    if entry.memory_reserve_mib:
        text = f"memory_unit is {entry.memory_unit_mib} MiB "
        text += f"and memory_reserve {entry.memory_reserve_mib} MiB, together"
        smaller = "smaller ones"
    text += f" more than the {gpu.memory_mib} MiB of {_gpu_name(gpu)}"
    return Mistake(text, f"write {smaller}, or divide the GPU by virtual_number")


def _tenths(item: SliceEntry, total_mib: int, overcommit: float | None) -> int:
    if item.thread_percentage is not None:
        return round(item.thread_percentage * 10)
    return _share_tenths(item.memory_mib, total_mib, overcommit)


def _share_tenths(part: int, whole: int, overcommit: float | None) -> int:
    if overcommit is None:
        return _ALL_TENTHS
    hundredths = round(overcommit * 100)  # a whole number keeps the division exact
    return max(1, min(_ALL_TENTHS, _ALL_TENTHS * part * hundredths // (100 * whole)))


def memory_mistake(entry: DeviceEntry, gpu: Gpu) -> Mistake | None:
    """Return that the entry's memory exceeds what the driver reports; None if it does not."""
    if entry.memory_mib is None or gpu.memory_mib is None or entry.memory_mib <= gpu.memory_mib:
        return None
    text = f"memory is {entry.memory_mib} MiB, more than the {gpu.memory_mib} MiB of {_gpu_name(gpu)}"
    return Mistake(text, f"write at most {gpu.memory_mib}MiB, or remove it")


def _gpu_name(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})"


def pools_of(domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Pool]:
    """Return the pools of the domain whose GPU is among `gpus`."""
    by_uuid = gpus_by_uuid(gpus)
    return [gpu.pool for gpu in domain.gpus if gpu.pool and gpu.uuid in by_uuid]


def units_for(pool: Pool, memory_mib: int) -> int:
    """Return how many units of the pool have at least this much memory."""
    return -(-memory_mib // pool.unit_mib)


def free_units(pool: Pool, taken_mib: int = 0, clients: int = 0) -> int:
    """Return how many units another client can get from the GPU; 0 if none fits.

    `clients` already use `taken_mib` of it, including their reserves and devices of a previous division.
    """
    if clients >= pool.clients:
        return 0
    return max(0, pool.memory_total_mib - taken_mib - pool.reserve_mib) // pool.unit_mib


def thread_tenths(pool: Pool) -> int:
    """Return how many tenths of a percent of the threads all clients of the pool may have together."""
    return round(_ALL_TENTHS * (pool.clients if pool.thread_overcommit is None else pool.thread_overcommit))


def pool_percentage(
    default: int, memory_mib: int, memory_total_mib: int, thread_overcommit: float | None
) -> float:
    """Return the percentage of a client that requests none.

    default: what such a client gets, in percent; 0 for a percentage in proportion to its memory
    thread_overcommit: how many times the threads are handed out; None for no limit
    """
    return float(default) or share_percentage(memory_mib, memory_total_mib, thread_overcommit)


def pool_device(host_id: str, pool: Pool, units: int, slot: int, gpus: Iterable[Gpu]) -> Device:
    """Return the device of a number of units; the same slot always has the same id and address.

    Raises NotFoundError if the pool's GPU is not among `gpus`, and ValueError if the pool never has that many
    units.
    """
    memory_mib = units * pool.unit_mib
    if not 0 < memory_mib <= pool.memory_mib:
        raise ValueError(f"{units} units of {pool.unit_mib} MiB out of a pool of {pool.memory_mib} MiB")
    gpu = gpus_by_uuid(gpus).get(pool.gpu_uuid)
    if gpu is None:
        raise NotFoundError(f"GPU {pool.gpu_uuid} is no longer present", "list the GPUs: yunion-mps gpus")
    percentage = pool_percentage(
        pool.thread_percentage, memory_mib, pool.memory_total_mib, pool.thread_overcommit
    )
    return Device(
        id=uuid5(host_id, f"{pool.gpu_uuid}/m{slot}"),
        addr=f"{gpu.address}-m{slot}",
        gpu_uuid=pool.gpu_uuid,
        slot=slot,
        memory_limit_mib=memory_mib,
        memory_total_mib=pool.memory_total_mib,
        thread_percentage=percentage,
        budget_enforced=enforces_budgets(gpu),
        domain=pool.domain,
        reserve_mib=pool.reserve_mib,
    )


def describe_division(plan: Plan, gpu_uuid: str | None) -> str:
    """Return `1 x 8192 MiB, 50 % + 2 x 4096 MiB, 25 %` or `180 units of 128 MiB`; empty if unused."""
    for pool in plan.pools:
        if pool.gpu_uuid == gpu_uuid:
            return _describe_pool(pool)
    devices = [device for device in plan.devices if device.gpu_uuid == gpu_uuid]
    parts = []
    for budget, equal_devices in groupby(devices, _describe_budget):
        parts.append(f"{len(list(equal_devices))} x {budget}")
    return " + ".join(parts)


def _describe_budget(device: Device) -> str:
    memory = "unknown memory" if device.memory_limit_mib is None else f"{device.memory_limit_mib} MiB"
    if device.sharing == NOT_SHARED:
        return memory
    if device.sharing != MPS:
        return f"{memory}, {device.sharing}"
    priority = "" if device.priority == NORMAL else f", {device.priority.replace('_', ' ')}"
    return f"{memory}, {device.thread_percentage:g} %{priority}"


def _describe_pool(pool: Pool) -> str:
    text = f"{pool.memory_mib // pool.unit_mib} units of {pool.unit_mib} MiB"
    if pool.reserve_mib:
        text += f", {pool.reserve_mib} MiB reserved for each client"
    if pool.thread_percentage:
        text += f", {pool.thread_percentage} % of the threads for each client"
    elif pool.thread_overcommit is None:
        return text + ", unlimited threads"
    if pool.thread_overcommit in (1, None):
        return text
    return f"{text}, threads overcommitted {pool.thread_overcommit:g}x"
