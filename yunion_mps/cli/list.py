"""`yunion-mps isolated-device-list`, in short `list`: Cloudpods' columns, footer and filters."""

from __future__ import annotations

import click

from yunion_mps.cli.ask import ask, quoted
from yunion_mps.cli.output import output_option, show
from yunion_mps.cli.table import draw

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
    "Device_minor",
    "Index",
    "Host_id",
    "numa_node",
    "Vendor_device_id",
    "PCIE_Info",
    "Dev_type",
    "Device_path",
    "Model",
)

#: The devices of a page, as with Cloudpods.
_PAGE = 20

# What the daemon takes, so that a wrong number is wrong usage here.
_NUMA_NODE = click.IntRange(-1, 2_147_483_647)
_FROM_0 = click.IntRange(0, 2_147_483_647)
_UP_TO = click.IntRange(0, 100_000)


@click.command("isolated-device-list")
@click.option(
    "--limit",
    type=_UP_TO,
    metavar="N",
    help=f"Devices per page; 0: all. Default: {_PAGE} in a table, otherwise all.",
)
@click.option(
    "--offset", type=_FROM_0, metavar="N", default=0, show_default=True, help="Devices to pass over."
)
@click.option("--dev-type", metavar="TYPE", help="Only this type, e.g. NVIDIA_MPS.")
@click.option("--model", metavar="NAME", help='Only this model, e.g. "Tesla P40".')
@click.option("--addr", metavar="ADDR", help="Only this device (00:06.0-1), or this GPU's (00:06.0).")
@click.option("--device-path", metavar="UUID", help="Only devices of the GPU with this UUID.")
@click.option("--vendor-device-id", metavar="ID", help="Only this kind of GPU, e.g. 10de:1b38.")
@click.option("--numa-node", type=_NUMA_NODE, metavar="N", help="Only GPUs at this NUMA node; -1: without.")
@click.option("--unused", is_flag=True, help="Only devices that yunion-mps run could be given now.")
@output_option
def command(limit: int | None, offset: int, output: str, **filters: object | None) -> None:
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
    words = [f"limit={limit}", f"offset={offset}"]
    for name, value in filters.items():
        if value is not None and value is not False:
            words.append(f"{name}={'true' if value is True else quoted(str(value))}")
    answer = ask("/v1/devices?" + "&".join(words))
    rows = [[device[field] for field in COLUMNS.values()] for device in answer["isolated_devices"]]
    header = list(COLUMNS)
    show(answer, output, header, rows, lambda: draw(header, rows, _DROP) + footer(answer))


def footer(answer: dict[str, int]) -> str:
    """Cloudpods' last line."""
    total, limit, offset = answer["total"], answer["limit"], answer["offset"]
    size = limit or max(total, 1)
    pages = -(-total // size)
    return (
        f"*** Total: {total} Pages: {pages} Limit: {limit} Offset: {offset} Page: {offset // size + 1} ***\n"
    )
