"""`status`, whether all is well, on one screen, and `doctor`, what is wrong and how to fix it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.devices import pools
from yunion_mps.cli.options import PID, Duration, call, complete_pid, listed_devices
from yunion_mps.cli.output import (
    Column,
    age_of,
    hint_text,
    notes,
    output_option,
    show,
    show_pairs,
    table,
    terminal_size,
    wrapped,
)
from yunion_mps.http.operations import GET_CLIENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.overview import Answers, HostOverview, folded, with_hints
from yunion_mps.paths import Paths
from yunion_mps.service.holdings import is_memory_unknown
from yunion_mps.text import count

if TYPE_CHECKING:
    from yunion_mps.answers import Domain, Status
    from yunion_mps.doctor.checks import Finding
    from yunion_mps.doctor.report import Report

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
    if it waits for leases of a previous division of its GPU to end. Free
    devices of a GPU that does not enforce budgets are leased only with --allow-unlimited.

    \b
    Examples:
      yunion-mps status
      yunion-mps status --exit-code
      yunion-mps status --output json
    """
    answer = call(GET_STATUS)
    host = HostOverview.of(
        Answers(
            answer,
            call(GET_GPUS)["gpus"],
            listed_devices(),
            (leases := call(GET_LEASES))["leases"],
            leases["waiting"],
            call(GET_CLIENTS, seen=True),
        )
    )
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
    for problem, hint in with_hints(folded(host.problems)):
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
        key_fields = (gpu["addr"], gpu["name"] or "", gpu["state"])
        key = key_fields if len(gpus) <= _MAX_ROWS else key_fields[1:]
        rows[key] = [before + more for before, more in zip(rows.get(key, [0] * len(numbers)), numbers)]
    shown = [(*(key if len(key) == 3 else (f"{row[0]} GPUs", *key)), *row[1:]) for key, row in rows.items()]
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


_HEADER = ("level", "check", "what", "hint")
_REPORT_INDENT = 12
#: With more similar findings of a check, as with 64 GPUs, the other checks would scroll off the screen.
_MAX_ALIKE = 3


@click.command("doctor", short_help="Find out why MPS does not work.")
@click.option(
    "--pid", type=PID, metavar="PID", shell_complete=complete_pid,
    help="Also check the environment of this process.",
)  # fmt: skip
@click.option("--selftest", is_flag=True, help="Also run a small CUDA program on one device of each domain.")
@click.option(
    "--timeout", type=Duration(1, 600), default="10s", show_default=True, metavar="DURATION",
    help="Time limit for each check.",
)  # fmt: skip
@click.option("--nagios", is_flag=True, help="Exit with the status of a monitoring plugin: 0, 1, 2 or 3.")
@output_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def doctor(
    pid: int | None, selftest: bool, timeout: int, nagios: bool, output: str, command: tuple[str, ...]
) -> None:  # fmt: skip
    """Check for everything that is known to make MPS fail on a host, and print how to fix it.

    Doctor changes nothing. It works as any user, with or without a running daemon; some checks need root.
    With COMMAND, it also checks the environment that COMMAND would have, without running it.

    It exits with 1 if there is a problem, and otherwise with 0. With --nagios, it exits with 2 if there is a
    problem, 1 if there is a warning, 3 if the state is unknown, and otherwise 0.

    \b
    Examples:
      yunion-mps doctor
      yunion-mps doctor --pid 4260
      yunion-mps doctor -- python3 train.py
      yunion-mps doctor --selftest
      yunion-mps doctor --output json
    """
    from yunion_mps.doctor.checks import Host
    from yunion_mps.doctor.report import run_checks, selected_checks

    host = Host(Paths.from_environment(), timeout)
    report = run_checks(selected_checks(dict(os.environ), pid, command, selftest_too=selftest), host)
    rows = [(line.finding.level, line.check, line.finding.what, line.finding.hint) for line in report.lines]
    show(report.as_json(), output, _HEADER, rows, lambda: _report_text(report))
    sys.stdout.flush()
    # A hanging driver could block a normal exit.
    os._exit(report.exit_code(nagios=nagios))


def _summary(report: Report) -> str:
    """Return for example `Found 2 problems and 1 warning (2 skipped, 19 ok)`."""
    bad = [count(report.counts[level], level) for level in ("problem", "warning") if report.counts[level]]
    others = [
        f"{report.counts[level]} {level}" for level in ("unknown", "skipped", "ok") if report.counts[level]
    ]
    found = f"Found {' and '.join(bad)}" if bad else "No problems found"
    if report.state == "unknown":
        found = "The state of this host is unknown"
    return f"{found} ({', '.join(others)})" if others else found


def _report_text(report: Report) -> str:
    """Format a summary of one line, because monitoring shows only the first, and a line for each finding.

    Of similar findings of a check on many GPUs, only the first are shown.
    """
    text = f"{_summary(report)}\n"
    # Checks with the same finding, such as all skipped for one reason, share a line.
    checks: dict[Finding, list[str]] = {}
    for line in report.lines:
        checks.setdefault(line.finding, []).append(line.check)
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding, names in checks.items():
        alike.setdefault((finding.level, ", ".join(names)), []).append(finding)
    for (level, names_of_checks), found in alike.items():
        begin = f"{level:<8} {names_of_checks}:"
        for finding in found[:_MAX_ALIKE]:
            text += wrapped(f"{begin} {finding.what}", _REPORT_INDENT)
            text += hint_text(finding.hint, f"{'':<8} Hint: ", _REPORT_INDENT)
        left = len(found) - _MAX_ALIKE
        text += (
            wrapped(f"{begin} {left} more like this (list all: -o csv)", _REPORT_INDENT) if left > 0 else ""
        )
    return text
