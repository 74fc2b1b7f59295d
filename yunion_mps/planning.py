"""What should be, as a pure function of the configuration and the GPUs found. Nothing here touches the host.

Invariants, held by property tests: the budgets of a GPU never add up to more than its memory; ids are unique
and do not depend on the order of GPUs or of the file; once a plan is in force, its difference is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import Problem
from yunion_mps.identity import NAMESPACE, uuid5
from yunion_mps.models import (
    DEFAULT,
    EXCLUSIVE_PROCESS,
    PROHIBITED,
    Config,
    Device,
    DeviceEntry,
    DomainPlan,
    Driver,
    Gpu,
    Inventory,
    Plan,
    Source,
)

VOLTA = (7, 0)
#: MPS needs compute capability 3.5 (nvidia-cuda-mps-control(1)).
_FIRST_WITH_MPS = (3, 5)

#: Clients that MPS serves on one GPU (NVIDIA's MPS documentation): from this compute capability and this
#: driver release on. The first row that fits counts.
MPS_CLIENTS = (
    (VOLTA, 590, 60),
    (VOLTA, 0, 48),
    (_FIRST_WITH_MPS, 0, 16),
)

#: Measured with 535: a control daemon keeps memory limits of devices 0 to 31, and ignores others silently.
MOST_GPUS_OF_A_DOMAIN = 32


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
    shares, problems = _shares(config, inventory)
    unavailable = {}
    usable = []
    for gpu in inventory.gpus:
        if gpu.pci_address in shares:
            reason = reason_against(gpu, config)
            if reason:
                unavailable[gpu.pci_address] = reason
            else:
                usable.append(gpu)
    problems += _too_many_in_one_domain(config, usable)
    groups = [("host", "", usable)] if config.cuda_mps_scope == "host" else _one_each(usable)
    domains = tuple(_domain(config, shares, name, below, gpus) for name, below, gpus in groups if gpus)
    names = {uuid: domain.name for domain in domains for uuid in domain.gpu_uuids}
    devices = [
        device
        for gpu in usable
        for device in _devices(config, host, gpu, shares[gpu.pci_address], names[str(gpu.uuid)])
    ]
    modes = {str(gpu.uuid): EXCLUSIVE_PROCESS for gpu in usable}
    if config.cuda_mps_compute_mode == "keep":
        modes = {}
    return Plan(host, domains, modes, tuple(devices), unavailable), problems


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


def host_id(machine_id: str) -> str:
    """The host's id: the same for as long as the machine id is."""
    return uuid5(NAMESPACE, machine_id)


def max_clients(gpu: Gpu, driver: Driver, override: int | None) -> int:
    """How many clients, and so devices, the GPU's MPS allows; the fewest where the capability is unknown."""
    if override:
        return override
    major = driver.version.partition(".")[0]
    release = int(major) if major.isdigit() else 0
    capability = gpu.compute_capability or _FIRST_WITH_MPS
    for lowest, first_release, clients in MPS_CLIENTS:
        if capability >= lowest and release >= first_release:
            return clients
    return MPS_CLIENTS[-1][2]


def enforces_budgets(gpu: Gpu) -> bool:
    """Whether memory limits and percentages are enforced, which no GPU before Volta does."""
    return gpu.compute_capability is not None and gpu.compute_capability >= VOLTA


def thread_percentage(policy: str, virtual_number: int) -> float:
    """The share of SM threads in percent: 100/n, 100/(0.5 n) or 100, one decimal, rounded down, at least 0.1.

    NVIDIA suggests the first for clients that are always busy, the second to let them use idle time.
    """
    if policy == "none":
        return 100.0
    tenths = (1000 if policy == "equal" else 2000) // virtual_number
    return max(1, min(1000, tenths)) / 10


def reason_against(gpu: Gpu, config: Config) -> str:
    """Why the GPU cannot serve MPS devices, empty where it can."""
    if gpu.reason:
        return gpu.reason
    if gpu.uuid is None or gpu.memory_mib is None:
        return "the driver does not tell the GPU's UUID and memory"
    if gpu.mig_enabled:
        return "the GPU is in MIG mode, which excludes MPS on it as a whole (turn it off: nvidia-smi -mig 0)"
    capability = gpu.compute_capability
    if capability is not None and capability < _FIRST_WITH_MPS:
        return f"MPS needs compute capability 3.5, the GPU has {capability[0]}.{capability[1]}"
    if gpu.compute_mode == PROHIBITED and config.cuda_mps_compute_mode == "keep":
        return "the GPU's compute mode is Prohibited, and cuda_mps_compute_mode is keep"
    return ""


def client_environment(device: Device, domain: DomainPlan) -> dict[str, str]:
    """The environment of a process that uses the device: it can only tighten what the control daemon set.

    The process sees one GPU, so the memory limit is that of its device 0.
    """
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": decimal(device.thread_percentage),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={device.memory_limit_mib}M",
        "CUDA_MPS_PIPE_DIRECTORY": domain.pipe_directory,
        "CUDA_VISIBLE_DEVICES": device.gpu_uuid,
    }


def decimal(percentage: float) -> str:
    """A percentage as NVIDIA's programs take it: `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")


def _shares(config: Config, inventory: Inventory) -> tuple[dict[str, int], list[Problem]]:
    """How many devices each GPU (by PCI address) is divided into, and what is wrong with the entries."""
    problems = []
    shares: dict[str, int] = {}
    first: dict[str, DeviceEntry] = {}
    for entry in config.devices:
        gpu = find_gpu(entry.path, inventory.gpus)
        if gpu is None and _may_be_broken(entry, inventory):
            continue
        if gpu is None:
            problems.append(_no_gpu(entry, inventory))
        elif gpu.pci_address in first:
            at = first[gpu.pci_address]
            what = f"path {entry.path} is GPU {gpu.address}, which line {at.path_at.line} divides already"
            if entry.path != at.path:
                what += f" as {at.path}"
            problems.append(Problem(*entry.path_at, what, "remove one of the two entries"))
        else:
            first[gpu.pci_address] = entry
            shares[gpu.pci_address] = entry.virtual_number
            problems += _too_many("virtual_number", entry.virtual_number, gpu, config, inventory, entry)
    if not config.devices:
        for gpu in inventory.gpus:
            shares[gpu.pci_address] = config.cuda_mps_replicas
            problems += _too_many("cuda_mps_replicas", config.cuda_mps_replicas, gpu, config, inventory)
    return shares, problems


def find_gpu(path: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """The GPU that a render node, a PCI address or a UUID names, None where none is so named."""
    wanted = path.strip()
    lower = wanted.lower()
    for gpu in gpus:
        link = f"/dev/dri/by-path/pci-{gpu.pci_address}-render" if gpu.render_node else None
        if wanted in (gpu.render_node, link) or lower == (gpu.uuid or "").lower():
            return gpu
        if _same_address(lower, gpu.pci_address):
            return gpu
    return None


def _same_address(text: str, pci_address: str) -> bool:
    """Whether `text` is the address, with its domain in any number of digits or, where it is 0, without."""
    domain, _, rest = pci_address.partition(":")
    head, _, tail = text.partition(":")
    if text.count(":") == 1:
        return int(domain, 16) == 0 and text == rest
    return tail == rest and head.lstrip("0") == domain.lstrip("0")


def _may_be_broken(entry: DeviceEntry, inventory: Inventory) -> bool:
    """Whether a UUID may be that of a broken GPU, which does not tell its own: then it is not wrong."""
    is_uuid = entry.path.strip().upper().startswith("GPU-")
    return is_uuid and any(gpu.uuid is None and gpu.reason for gpu in inventory.gpus)


def _no_gpu(entry: DeviceEntry, inventory: Inventory) -> Problem:
    names = [gpu.render_node or gpu.uuid or gpu.address for gpu in inventory.gpus]
    remedy = f"the GPUs of this host are {', '.join(names)}" if names else "this host has no NVIDIA GPU"
    return Problem(*entry.path_at, f"path {entry.path} is no GPU of this host", remedy)


def _too_many(
    key: str, number: int, gpu: Gpu, config: Config, inventory: Inventory, entry: DeviceEntry | None = None
) -> list[Problem]:
    most = max_clients(gpu, inventory.driver, config.cuda_mps_max_clients)
    if gpu.reason or number <= most:
        return []
    at = entry.virtual_number_at if entry else config.sources[key]
    if at.line is None:  # the default is above what the operator's own override allows
        at = config.sources["cuda_mps_max_clients"]
    what = (
        f"{key} is {number}, more than the {most} clients that MPS allows on GPU {gpu.address} ({gpu.name})"
    )
    remedy = f"write at most {most}"
    if enforces_budgets(gpu):
        remedy += ", or set cuda_mps_max_clients in host.conf where the driver allows more"
    return [Problem(*at, what, remedy)]


def _too_many_in_one_domain(config: Config, gpus: Sequence[Gpu]) -> list[Problem]:
    if config.cuda_mps_scope != "host" or len(gpus) <= MOST_GPUS_OF_A_DOMAIN:
        return []
    most = MOST_GPUS_OF_A_DOMAIN
    what = f"cuda_mps_scope is host, and one control daemon cannot limit more than {most} GPUs"
    at = config.sources["cuda_mps_scope"]
    if at.line is None:  # the default: host.conf is where MPS is enabled
        at = Source(config.sources["enable_cuda_mps"].file, None)
    return [Problem(*at, what, "write cuda_mps_scope: gpu")]


def _one_each(gpus: Iterable[Gpu]) -> list[tuple[str, str, list[Gpu]]]:
    """A domain for each GPU, in directories named by its UUID."""
    return [(gpu.address, f"/{gpu.uuid}", [gpu]) for gpu in gpus]


def _domain(
    config: Config, shares: Mapping[str, int], name: str, below: str, gpus: Sequence[Gpu]
) -> DomainPlan:
    """One control daemon's plan; its default percentage is the largest, for clients can only tighten it."""
    numbers = [shares[gpu.pci_address] for gpu in gpus]
    return DomainPlan(
        name,
        config.cuda_mps_pipe_directory + below,
        config.cuda_mps_log_directory + below,
        tuple(str(gpu.uuid) for gpu in gpus),
        tuple((gpu.memory_mib or 0) // number for gpu, number in zip(gpus, numbers)),
        max(thread_percentage(config.cuda_mps_thread_percentage, number) for number in numbers),
    )


def _devices(config: Config, host: str, gpu: Gpu, number: int, domain: str) -> Iterable[Device]:
    memory = gpu.memory_mib or 0
    percentage = thread_percentage(config.cuda_mps_thread_percentage, number)
    for slot in range(number):
        yield Device(
            id=uuid5(host, f"{gpu.uuid}/{slot}"),
            addr=f"{gpu.address}-{slot}",
            gpu_uuid=str(gpu.uuid),
            slot=slot,
            memory_limit_mib=memory // number,
            memory_total_mib=memory,
            thread_percentage=percentage,
            budget_enforced=enforces_budgets(gpu),
            domain=domain,
        )
