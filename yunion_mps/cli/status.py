"""`yunion-mps status`: whether all is well, and what is not, first."""

from __future__ import annotations

import time
from typing import Any

import click

from yunion_mps.cli.ask import ask
from yunion_mps.cli.output import output_option, show_pairs
from yunion_mps.cli.table import draw, notes

_COLUMNS = (
    "Domain",
    "State",
    "PID",
    "Restarts",
    "GPUs",
    "Threads_%",
    "Memory_MiB",
    "Pipe_directory",
)
_DROP = ("Restarts", "Memory_MiB", "Threads_%", "Pipe_directory", "PID", "GPUs")


@click.command("status", short_help="Show whether all is well.")
@output_option
def command(output: str) -> None:
    """Show how the daemon, the control daemons and the devices are.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --output json
    """
    answer = ask("/v1/status")
    show_pairs(answer, output, lambda: _text(answer))


def _text(status: dict[str, Any]) -> str:
    devices, gpus, driver = status["devices"], status["gpus"], status["driver"]
    lines = [f"State:    {status['state']}"]
    if status["notice"]:
        lines.append(f"Notice:   {status['notice']}")
    lines += [f"Warning:  {warning}" for warning in status["warnings"]]
    lines += [f"Pending:  {d['name']}: {d['pending']}" for d in status["domains"] if d["pending"]]
    up_s = max(0, int(time.time() - status["started"]))
    cuda = f", CUDA {driver['cuda_version']}" if driver["cuda_version"] else ""
    lines.append(f"Devices:  {devices['available']} of {devices['total']} available")
    broken = f", {gpus['unavailable']} unavailable (see: yunion-mps gpus)" if gpus["unavailable"] else ""
    lines.append(f"GPUs:     {gpus['total']}{broken}")
    lines.append(f"Driver:   {driver['version'] or 'not looked at'}{cuda}")
    lines.append(f"Host id:  {status['host_id']}")
    lines.append(f"Daemon:   {status['version']}, PID {status['pid']}, up {_duration(up_s)}")
    text = "\n".join(lines) + "\n"
    if not status["domains"]:
        return text
    rows = [
        (
            domain["name"],
            domain["state"],
            domain["pid"],
            domain["restarts"],
            len(domain["gpus"]),
            domain["thread_percentage"],
            ",".join(str(limit) for limit in sorted(set(domain["memory_limits"]) - {None})),
            domain["pipe_directory"],
        )
        for domain in status["domains"]
    ]
    known = [domain for domain in status["domains"] if domain["reason"] != domain["pending"]]
    reasons = notes((domain["name"], domain["reason"]) for domain in known)
    return text + draw(_COLUMNS, rows, _DROP) + reasons


def _duration(seconds: int) -> str:
    """Seconds in the two largest units: `3 d 4 h`."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    parts = []
    for size, name in units:
        if seconds >= size:
            parts.append(f"{seconds // size} {name}")
            seconds %= size
    return " ".join(parts[:2]) or "0 s"
