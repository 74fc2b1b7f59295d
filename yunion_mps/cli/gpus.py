"""`yunion-mps gpus`: every GPU of the host, the broken ones with their reason."""

from __future__ import annotations

from typing import Any

import click

from yunion_mps.cli.ask import ask
from yunion_mps.cli.output import output_option, show
from yunion_mps.cli.table import draw, notes

COLUMNS = {
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
_DROP = ("MIG", "Capability", "UUID", "Enforced", "Compute_mode", "Memory_MiB", "Name", "Devices")


@click.command("gpus")
@output_option
def command(output: str) -> None:
    """List the NVIDIA GPUs of this host.

    \b
    Examples:
      yunion-mps gpus
      yunion-mps gpus --output csv
    """
    answer = ask("/v1/gpus")
    rows = [[gpu[field] for field in COLUMNS.values()] for gpu in answer["gpus"]]
    show(answer, output, list(COLUMNS), rows, lambda: _text(answer["gpus"]))


def _text(gpus: list[dict[str, Any]]) -> str:
    """A table, and below it the reasons, which no column has room for."""
    header = [name for name in COLUMNS if name != "Reason"]
    rows = [[gpu[COLUMNS[name]] for name in header] for gpu in gpus]
    text = draw(header, rows, _DROP) + notes((gpu["addr"], gpu["reason"]) for gpu in gpus)
    return text + notes((gpu["addr"], free_in_units(gpu)) for gpu in gpus)


def free_in_units(gpu: dict[str, Any]) -> str:
    """What can still be had of a GPU whose memory is handed out in units, empty for any other."""
    if gpu["memory_free"] is None or gpu["reason"]:
        return ""
    return f"{gpu['memory_free']} of {gpu['memory_total']} MiB can be had: yunion-mps run --gpu-mem"
