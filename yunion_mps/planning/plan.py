"""The plan as a pure function of the configuration and the GPUs found.

Invariants, held by property tests: the budgets of a GPU never add up to more than its memory; ids are unique
and do not depend on the order of GPUs or entries; once a plan is applied, no compute mode has to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.enums import MPS, TIME_SLICING
from yunion_mps.core.errors import Problem
from yunion_mps.core.gpu_path import UUID, parse_gpu_path
from yunion_mps.core.identity import NAMESPACE, uuid5
from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import (
    DEFAULT,
    Device,
    DirectGpu,
    DomainPlan,
    Driver,
    Gpu,
    Inventory,
    MissingGpu,
    Plan,
    Pool,
    Slice,
    gpus_by_address,
    gpus_by_uuid,
)
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import COMPUTE_MODE_REFUSED, RECORD_HIDDEN, Reason
from yunion_mps.core.settings import Config, DeviceEntry, Source
from yunion_mps.planning.division import (
    MAX_GPUS_PER_DOMAIN,
    divide,
    enforces_budgets,
    keeps_mode,
    max_clients,
    mode_for,
    pools_of,
    unusable_reason,
)
from yunion_mps.planning.entries import Resolution, reservations, resolve_entries
from yunion_mps.planning.mig import instances_of
from yunion_mps.planning.multiuser import is_multiuser, multiuser_warnings
from yunion_mps.planning.without_mps import direct_devices, divide_directly


class ModeChange(NamedTuple):
    """The change of the compute mode of a GPU (UUID)."""

    gpu_uuid: str
    before: str
    after: str


class _Groups(NamedTuple):
    """The GPUs and MIG instances that entries divide, each in the inventory's order."""

    #: Those whose devices can be used.
    usable: list[Gpu]
    #: Those that have served before and cannot be used now.
    lost: list[Gpu]
    #: Those that have refused the compute mode that they need, which is tried again.
    refused: list[Gpu]
    #: Why the others and the lost ones cannot be used, by PCI address.
    unavailable: dict[str, Reason]
    #: The way of sharing of all of them, by PCI address.
    sharing: dict[str, str]

    def with_mps(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        return [gpu for gpu in gpus if self.sharing[gpu.pci_address] == MPS]

    def without_mps(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        return [gpu for gpu in gpus if self.sharing[gpu.pci_address] != MPS]


class _Divided(NamedTuple):
    """What is divided once MIG layouts are considered."""

    #: The entry of each GPU or MIG instance, by PCI address.
    entries: dict[str, DeviceEntry]
    layouts: tuple[MigLayout, ...]
    #: Why layouts are not in effect yet, by the PCI address of their GPU.
    waiting: dict[str, Reason]


def make_plan(
    config: Config, inventory: Inventory, machine_id: str, used: Collection[str] = ()
) -> tuple[Plan, list[Problem]]:
    """Return the plan and the problems that depend on the GPUs.

    A plan with problems that are not minor must not be used. A minor one concerns a single GPU, which is
    unavailable in the plan.

    machine_id: the host's, as in machine-id(5), from which the host id is made.
    used: UUIDs of MIG instances that the layouts keep if possible.
    """
    host_id = uuid5(NAMESPACE, machine_id)
    if not config.enable_cuda_mps:
        return Plan(host_id), []
    resolution = _resolve(config, inventory)
    refused = resolution.refused
    kept_modes = {address for address, entry in resolution.entries.items() if keeps_mode(entry, config)}
    valid = {address: entry for address, entry in resolution.entries.items() if address not in refused}
    memory_mib = {address: entry.memory_mib for address, entry in valid.items() if entry.memory_mib}
    gpus = _with_memory(inventory.gpus, memory_mib)
    entries, layouts, waiting = _with_instances(valid, gpus, used)
    groups = _classify(entries, gpus, inventory.served, kept_modes)
    planned = [*groups.usable, *groups.lost]
    served = groups.with_mps(groups.usable)
    domains = _domains(config, entries, inventory.driver, served)
    parked = _domains(config, entries, inventory.driver, groups.with_mps(groups.lost))
    direct = tuple(divide_directly(entries[gpu.pci_address], gpu) for gpu in groups.without_mps(planned))
    plan = Plan(
        host_id=host_id,
        domains=domains,
        compute_modes=_compute_modes([*planned, *groups.refused], groups.sharing, layouts, gpus, kept_modes),
        devices=_devices(host_id, (*domains, *parked), direct, planned, gpus),
        unavailable={**groups.unavailable, **waiting, **refused},
        pools=_pools((*domains, *parked), planned),
        parked=parked,
        reserved=reservations(resolution.entries, gpus),
        over_budget=_over_budget(config, entries, groups.with_mps(planned)),
        direct=direct,
        sharing=groups.sharing,
        layouts=layouts,
        time_slices=_time_slices(entries, groups.without_mps(planned)),
        kept_modes=frozenset(kept_modes),
        memory_mib=memory_mib,
        missing=resolution.missing,
        meant=resolution.meant,
        warnings=(*resolution.warnings, *multiuser_warnings(config, served)),
    )
    return plan, [*resolution.problems, *_too_many_in_one_domain(config, served)]


def _classify(
    entries: Mapping[str, DeviceEntry],
    gpus: Iterable[Gpu],
    served: Collection[str],
    kept_modes: Collection[str],
) -> _Groups:
    """Return the divided GPUs by whether they can be used; `served` are the UUIDs of those that have been."""
    groups = _Groups(usable=[], lost=[], refused=[], unavailable={}, sharing={})
    for gpu in gpus:
        if gpu.pci_address not in entries:
            continue
        sharing = entries[gpu.pci_address].sharing
        groups.sharing[gpu.pci_address] = sharing
        reason = unusable_reason(gpu, sharing, keeps_mode=gpu.physical_address in kept_modes)
        if not reason:
            groups.usable.append(gpu)
            continue
        groups.unavailable[gpu.pci_address] = reason
        if reason.code == COMPUTE_MODE_REFUSED:
            groups.refused.append(gpu)
        # MPS limits memory, so a GPU whose memory is unknown cannot be divided.
        is_divisible = gpu.memory_mib is not None or sharing == TIME_SLICING
        if gpu.uuid in served and is_divisible:
            groups.lost.append(gpu)
    return groups


def _compute_modes(
    planned: Iterable[Gpu],
    sharing: Mapping[str, str],
    layouts: Iterable[MigLayout],
    gpus: Sequence[Gpu],
    kept_modes: Collection[str],
) -> dict[str, str]:
    """Return the compute mode that each whole GPU (UUID) should have, except those whose mode is kept."""
    modes: dict[str, str] = {}
    for gpu in planned:
        uuid, mode = mode_for(gpu, sharing[gpu.pci_address])
        modes[uuid] = mode
    in_mig_mode = {gpu.uuid for gpu in gpus if gpu.mig_enabled}
    for layout in layouts:
        if layout.enabled or layout.gpu_uuid in in_mig_mode:
            modes[layout.gpu_uuid] = DEFAULT
    for gpu in gpus:
        if gpu.pci_address in kept_modes or gpu.mode_is_fixed:
            modes.pop(str(gpu.uuid), None)
    return modes


def _devices(
    host_id: str,
    domains: Iterable[DomainPlan],
    direct: Iterable[DirectGpu],
    planned: Sequence[Gpu],
    gpus: Iterable[Gpu],
) -> tuple[Device, ...]:
    """Return all devices of the `planned` GPUs, in the order of `gpus` and of slots."""
    devices: list[Device] = []
    for domain in domains:
        devices += devices_of(host_id, domain, planned)
    devices += direct_devices(host_id, direct, planned)
    order = {str(gpu.uuid): place for place, gpu in enumerate(gpus)}
    return tuple(sorted(devices, key=lambda device: (order[device.gpu_uuid], device.slot)))


def _pools(domains: Iterable[DomainPlan], planned: Sequence[Gpu]) -> tuple[Pool, ...]:
    pools: list[Pool] = []
    for domain in domains:
        pools += pools_of(domain, planned)
    return tuple(pools)


def _over_budget(config: Config, entries: Mapping[str, DeviceEntry], gpus: Iterable[Gpu]) -> dict[str, str]:
    """Return by GPU (UUID) what happens to a job that exceeds its budget."""
    return {str(gpu.uuid): entries[gpu.pci_address].over_budget or config.over_budget for gpu in gpus}


def _time_slices(entries: Mapping[str, DeviceEntry], gpus: Iterable[Gpu]) -> dict[str, str]:
    """Return the configured time slices by GPU (UUID)."""
    time_slices: dict[str, str] = {}
    for gpu in gpus:
        time_slice = entries[gpu.pci_address].time_slice
        if time_slice:
            time_slices[str(gpu.uuid)] = time_slice
    return time_slices


def _resolve(config: Config, inventory: Inventory) -> Resolution:
    """Return which GPU each entry divides, as far as that is known.

    If this user may not read what the entries meant before, only a UUID says which GPU an entry means: a
    render node or an address may lead to another GPU now.
    """
    if not inventory.meant_is_hidden or not config.devices:
        return resolve_entries(config, inventory)
    certain: list[DeviceEntry] = []
    hidden: list[MissingGpu] = []
    for entry in config.devices:
        name = parse_gpu_path(entry.path)
        if name and name.kind == UUID:
            certain.append(entry)
            continue
        place = f"{entry.path_at.file}:{entry.path_at.line}"
        why = Reason("only root can read which GPU this entry means", RECORD_HIDDEN)
        hidden.append(MissingGpu(entry.path, place, why, entry.reserved_for))
    if not certain:  # no entries at all would mean every GPU
        return Resolution(missing=tuple(hidden))
    resolution = resolve_entries(config._replace(devices=tuple(certain)), inventory)
    return resolution._replace(missing=(*resolution.missing, *hidden))


def _with_memory(gpus: Iterable[Gpu], memory_mib: Mapping[str, int]) -> tuple[Gpu, ...]:
    """Return the GPUs with their configured memory, by PCI address."""
    return tuple(gpu._replace(memory_mib=memory_mib.get(gpu.pci_address, gpu.memory_mib)) for gpu in gpus)


def mode_changes(plan: Plan, gpus: Iterable[Gpu]) -> tuple[ModeChange, ...]:
    """Return which of the GPUs' compute modes differ from those of the plan."""
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


def devices_of(host_id: str, domain: DomainPlan, gpus: Iterable[Gpu]) -> list[Device]:
    """Return the devices into which the domain divides its GPUs, in the order of its GPUs and of slots.

    GPUs that are not among `gpus`, or have no limit in the domain, have no devices.
    """
    by_uuid = gpus_by_uuid(gpus)
    devices: list[Device] = []
    for planned in domain.gpus:
        gpu = by_uuid.get(planned.uuid)
        if gpu is None or planned.memory_limit_mib is None:
            continue
        equal_share = Slice(planned.memory_limit_mib, planned.thread_percentage)
        shares = planned.slices or (equal_share,) * planned.device_count
        for slot, share in enumerate(shares):
            device = Device(
                id=uuid5(host_id, f"{gpu.identity or planned.uuid}/{slot}"),
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
            devices.append(device)
    return devices


def without_root(domain: DomainPlan, paths: Paths) -> DomainPlan:
    """Return the domain with the directories that it had before `below_root`."""
    root = paths.under("")
    return domain._replace(
        pipe_directory=domain.pipe_directory[len(root) :], log_directory=domain.log_directory[len(root) :]
    )


def _too_many_in_one_domain(config: Config, served: Iterable[Gpu]) -> list[Problem]:
    """Return a problem if more GPUs would share a control daemon than it can limit."""
    whole_gpus = [gpu for gpu in served if not gpu.parent]
    if config.cuda_mps_scope != "host" or len(whole_gpus) <= MAX_GPUS_PER_DOMAIN:
        return []
    limit = MAX_GPUS_PER_DOMAIN
    text = f"cuda_mps_scope is host, and one control daemon cannot limit more than {limit} GPUs"
    source = config.sources["cuda_mps_scope"]
    if source.line is None:  # the default: host.conf is where MPS is enabled
        source = Source(config.sources["enable_cuda_mps"].file, None)
    return [Problem(source.file, source.line, text, "write cuda_mps_scope: gpu")]


def _domains(
    config: Config, entries: Mapping[str, DeviceEntry], driver: Driver, gpus: Iterable[Gpu]
) -> tuple[DomainPlan, ...]:
    """Return the control daemons for these GPUs: one for all, or one each, in a directory named by UUID.

    A MIG instance always has its own, because one control daemon cannot serve several.

    Source: NVIDIA: Multi-Instance GPU User Guide, section "MIG with CUDA MPS".
    """
    of_host: list[Gpu] = []
    alone: list[Gpu] = []
    for gpu in gpus:
        if config.cuda_mps_scope == "host" and not gpu.parent:
            of_host.append(gpu)
        else:
            alone.append(gpu)
    domains = []
    if of_host:
        domains.append(_domain("host", "", of_host, config, entries=entries, driver=driver))
    for gpu in alone:
        name = gpu.address
        domains.append(_domain(name, f"/{gpu.uuid}", [gpu], config, entries=entries, driver=driver))
    return tuple(domains)


def _domain(
    name: str,
    below: str,
    gpus: Sequence[Gpu],
    config: Config,
    *,
    entries: Mapping[str, DeviceEntry],
    driver: Driver,
) -> DomainPlan:
    """Return the control daemon of these GPUs, in directories `below` the configured ones.

    Its default limits are those of its largest device, because clients can only tighten them.
    """
    planned = []
    for gpu in gpus:
        clients = max_clients(gpu, driver, config.cuda_mps_max_clients)
        planned.append(divide(entries[gpu.pci_address], gpu, config, name, clients))
    return DomainPlan(
        name=name,
        pipe_directory=config.cuda_mps_pipe_directory + below,
        log_directory=config.cuda_mps_log_directory + below,
        gpus=tuple(planned),
        thread_percentage=max(gpu.thread_percentage for gpu in planned),
        multiuser=is_multiuser(config, gpus),
        pipe_group=config.cuda_mps_pipe_group or "",
    )


def _with_instances(
    entries: Mapping[str, DeviceEntry], gpus: Sequence[Gpu], used: Collection[str]
) -> _Divided:
    """Return the entries with those of MIG instances instead of their GPUs', the layouts, and what waits."""
    by_address = gpus_by_address(gpus)
    divided: dict[str, DeviceEntry] = {}
    layouts: list[MigLayout] = []
    waiting: dict[str, Reason] = {}
    for address, entry in entries.items():
        if not entry.mig:
            divided[address] = entry
            continue
        gpu = by_address[address]
        instances = instances_of(entry, gpu, gpus, used)
        divided.update(instances.entries)
        layouts.extend(instances.layouts)
        if gpu.reason:
            waiting[address] = gpu.reason
        else:
            waiting.update(instances.waiting)
    return _Divided(divided, tuple(layouts), waiting)
