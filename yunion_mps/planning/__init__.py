"""What should be, as a pure function of the configuration and the GPUs found. Nothing here touches the host.

Invariants, held by property tests: the budgets of a GPU never add up to more than its memory; ids are unique
and do not depend on the order of GPUs or of the file; once a plan is in force, its difference is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import Problem
from yunion_mps.identity import NAMESPACE, uuid5
from yunion_mps.models import (
    DEFAULT,
    EXCLUSIVE_PROCESS,
    NORMAL,
    PRIORITIES,
    Config,
    Device,
    DeviceEntry,
    DomainPlan,
    Gpu,
    Inventory,
    Plan,
    Slice,
    Source,
)
from yunion_mps.planning.capabilities import (
    MOST_GPUS_OF_A_DOMAIN,
    enforces_budgets,
    max_clients,
    reason_against,
)
from yunion_mps.planning.dividing import divide, thread_percentage
from yunion_mps.planning.entries import entries_of, find_gpu
from yunion_mps.planning.pools import free_units, pool_device, pools_of, units_for
from yunion_mps.planning.words import division

__all__ = [
    "DEVICE_VARIABLE",
    "Changes",
    "ModeChange",
    "client_environment",
    "decimal",
    "devices_of",
    "difference",
    "division",
    "enforces_budgets",
    "find_gpu",
    "free_units",
    "host_id",
    "make_plan",
    "max_clients",
    "pool_device",
    "pools_of",
    "reason_against",
    "thread_percentage",
    "units_for",
    "whole_environment",
]


#: Tells whose process it is that uses a device; it means nothing to CUDA.
DEVICE_VARIABLE = "YUNION_MPS_DEVICE"


class ModeChange(NamedTuple):
    """A GPU whose compute mode has to change."""

    gpu_uuid: str
    before: str
    after: str


class Changes(NamedTuple):
    """What has to be done to the host so that the plan is in force."""

    compute_modes: tuple[ModeChange, ...]
    stop: tuple[DomainPlan, ...]
    start: tuple[DomainPlan, ...]

    @property
    def nothing(self) -> bool:
        """Whether the plan is in force already."""
        return not any(self)


def make_plan(config: Config, inventory: Inventory, machine_id: str) -> tuple[Plan, list[Problem]]:
    """Return the plan and the problems that only the GPUs show; with problems, it is not to be used."""
    host = host_id(machine_id)
    if not config.enable_cuda_mps:
        return Plan(host), []
    entries, problems = entries_of(config, inventory)
    unavailable = {}
    usable = []
    for gpu in inventory.gpus:
        if gpu.pci_address in entries:
            reason = reason_against(gpu, config)
            if reason:
                unavailable[gpu.pci_address] = reason
            else:
                usable.append(gpu)
    problems += _too_many_in_one_domain(config, usable)
    lost = [
        gpu
        for gpu in inventory.gpus
        if gpu.pci_address in unavailable and gpu.uuid in inventory.served and gpu.memory_mib is not None
    ]
    domains, parked = (_domains(config, entries, inventory, gpus) for gpus in (usable, lost))
    planned = [*usable, *lost]
    devices = [device for domain in (*domains, *parked) for device in devices_of(host, domain, planned)]
    pools = [pool for domain in (*domains, *parked) for pool in pools_of(domain, planned)]
    order = {str(gpu.uuid): place for place, gpu in enumerate(inventory.gpus)}
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    modes = {str(gpu.uuid): EXCLUSIVE_PROCESS for gpu in planned}
    if config.cuda_mps_compute_mode == "keep":
        modes = {}
    return Plan(host, domains, modes, tuple(devices), unavailable, tuple(pools), parked), problems


def difference(plan: Plan, inventory: Inventory, running: Sequence[DomainPlan]) -> Changes:
    """Return what is to be done where the GPUs are as in `inventory` and `running` are in force."""
    modes = []
    for gpu in inventory.gpus:
        wanted = plan.compute_modes.get(gpu.uuid or "")
        if wanted and gpu.compute_mode != wanted:
            modes.append(ModeChange(str(gpu.uuid), gpu.compute_mode or DEFAULT, wanted))
    stop = tuple(domain for domain in running if domain not in plan.domains)
    start = tuple(domain for domain in plan.domains if domain not in running)
    return Changes(tuple(modes), stop, start)


def devices_of(host: str, domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Device]:
    """The devices into which the domain divides its GPUs, by GPU in the domain's order and slot.

    A GPU that is not among `gpus`, or that the domain has no limit for, has none.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    devices = []
    for planned in domain.gpus:
        gpu = by_uuid.get(planned.uuid)
        if gpu is None or planned.memory_limit_mib is None:
            continue
        equal = (Slice(planned.memory_limit_mib, planned.thread_percentage),) * planned.device_count
        devices += [
            Device(
                id=uuid5(host, f"{planned.uuid}/{slot}"),
                addr=f"{gpu.address}-{slot}",
                gpu_uuid=planned.uuid,
                slot=slot,
                memory_limit_mib=one.memory_limit_mib,
                memory_total_mib=gpu.memory_mib or 0,
                thread_percentage=one.thread_percentage,
                budget_enforced=enforces_budgets(gpu),
                domain=domain.name,
                priority=one.priority,
            )
            for slot, one in enumerate(planned.slices or equal)
        ]
    return devices


def host_id(machine_id: str) -> str:
    """The host's id: the same for as long as the machine id is."""
    return uuid5(NAMESPACE, machine_id)


def client_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """The environment of a process that uses the domain's devices: it can only tighten what that has set.

    Devices of one GPU are one budget, their sum. The process sees just their GPUs, in this order, and has one
    percentage for all of them: where they differ, the smallest. Its priority is the lowest of them.
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
    """The environment of a process that has all devices: each GPU up to what one client may get of it.

    A client cannot get more than its control daemon gives, so more is not promised. Of a GPU that this one
    does not serve now, nobody gets anything, and its devices' sum stands there.
    """
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
    """Why a process would get less than the devices' sum, empty where it gets all of it.

    A client's environment can only tighten the domain's limits.
    """
    for uuid in dict.fromkeys(device.gpu_uuid for device in devices):
        own = [device for device in devices if device.gpu_uuid == uuid]
        wanted_mib = sum(device.memory_limit_mib for device in own)
        most_mib = domain.memory_limit_of(uuid)
        if most_mib is not None and wanted_mib > most_mib:
            return (
                f"its control daemon gives no process more than {most_mib} MiB of GPU "
                f"{own[0].gpu_address}, not {wanted_mib} MiB"
            )
        wanted = min(100.0, sum(device.thread_percentage for device in own))
        if round(wanted, 1) > domain.thread_percentage:
            most = decimal(domain.thread_percentage)
            instead = f"{most} % of the threads of GPU {own[0].gpu_address}, not {decimal(wanted)} %"
            return f"its control daemon gives no process more than {instead}"
    return ""


def decimal(percentage: float) -> str:
    """A percentage as NVIDIA's programs take it: `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")


def _too_many_in_one_domain(config: Config, gpus: Sequence[Gpu]) -> list[Problem]:
    if config.cuda_mps_scope != "host" or len(gpus) <= MOST_GPUS_OF_A_DOMAIN:
        return []
    most = MOST_GPUS_OF_A_DOMAIN
    what = f"cuda_mps_scope is host, and one control daemon cannot limit more than {most} GPUs"
    at = config.sources["cuda_mps_scope"]
    if at.line is None:  # the default: host.conf is where MPS is enabled
        at = Source(config.sources["enable_cuda_mps"].file, None)
    return [Problem(*at, what, "write cuda_mps_scope: gpu")]


def _domains(
    config: Config, entries: Mapping[str, DeviceEntry], inventory: Inventory, gpus: Sequence[Gpu]
) -> tuple[DomainPlan, ...]:
    groups = [("host", "", gpus)] if config.cuda_mps_scope == "host" else _one_each(gpus)
    given = (group for group in groups if group[2])
    return tuple(_domain(config, entries, inventory, *group) for group in given)


def _one_each(gpus: Iterable[Gpu]) -> list[tuple[str, str, Sequence[Gpu]]]:
    """A domain for each GPU, in directories named by its UUID."""
    return [(gpu.address, f"/{gpu.uuid}", [gpu]) for gpu in gpus]


def _domain(
    config: Config,
    entries: Mapping[str, DeviceEntry],
    inventory: Inventory,
    name: str,
    below: str,
    gpus: Sequence[Gpu],
) -> DomainPlan:
    """One control daemon's plan; its default limits are the largest, for clients can only tighten them."""
    divided = tuple(
        divide(
            entries[gpu.pci_address],
            gpu,
            config,
            name,
            max_clients(gpu, inventory.driver, config.cuda_mps_max_clients),
        )
        for gpu in gpus
    )
    return DomainPlan(
        name,
        config.cuda_mps_pipe_directory + below,
        config.cuda_mps_log_directory + below,
        divided,
        max(gpu.thread_percentage for gpu in divided),
        config.cuda_mps_multiuser,
        config.cuda_mps_pipe_group or "",
    )
