"""What MPS can do on a GPU, how an entry divides it, and the environment of a process that uses the devices.

An entry divides a GPU into equal devices, slices or a pool.

Thread percentages are counted in tenths of a percent, as integers: NVIDIA's programs are no more precise.
Invariant, held by property tests: as long as every client gets at most `free_units`, the memory of a pool's
devices, each with its reserve, never exceeds the GPU's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from yunion_mps import reasons
from yunion_mps.enums import NORMAL, PRIORITIES
from yunion_mps.errors import InfeasibleError, NotFoundError
from yunion_mps.identity import uuid5
from yunion_mps.models import PROHIBITED, Device, DomainPlan, Driver, Gpu, Plan, PlannedGpu, Pool, Slice
from yunion_mps.reasons import LIMITS_PENDING, NO_REASON, Reason, hint_of
from yunion_mps.settings import Config, DeviceEntry, SliceEntry

#: Lists the addresses of the devices that a process uses; CUDA ignores it.
DEVICE_VARIABLE = "YUNION_MPS_DEVICE"

VOLTA = (7, 0)
#: MPS needs compute capability 3.5 (nvidia-cuda-mps-control(1)).
_FIRST_WITH_MPS = (3, 5)

#: Clients that MPS serves on one GPU (NVIDIA's MPS documentation), by minimum compute capability and driver
#: release. The first matching row applies.
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
    """Whether memory limits and percentages are enforced; no GPU older than Volta does that."""
    return gpu.compute_capability is not None and gpu.compute_capability >= VOLTA


def unusable_reason(gpu: Gpu, config: Config) -> Reason:
    """Return why the GPU cannot serve MPS devices; empty if it can."""
    if gpu.reason:
        return gpu.reason
    if gpu.uuid is None or gpu.memory_mib is None:
        return Reason("the driver does not report the GPU's UUID and memory", reasons.GPU_ERROR)
    if gpu.mig_enabled:
        what = "the GPU is in MIG mode, so MPS cannot serve it as a whole"
        return Reason(what, reasons.MIG_ENABLED)
    capability = gpu.compute_capability
    if capability is not None and capability < _FIRST_WITH_MPS:
        what = f"MPS requires compute capability 3.5, but the GPU has {capability[0]}.{capability[1]}"
        return Reason(what, reasons.MPS_UNSUPPORTED)
    if gpu.compute_mode == PROHIBITED and config.cuda_mps_compute_mode == "keep":
        what = "the GPU's compute mode is Prohibited, and cuda_mps_compute_mode is keep"
        return Reason(what, reasons.COMPUTE_MODE_PROHIBITED)
    return NO_REASON


def divide(entry: DeviceEntry, gpu: Gpu, config: Config, domain: str, clients: int) -> PlannedGpu:
    """Divide the GPU by a valid entry; `clients` is how many MPS allows."""
    uuid, total_mib = str(gpu.uuid), gpu.memory_mib or 0
    overcommit = overcommit_of(entry, config)
    if entry.slices:
        slices = tuple(
            Slice(item.memory_mib, _tenths(item, total_mib, overcommit) / 10, item.priority)
            for item in entry.slices
        )
        most_mib = max(share.memory_limit_mib for share in slices)
        most = max(share.thread_percentage for share in slices)
        return PlannedGpu(uuid, most_mib, len(slices), most, slices)
    if entry.memory_unit_mib:
        reserve_mib = entry.memory_reserve_mib
        unit_mib = entry.memory_unit_mib
        most_mib = max(0, total_mib - reserve_mib) // unit_mib * unit_mib
        pool = Pool(
            uuid, domain, unit_mib, most_mib, total_mib, reserve_mib, clients, overcommit,
            entry.thread_percentage,
        )  # fmt: skip
        most = 100.0 if pool.thread_percentage else share_percentage(most_mib, total_mib, overcommit)
        return PlannedGpu(uuid, most_mib, 0, most, pool=pool)
    number = entry.virtual_number
    percentage, share_mib = share_percentage(1, number, overcommit), total_mib // number
    together = min(config.cuda_mps_combine, number)
    if together == 1:
        return PlannedGpu(uuid, share_mib, number, percentage)
    most = min(100.0, round(percentage * together, 1))
    return PlannedGpu(uuid, share_mib * together, number, most, (Slice(share_mib, percentage),) * number)


def share_percentage(part: int, whole: int, overcommit: float | None) -> float:
    """Return the percentage of SM threads for a part of a GPU, rounded down to one decimal; at least 0.1.

    That is 100/n for one of n equal devices, and with an `overcommit` of 2 twice as much; None: 100. NVIDIA
    suggests the first for clients that are always busy, the second to let them use idle time.
    """
    return _share_tenths(part, whole, overcommit) / 10


def overcommit_of(entry: DeviceEntry, config: Config) -> float | None:
    """Return how many times the GPU's threads may be handed out; None: no limit."""
    if entry.thread_overcommit is not None:
        return entry.thread_overcommit
    return _OVERCOMMIT[config.cuda_mps_thread_percentage]


def slices_error(entry: DeviceEntry, gpu: Gpu, config: Config) -> list[tuple[str, str]]:
    """Return in which ways the slices exceed the GPU, each with a hint."""
    total_mib = gpu.memory_mib
    if total_mib is None:
        return []
    wrong = []
    taken_mib = sum(item.memory_mib for item in entry.slices)
    if taken_mib > total_mib:
        what = f"the slices add up to {taken_mib} MiB, more than the {total_mib} MiB of {_gpu_name(gpu)}"
        wrong.append((what, f"reduce them by {taken_mib - total_mib} MiB"))
    overcommit = overcommit_of(entry, config)
    by_share = all(item.thread_percentage is None for item in entry.slices)
    if overcommit is None or by_share:
        return wrong
    tenths = sum(_tenths(item, total_mib, overcommit) for item in entry.slices)
    if tenths > round(_ALL_TENTHS * overcommit):
        most = f"more than {100 * overcommit:g} %"
        what = f"the slices add up to {tenths / 10:g} % of the threads of {_gpu_name(gpu)}, {most}"
        more = -(-tenths // 10) / 100
        wrong.append(
            (what, f"lower their thread_percentage, or overcommit the threads: thread_overcommit: {more:g}")
        )
    return wrong


def pool_error(entry: DeviceEntry, gpu: Gpu) -> list[tuple[str, str]]:
    """Return why no client could get anything from the pool, with a hint."""
    if gpu.memory_mib is None or gpu.memory_mib >= entry.memory_unit_mib + entry.memory_reserve_mib:
        return []
    what, smaller = f"memory_unit is {entry.memory_unit_mib} MiB,", "a smaller one"
    if entry.memory_reserve_mib:
        what = f"{what[:-1]} and memory_reserve {entry.memory_reserve_mib} MiB, together"
        smaller = "smaller ones"
    what += f" more than the {gpu.memory_mib} MiB of {_gpu_name(gpu)}"
    return [(what, f"write {smaller}, or divide the GPU by virtual_number")]


def _tenths(item: SliceEntry, total_mib: int, overcommit: float | None) -> int:
    if item.thread_percentage is not None:
        return round(item.thread_percentage * 10)
    return _share_tenths(item.memory_mib, total_mib, overcommit)


def _share_tenths(part: int, whole: int, overcommit: float | None) -> int:
    if overcommit is None:
        return _ALL_TENTHS
    hundredths = round(overcommit * 100)  # a whole number keeps the division exact
    return max(1, min(_ALL_TENTHS, _ALL_TENTHS * part * hundredths // (100 * whole)))


def _gpu_name(gpu: Gpu) -> str:
    return f"GPU {gpu.address} ({gpu.name})"


def pools_of(domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Pool]:
    there = {gpu.uuid for gpu in gpus}
    return [gpu.pool for gpu in domain.gpus if gpu.pool and gpu.uuid in there]


def units_for(pool: Pool, memory_mib: int) -> int:
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
    """Return the percentage of a client that requests none: the default, or in proportion if that is 0."""
    return float(default) or share_percentage(memory_mib, memory_total_mib, thread_overcommit)


def pool_device(host_id: str, pool: Pool, units: int, slot: int, gpus: Iterable[Gpu]) -> Device:
    """Return the device of a number of units; the same slot always has the same id and address.

    Raises NotFoundError if the pool's GPU is not among `gpus`, ValueError if the pool never has that many.
    """
    memory_mib = units * pool.unit_mib
    if not 0 < memory_mib <= pool.memory_mib:
        raise ValueError(f"{units} units of {pool.unit_mib} MiB out of a pool of {pool.memory_mib} MiB")
    gpu = next((gpu for gpu in gpus if gpu.uuid == pool.gpu_uuid), None)
    if gpu is None:
        raise NotFoundError(f"GPU {pool.gpu_uuid} is no longer present", "list the GPUs: yunion-mps gpus")
    return Device(
        id=uuid5(host_id, f"{pool.gpu_uuid}/m{slot}"),
        addr=f"{gpu.address}-m{slot}",
        gpu_uuid=pool.gpu_uuid,
        slot=slot,
        memory_limit_mib=memory_mib,
        memory_total_mib=pool.memory_total_mib,
        thread_percentage=pool_percentage(
            pool.thread_percentage, memory_mib, pool.memory_total_mib, pool.thread_overcommit
        ),
        budget_enforced=enforces_budgets(gpu),
        domain=pool.domain,
        reserve_mib=pool.reserve_mib,
    )


def describe_division(plan: Plan, gpu_uuid: str | None) -> str:
    """Return `1 x 8192 MiB, 50 % + 2 x 4096 MiB, 25 %` or `180 units of 128 MiB`; empty if unused."""
    pool = next((pool for pool in plan.pools if pool.gpu_uuid == gpu_uuid), None)
    if pool:
        return _describe_pool(pool)
    devices = [device for device in plan.devices if device.gpu_uuid == gpu_uuid]
    return " + ".join(f"{len(list(group))} x {what}" for what, group in groupby(devices, _describe_budget))


def _describe_budget(device: Device) -> str:
    priority = "" if device.priority == NORMAL else f", {device.priority.replace('_', ' ')}"
    return f"{device.memory_limit_mib} MiB, {device.thread_percentage:g} %{priority}"


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


# -- the environment of a process that uses devices


def client_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """Return the environment of a process that uses these devices; it can only tighten the domain's limits.

    Devices of one GPU add up to one budget. The process sees only their GPUs, in this order, and has one
    thread percentage and one priority: the lowest among them.
    """
    memory_mib: dict[str, int] = {}
    percentage: dict[str, float] = {}
    for device in devices:
        gpu = device.gpu_uuid
        memory_mib[gpu] = memory_mib.get(gpu, 0) + device.memory_limit_mib
        percentage[gpu] = min(100.0, round(percentage.get(gpu, 0.0) + device.thread_percentage, 1))
    limits = (f"{number}={mib}M" for number, mib in enumerate(memory_mib.values()))
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": decimal(min(percentage.values())),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(limits),
        "CUDA_MPS_PIPE_DIRECTORY": domain.pipe_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(memory_mib),
        DEVICE_VARIABLE: ",".join(device.addr for device in devices),
    }
    priority = max(PRIORITIES.index(device.priority) for device in devices)
    if priority != PRIORITIES.index(NORMAL):
        environment["CUDA_MPS_CLIENT_PRIORITY"] = str(priority)
    return dict(sorted(environment.items()))


def whole_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """Return the environment of a process that has all devices, with the domain's limit for each GPU."""
    sums = Counter[str]()
    for device in devices:
        sums[device.gpu_uuid] += device.memory_limit_mib
    most = [domain.memory_limit_of(gpu) or mib for gpu, mib in sums.items()]
    return {
        **client_environment(devices, domain),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(f"{number}={mib}M" for number, mib in enumerate(most)),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": decimal(domain.thread_percentage),
    }


def why_not_honoured(devices: Sequence[Device], domain: DomainPlan) -> str:
    """Return why a process would get less than the sum of its devices; empty if it gets all.

    A client's environment can only tighten the domain's limits.
    """
    for uuid in dict.fromkeys(device.gpu_uuid for device in devices):
        own = [device for device in devices if device.gpu_uuid == uuid]
        requested_mib = sum(device.memory_limit_mib for device in own)
        most_mib = domain.memory_limit_of(uuid)
        if most_mib is not None and requested_mib > most_mib:
            return (
                f"the control daemon limits each process to {most_mib} MiB of GPU "
                f"{own[0].gpu_address}, not {requested_mib} MiB"
            )
        requested = min(100.0, sum(device.thread_percentage for device in own))
        if round(requested, 1) > domain.thread_percentage:
            most = decimal(domain.thread_percentage)
            instead = f"{most} % of the threads of GPU {own[0].gpu_address}, not {decimal(requested)} %"
            return f"the control daemon limits each process to {instead}"
    return ""


def require_one_budget(devices: Sequence[Device], domain: DomainPlan, planned: DomainPlan | None) -> None:
    """Raise InfeasibleError if the devices cannot form one budget; the limits of `planned` are pending."""
    why = why_not_honoured(devices, domain)
    if not why:
        return
    what = f"{len(devices)} devices cannot be combined into one budget"
    if planned and not why_not_honoured(devices, planned):
        pending = "the new limit takes effect once the MPS servers with the old one have ended"
        raise InfeasibleError(f"{what} yet: {why}; {pending}", hint_of(LIMITS_PENDING), LIMITS_PENDING)
    more = f"set cuda_mps_combine: {len(devices)} in host.conf"
    raise InfeasibleError(f"{what}: {why}", f"request them on different GPUs, or {more}")


def decimal(percentage: float) -> str:
    """Format a percentage for NVIDIA's programs: `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")
