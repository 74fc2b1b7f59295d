"""`list`, `isolated-device-list` (in Cloudpods' format), `show` and `gpus`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.calls import call_daemon, listed_devices
from yunion_mps.cli.options import Number, complete_gpu, device_argument, one_device
from yunion_mps.cli.output import (
    Column,
    cell,
    hint_text,
    mib_text,
    notes,
    output_option,
    show,
    show_pairs,
    table,
    wide_output_option,
    wrapped,
)
from yunion_mps.core.addresses import gpu_of, is_part
from yunion_mps.core.enums import FREE, MIG, TIME_SLICING, WHY_UNENFORCED
from yunion_mps.host.proc import user_name
from yunion_mps.http.operations import GET_DEVICE, GET_DEVICES, GET_GPUS, MAX_LIMIT, MAX_NUMBER
from yunion_mps.observe.holdings import ID_LENGTH
from yunion_mps.views.overview import way_of

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceDetailsJson, DeviceJson, DeviceListJson, GpuJson, PcieLinkJson

#: Fields of a device in CSV.
_DEVICE_FIELDS = (
    "addr", "model", "memory_mib", "gpu_memory_mib", "thread_percentage", "state", "reason", "reason_code",
    "lease", "holder", "budget_enforced", "sharing", "reserved_for", "gpu_uuid", "vendor_device_id",
    "numa_node", "id",
)  # fmt: skip
_DEVICES = (
    Column("ADDRESS", "addr"),
    Column("GPU", "model", least=9, drop=2),
    Column("MEMORY", lambda record: mib_text(record["memory_mib"]), numeric=True, drop=1),
    Column("SM %", "thread_percentage", numeric=True, drop=3),
    Column("STATE", lambda record: describe_state(record)),
    Column("ENFORCED", "budget_enforced", wide=True, drop=5),
    Column("SHARING", "sharing", wide=True, drop=5),
    Column("NUMA", lambda record: _numa(record["numa_node"]), numeric=True, wide=True, drop=8),
    Column("PCIE", lambda record: _link(record["pcie_info"]), wide=True, drop=7),
    Column("GPU UUID", "gpu_uuid", wide=True, drop=4),
    Column("DEVICE ID", "id", wide=True, drop=6),
    Column("LEASE", lambda record: (record["lease"] or "")[:ID_LENGTH], wide=True, drop=5),
    Column("HOLDER", "holder", least=16),
)

#: Cloudpods' headers and their fields.
COLUMNS = {
    "ID": "id",
    "Dev_type": "dev_type",
    "Model": "model",
    "Addr": "addr",
    "Vendor_device_id": "vendor_device_id",
    "Host_id": "host_id",
    "numa_node": "numa_node",
    "Device_path": "device_path",
    "PCIE_Info": "pcie_info",
    "Index": "index",
    "Device_minor": "device_minor",
}
#: As Cloudpods' own table, it is complete on every terminal: no column is omitted or cut.
_CLOUDPODS = [Column(header, field) for header, field in COLUMNS.items()]
#: The number of devices on a page, as in Cloudpods.
_PAGE = 20

_GPU_FIELDS = (
    "addr", "name", "uuid", "memory_mib", "memory_free_mib", "devices", "budget_enforced", "sharing", "state",
    "reason", "reason_code", "reserved_for", "compute_mode", "compute_capability", "mig_enabled",
    "vendor_device_id", "numa_node", "render_node", "index", "device_minor", "utilization", "memory_used_mib",
    "temperature_c", "power_w", "power_limit_w", "parent", "mig_profile", "time_slice", "mig_layout",
)  # fmt: skip

_GPUS = (
    Column("ADDRESS", "addr"),
    Column("NAME", lambda record: _name(record), least=9, drop=2),
    Column("MEMORY", lambda record: mib_text(record["memory_mib"]), numeric=True),
    Column("DEVICES", "devices", numeric=True),
    Column("SHARING", lambda record: way_of(record), drop=1),
    Column("ENFORCED", lambda record: record["budget_enforced"] if _has_budgets(record) else None, drop=3),
    Column("STATE", "state"),
    Column("UTIL %", "utilization", numeric=True, drop=4),
    Column("USED", lambda record: mib_text(record["memory_used_mib"]), numeric=True, wide=True, drop=5),
    Column("TEMP C", "temperature_c", numeric=True, wide=True, drop=6),
    Column("POWER W", lambda record: _power(record), numeric=True, wide=True, drop=7),
    Column("COMPUTE MODE", "compute_mode", wide=True, drop=8),
    Column("CAPABILITY", "compute_capability", wide=True, drop=9),
    Column("MIG", lambda record: _on(record["mig_enabled"]), wide=True, drop=10),
    Column("NUMA", lambda record: _numa(record["numa_node"]), numeric=True, wide=True, drop=11),
    Column("PCIE", lambda record: _link(record["pcie_info"]), wide=True, drop=12),
    Column("INDEX", "index", numeric=True, wide=True, drop=13),
    Column("UUID", "uuid", wide=True, drop=4),
)

# The daemon's bounds, so that a number out of range is a usage error.
_NUMA_NODE = Number(-1, MAX_NUMBER)
_FROM_0 = Number(0, MAX_NUMBER)
_UP_TO = Number(0, MAX_LIMIT)


@click.command("list", short_help="List the devices, their budgets and holders.")
@click.option(
    "--gpu", metavar="GPU", shell_complete=complete_gpu,
    help="Show only devices of this GPU: an address, a UUID or a unique prefix of either.",
)  # fmt: skip
@click.option("--free", is_flag=True, help="Show only devices that can be leased now.")
@wide_output_option
def list_devices(gpu: str | None, free: bool, output: str) -> None:
    """List the devices of this host, and the lease holder of each.

    To see processes that use a device without a lease, run yunion-mps who.

    \b
    Examples:
      yunion-mps list
      yunion-mps list --free --gpu 00:06.0
      yunion-mps list --output wide
      yunion-mps list --output json
    """
    gpus = call_daemon(GET_GPUS)["gpus"]
    if gpu is not None:
        from yunion_mps.leases.request import index_of_gpu  # not needed by a plain list

        names = [(record["addr"], record["uuid"] or "") for record in gpus]
        chosen = gpus[index_of_gpu(gpu, names)]["addr"]
        gpus = [record for record in gpus if is_part(record["addr"], chosen)]
    devices = listed_devices()
    if gpu is not None:
        devices = [record for record in devices if is_part(record["addr"], chosen)]
    if free:
        devices = [record for record in devices if is_free(record)]
    answer = {"isolated_devices": devices, "total": len(devices), "limit": 0, "offset": 0}
    units = pools(gpus)
    without_devices = "No devices."
    if gpu or free:
        without_devices = "No devices match."
    elif not units:
        without_devices = "No devices. See why: yunion-mps status"
    show(
        answer, output, _DEVICE_FIELDS, devices,
        lambda: _devices_text(devices, without_devices, wide=output == "wide") + units,
    )  # fmt: skip


def is_free(record: DeviceJson) -> bool:
    """Return whether the user of this command can lease the device now."""
    user = user_name(os.geteuid())
    is_for_user = record["free_for"] in (None, user) and user not in record["not_free_for"]
    return record["state"] == FREE and is_for_user


def describe_state(record: DeviceJson) -> str:
    """Return the state of the device; if it is free for one user only, `free for alice`."""
    if record["free_for"]:
        return f"free for {record['free_for']}"
    if record["free_for"] is not None:
        return "free for no user now"
    if record["not_free_for"]:
        return f"free, not for {', '.join(record['not_free_for'])}"
    return record["state"]


def _devices_text(devices: list[DeviceJson], none: str, *, wide: bool) -> str:
    """Format a table, followed by what is wrong with devices, once for each GPU."""
    gpu_notes = dict.fromkeys((gpu_of(record["addr"]), _note(record)) for record in devices)
    return table(_DEVICES, devices, none=none, wide=wide) + notes(gpu_notes)


def _note(device: DeviceJson) -> str:
    """Return why the device is unavailable or pending, or that it is leased only on request."""
    if device["reason"] or device["budget_enforced"]:
        return device["reason"]
    cause = "the GPU is time-sliced, so budgets" if device["sharing"] == TIME_SLICING else "budgets"
    return f"{cause} are not enforced: lease its devices with --allow-unlimited"


def _has_budgets(gpu: GpuJson) -> bool:
    """Return whether the GPU can have budgets: one without the instances of its MIG layout has none yet."""
    return bool(gpu["compute_capability"]) and (gpu["sharing"] != MIG or bool(gpu["devices"]))


def _name(gpu: GpuJson) -> str | None:
    """Return its name; for a MIG instance only the profile, because its row follows its GPU's."""
    return f"MIG {gpu['mig_profile']}" if gpu["mig_profile"] else gpu["name"]


def _power(gpu: GpuJson) -> str | None:
    """Format `188 / 700`: power draw and limit."""
    if gpu["power_w"] is None:
        return None
    drawn = f"{gpu['power_w']:.0f}"
    return drawn if gpu["power_limit_w"] is None else f"{drawn} / {gpu['power_limit_w']:.0f}"


def _numa(node: int | None) -> int | None:
    return None if node == -1 else node


def _link(link: PcieLinkJson | None) -> str | None:
    """Format for example `5.0 x16`."""
    if link is None:
        return None
    return f"{link['version']} x{link['lane_width']}"


def _whole_link(link: PcieLinkJson | None) -> str | None:
    if link is None:
        return None
    return f"{_link(link)}, {link['transfer_rate_per_lane']} per lane, {link['throughput']}"


def _on(value: bool | None) -> str | None:
    if value is None:
        return None
    return "on" if value else "off"


@click.command("isolated-device-list", short_help="List the devices as Cloudpods does.")
@click.option(
    "--limit", type=_UP_TO, metavar="N",
    help=f"Show at most N devices; 0 shows all. Default: {_PAGE} in a table, otherwise all.",
)  # fmt: skip
@click.option(
    "--offset", type=_FROM_0, metavar="N", default=0, show_default=True, help="Skip the first N devices."
)
@click.option("--dev-type", metavar="TYPE", help="Show only devices of this type, e.g. NVIDIA_MPS.")
@click.option("--model", metavar="NAME", help='Show only devices of this GPU model, e.g. "Tesla P40".')
@click.option(
    "--addr", metavar="ADDR", help="Show only this device (00:06.0-1) or devices of this GPU (00:06.0)."
)
@click.option("--device-path", metavar="UUID", help="Show only devices of the GPU with this UUID.")
@click.option(
    "--vendor-device-id", metavar="ID", help="Show only devices of GPUs with this PCI id, e.g. 10de:1b38."
)
@click.option(
    "--numa-node", type=_NUMA_NODE, metavar="N",
    help="Show only devices of GPUs on this NUMA node; -1 selects GPUs without one.",
)  # fmt: skip
@click.option("--unused", is_flag=True, help="Show only devices that can be leased now.")
@output_option
def list_as_cloudpods(limit: int | None, offset: int, output: str, **filters: Any) -> None:
    """List the devices of this host in the format of the Cloudpods command of the same name.

    \b
    Examples:
      yunion-mps isolated-device-list
      yunion-mps isolated-device-list --addr 00:06.0 --limit 0
      yunion-mps isolated-device-list --unused --output json
    """
    if limit is None:
        limit = _PAGE if output == "table" else 0
    selected = {name: value for name, value in filters.items() if value is not False}
    answer = call_daemon(GET_DEVICES, limit=limit, offset=offset, **selected)
    devices = answer["isolated_devices"]
    rows = [_cloudpods_row(device) for device in devices]
    show(answer, output, list(COLUMNS), rows, lambda: table(_CLOUDPODS, devices, boxed=True) + footer(answer))


def _cloudpods_row(device: Mapping[str, object]) -> list[object]:
    return [device[field] for field in COLUMNS.values()]


def footer(answer: DeviceListJson) -> str:
    """Return the line that Cloudpods prints below a list."""
    total = answer["total"]
    limit = answer["limit"]
    offset = answer["offset"]
    size = limit or max(total, 1)
    pages = -(-total // size)
    return (
        f"*** Total: {total} Pages: {pages} Limit: {limit} Offset: {offset} Page: {offset // size + 1} ***\n"
    )


@click.command("show", short_help="Show one device in detail.")
@device_argument
@output_option
def show_device(device: str, output: str) -> None:
    """Show one device, and the environment variables that a process needs to use it.

    DEVICE is an id, an address (00:06.0-1) or a unique prefix of either. Inside a job with one device it may
    be omitted: YUNION_MPS_DEVICE names it.

    \b
    Examples:
      yunion-mps show 00:06.0-1
      yunion-mps show 00:06.0-1 --output json
    """
    answer = call_daemon(GET_DEVICE, id=one_device(device))
    show_pairs(answer, output, lambda: _device_text(answer))


def _device_text(answer: DeviceDetailsJson) -> str:
    """Format a device, and its environment on lines that can be copied."""
    why = WHY_UNENFORCED.get(answer["sharing"])
    unenforced = "" if answer["budget_enforced"] else f" (not enforced: the GPU is {why})"
    state = describe_state(answer)
    if answer["reason"]:
        state += f": {answer['reason']}"
    lines: dict[str, object] = {
        "Address": answer["addr"],
        "State": state,
        "Holder": answer["holder"],
        "Lease": answer["lease"],
        "Budget": f"{_memory_of_all(answer)}, {cell(answer['thread_percentage'])} % of the SM threads"
        + unenforced,
        "GPU": f"{answer['model'] or 'unknown'} ({gpu_of(answer['addr'])})",
        "GPU UUID": answer["gpu_uuid"],
        "PCI IDs": answer["vendor_device_id"],
        "PCIe": _whole_link(answer["pcie_info"]),
        "NUMA node": _numa(answer["numa_node"]),
    }
    if answer["domain"]:
        lines["Domain"] = answer["domain"]
    else:
        lines["Sharing"] = answer["sharing"]
    lines["Device ID"] = answer["id"]
    lines["Host ID"] = answer["host_id"]
    return format_fields(lines) + environment_text(answer["client_environment"])


def _memory_of_all(device: DeviceJson) -> str:
    """Format `5760 of 23040 MiB`."""
    if device["memory_mib"] is None:
        return "unknown memory"
    return f"{device['memory_mib']} of {device['gpu_memory_mib']} MiB"


def format_fields(lines: Mapping[str, object]) -> str:
    """Format `Name:  value` lines with aligned values; unknown values are dashes."""
    indent = max(map(len, lines)) + 3
    text = ""
    for name, value in lines.items():
        text += wrapped(f"{name + ':':{indent}}{cell(value) or '-'}", indent)
    return text


def environment_text(environment: Mapping[str, str]) -> str:
    """Format the variables below a heading; "" if there are none."""
    if not environment:
        return ""
    text = "Environment variables for processes on this device:\n"
    for name, value in environment.items():
        text += f"  {name}={cell(value)}\n"
    return text


@click.command("gpus", short_help="List the GPUs.")
@wide_output_option
def list_gpus(output: str) -> None:
    """List this host's NVIDIA GPUs, and explain why any of them is unavailable.

    \b
    Examples:
      yunion-mps gpus
      yunion-mps gpus --output wide
      yunion-mps gpus --output csv
    """
    answer = call_daemon(GET_GPUS)
    gpus = answer["gpus"]
    show(answer, output, _GPU_FIELDS, gpus, lambda: _gpus_text(gpus, wide=output == "wide"))


def _gpus_text(gpus: list[GpuJson], *, wide: bool) -> str:
    """Format a table, followed by the reasons, which are too long for a column."""
    text = table(_GPUS, gpus, none="No GPUs.", wide=wide)
    return text + notes((gpu["addr"], gpu["reason"]) for gpu in gpus) + pools(gpus)


def pools(gpus: Iterable[GpuJson]) -> str:
    """Format the free memory of GPUs that are leased in units."""
    text = ""
    for gpu in gpus:
        if gpu["memory_free_mib"] is not None and not gpu["reason"]:
            text += hint_text(_pool(gpu), f"{gpu['addr']}: ")
    return text


def _pool(gpu: GpuJson) -> str:
    """Return how much memory is free, and who can lease it."""
    of_all = f"{gpu['memory_free_mib']} of {gpu['memory_mib']} MiB"
    if gpu["reserved_for"]:
        return f"reserved for {gpu['reserved_for']}; {of_all} are free"
    whose = ""
    if gpu["free_for"] is not None:
        whose = f" by {gpu['free_for']} only" if gpu["free_for"] else " by no user now"
    return f"{of_all} can be leased{whose}; to lease some: yunion-mps run --gpu-mem SIZE COMMAND"
