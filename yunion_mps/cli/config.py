"""`yunion-mps config check` and `config show`: both work without the daemon and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import click

from yunion_mps.cli.output import (
    Column,
    cell,
    mib_text,
    notes,
    output_option,
    show,
    show_pairs,
    table,
    wrapped,
)
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.core.addresses import is_part
from yunion_mps.core.enums import ENTRY_TYPES, MIG, MPS, TIME_SLICING
from yunion_mps.core.errors import ConfigError
from yunion_mps.core.mig import DISABLED
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import NO_REASON, RECORD_HIDDEN, hint_of
from yunion_mps.core.text import count
from yunion_mps.views.overview import way_of

if TYPE_CHECKING:
    from yunion_mps.core.models import DomainPlan, Gpu, MissingGpu, Plan
    from yunion_mps.core.settings import Config, DeviceEntry, SliceEntry, Source
    from yunion_mps.supervisor.preflight import Preflight

# The configuration's parser and the planning are imported where they are needed: they take 45 ms, and --help
# and completion import this module to list its commands.

_FIELDS = ("key", "value", "from")
_COLUMNS = (
    Column("KEY", 0),
    Column("VALUE", lambda row: cell(row[1])),  # as in the file: true, not yes
    Column("FROM", 2, short=lambda row: row[2].rpartition("/")[2]),
)
_ENTRY_COLUMNS = (
    Column("DEVICE PATH", lambda entry: entry.path),
    Column("DIVISION", lambda entry: _entry_text(entry)),
    Column(
        "FROM",
        lambda entry: _source_text(entry.path_at),
        short=lambda entry: _source_text(entry.path_at).rpartition("/")[2],
    ),
)
_FILE_COLUMNS = (Column("FILE", lambda file: file),)
_SHARING = Column("SHARING", lambda gpu: way_of(gpu), drop=1)
_GPU_COLUMNS = (
    Column("GPU", "addr"),
    Column("NAME", "name", least=9, drop=5),
    _SHARING,
    Column("DEVICES", "devices", numeric=True),
    Column("MEMORY", lambda gpu: mib_text(gpu["memory_limit_mib"]), numeric=True, drop=1),
    Column("SM %", "thread_percentage", numeric=True, drop=2),
    Column("COMPUTE MODE", "compute_mode", drop=3),
    Column("DOMAIN", "domain", drop=4),
)


#: A value and its place in the configuration.
SettingRecord = TypedDict("SettingRecord", {"value": object, "from": str})


class SliceRecord(TypedDict):
    """An item of an entry's `slices`."""

    memory_mib: int
    thread_percentage: float | None
    priority: str


class _Division(TypedDict, total=False):
    slices: list[SliceRecord]
    memory_unit: int
    memory_reserve: int
    virtual_number: int
    memory: int
    thread_overcommit: float
    thread_percentage: int
    reserved_for: str
    over_budget: str
    cuda_mps_compute_mode: str
    time_slice: str
    mig: list[str]
    mig_restore: bool


#: The keys of an entry that its text names after what divides the GPU; those of the first line are in MiB.
_IN_MIB = ("memory", "memory_reserve")
_OTHER_KEYS = ("thread_overcommit", "reserved_for", "over_budget", "cuda_mps_compute_mode", "mig_restore")

EntryFields = TypedDict("EntryFields", {"path": str, "type": str, "from": str})


class EntryRecord(EntryFields, _Division):
    """An entry of the device file: its keys, and where it is."""


class ConfigRecord(TypedDict):
    """The files that were read, the keys of host.conf and host_local.conf, and the device file."""

    files: list[str]
    keys: dict[str, SettingRecord]
    gpu_memory_unit: SettingRecord
    devices: list[EntryRecord]


class GpuRecord(TypedDict):
    """A GPU and its devices in the plan; the limits are those of each device, null if they differ."""

    addr: str
    uuid: str | None
    name: str | None
    devices: int
    division: str
    memory_limit_mib: int | None
    thread_percentage: float | None
    compute_mode: str | None
    domain: str | None
    budget_enforced: bool
    why_unenforced: str
    sharing: str | None
    time_slice: str | None
    reason: str


class DomainRecord(TypedDict):
    """A control daemon in the plan."""

    name: str
    pipe_directory: str
    gpus: list[str]
    memory_limits_mib: list[int | None]
    thread_percentage: float
    multiuser: bool


class MissingRecord(TypedDict):
    """An entry whose GPU this host does not have now."""

    path: str
    place: str
    reason: str
    reason_code: str


class PlanRecord(TypedDict):
    """What the daemon would make of the configuration."""

    notice: str
    users: str
    warnings: list[str]
    missing: list[MissingRecord]
    driver: str | None
    host_id: str
    gpus: list[GpuRecord]
    domains: list[DomainRecord]
    configuration: ConfigRecord


@click.group("config", cls=SuggestingGroup, short_help="Show or check the configuration.")
def config_group() -> None:
    """Show or check the configuration files: host.conf, host_local.conf and host_container_device.yml.

    Values of host_local.conf, which need not exist, replace those of host.conf. Neither command needs the
    daemon, and neither changes anything.

    \b
    Examples:
      yunion-mps config show
      yunion-mps config check
    """


@config_group.command("show", short_help="Show each key with its value and origin.")
@output_option
def show_config(output: str) -> None:
    """Show each key with its value and origin: a file and line, or the default.

    \b
    Examples:
      yunion-mps config show
      yunion-mps config show --output yaml
    """
    from yunion_mps.config import load  # see above

    config, problems = load(Paths.from_environment())
    if problems:
        raise ConfigError(problems)
    rows = _setting_rows(config)
    for entry in config.devices:
        rows.append(("devices", f"{entry.path}: {_entry_text(entry)}", _source_text(entry.path_at)))
    show(config_json(config), output, _FIELDS, rows, lambda: config_text(config))


def config_json(config: Config) -> ConfigRecord:
    """Return every key with its value and place, and the device entries as written in the file."""
    from yunion_mps.config import KEYS  # see above

    return {
        "files": list(config.files),
        "keys": {name: _setting(getattr(config, name), config.sources[name]) for name in KEYS},
        "gpu_memory_unit": _setting(config.gpu_memory_unit_mib, config.gpu_memory_unit_at),
        "devices": [_entry_json(entry) for entry in config.devices],
    }


def _setting(value: object, source: Source) -> SettingRecord:
    return {"value": value, "from": _source_text(source)}


def _entry_json(entry: DeviceEntry) -> EntryRecord:
    return {
        "path": entry.path,
        "type": ENTRY_TYPES[entry.sharing],
        **_division_json(entry),
        **_other_keys_json(entry),
        "from": _source_text(entry.path_at),
    }


def _division_json(entry: DeviceEntry) -> _Division:
    """Return the key that divides the GPU, and those that only that one can have beside it."""
    if entry.slices:
        return {"slices": [_slice_json(part) for part in entry.slices]}
    if not entry.memory_unit_mib:
        return {"virtual_number": entry.virtual_number}
    shown: _Division = {"memory_unit": entry.memory_unit_mib, "memory_reserve": entry.memory_reserve_mib}
    if entry.thread_percentage:
        shown["thread_percentage"] = entry.thread_percentage
    return shown


def _other_keys_json(entry: DeviceEntry) -> _Division:
    shown: _Division = {}
    if entry.memory_mib is not None:
        shown["memory"] = entry.memory_mib
    if entry.thread_overcommit is not None:
        shown["thread_overcommit"] = entry.thread_overcommit
    if entry.reserved_for:
        shown["reserved_for"] = entry.reserved_for
    if entry.over_budget:
        shown["over_budget"] = entry.over_budget
    if entry.cuda_mps_compute_mode:
        shown["cuda_mps_compute_mode"] = entry.cuda_mps_compute_mode
    if entry.time_slice:
        shown["time_slice"] = entry.time_slice
    if entry.mig:
        shown["mig"] = list(entry.mig)
        shown["mig_restore"] = entry.mig_restore
    return shown


def _slice_json(part: SliceEntry) -> SliceRecord:
    return {
        "memory_mib": part.memory_mib,
        "thread_percentage": part.thread_percentage,
        "priority": part.priority,
    }


def _source_text(source: Source) -> str:
    return source.file if source.line is None else f"{source.file}:{source.line}"


def config_text(config: Config) -> str:
    """Format tables of the settings, of the device entries and of the files; nothing is cut."""
    entries = table(_ENTRY_COLUMNS, config.devices, none="No devices are configured.")
    return table(_COLUMNS, _setting_rows(config)) + entries + table(_FILE_COLUMNS, config.files)


def _setting_rows(config: Config) -> list[tuple[str, object, str]]:
    record = config_json(config)
    unit = record["gpu_memory_unit"]
    rows = [(name, setting["value"], setting["from"]) for name, setting in record["keys"].items()]
    return [*rows, ("gpu_memory_unit", f"{unit['value']} MiB", unit["from"])]


def _entry_text(entry: DeviceEntry) -> str:
    """Return how the entry divides its GPU, then each other key that it has."""
    text = _division_text(entry)
    for name, value in _entry_json(entry).items():
        if name in _IN_MIB and value:
            text += f"; {name}: {value} MiB"
        elif name in _OTHER_KEYS and value:
            text += f"; {name}: {'true' if value is True else value}"
    return text


def _division_text(entry: DeviceEntry) -> str:
    sharing = f"time-sliced ({entry.time_slice})" if entry.time_slice else "time-sliced"
    sliced = f", {sharing}" if entry.sharing == TIME_SLICING else ""
    if entry.mig not in ((), (DISABLED,)):
        number = entry.virtual_number
        devices = f", {count(number, 'equal device')} each" if number else ""
        return f"MIG: {' + '.join(entry.mig)}{devices}{sliced}"
    if entry.slices:
        return ", ".join(f"{part.memory_mib} MiB" for part in entry.slices)
    if entry.memory_unit_mib:
        threads = f", {entry.thread_percentage} % of the threads each" if entry.thread_percentage else ""
        return f"units of {entry.memory_unit_mib} MiB{threads}"
    return count(entry.virtual_number, "equal device") + sliced


@config_group.command("check", short_help="Check the files, and show the resulting plan.")
@output_option
def check_config(output: str) -> None:
    """Check the files against the GPUs of this host, and show the resulting plan.

    If a file has errors, all of them are printed with file and line, and check exits with 6.

    \b
    Examples:
      yunion-mps config check
      yunion-mps config check --output json
    """
    from yunion_mps.supervisor.preflight import run_preflight  # see above
    from yunion_mps.supervisor.unit_access import unit_problems, unit_warnings

    paths = Paths.from_environment()
    preflight = run_preflight(paths, find_unit_problems=unit_problems)
    warnings = (*preflight.plan.warnings, *unit_warnings(paths, preflight.config))
    preflight = preflight._replace(plan=preflight.plan._replace(warnings=warnings))
    try:
        preflight.check(even_without_driver=True)
        show_pairs(plan_json(preflight), output, lambda: plan_text(preflight))
    finally:
        preflight.close()


def plan_json(preflight: Preflight) -> PlanRecord:
    """Return the plan as `config check --output json` prints it."""
    plan = preflight.plan
    return {
        "notice": _notice(preflight),
        "users": _users(preflight),
        "warnings": list(plan.warnings),
        "missing": [_missing_record(entry) for entry in plan.missing],
        "driver": preflight.inventory.driver.version or None,
        "host_id": plan.host_id,
        "gpus": gpu_records(preflight),
        "domains": [_domain_record(domain) for domain in plan.domains],
        "configuration": config_json(preflight.configured),
    }


def _missing_record(entry: MissingGpu) -> MissingRecord:
    return {
        "path": entry.path,
        "place": entry.place,
        "reason": entry.reason,
        "reason_code": entry.reason.code,
    }


def _domain_record(domain: DomainPlan) -> DomainRecord:
    return {
        "name": domain.name,
        "pipe_directory": domain.pipe_directory,
        "gpus": list(domain.gpu_uuids),
        "memory_limits_mib": list(domain.memory_limits_mib),
        "thread_percentage": domain.thread_percentage,
        "multiuser": domain.multiuser,
    }


def _notice(preflight: Preflight) -> str:
    config = preflight.config
    notices: list[str] = []
    if not config.enable_cuda_mps:
        notices.append(f"MPS is disabled: enable_cuda_mps is false{config.also_disabled}")
    if preflight.driver_error:
        notices.append(f"the NVIDIA driver does not work now: {preflight.driver_error.message}")
    return "; ".join([*notices, *preflight.all_warnings])


def gpu_records(preflight: Preflight) -> list[GpuRecord]:
    """Return what the plan makes of each GPU of the host."""
    after = preflight.plan_with_layouts()
    return [_gpu_record(gpu, preflight.plan, after) for gpu in preflight.inventory.gpus]


def _gpu_record(gpu: Gpu, plan: Plan, after: Plan) -> GpuRecord:
    """Return the record of a GPU, with the devices of its instances; `after` has all layouts in effect."""
    # See above.
    from yunion_mps.planning.division import describe_division, enforces_budgets, why_unenforced
    from yunion_mps.planning.mig import describe_layout

    devices = [device for device in after.devices if is_part(device.addr, gpu.address)]
    sharing = plan.sharing.get(gpu.pci_address)
    if any(layout.enabled and layout.gpu_uuid == gpu.uuid for layout in plan.layouts):
        sharing = MIG
    memory_mib: int | None = None
    percentage: float | None = None
    if len({(device.memory_limit_mib, device.thread_percentage) for device in devices}) == 1:
        memory_mib = devices[0].memory_limit_mib
        percentage = devices[0].thread_percentage
    compute_mode = gpu.compute_mode
    desired_mode = plan.compute_modes.get(gpu.uuid or "")
    if desired_mode and desired_mode != compute_mode:
        compute_mode = f"{compute_mode or 'unknown'} -> {desired_mode}"
    is_enforced = enforces_budgets(gpu) and sharing != TIME_SLICING
    if not all(device.budget_enforced for device in devices):
        is_enforced = False
    reason: str = gpu.reason or plan.unavailable.get(gpu.pci_address, NO_REASON)
    if not (reason or sharing or devices):
        reason = _why_not_divided(plan)
    return {
        "addr": gpu.address,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "devices": len(devices),
        "division": describe_layout(plan, gpu) if sharing == MIG else describe_division(plan, gpu.uuid),
        "memory_limit_mib": memory_mib,
        "thread_percentage": percentage,
        "compute_mode": compute_mode,
        "domain": _domain_of(gpu, plan),
        "budget_enforced": is_enforced,
        "why_unenforced": "" if is_enforced else why_unenforced(gpu, sharing or ""),
        "sharing": sharing,
        "time_slice": plan.time_slices.get(gpu.uuid or ""),
        "reason": reason,
    }


def _domain_of(gpu: Gpu, plan: Plan) -> str | None:
    for domain in plan.domains:
        if gpu.uuid in domain.gpu_uuids:
            return domain.name
    return None


def _why_not_divided(plan: Plan) -> str:
    if any(entry.reason.code == RECORD_HIDDEN for entry in plan.missing):
        return "only root can see whether an entry means it"
    return "not configured"


def plan_text(preflight: Preflight) -> str:
    """Format the plan as `config check` prints it."""
    hidden = [entry for entry in preflight.plan.missing if entry.reason.code == RECORD_HIDDEN]
    text = "The configuration is valid, as far as this user can check it:\n"
    if not hidden:
        text = "The configuration is valid:\n"
    text += config_text(preflight.configured)
    notice = _notice(preflight)
    if notice:
        text += f"{notice}.\n"
    for warning in preflight.plan.warnings:
        text += f"Warning: {warning}.\n  {hint_of(warning.code)}\n"
    for entry in preflight.plan.missing:
        message = f"Path {entry.path}" if entry in hidden else f"No GPU now for path {entry.path}"
        text += f"{message} ({entry.place}): {entry.reason}.\n"
        text += f"  {hint_of(entry.reason.code)}\n"
    gpus = gpu_records(preflight)
    if not gpus or (hidden and not preflight.plan.sharing):
        return text
    columns = list(_GPU_COLUMNS)
    if all(gpu["sharing"] in (MPS, None) for gpu in gpus):
        columns.remove(_SHARING)
    text += "The daemon would divide the GPUs as follows:\n" + table(columns, gpus)
    text += notes((gpu["addr"], _note(gpu)) for gpu in gpus)
    for domain in preflight.plan.domains:
        served = count(len(domain.gpu_uuids), "GPU")
        text += f"Control daemon of domain {domain.name}: {served}, pipe directory {domain.pipe_directory}\n"
    users = _users(preflight)
    if users:
        text += wrapped(f"Users: {users}.", 7)
    return text


def _users(preflight: Preflight) -> str:
    """Return whose jobs run at the same time, and what would let more users share the host."""
    from yunion_mps.planning.multiuser import describe_users  # see above
    from yunion_mps.supervisor.preflight import supports_multiuser

    supported = supports_multiuser(Paths.from_environment()) if preflight.plan.domains else None
    return describe_users(preflight.plan, preflight.inventory, knows_multiuser=supported)


def _note(gpu: GpuRecord) -> str:
    if gpu["reason"]:
        return gpu["reason"]
    if gpu["sharing"] == MIG:
        return f"MIG layout: {gpu['division']}"
    uneven = gpu["division"] if gpu["memory_limit_mib"] is None else ""
    why = gpu["why_unenforced"]
    unenforced = f"budgets are not enforced: the GPU is {why}" if why else ""
    return "; ".join(filter(None, (uneven, unenforced)))
