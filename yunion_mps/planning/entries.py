"""Which GPU an entry of the device file means, and whether the GPU can be divided as it says."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.errors import Problem
from yunion_mps.models import Config, DeviceEntry, Gpu, Inventory, Source
from yunion_mps.planning.capabilities import enforces_budgets, max_clients
from yunion_mps.planning.dividing import wrong_pool, wrong_slices


def entries_of(config: Config, inventory: Inventory) -> tuple[dict[str, DeviceEntry], list[Problem]]:
    """The entry that divides each GPU (by PCI address), and what is wrong with the entries.

    Where the file has none, there is one for every GPU: `cuda_mps_replicas` equal devices.
    """
    problems = []
    entries: dict[str, DeviceEntry] = {}
    for entry in config.devices:
        gpu = find_gpu(entry.path, inventory.gpus)
        if gpu is None and _may_be_broken(entry, inventory):
            continue
        if gpu is None:
            problems.append(_no_gpu(entry, inventory))
        elif gpu.pci_address in entries:
            first = entries[gpu.pci_address]
            what = f"path {entry.path} is GPU {gpu.address}, which line {first.path_at.line} divides already"
            if entry.path != first.path:
                what += f" as {first.path}"
            problems.append(Problem(*entry.path_at, what, "remove one of the two entries"))
        else:
            entries[gpu.pci_address] = entry
            problems += _wrong_for(entry, gpu, config, inventory)
    if not config.devices:
        at = config.sources["cuda_mps_replicas"]
        for gpu in inventory.gpus:
            entries[gpu.pci_address] = DeviceEntry(gpu.pci_address, config.cuda_mps_replicas, at, at)
            problems += _too_many("cuda_mps_replicas", config.cuda_mps_replicas, gpu, config, inventory, at)
    return entries, problems


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


def _wrong_for(entry: DeviceEntry, gpu: Gpu, config: Config, inventory: Inventory) -> list[Problem]:
    """What the entry asks of its GPU and that cannot give; a broken one is not held to it."""
    if gpu.reason:
        return []
    at = entry.divided_at
    if entry.slices:
        many = _too_many("slices", len(entry.slices), gpu, config, inventory, at)
        return many + [Problem(*at, *wrong) for wrong in wrong_slices(entry, gpu, config)]
    if entry.memory_unit_mib:
        return [Problem(*at, *wrong) for wrong in wrong_pool(entry, gpu)]
    return _too_many("virtual_number", entry.virtual_number, gpu, config, inventory, at)


def _too_many(
    key: str, count: int, gpu: Gpu, config: Config, inventory: Inventory, at: Source
) -> list[Problem]:
    most = max_clients(gpu, inventory.driver, config.cuda_mps_max_clients)
    if gpu.reason or count <= most:
        return []
    if at.line is None:  # the default is above what the operator's own override allows
        at = config.sources["cuda_mps_max_clients"]
    is_many = f"are {count}" if key == "slices" else f"is {count}"
    what = f"{key} {is_many}, more than the {most} clients that MPS allows on GPU {gpu.address} ({gpu.name})"
    remedy = f"write at most {most}"
    if enforces_budgets(gpu):
        remedy += ", or set cuda_mps_max_clients in host.conf where the driver allows more"
    return [Problem(*at, what, remedy)]
