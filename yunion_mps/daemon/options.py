"""The daemon's few options. click is imported only if one is given, because that costs 20 ms."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.errors import YunionError

if TYPE_CHECKING:
    import click

PROGRAM = "yunion-mps-daemon"
_LEVEL_VARIABLE = "YUNION_MPS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
_HELP = """\
Run NVIDIA MPS as a service: divide GPUs into devices, and enforce their budgets.

The daemon runs in the foreground, and is normally started by systemd:
systemctl enable --now yunion-mps-daemon

It reads /etc/yunion/host.conf, host_local.conf, whose values replace those of host.conf, and the device
file; yunion-mps config show prints them. On SIGTERM or SIGINT, it gives running jobs time to end, stops, and
restores the GPUs' compute modes.
"""
_STATUSES = """\b
Exit status:
  0 stopped cleanly, or --check: a start succeeds, even if it waits for the driver;
  1 failure, or --require-driver: the driver does not work now; 2 wrong usage;
  4 permission denied; 6 invalid configuration
"""
_WITH_CHECK = "--require-driver requires --check."
_ONE_OF = "--check, --restore and --adopt are mutually exclusive: use one of them."


class Options(NamedTuple):
    """What the daemon was started for; without `check`, `restore` and `adopt`, it serves."""

    check: bool = False
    #: With `check`: whether it fails if the driver does not work now.
    require_driver: bool = False
    restore: bool = False
    #: The PID of a control daemon to adopt.
    adopt: int | None = None
    log_level: str = ""

    @property
    def is_offline(self) -> bool:
        """Whether something is to be done while no daemon runs, instead of running it."""
        return self.check or self.restore or self.adopt is not None


def parse_options(arguments: Sequence[str]) -> Options:
    """Return the options; exit for --help, --version and wrong usage (status 2)."""
    if not arguments and _default_level() in LEVELS:
        return Options(log_level=_default_level())
    from yunion_mps.core.program import print_error, run_command

    try:
        options = run_command(daemon_command(), PROGRAM, arguments)
    except YunionError as error:
        sys.exit(print_error(PROGRAM, error))
    return options if isinstance(options, Options) else sys.exit(0)  # --help or --version


def _default_level() -> str:
    return os.environ.get(_LEVEL_VARIABLE) or "info"


def daemon_command() -> click.Command:
    """Return all options with their help, as a command that returns what was given."""
    import click

    from yunion_mps.core.program import program_command
    from yunion_mps.http.operations import MAX_PID

    def pid(text: str) -> int:
        if not re.fullmatch("[1-9][0-9]{0,6}", text) or int(text) > MAX_PID:
            raise click.BadParameter(f"{text} is not a PID.")
        return int(text)

    def check_options(
        *, check: bool, require_driver: bool, restore: bool, adopt: int | None, log_level: str | None
    ) -> Options:
        if check + restore + (adopt is not None) > 1:
            raise click.UsageError(_ONE_OF)
        if require_driver and not check:
            raise click.UsageError(_WITH_CHECK)
        level = log_level or _default_level()
        if level not in LEVELS:
            raise click.UsageError(f"{_LEVEL_VARIABLE} is {level!r}: use one of {', '.join(LEVELS)}.")
        return Options(
            check=check, require_driver=require_driver, restore=restore, adopt=adopt, log_level=level
        )

    options = (
        click.option("--check", is_flag=True, help="Check the configuration against the GPUs, and exit."),
        click.option(
            "--require-driver", is_flag=True,
            help="With --check: fail if the NVIDIA driver does not work now.",
        ),
        click.option(
            "--restore", is_flag=True,
            help="Clean up after a daemon that was killed: end its control daemons, restore the GPUs' "
            "compute modes, and exit.",
        ),
        click.option(
            "--adopt", type=pid, metavar="PID",
            help="Adopt a control daemon started by another program, together with its jobs, and exit.",
        ),
        click.option(
            "--log-level", type=click.Choice(LEVELS), metavar="LEVEL",
            help=f"Log messages of this level and above: {', '.join(LEVELS)}. Default: info.",
        ),
    )  # fmt: skip
    return program_command(PROGRAM, check_options, _HELP, _STATUSES, options)
