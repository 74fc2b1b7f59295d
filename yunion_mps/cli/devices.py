"""What the host has: `isolated-device-list` (in short `list`, with Cloudpods' columns), `show`, `gpus`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.common import call, device_argument, one_device
from yunion_mps.cli.output import cell, draw, fields, notes, output_option, pairs, show, show_pairs
from yunion_mps.http.operations import GET_DEVICE, GET_DEVICES, GET_GPUS, MAX_LIMIT, MAX_NUMBER

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceDetails, DeviceList, Gpu


#: Cloudpods' headers, and the fields under them.
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
#: What a narrow terminal can do without, the least useful first.
_DROP = (
    "Device_minor", "Index", "Host_id", "numa_node", "Vendor_device_id", "PCIE_Info", "Dev_type",
    "Device_path", "Model",
)  # fmt: skip
#: The devices of a page, as with Cloudpods.
_PAGE = 20

_GPU_COLUMNS = {
    "Addr": "addr",
    "Name": "name",
    "UUID": "uuid",
    "Memory_MiB": "memory_total",
    "Compute_mode": "compute_mode",
    "Capability": "compute_capability",
    "MIG": "mig_enabled",
    "Devices": "devices",
    "Enforced": "budget_enforced",
    "State": "state",
    "Reason": "reason",
}
_GPU_DROP = ("MIG", "Capability", "UUID", "Enforced", "Compute_mode", "Memory_MiB", "Name", "Devices")

# What the daemon takes, so that a wrong number is wrong usage here.
_NUMA_NODE = click.IntRange(-1, MAX_NUMBER)
_FROM_0 = click.IntRange(0, MAX_NUMBER)
_UP_TO = click.IntRange(0, MAX_LIMIT)


@click.command("isolated-device-list")
@click.option(
    "--limit",
    type=_UP_TO,
    metavar="N",
    help=f"Show at most N devices; 0 shows all. Default: {_PAGE} in a table, otherwise all.",
)
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
    "--numa-node",
    type=_NUMA_NODE,
    metavar="N",
    help="Show only devices of GPUs at this NUMA node; -1 if there is none.",
)
@click.option("--unused", is_flag=True, help="Show only devices that yunion-mps run could get now.")
@output_option
def list_devices(limit: int | None, offset: int, output: str, **filters: Any) -> None:
    """List the MPS devices of this host.

    \b
    Examples:
      yunion-mps isolated-device-list
      yunion-mps list
      yunion-mps list --addr 00:06.0 --limit 0
      yunion-mps list --unused --output json
    """
    if limit is None:
        limit = _PAGE if output == "table" else 0
    given = {name: value for name, value in filters.items() if value is not False}
    answer = call(GET_DEVICES, limit=limit, offset=offset, **given)
    rows = [fields(device, COLUMNS.values()) for device in answer["isolated_devices"]]
    header = list(COLUMNS)
    show(answer, output, header, rows, lambda: draw(header, rows, _DROP) + footer(answer))


def footer(answer: DeviceList) -> str:
    """Cloudpods' last line."""
    total, limit, offset = answer["total"], answer["limit"], answer["offset"]
    size = limit or max(total, 1)
    pages = -(-total // size)
    return (
        f"*** Total: {total} Pages: {pages} Limit: {limit} Offset: {offset} Page: {offset // size + 1} ***\n"
    )


@click.command("show", short_help="Show one device in detail.")
@device_argument
@output_option
def show_device(device: str, output: str) -> None:
    """Show one device and the environment variables with which a process uses it.

    DEVICE is an id, an address (00:06.0-1) or a unique prefix of either. Inside a job with one device it may
    be omitted: YUNION_MPS_DEVICE names it.

    \b
    Examples:
      yunion-mps show 00:06.0-1
      yunion-mps show 00:06.0-1 --output json
    """
    answer = call(GET_DEVICE, id=one_device(device))
    show_pairs(answer, output, lambda: _device_text(answer))


def _device_text(answer: DeviceDetails) -> str:
    """A table, and below it the environment in lines that can be copied as they are."""
    about = {name: value for name, value in answer.items() if name != "client_environment"}
    text = draw(("Field", "Value"), pairs(about))
    if answer["client_environment"]:
        text += "Environment variables of a process that uses it:\n"
    return text + "".join(f"  {name}={cell(value)}\n" for name, value in answer["client_environment"].items())


@click.command("gpus")
@output_option
def list_gpus(output: str) -> None:
    """List the NVIDIA GPUs of this host.

    \b
    Examples:
      yunion-mps gpus
      yunion-mps gpus --output csv
    """
    answer = call(GET_GPUS)
    rows = [fields(gpu, _GPU_COLUMNS.values()) for gpu in answer["gpus"]]
    show(answer, output, list(_GPU_COLUMNS), rows, lambda: _gpus_text(answer["gpus"]))


def _gpus_text(gpus: list[Gpu]) -> str:
    """A table, and below it the reasons, which no column has room for."""
    header = [name for name in _GPU_COLUMNS if name != "Reason"]
    rows = [fields(gpu, (_GPU_COLUMNS[name] for name in header)) for gpu in gpus]
    return draw(header, rows, _GPU_DROP) + notes((gpu["addr"], gpu["reason"]) for gpu in gpus) + pools(gpus)


def pools(gpus: Iterable[Gpu]) -> str:
    """What is free of the GPUs whose memory is handed out in units."""
    return notes(
        (
            gpu["addr"],
            f"{gpu['memory_free']} of {gpu['memory_total']} MiB are free to lease: yunion-mps run --gpu-mem",
        )
        for gpu in gpus
        if gpu["memory_free"] is not None and not gpu["reason"]
    )
