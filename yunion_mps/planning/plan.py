"""The plan as a pure function of the configuration and the GPUs found.

Invariants, held by property tests: the budgets of a GPU never add up to more than its memory; ids are unique
and do not depend on the order of GPUs or entries; once a plan is applied, no compute mode has to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.enums import MPS, TIME_SLICING
from yunion_mps.errors import Problem
from yunion_mps.identity import NAMESPACE, uuid5
from yunion_mps.mig import DISABLED, MigLayout
from yunion_mps.models import (
    DEFAULT,
    Device,
    DomainPlan,
    Driver,
    Gpu,
    Inventory,
    Plan,
    Slice,
)
from yunion_mps.paths import Paths
from yunion_mps.planning.division import (
    MAX_GPUS_PER_DOMAIN,
    divide,
    enforces_budgets,
    keeps_mode,
    max_clients,
    memory_error,
    pool_error,
    pools_of,
    slices_error,
    unusable_reason,
)
from yunion_mps.planning.mig import LayoutError, instances_of, layout_of
from yunion_mps.planning.sharing import direct_devices, divide_directly, mode_for
from yunion_mps.reasons import Reason
from yunion_mps.settings import Config, DeviceEntry, Source

#: Where CUDA looks for a control daemon unless CUDA_MPS_PIPE_DIRECTORY is set (NVIDIA's MPS documentation).
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"


class ModeChange(NamedTuple):
    gpu_uuid: str
    before: str
    after: str


def make_plan(
    config: Config, inventory: Inventory, machine_id: str, used: Collection[str] = ()
) -> tuple[Plan, list[Problem]]:
    """Return the plan and the problems that depend on the GPUs; a plan with problems must not be used.

    MIG layouts keep, if possible, the instances (UUIDs) that are `used`.
    """
    host = uuid5(NAMESPACE, machine_id)
    if not config.enable_cuda_mps:
        return Plan(host), []
    entries, problems = _entries_of(config, inventory)
    reserved = _reservations(entries, inventory.gpus)
    kept_modes = frozenset(address for address, entry in entries.items() if keeps_mode(entry, config))
    memory_mib = {address: entry.memory_mib for address, entry in entries.items() if entry.memory_mib}
    inventory = _with_memory(inventory, memory_mib)
    entries, layouts, waiting = _with_instances(entries, inventory.gpus, used)
    divided = [gpu for gpu in inventory.gpus if gpu.pci_address in entries]
    sharing = {gpu.pci_address: entries[gpu.pci_address].sharing for gpu in divided}
    unusable = {
        gpu.pci_address: unusable_reason(
            gpu, sharing[gpu.pci_address], keeps_mode=gpu.physical_address in kept_modes
        )
        for gpu in divided
    }
    unavailable = {address: reason for address, reason in unusable.items() if reason}
    usable = [gpu for gpu in divided if gpu.pci_address not in unavailable]
    of_host = [gpu for gpu in usable if sharing[gpu.pci_address] == MPS and not gpu.parent]
    problems += _too_many_in_one_domain(config, of_host)
    served = [
        gpu
        for gpu in divided
        if gpu.uuid in inventory.served
        if gpu.memory_mib is not None or sharing[gpu.pci_address] == TIME_SLICING
    ]
    lost = [gpu for gpu in served if gpu.pci_address in unavailable]
    domains, parked = (
        _domains(config, entries, inventory.driver, [gpu for gpu in gpus if sharing[gpu.pci_address] == MPS])
        for gpus in (usable, lost)
    )
    planned = [*usable, *lost]
    apart = [gpu for gpu in planned if sharing[gpu.pci_address] != MPS]
    slices = {str(gpu.uuid): entries[gpu.pci_address].time_slice for gpu in apart}
    slices = {uuid: time_slice for uuid, time_slice in slices.items() if time_slice}
    direct = tuple(divide_directly(entries[gpu.pci_address], gpu) for gpu in apart)
    devices = [device for domain in (*domains, *parked) for device in devices_of(host, domain, planned)]
    devices += direct_devices(host, direct, planned)
    pools = [pool for domain in (*domains, *parked) for pool in pools_of(domain, planned)]
    order = {str(gpu.uuid): place for place, gpu in enumerate(inventory.gpus)}
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    modes = dict(mode_for(gpu, sharing[gpu.pci_address]) for gpu in planned)
    in_mig_mode = {gpu.uuid for gpu in inventory.gpus if gpu.mig_enabled}
    modes |= {one.gpu_uuid: DEFAULT for one in layouts if one.enabled or one.gpu_uuid in in_mig_mode}
    for gpu in inventory.gpus:
        if gpu.pci_address in kept_modes or gpu.mode_is_fixed:
            modes.pop(str(gpu.uuid), None)
    actions = {
        str(gpu.uuid): entries[gpu.pci_address].over_budget or config.over_budget
        for gpu in planned
        if sharing[gpu.pci_address] == MPS
    }
    unavailable |= waiting
    plan = Plan(
        host, domains, modes, tuple(devices), unavailable, tuple(pools), parked, reserved,
        actions, direct, sharing, time_slices=slices, layouts=layouts, kept_modes=kept_modes,
        memory_mib=memory_mib,
    )  # fmt: skip
    return plan, problems


def _with_memory(inventory: Inventory, memory_mib: Mapping[str, int]) -> Inventory:
    """Return the inventory with the configured memory of these GPUs (PCI addresses)."""
    gpus = [
        gpu._replace(memory_mib=memory_mib.get(gpu.pci_address, gpu.memory_mib)) for gpu in inventory.gpus
    ]
    return inventory._replace(gpus=tuple(gpus))


def mode_changes(plan: Plan, gpus: Iterable[Gpu]) -> tuple[ModeChange, ...]:
    changes = []
    for gpu in gpus:
        desired = plan.compute_modes.get(gpu.uuid or "")
        if desired and gpu.compute_mode != desired:
            changes.append(ModeChange(str(gpu.uuid), gpu.compute_mode or DEFAULT, desired))
    return tuple(changes)


def below_root(domain: DomainPlan, paths: Paths) -> DomainPlan:
    """Return the domain with its configured directories below our root directory."""
    return domain._replace(
        pipe_directory=paths.under(domain.pipe_directory), log_directory=paths.under(domain.log_directory)
    )


def devices_of(host: str, domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Device]:
    """Return the devices into which the domain divides its GPUs, in the order of its GPUs and of slots.

    GPUs that are not among `gpus`, or have no limit in the domain, have no devices.
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
                id=uuid5(host, f"{gpu.identity or planned.uuid}/{slot}"),
                addr=f"{gpu.address}-{slot}",
                gpu_uuid=planned.uuid,
                slot=slot,
                memory_limit_mib=share.memory_limit_mib,
                memory_total_mib=gpu.memory_mib,
                thread_percentage=share.thread_percentage,
                budget_enforced=enforces_budgets(gpu),
                domain=domain.name,
                priority=share.priority,
            )
            for slot, share in enumerate(planned.slices or equal)
        ]
    return devices


def without_root(domain: DomainPlan, paths: Paths) -> DomainPlan:
    """Return the domain with the directories that it had before `below_root`."""
    root = paths.under("")
    return domain._replace(
        pipe_directory=domain.pipe_directory[len(root) :], log_directory=domain.log_directory[len(root) :]
    )


def _too_many_in_one_domain(config: Config, gpus: Sequence[Gpu]) -> list[Problem]:
    if config.cuda_mps_scope != "host" or len(gpus) <= MAX_GPUS_PER_DOMAIN:
        return []
    most = MAX_GPUS_PER_DOMAIN
    what = f"cuda_mps_scope is host, and one control daemon cannot limit more than {most} GPUs"
    at = config.sources["cuda_mps_scope"]
    if at.line is None:  # the default: host.conf is where MPS is enabled
        at = Source(config.sources["enable_cuda_mps"].file, None)
    return [Problem(*at, what, "write cuda_mps_scope: gpu")]


def _domains(
    config: Config, entries: Mapping[str, DeviceEntry], driver: Driver, gpus: Sequence[Gpu]
) -> tuple[DomainPlan, ...]:
    """Return the control daemons for these GPUs: one for all, or one each, in a directory named by UUID.

    A MIG instance always has its own, because one control daemon cannot serve several (NVIDIA's MPS
    documentation).

    Each one's default limits are those of its largest device, because clients can only tighten them.
    """
    groups = [(gpu.address, f"/{gpu.uuid}", [gpu]) for gpu in gpus]
    if config.cuda_mps_scope == "host":
        whole = [gpu for gpu in gpus if not gpu.parent]
        instances = [group for gpu, group in zip(gpus, groups) if gpu.parent]
        groups = [*([("host", "", whole)] if whole else []), *instances]
    domains = []
    for name, below, group in groups:
        clients = (max_clients(gpu, driver, config.cuda_mps_max_clients) for gpu in group)
        divided = tuple(
            divide(entries[gpu.pci_address], gpu, config, name, most) for gpu, most in zip(group, clients)
        )
        domains.append(
            DomainPlan(
                name,
                config.cuda_mps_pipe_directory + below,
                config.cuda_mps_log_directory + below,
                divided,
                max(gpu.thread_percentage for gpu in divided),
                config.cuda_mps_multiuser,
                config.cuda_mps_pipe_group or "",
            )
        )
    return tuple(domains)


def _entries_of(config: Config, inventory: Inventory) -> tuple[dict[str, DeviceEntry], list[Problem]]:
    """Return the entry that divides each GPU (by PCI address), and the problems of the entries.

    Without entries, every GPU is divided into `cuda_mps_replicas` equal devices.
    """
    problems = []
    entries: dict[str, DeviceEntry] = {}
    physical = [gpu for gpu in inventory.gpus if not gpu.parent]
    for entry in config.devices:
        gpu = find_gpu(entry.path, physical)
        if gpu is None and _may_be_broken(entry, inventory):
            continue
        if gpu is None:
            problems.append(_no_gpu(entry, inventory))
        elif gpu.pci_address in entries:
            first = entries[gpu.pci_address]
            line = first.path_at.line
            what = f"path {entry.path} is GPU {gpu.address}, which is already divided on line {line}"
            if entry.path != first.path:
                what += f" as {first.path}"
            problems.append(Problem(*entry.path_at, what, "remove one of the two entries"))
        else:
            entries[gpu.pci_address] = entry
            problems += _entry_error(entry, gpu, config, inventory)
    if not config.devices:
        at = config.sources["cuda_mps_replicas"]
        for gpu in physical:
            entries[gpu.pci_address] = DeviceEntry(gpu.pci_address, config.cuda_mps_replicas, at, at)
            problems += _too_many("cuda_mps_replicas", config.cuda_mps_replicas, gpu, config, inventory, at)
    return entries, problems


def _reservations(entries: Mapping[str, DeviceEntry], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return what GPUs and their MIG instances (UUIDs) are reserved for, even those without devices now."""
    entries_by_gpu = {gpu.uuid: entries.get(gpu.pci_address) for gpu in gpus}
    found = {gpu.uuid: entries_by_gpu.get(gpu.parent or gpu.uuid) for gpu in gpus}
    return {
        uuid: entry.reserved_for for uuid, entry in found.items() if uuid and entry and entry.reserved_for
    }


def _with_instances(
    entries: Mapping[str, DeviceEntry], gpus: Sequence[Gpu], used: Collection[str]
) -> tuple[dict[str, DeviceEntry], tuple[MigLayout, ...], dict[str, Reason]]:
    """Return the entries with those of MIG instances instead of their GPUs', the layouts, and what waits."""
    by_address = {gpu.pci_address: gpu for gpu in gpus}
    divided: dict[str, DeviceEntry] = {}
    layouts: list[MigLayout] = []
    waiting: dict[str, Reason] = {}
    for address, entry in entries.items():
        if not entry.mig:
            divided[address] = entry
            continue
        gpu = by_address[address]
        instances = instances_of(entry, gpu, gpus, used)
        divided |= instances.entries
        layouts += instances.layouts
        waiting |= {address: gpu.reason} if gpu.reason else instances.waiting
    return divided, tuple(layouts), waiting


def find_gpu(path: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """Find the GPU with this render node, PCI address or UUID."""
    name = path.strip()
    lower = name.lower()
    for gpu in gpus:
        link = f"/dev/dri/by-path/pci-{gpu.pci_address}-render" if gpu.render_node else None
        if name in (gpu.render_node, link) or lower == (gpu.uuid or "").lower():
            return gpu
        if _same_address(lower, gpu.pci_address):
            return gpu
    return None


def _same_address(text: str, pci_address: str) -> bool:
    """Whether `text` is the address, with any number of domain digits, or without a domain if that is 0."""
    domain, _, rest = pci_address.partition(":")
    head, _, tail = text.partition(":")
    if text.count(":") == 1:
        return int(domain, 16) == 0 and text == rest
    return tail == rest and head.lstrip("0") == domain.lstrip("0")


def _may_be_broken(entry: DeviceEntry, inventory: Inventory) -> bool:
    """Whether the UUID may be that of a broken GPU, which does not report its UUID: then it is no problem."""
    is_uuid = entry.path.strip().upper().startswith("GPU-")
    return is_uuid and any(gpu.uuid is None and gpu.reason for gpu in inventory.gpus)


def _no_gpu(entry: DeviceEntry, inventory: Inventory) -> Problem:
    names = [gpu.render_node or gpu.uuid or gpu.address for gpu in inventory.gpus if not gpu.parent]
    hint = (
        f"use one of this host's GPUs: {', '.join(names)}"
        if names
        else "remove the entry: this host has no NVIDIA GPU"
    )
    return Problem(*entry.path_at, f"path {entry.path} is not a GPU of this host", hint)


def _entry_error(entry: DeviceEntry, gpu: Gpu, config: Config, inventory: Inventory) -> list[Problem]:
    """Return how the entry exceeds its GPU; a broken GPU is not checked."""
    if gpu.reason:
        return []
    at = entry.divided_at
    if wrong := [Problem(*(entry.memory_at or at), *error) for error in memory_error(entry, gpu)]:
        return wrong
    gpu = gpu._replace(memory_mib=entry.memory_mib or gpu.memory_mib)
    if wrong := _layout_error(entry, gpu):
        return wrong
    is_split = entry.mig not in ((), (DISABLED,))
    if entry.sharing == TIME_SLICING or (is_split and not entry.virtual_number):
        how = "split into MIG instances" if is_split else "time-sliced"
        return _found_by_every_program(gpu, config, how)
    if entry.slices:
        many = _too_many("slices", len(entry.slices), gpu, config, inventory, at)
        return many + [Problem(*at, *wrong) for wrong in slices_error(entry, gpu, config)]
    if entry.memory_unit_mib:
        return [Problem(*at, *wrong) for wrong in pool_error(entry, gpu)]
    return _too_many("virtual_number", entry.virtual_number, gpu, config, inventory, at)


def _found_by_every_program(gpu: Gpu, config: Config, how: str) -> list[Problem]:
    """Return a problem if programs without MPS would find the control daemon of other GPUs."""
    at = config.sources["cuda_mps_pipe_directory"]
    if config.cuda_mps_scope != "host" or config.cuda_mps_pipe_directory != DEFAULT_PIPE_DIRECTORY:
        return []
    what = f"cuda_mps_pipe_directory is {DEFAULT_PIPE_DIRECTORY}, where every program finds the control "
    what += f"daemon, even one on GPU {gpu.address} ({gpu.name}), which is {how}"
    return [Problem(*at, what, "write another directory, such as /run/nvidia-mps/pipe")]


def _layout_error(entry: DeviceEntry, gpu: Gpu) -> list[Problem]:
    try:
        if entry.mig:
            layout_of(entry, gpu)
    except LayoutError as error:
        return [Problem(*(entry.mig_at or entry.divided_at), error.what, error.hint)]
    return []


def _too_many(
    key: str, count: int, gpu: Gpu, config: Config, inventory: Inventory, at: Source
) -> list[Problem]:
    most = max_clients(gpu, inventory.driver, config.cuda_mps_max_clients)
    if gpu.reason or count <= most:
        return []
    if at.line is None:  # the default exceeds the operator's own override
        at = config.sources["cuda_mps_max_clients"]
    is_many = f"are {count}" if key == "slices" else f"is {count}"
    what = f"{key} {is_many}, more than the {most} clients that MPS allows on GPU {gpu.address} ({gpu.name})"
    hint = f"write at most {most}"
    if enforces_budgets(gpu):
        hint += ", or set cuda_mps_max_clients in host.conf if the driver allows more"
    return [Problem(*at, what, hint)]
