"""`yunion-mps doctor`: what makes MPS fail on this host, and what to do about it."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.output import cell, output_option, show
from yunion_mps.cli.table import terminal_width
from yunion_mps.paths import Paths

if TYPE_CHECKING:
    from yunion_mps.doctor.finding import Finding
    from yunion_mps.doctor.running import Report

_HEADER = ("Level", "Check", "What", "Remedy")


@click.command("doctor", short_help="Find what makes MPS fail here.")
@click.option(
    "--pid", type=click.IntRange(1, 4194304), metavar="PID",
    help="Look at this process' environment too.",
)  # fmt: skip
@click.option("--selftest", is_flag=True, help="Run a small CUDA program on a device of each domain.")
@click.option(
    "--timeout", type=click.FloatRange(0.1, 600), default=10, show_default=True, metavar="SECONDS",
    help="What one check may take.",
)  # fmt: skip
@output_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
def command(
    pid: int | None,
    selftest: bool,
    timeout: float,
    output: str,
    command: tuple[str, ...],
) -> None:
    """Look at all that makes MPS fail, and say what to do; changes nothing.

    Works with the daemon and without it, as root and as a user. With COMMAND it
    looks at the environment that COMMAND would have here, and does not run it.

    \b
    Exit status, as monitoring has it:
      0 all is well; 1 a warning; 2 a problem; 3 it could not be found out

    \b
    Examples:
      yunion-mps doctor
      yunion-mps doctor --pid 4260
      yunion-mps doctor -- python3 train.py
      yunion-mps doctor --selftest
      yunion-mps doctor --output json
    """
    from yunion_mps.doctor.checks import checks
    from yunion_mps.doctor.host import Host
    from yunion_mps.doctor.running import run

    host = Host(Paths.from_environment(), timeout)
    report = run(checks(dict(os.environ), pid, command, selftest=selftest), host)
    rows = [(line.finding.level, line.check, line.finding.what, line.finding.remedy) for line in report.lines]
    show(report.as_json(), output, _HEADER, rows, lambda: _text(report))
    sys.stdout.flush()
    # At once: a driver that hangs would also keep a tidy end waiting.
    os._exit(report.exit_code)


def _text(report: Report) -> str:
    """The state first, in one line, for that is what monitoring shows; then a line for each finding."""
    counts = [f"{count} {level}{_plural(level, count)}" for level, count in report.counts.items() if count]
    text = f"{report.state}: {', '.join(counts)}\n"
    # Where many checks were skipped for one reason, that is told once.
    checks: dict[Finding, list[str]] = {}
    for line in report.lines:
        checks.setdefault(line.finding, []).append(line.check)
    for (level, what, remedy), names in checks.items():
        text += _wrapped(f"{level:<8} {', '.join(names)}: {what}")
        text += _wrapped(f"{'':<8} -> {remedy}") if remedy else ""
    return text


def _plural(level: str, count: int) -> str:
    return "s" if count > 1 and level in ("problem", "warning") else ""


def _wrapped(line: str) -> str:
    width = terminal_width()
    text = cell(line)
    if not width or len(text) <= width:
        return f"{text}\n"
    indent = " " * 12
    lines = textwrap.wrap(
        text, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"
