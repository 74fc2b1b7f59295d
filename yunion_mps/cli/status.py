"""`status`: whether all is well, on one screen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.calls import call, listed_devices
from yunion_mps.cli.devices import pools
from yunion_mps.cli.output import (
    Column,
    age_of,
    hint_text,
    notes,
    output_option,
    show_pairs,
    table,
    terminal_size,
    wrapped,
)
from yunion_mps.http.operations import GET_CLIENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.overview import HostAnswers, HostOverview, fold_problems, with_hints
from yunion_mps.service.holdings import is_memory_unknown
from yunion_mps.text import count

if TYPE_CHECKING:
    from yunion_mps.answers import Domain, Status

_DOMAIN_COLUMNS = (
    Column("DOMAIN", "name"),
    Column("STATE", "state"),
    Column("PID", "pid", numeric=True, drop=2),
    Column("RESTARTS", "restarts", numeric=True, drop=5),
    Column("GPUS", lambda domain: len(domain["gpus"]), numeric=True, drop=1),
    Column("DEFAULT LIMIT", lambda domain: _default_limit(domain), drop=4),
    Column("PIPE DIRECTORY", "pipe_directory", least=20, drop=3),
)
_GPU_COLUMNS = (
    Column("GPU", 0),
    Column("NAME", 1, least=9, drop=2),
    Column("STATE", 2),
    Column("DEVICES", 3, numeric=True, drop=1),
    Column("IN USE", 4, numeric=True),
    Column("FREE", 5, numeric=True),
    Column("MEMORY USED", lambda row: f"{row[6]} / {row[7]} MiB" if row[7] else None, numeric=True),
)
_INDENT = 10
#: More rows are summarised, to fit on one screen.
_MAX_ROWS = 12


@click.command("status", short_help="Show the state of the service, problems first.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the state is degraded or failed.")
@output_option
def status(exit_code: bool, output: str) -> None:
    """Show the state of the daemon, the GPUs and the devices, with problems and hints first.

    The state is ready, degraded (there is a problem), failed (no control daemon is ready) or disabled
    (enable_cuda_mps is false). Warnings do not change it. Jobs over budget or outside MPS are problems.

    A device is available if its control daemon is ready; used if it is leased or a process uses it; free if
    it can be leased; reserved if it can be, but only by pods, as host_container_device.yml says; and pending
    if it waits for leases of a previous division of its GPU to end. Free devices of a GPU that does not
    enforce budgets are leased only with --allow-unlimited.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --exit-code
      yunion-mps status --output json
    """
    answer, gpus, devices = call(GET_STATUS), call(GET_GPUS)["gpus"], listed_devices()
    leases, clients = call(GET_LEASES), call(GET_CLIENTS, seen=True)
    host = HostOverview.of(HostAnswers(answer, gpus, devices, leases["leases"], leases["waiting"], clients))
    answer = {**answer, "problems": host.problems}
    show_pairs(answer, output, lambda: _status_text(answer, host))
    if exit_code and answer["state"] in ("degraded", "failed"):
        raise click.exceptions.Exit(1)


def _status_text(status: Status, host: HostOverview) -> str:
    devices, driver, leases, gpus = status["devices"], status["driver"], status["leases"], host.answers.gpus
    cuda = f", CUDA {driver['cuda_version']}" if driver["cuda_version"] else ""
    waiting = f", {count(leases['waiting'], 'request')} queued" if leases["waiting"] else ""
    outside_mps = status["outside_mps"]
    processes = count(status["clients"] + outside_mps, "process", "processes")
    processes += f", {outside_mps} outside MPS" if outside_mps else ""
    up = age_of(status["started"])
    available = f"{devices['available']} of {devices['total']} available"
    if not devices["total"] and any(gpu["memory_free_mib"] is not None for gpu in gpus):
        available = "created on request"
    free = f", {devices['used']} used, {devices['free']} free" if devices["total"] or devices["used"] else ""
    unenforced_gpus = {gpu["addr"] for gpu in gpus if not gpu["budget_enforced"]}
    unenforced = sum(holding.is_spare and holding.gpu in unenforced_gpus for holding in host.holdings)
    free += f" ({unenforced} without enforced budgets)" if unenforced else ""
    pending = "".join(f", {devices[name]} {name}" for name in ("pending", "reserved") if devices[name])
    broken = status["gpus"]["unavailable"]
    text = wrapped(f"State:    {status['state']}")
    for problem, hint in with_hints(fold_problems(host.problems)):
        text += wrapped(f"{problem.title + ':':9} {problem.text}", _INDENT)
        text += hint_text(hint, "Hint:     ", _INDENT)
    lines = [
        f"Devices:  {available}{pending}{free}",
        f"Leases:   {leases['total']}{waiting}; {processes}",
        f"GPUs:     {status['gpus']['total']}" + (f", {broken} unavailable" if broken else ""),
        f"Driver:   {driver['version'] or 'not queried'}{cuda}",
        f"Host:     {os.uname().nodename}, id {status['host_id']}",
        f"Daemon:   {status['version']}, PID {status['pid']}, up {up}",
    ]
    text += "".join(wrapped(line, _INDENT) for line in lines)
    text += _gpu_table(host) if gpus else ""
    end = pools(gpus) + notes(("Incomplete", error) for error in status["errors"])
    domains = _domain_table(status["domains"], _MAX_ROWS)
    if 0 < terminal_size()[1] <= (text + domains + end).count("\n"):
        domains = _domain_table(status["domains"], 0)  # problems must not scroll off the screen
    return text + domains + end


def _gpu_table(host: HostOverview) -> str:
    """Format a row for each GPU; if these are too many, a row for each model and state."""
    gpus = host.answers.gpus
    rows: dict[tuple[str, ...], list[Any]] = {}
    for gpu in gpus:
        its_holdings = [holding for holding in host.holdings if holding.gpu == gpu["addr"]]
        numbers = (
            1,
            sum(len(holding.devices) for holding in its_holdings),
            sum(len(holding.devices) for holding in its_holdings if holding.in_use),
            sum(holding.is_spare for holding in its_holdings),
            host.memory_by_gpu.get(gpu["addr"], 0),
            0 if is_memory_unknown(gpu) else gpu["memory_mib"] or 0,
        )
        noun = "instances" if gpu["parent"] else "GPUs"
        key_fields = (gpu["addr"], gpu["name"] or "", gpu["state"])
        key = key_fields if len(gpus) <= _MAX_ROWS else (noun, *key_fields[1:])
        rows[key] = [before + more for before, more in zip(rows.get(key, [0] * len(numbers)), numbers)]
    if len(gpus) > _MAX_ROWS:
        rows = {(f"{row[0]} {noun}", *key): row for (noun, *key), row in rows.items()}
    shown = [(*key, *row[1:]) for key, row in rows.items()]
    return table(_GPU_COLUMNS, shown)


def _default_limit(domain: Domain) -> str | None:
    """Format the default limits of clients, the range over all GPUs: `5760-20389 MiB, 25 %`."""
    limits = [limit for limit in domain["memory_limits_mib"] if limit is not None]
    if not limits:
        return None
    lowest, highest = min(limits), max(limits)
    memory = f"{lowest}-{highest}" if lowest < highest else str(highest)
    return f"{memory} MiB, {domain['thread_percentage']} %"


def _domain_table(domains: Sequence[Domain], limit: int) -> str:
    """Format the control daemons; if there are more than `limit`, only those that are not ready."""
    shown = [domain for domain in domains if len(domains) <= limit or domain["state"] != "ready"][:_MAX_ROWS]
    text = table(_DOMAIN_COLUMNS, shown) if shown else ""
    left = len(domains) - len(shown)
    ready = sum(domain["state"] == "ready" for domain in domains)
    return text + (f"Domains:  {ready} of {len(domains)} ready (list all: -o json)\n" if left else "")
