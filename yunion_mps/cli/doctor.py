"""`doctor`: what is wrong, and how to fix it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.options import PID, Duration, complete_pid
from yunion_mps.cli.output import hint_text, output_option, show, wrapped
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import count

if TYPE_CHECKING:
    from yunion_mps.doctor.checks import Finding
    from yunion_mps.doctor.report import Report

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
@click.option(
    "--nagios", is_flag=True,
    help="Print one line, and exit with 0, 1, 2 or 3, as a monitoring plugin.",
)  # fmt: skip
@output_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def doctor(
    pid: int | None, selftest: bool, timeout: int, nagios: bool, output: str, command: tuple[str, ...]
) -> None:  # fmt: skip
    """Check for everything that is known to make MPS fail on a host, and print how to fix it.

    Doctor changes nothing. It works as any user, with or without a running daemon; some checks need root.
    With COMMAND, it also checks the environment that COMMAND would have, without running it.

    It exits with 1 if there is a problem, and otherwise with 0. With --nagios, it exits with 2 if there is a
    problem, 1 if there is a warning, 3 if the state is unknown, and otherwise 0; and it prints one line with
    the worst finding and the number of findings of each level, unless another format is chosen.

    \b
    Examples:
      yunion-mps doctor
      yunion-mps doctor --pid 4260
      yunion-mps doctor -- python3 train.py
      yunion-mps doctor --selftest
      yunion-mps doctor --output json
    """
    # 50 ms, which --help and completion need not pay: they import this module to list the command.
    from yunion_mps.doctor.checks import Host
    from yunion_mps.doctor.report import run_checks, select_checks

    host = Host(Paths.from_environment(), timeout)
    report = run_checks(select_checks(dict(os.environ), pid, command, selftest_too=selftest), host)
    rows = [(line.finding.level, line.check, line.finding.what, line.finding.hint) for line in report.lines]
    show(report.as_json(), output, _HEADER, rows, lambda: _report_text(report, nagios=nagios))
    sys.stdout.flush()
    # A hanging driver could block a normal exit.
    os._exit(report.exit_code(nagios=nagios))


def _summary(report: Report) -> str:
    """Return for example `Found 2 problems and 1 warning (2 skipped, 19 ok)`."""
    counts = report.counts
    bad = [count(counts[level], level) for level in ("problem", "warning") if counts[level]]
    others = [f"{counts[level]} {level}" for level in ("unknown", "skipped", "ok") if counts[level]]
    summary = f"Found {' and '.join(bad)}" if bad else "No problems found"
    if report.state == "unknown":
        summary = "The state of this host is unknown"
    return f"{summary} ({', '.join(others)})" if others else summary


def _report_text(report: Report, *, nagios: bool) -> str:
    """Format a summary, and a line for each finding; for `nagios`, only one line.

    Of similar findings of a check on many GPUs, only the first are shown.
    """
    if nagios:
        return f"{report.nagios_line}\n"
    text = f"{_summary(report)}\n"
    # Checks with the same finding, such as all skipped for one reason, share a line.
    checks: dict[Finding, list[str]] = {}
    for line in report.lines:
        checks.setdefault(line.finding, []).append(line.check)
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding, names in checks.items():
        alike.setdefault((finding.level, ", ".join(names)), []).append(finding)
    for (level, names_of_checks), findings in alike.items():
        begin = f"{level:<8} {names_of_checks}:"
        for finding in findings[:_MAX_ALIKE]:
            text += wrapped(f"{begin} {finding.what}", _REPORT_INDENT)
            text += hint_text(finding.hint, f"{'':<8} Hint: ", _REPORT_INDENT)
        more = len(findings) - _MAX_ALIKE
        if more > 0:
            text += wrapped(f"{begin} {more} more like this (list all: -o csv)", _REPORT_INDENT)
    return text
