"""`yunion-mps status`: one screen of whether all is well, and what is not, first."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import click

from yunion_mps.cli.ask import ask
from yunion_mps.cli.gpus import free_in_units
from yunion_mps.cli.output import output_option, show_pairs
from yunion_mps.cli.screen import asking
from yunion_mps.cli.screen.text import duration, right
from yunion_mps.cli.table import draw, notes, terminal_rows, wrapped
from yunion_mps.overview.findings import Finding, everything, folded, overall_state
from yunion_mps.overview.uses import NOBODY, Clients, Holding, holdings, memory_by_gpu, past_mps
from yunion_mps.overview.words import count

_DOMAIN_COLUMNS = (
    "Domain",
    "State",
    "PID",
    "Restarts",
    "GPUs",
    "Default_limit",
    "Pipe_directory",
)
_DOMAIN_DROP = ("Restarts", "Default_limit", "Pipe_directory", "PID", "GPUs")
_GPU_COLUMNS = ("GPU", "Name", "State", "Devices", "In_use", "Free", "Used_MiB", "Memory_MiB")
_GPU_DROP = ("Memory_MiB", "Name", "Devices")
_NUMBERS = ("PID", "Restarts", "GPUs", "Memory_MiB", "Devices", "In_use", "Free", "Used_MiB")
_INDENT = 10
#: More rows than these are counted, and not shown one by one: it is to be one screen.
_MOST_ROWS = 12

Json = dict[str, Any]


@click.command("status", short_help="Show whether all is well.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the state is degraded or failed.")
@output_option
def command(exit_code: bool, output: str) -> None:
    """Show how the daemon, the GPUs, the devices and their users are: what is wrong first, with its remedy.

    A device is available where its control daemon serves it, used where somebody has it, by a lease or by
    using it, and free where nobody has it and yunion-mps run would be given it. It is pending if its GPU was
    divided again and leases of the former division have not ended.

    The state is ready, degraded (there is a problem), failed (nothing serves) or disabled (MPS is not
    offered); warnings do not change it. For monitoring, --exit-code exits with 1 if it is degraded or failed;
    yunion-mps doctor checks more.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --exit-code
      yunion-mps status --output json
    """
    status = ask("/v1/status")
    gpus = ask("/v1/gpus")["gpus"]
    devices = ask("/v1/devices?limit=0")["isolated_devices"]
    held, waiting = asking.leases()
    clients = asking.clients_or_why() if status["domains"] else NOBODY
    found = holdings(devices, held, clients.clients)
    wrong = everything(status, gpus, held, found, clients)
    state = overall_state(status, wrong)
    in_use = sum(len(holding.devices) for holding in found if holding.in_use)
    past = past_mps(clients.clients)
    answer = {
        **status,
        "state": state,
        "devices": {**status["devices"], "used": in_use, "free": _free(found)},
        "leases": {"total": len(held), "waiting": len(waiting)},
        "clients": len(clients.clients) - past,
        "past_mps": past,
        "problems": [{"kind": one.kind, "what": one.what, "remedy": one.remedy} for one in wrong],
        "troubles": clients.troubles,
    }
    show_pairs(answer, output, lambda: _text(answer, gpus, found, wrong, clients))
    if exit_code and state in ("degraded", "failed"):
        raise click.exceptions.Exit(1)


def _free(found: Sequence[Holding]) -> int:
    return sum(one.is_spare for one in found)


def _text(
    status: Json, gpus: Sequence[Json], found: Sequence[Holding], wrong: Sequence[Finding],
    clients: Clients,
) -> str:  # fmt: skip
    devices, driver, leases = status["devices"], status["driver"], status["leases"]
    cuda = f", CUDA {driver['cuda_version']}" if driver["cuda_version"] else ""
    waiting = f", {leases['waiting']} waiting" if leases["waiting"] else ""
    clients_of = f"{count(status['clients'], 'client')} of MPS"
    if status["past_mps"]:
        clients_of += f", {count(status['past_mps'], 'process', 'processes')} past MPS"
    up = duration(time.time() - status["started"])
    free = f", {devices['used']} used, {devices['free']} free" if devices["total"] or devices["used"] else ""
    pending = f", {devices['pending']} pending" if devices.get("pending") else ""
    broken = status["gpus"]["unavailable"]
    lines = [
        f"State:    {status['state']}",
        *_wrong(wrong),
        f"Devices:  {devices['available']} of {devices['total']} available{pending}{free}",
        f"Leases:   {leases['total']}{waiting}; {clients_of}",
        f"GPUs:     {status['gpus']['total']}" + (f", {broken} unavailable" if broken else ""),
        f"Driver:   {driver['version'] or 'not looked at'}{cuda}",
        f"Host:     {os.uname().nodename}, id {status['host_id']}",
        f"Daemon:   {status['version']}, PID {status['pid']}, up {up}",
    ]
    text = "".join(wrapped(line, _INDENT) for line in lines)
    text += _gpu_table(gpus, found, clients) if gpus else ""
    end = notes((gpu["addr"], free_in_units(gpu)) for gpu in gpus)
    end += notes(("Not known", trouble) for trouble in clients.troubles)
    domains = _domain_table(status["domains"], _MOST_ROWS)
    if 0 < terminal_rows() <= (text + domains + end).count("\n"):
        domains = _domain_table(status["domains"], 0)  # what is wrong must not be scrolled away
    return text + domains + end


def _wrong(wrong: Sequence[Finding]) -> list[str]:
    """Each with its remedy below it, which several may share."""
    shown = folded(wrong)
    lines = []
    for place, one in enumerate(shown):
        lines.append(f"{one.kind + ':':9} {one.what}")
        if place + 1 == len(shown) or shown[place + 1].remedy != one.remedy:
            lines.append(f"Remedy:   {one.remedy}")
    return lines


def _gpu_table(gpus: Sequence[Json], found: Sequence[Holding], clients: Clients) -> str:
    """A row a GPU; where they are too many for a screen, a row for those of a kind in a state."""
    used_mib = memory_by_gpu(clients.clients)
    rows: dict[tuple[str, ...], list[Any]] = {}
    for gpu in gpus:
        own = [one for one in found if one.gpu == gpu["addr"]]
        in_use = sum(len(one.devices) for one in own if one.in_use)
        total = sum(len(one.devices) for one in own)
        numbers = (total, in_use, _free(own), used_mib.get(gpu["addr"], 0), gpu["memory_total"] or 0)
        words = (gpu["addr"], gpu["name"] or "", gpu["state"])
        key = words if len(gpus) <= _MOST_ROWS else words[1:]
        row = rows.setdefault(key, [0, 0, 0, 0, 0, 0])
        rows[key] = [before + more for before, more in zip(row, (1, *numbers))]
    shown = [(*(key if len(key) == 3 else (f"{row[0]} GPUs", *key)), *row[1:]) for key, row in rows.items()]
    return draw(_GPU_COLUMNS, right(_GPU_COLUMNS, shown, _NUMBERS), _GPU_DROP)


def _default_limit(domain: Json) -> str:
    """`5760 MiB, 25 %`: what a client gets that sets no limit, which is the largest device's budget."""
    memory = ",".join(str(limit) for limit in sorted(set(domain["memory_limits"]) - {None}))
    return (f"{memory} MiB, " if memory else "") + f"{domain['thread_percentage']} %"


def _domain_table(domains: Sequence[Json], most: int) -> str:
    """The control daemons; where they are more than so many, those that do not serve."""
    shown = [one for one in domains if len(domains) <= most or one["state"] != "ready"][:_MOST_ROWS]
    rows = [
        (
            domain["name"],
            domain["state"],
            domain["pid"],
            domain["restarts"],
            len(domain["gpus"]),
            _default_limit(domain),
            domain["pipe_directory"],
        )
        for domain in shown
    ]
    text = draw(_DOMAIN_COLUMNS, right(_DOMAIN_COLUMNS, rows, _NUMBERS), _DOMAIN_DROP) if rows else ""
    left = len(domains) - len(shown)
    ready = sum(domain["state"] == "ready" for domain in domains)
    return text + (f"Domains:  {ready} of {len(domains)} are ready (all: -o json)\n" if left else "")
