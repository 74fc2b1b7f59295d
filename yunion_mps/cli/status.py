"""`yunion-mps status`: one screen of whether all is well; `yunion-mps who`: who has which device."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.common import call, listed_devices
from yunion_mps.cli.devices import pools
from yunion_mps.cli.output import (
    draw,
    duration,
    notes,
    output_option,
    show,
    show_pairs,
    terminal_size,
    wrapped,
)
from yunion_mps.errors import YunionError
from yunion_mps.http.operations import GET_CLIENTS, GET_GPUS, GET_LEASES, GET_STATUS, SLOW_S
from yunion_mps.overview import count
from yunion_mps.overview.findings import HostFinding, folded, of_uses, with_hints
from yunion_mps.overview.holdings import ID_LENGTH, NO_CLIENTS, Holding, holdings, in_container
from yunion_mps.overview.host import IN_USE, Answers, HostOverview, state_of
from yunion_mps.times import seconds

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Domain

Json = dict[str, Any]

#: A host on which asking for the clients takes longer has another trouble, which is to be seen at once.
_CLIENTS_S = 6.0

_DOMAIN_COLUMNS = ("Domain", "State", "PID", "Restarts", "GPUs", "Default_limit", "Pipe_directory")
_DOMAIN_DROP = ("Restarts", "Default_limit", "Pipe_directory", "PID", "GPUs")
_GPU_COLUMNS = ("GPU", "Name", "State", "Devices", "In_use", "Free", "Used_MiB", "Memory_MiB")
_GPU_DROP = ("Memory_MiB", "Name", "Devices")
_NUMBERS = ("PID", "Restarts", "GPUs", "Memory_MiB", "Devices", "In_use", "Free", "Used_MiB", "Of_MiB")
_INDENT = 10
#: More rows than these are counted, and not shown one by one: it is to be one screen.
_MAX_ROWS = 12

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
_IN_OTHERS = ("GPU", "Container")
_DROP = ("Lease", "Since", "Remark", "Of_MiB", "Command", "PID")


def ask_clients(timeout_s: float) -> ClientList:
    """Who uses GPUs now, as the driver sees it: no look at a screen may cost a job; raises YunionError."""
    return call(GET_CLIENTS, timeout_s, seen=True)


def ask_clients_soon() -> ClientList:
    """The same, and not for long; if the answer fails, why is one of its errors."""
    try:
        return ask_clients(_CLIENTS_S)
    except YunionError as error:
        return {**NO_CLIENTS, "errors": [f"who uses the GPUs: {error.message}"]}


@click.command("status", short_help="Show the state of the service, problems first.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the state is degraded or failed.")
@output_option
def status(exit_code: bool, output: str) -> None:
    """Show the state of the daemon, the GPUs and the devices, with problems and hints first.

    The state is ready, degraded (there is a problem), failed (no control daemon is ready) or disabled
    (enable_cuda_mps is false). Warnings do not change it.

    A device is available if its control daemon is ready; used if it is leased or a process uses it; free if
    neither is so and yunion-mps run could get it; and pending if its GPU was divided again but leases of the
    old division still exist.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --exit-code
      yunion-mps status --output json
    """
    daemon = call(GET_STATUS)
    gpus = call(GET_GPUS)["gpus"]
    devices = listed_devices()
    leases = call(GET_LEASES)
    clients = ask_clients_soon() if daemon["domains"] else NO_CLIENTS
    host = HostOverview.of(Answers(daemon, gpus, devices, leases["leases"], leases["waiting"], clients))
    past = sum(client["mps"] is False for client in clients["clients"])
    answer: dict[str, Any] = {
        **daemon,
        "state": host.state,
        "devices": host.devices,
        "leases": {"total": len(leases["leases"]), "waiting": len(leases["waiting"])},
        "clients": len(clients["clients"]) - past,
        "outside_mps": past,
        "problems": [
            {"kind": one.kind, "code": one.code, "what": one.what, "hint": one.hint} for one in host.findings
        ],
        "errors": clients["errors"],
    }
    show_pairs(answer, output, lambda: _status_text(answer, host))
    if exit_code and host.state in ("degraded", "failed"):
        raise click.exceptions.Exit(1)


def _status_text(status: dict[str, Any], host: HostOverview) -> str:
    devices, driver, leases, gpus = status["devices"], status["driver"], status["leases"], host.answers.gpus
    cuda = f", CUDA {driver['cuda_version']}" if driver["cuda_version"] else ""
    waiting = f", {leases['waiting']} waiting" if leases["waiting"] else ""
    clients = f"{count(status['clients'], 'client')} of MPS"
    if status["outside_mps"]:
        clients += f", {count(status['outside_mps'], 'process', 'processes')} outside MPS"
    up = duration(time.time() - seconds(status["started"]))
    free = f", {devices['used']} used, {devices['free']} free" if devices["total"] or devices["used"] else ""
    pending = f", {devices['pending']} pending" if devices.get("pending") else ""
    broken = status["gpus"]["unavailable"]
    lines = [f"State:    {status['state']}"]
    for one, hint in with_hints(folded(host.findings)):
        lines += [f"{one.kind + ':':9} {one.what}", *([f"Hint:     {hint}"] if hint else [])]
    lines += [
        f"Devices:  {devices['available']} of {devices['total']} available{pending}{free}",
        f"Leases:   {leases['total']}{waiting}; {clients}",
        f"GPUs:     {status['gpus']['total']}" + (f", {broken} unavailable" if broken else ""),
        f"Driver:   {driver['version'] or 'not looked at'}{cuda}",
        f"Host:     {os.uname().nodename}, id {status['host_id']}",
        f"Daemon:   {status['version']}, PID {status['pid']}, up {up}",
    ]
    text = "".join(wrapped(line, _INDENT) for line in lines)
    text += _gpu_table(host) if gpus else ""
    end = pools(gpus) + notes(("Not known", error) for error in status["errors"])
    domains = _domain_table(status["domains"], _MAX_ROWS)
    if 0 < terminal_size()[1] <= (text + domains + end).count("\n"):
        domains = _domain_table(status["domains"], 0)  # what is wrong must not be scrolled away
    return text + domains + end


def _gpu_table(host: HostOverview) -> str:
    """A row a GPU; if they are too many for a screen, a row for those of a kind in a state."""
    gpus = host.answers.gpus
    rows: dict[tuple[str, ...], list[Any]] = {}
    for gpu in gpus:
        own = [one for one in host.holdings if one.gpu == gpu["addr"]]
        numbers = (
            1,
            sum(len(one.devices) for one in own),
            sum(len(one.devices) for one in own if one.in_use),
            sum(one.is_spare for one in own),
            host.memory_by_gpu.get(gpu["addr"], 0),
            gpu["memory_total"] or 0,
        )
        words = (gpu["addr"], gpu["name"] or "", gpu["state"])
        key = words if len(gpus) <= _MAX_ROWS else words[1:]
        rows[key] = [before + more for before, more in zip(rows.get(key, [0] * len(numbers)), numbers)]
    shown = [(*(key if len(key) == 3 else (f"{row[0]} GPUs", *key)), *row[1:]) for key, row in rows.items()]
    return draw(_GPU_COLUMNS, shown, _GPU_DROP, _NUMBERS)


def _default_limit(domain: Domain) -> str:
    """`5760 MiB, 25 %`: what a client gets that sets no limit, which is the largest device's budget."""
    limits = {limit for limit in domain["memory_limits"] if limit is not None}
    memory = ",".join(map(str, sorted(limits)))
    return (f"{memory} MiB, " if memory else "") + f"{domain['thread_percentage']} %"


def _domain_table(domains: Sequence[Domain], most: int) -> str:
    """The control daemons; if they are more than so many, those that do not serve."""
    shown = [one for one in domains if len(domains) <= most or one["state"] != "ready"][:_MAX_ROWS]
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
    text = draw(_DOMAIN_COLUMNS, rows, _DOMAIN_DROP, _NUMBERS) if rows else ""
    left = len(domains) - len(shown)
    ready = sum(domain["state"] == "ready" for domain in domains)
    return text + (f"Domains:  {ready} of {len(domains)} are ready (all: -o json)\n" if left else "")


@click.command("who", short_help="Show who has which device.")
@output_option
def who(output: str) -> None:
    """Show who has which device: by a lease, or by using it.

    A line is one process and what it has of its device's budget; a lease whose command uses no GPU yet is
    idle, and a client of MPS that does not say which device it uses has no device. What is over budget, or
    outside MPS, is said below.

    \b
    Examples:
      yunion-mps who
      yunion-mps who --output json
    """
    devices = listed_devices()
    leases = call(GET_LEASES)
    clients = ask_clients(SLOW_S)
    found = [one for one in holdings(devices, leases["leases"], clients["clients"]) if one.in_use]
    uses = [use for holding in found for use in _uses(holding)]
    wrong = list(of_uses(found, clients))
    answer = {
        "uses": uses,
        "waiting": leases["waiting"],
        "problems": [{"code": one.code, "what": one.what, "hint": one.hint} for one in wrong],
        "errors": clients["errors"],
        "total": len(uses),
    }
    rows = [[use[field] for field in COLUMNS.values()] for use in uses]
    show(answer, output, list(COLUMNS), rows, lambda: _who_text(answer, wrong))


def _uses(holding: Holding) -> list[Json]:
    """One entry for each process, or one for a lease without any."""
    lease, state = holding.lease, state_of(holding)
    return [
        {
            "device": holding.named or None,
            "devices": list(holding.devices),
            "gpu": holding.gpu or None,
            "lease": lease["id"] if lease else None,
            "name": lease["name"] if lease else None,
            "memory_budget": holding.budget_mib,
            "user": process.user,
            "pid": process.pid,
            "command": process.command,
            "container": process.container,
            "since": lease["since"] if lease else process.started,
            "memory_used": process.memory_mib,
            "remark": "" if state == IN_USE else state,
        }
        for process in holding.holders
    ]


def _who_text(answer: Json, wrong: Sequence[HostFinding]) -> str:
    """A table, then the queued requests, what is wrong with a hint, and what is not known."""
    now_s = time.time()
    header = [name for name in COLUMNS if name not in _IN_OTHERS]
    text = draw(header, [_row(use, header, now_s) for use in answer["uses"]], _DROP, _NUMBERS)
    for one in answer["waiting"]:
        since = duration(now_s - seconds(one["since"]))
        user = f"{one['user']} (PID {one['pid']})" if one["pid"] else one["user"]
        text += wrapped(f"Waiting: {user} wants {one['wants']}, for {since}")
    for finding, hint in with_hints(folded(wrong)):
        text += wrapped(f"{finding.kind}: {finding.what}") + (wrapped(f"Hint: {hint}") if hint else "")
    return text + notes(("Not known", error) for error in answer["errors"])


def _row(use: Json, header: Sequence[str], now_s: float) -> list[object]:
    shown = {
        **use,
        "device": use["device"] or use["gpu"],
        "lease": (use["lease"] or "")[:ID_LENGTH],
        "command": in_container(use["container"], use["command"] or ""),
        "since": "" if use["since"] is None else duration(now_s - seconds(use["since"])),
    }
    return [shown[COLUMNS[name]] for name in header]
