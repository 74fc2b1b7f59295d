"""Which GPU an entry of the device file means, and into how many devices it is divided."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.errors import Problem
from yunion_mps.models import Config, DeviceEntry, Gpu, Inventory
from yunion_mps.planning.capabilities import enforces_budgets, max_clients


def shares_of(config: Config, inventory: Inventory) -> tuple[dict[str, int], list[Problem]]:
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
