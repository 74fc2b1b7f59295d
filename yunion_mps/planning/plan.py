"""The plan as a pure function of the configuration and the GPUs found.

Invariants, held by property tests: the budgets of a GPU never add up to more than its memory; ids are unique
and do not depend on the order of GPUs or entries; once a plan is applied, no compute mode has to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.enums import MPS, TIME_SLICING
from yunion_mps.errors import Problem
from yunion_mps.gpu_path import UUID, parse_gpu_path
from yunion_mps.identity import NAMESPACE, uuid5
from yunion_mps.mig import MigLayout
from yunion_mps.models import (
    DEFAULT,
    Device,
    DomainPlan,
    Driver,
    Gpu,
    Inventory,
    MissingGpu,
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
    pools_of,
    unusable_reason,
)
from yunion_mps.planning.entries import Resolution, reservations, resolve
from yunion_mps.planning.mig import instances_of
from yunion_mps.planning.multiuser import is_multiuser, multiuser_warnings
from yunion_mps.planning.sharing import direct_devices, divide_directly, mode_for
from yunion_mps.reasons import RECORD_HIDDEN, Reason
from yunion_mps.settings import Config, DeviceEntry, Source


class ModeChange(NamedTuple):
    gpu_uuid: str
    before: str
    after: str


def make_plan(
    config: Config, inventory: Inventory, machine_id: str, used: Collection[str] = ()
) -> tuple[Plan, list[Problem]]:
    """Return the plan and the problems that depend on the GPUs.

    A plan with problems that are not minor must not be used. A minor one concerns a single GPU, which is
    unavailable in the plan.

    MIG layouts keep, if possible, the instances (UUIDs) that are `used`.
    """
    host = uuid5(NAMESPACE, machine_id)
    if not config.enable_cuda_mps:
        return Plan(host), []
    resolution = _resolve(config, inventory)
    entries, problems = resolution.entries, resolution.problems
    kept_modes = frozenset(address for address, entry in entries.items() if keeps_mode(entry, config))
    memory_mib = {
        address: entry.memory_mib
        for address, entry in entries.items()
        if entry.memory_mib and address not in resolution.refused
    }
    inventory = _with_memory(inventory, memory_mib)
    reserved = reservations(entries, inventory.gpus)
    entries, layouts, waiting = _with_instances(
        {address: entry for address, entry in entries.items() if address not in resolution.refused},
        inventory.gpus,
        used,
    )
    waiting |= resolution.refused
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
    through_mps = [gpu for gpu in usable if sharing[gpu.pci_address] == MPS]
    of_host = [gpu for gpu in through_mps if not gpu.parent]
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
        actions, direct, sharing, time_slices=slices, layouts=layouts, missing=resolution.missing,
        meant=resolution.meant, warnings=(*resolution.warnings, *multiuser_warnings(config, through_mps)),
        kept_modes=kept_modes, memory_mib=memory_mib,
    )  # fmt: skip
    return plan, problems


def _resolve(config: Config, inventory: Inventory) -> Resolution:
    """Return which GPU each entry divides, as far as that is known.

    If this user may not read what the entries meant before, only a UUID says which GPU an entry means: a
    render node or an address may lead to another GPU now.
    """
    if not inventory.meant_is_hidden or not config.devices:
        return resolve(config, inventory)
    certain: list[DeviceEntry] = []
    hidden: list[MissingGpu] = []
    for entry in config.devices:
        name = parse_gpu_path(entry.path)
        if name and name.kind == UUID:
            certain.append(entry)
            continue
        file, line = entry.path_at
        why = Reason("only root can read which GPU this entry means", RECORD_HIDDEN)
        hidden.append(MissingGpu(entry.path, f"{file}:{line}", why, entry.reserved_for))
    if not certain:  # no entries at all would mean every GPU
        return Resolution({}, {}, tuple(hidden), {}, (), [])
    resolution = resolve(config._replace(devices=tuple(certain)), inventory)
    return resolution._replace(missing=(*resolution.missing, *hidden))


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
                is_multiuser(config, group),
                config.cuda_mps_pipe_group or "",
            )
        )
    return tuple(domains)


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
