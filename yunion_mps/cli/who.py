"""`yunion-mps who`: who has what, since when, and how much of it they use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click

from yunion_mps.cli.ask import SLOW_S, ask
from yunion_mps.cli.output import output_option, show
from yunion_mps.cli.screen import asking
from yunion_mps.cli.screen.text import duration, right
from yunion_mps.cli.table import draw, notes, wrapped
from yunion_mps.overview.findings import folded, of_uses
from yunion_mps.overview.uses import Clients, Holding, Process, holdings, in_container

COLUMNS = {
    "Device": "device",
    "GPU": "gpu",
    "Lease": "lease",
    "User": "user",
    "PID": "pid",
    "Command": "command",
    "Since": "since",
    "Used_MiB": "memory_used",
    "Of_MiB": "memory_budget",
    "Remark": "remark",
    "Container": "container",
}
#: What the table has no column for: a device's address begins with its GPU, and a command with its container.
_TOLD = ("GPU", "Container")
_NUMBERS = ("PID", "Used_MiB", "Of_MiB")
_DROP = ("Lease", "Since", "Remark", "Of_MiB", "Command", "PID")
#: So much of a lease's id tells it from the others.
_ID_LENGTH = 8

OVER, PAST_MPS, NO_DEVICE, IDLE = "over budget", "past MPS", "no device", "idle"

Json = dict[str, Any]


@click.command("who", short_help="Show who has which device.")
@output_option
def command(output: str) -> None:
    """Show who has which device: by a lease, or by using it.

    A line is one process and what it has of its device's budget; a lease whose command uses no GPU yet is
    idle, and a client of MPS that does not say which device it uses has no device. What is over budget, or
    past MPS, is said below.

    \b
    Examples:
      yunion-mps who
      yunion-mps who --output json
    """
    devices = ask("/v1/devices?limit=0")["isolated_devices"]
    held, waiting = asking.leases()
    clients = asking.clients(SLOW_S)
    found = [one for one in holdings(devices, held, clients.clients) if one.in_use]
    uses = [use for holding in found for use in _uses(holding)]
    problems = [{"what": one.what, "remedy": one.remedy} for one in of_uses(found, clients)]
    answer = {
        "uses": uses,
        "waiting": waiting,
        "problems": problems,
        "troubles": clients.troubles,
        "total": len(uses),
    }
    rows = [[_shown(use, field) for field in COLUMNS.values()] for use in uses]
    show(answer, output, list(COLUMNS), rows, lambda: _text(answer, found, clients))


def _uses(holding: Holding) -> list[Json]:
    """One entry for each process, or one for a lease that none uses."""
    lease = holding.lease
    common = {
        "device": holding.named or None,
        "devices": list(holding.devices),
        "gpu": holding.gpu or None,
        "lease": lease["id"] if lease else None,
        "name": lease["name"] if lease else None,
        "memory_budget": holding.budget_mib,
    }
    if not holding.processes:
        assert lease
        command = lease["command"] or lease["name"]
        holder = Process(lease["pid"], lease["user"], command, lease["since"], 0, lease["container"])
        return [_use(common, holder, lease, IDLE)]
    remark = PAST_MPS if holding.past_mps else OVER if holding.over_mib else ""
    remark = remark or ("" if holding.devices else NO_DEVICE)
    return [_use(common, process, lease, remark) for process in holding.processes]


def _use(common: Json, process: Process, lease: Json | None, remark: str) -> Json:
    return {
        **common,
        "user": process.user,
        "pid": process.pid,
        "command": process.command,
        "container": process.container,
        "since": lease["since"] if lease else process.started_s,
        "memory_used": process.memory_mib,
        "remark": remark,
    }


def _text(answer: Json, found: Iterable[Holding], clients: Clients) -> str:
    """A table, then who waits, what is wrong with what to do, and what is not known."""
    now_s = time.time()
    header = [name for name in COLUMNS if name not in _TOLD]
    rows = [_row(use, now_s) for use in answer["uses"]]
    text = draw(header, right(header, rows, _NUMBERS), _DROP)
    for one in answer["waiting"]:
        since = duration(now_s - one["since"])
        who = f"{one['user']} (PID {one['pid']})" if one["pid"] else one["user"]
        text += wrapped(f"Waiting: {who} wants {one['wants']}, for {since}")
    wrong = folded(list(of_uses(found, clients)))
    for place, finding in enumerate(wrong):
        text += wrapped(f"{finding.kind}: {finding.what}")
        if place + 1 == len(wrong) or wrong[place + 1].remedy != finding.remedy:
            text += wrapped(f"Remedy: {finding.remedy}")
    return text + notes(("Not known", trouble) for trouble in answer["troubles"])


def _row(use: Json, now_s: float) -> list[object]:
    since = "" if use["since"] is None else duration(now_s - use["since"])
    shown = {
        **use,
        "device": use["device"] or use["gpu"],
        "lease": (use["lease"] or "")[:_ID_LENGTH],
        "command": in_container(use["container"], use["command"] or ""),
        "since": since,
    }
    return [shown[field] for name, field in COLUMNS.items() if name not in _TOLD]


def _shown(use: Json, field: str) -> object:
    value = use[field]
    if field == "since" and value is not None:
        return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(value))
    return value
