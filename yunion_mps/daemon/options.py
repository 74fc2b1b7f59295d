"""The daemon's few options. argparse is imported only if one is given, because that costs 7 ms."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from argparse import ArgumentParser

_LEVEL_VARIABLE = "YUNION_MPS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
_EPILOG = """\
The daemon runs in the foreground; systemd starts it: systemctl enable --now yunion-mps-daemon.
It reads /etc/yunion/host.conf and the device file named there (see: yunion-mps config show), and stops
on SIGTERM or SIGINT, waiting a while for running jobs and restoring the GPUs' compute modes.

exit status: 0 after a clean stop; 1 something failed, and the last lines say what; 2 wrong usage;
  6 bad configuration
"""


class Options(NamedTuple):
    """What the daemon was started with; the names are those of the options."""

    check: bool = False
    restore: bool = False
    adopt: int | None = None
    log_level: str = "info"


def parse(arguments: Sequence[str]) -> Options:
    """The options; exits by itself for --help, --version and wrong usage (status 2)."""
    level = os.environ.get(_LEVEL_VARIABLE) or "info"
    found = Options(log_level=level)
    if arguments:
        found = Options(**vars(parser(level).parse_args(arguments)))
    if found.log_level not in LEVELS:
        choices = ", ".join(LEVELS)
        with contextlib.suppress(OSError):  # the exit status says it even if nothing can be written
            sys.stderr.write(f"yunion-mps-daemon: {_LEVEL_VARIABLE} is {level!r}: write one of {choices}\n")
        sys.exit(2)
    return found


def parser(level: str = Options().log_level) -> ArgumentParser:
    """All options with their help; `level` is the log level if none is given."""
    import argparse

    from yunion_mps import version_line

    made = argparse.ArgumentParser(
        prog="yunion-mps-daemon",
        description="Runs NVIDIA MPS as a service: GPUs divided into devices with budgets that are kept.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--check", action="store_true", help="check the configuration against the GPUs, and exit"
    )
    made.add_argument(
        "--restore", action="store_true", help="undo what a daemon that was killed has left, and exit"
    )
    made.add_argument(
        "--adopt",
        type=int,
        metavar="PID",
        help="adopt a control daemon that was not started by us, with its jobs, and exit",
    )
    made.add_argument(
        "--log-level", choices=LEVELS, default=level, help="what is logged (default: %(default)s)"
    )
    made.add_argument("--version", action="version", version=version_line("yunion-mps-daemon"))
    return made
