"""The program yunion-mps. Each command is one short file: parse, ask, show."""

from __future__ import annotations

import contextlib
import gc
import os
import sys


def main() -> None:
    """Run one command.

    The garbage collector is off until the command is imported (see `root`), and the process ends without
    Python taking down every module first: 9 ms of a command that takes 40.
    """
    gc.disable()
    try:
        status = _run()
    except KeyboardInterrupt:
        status = 130
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or none
            stream.flush()
    os._exit(status)


def _run() -> int:
    """The exit status. What container engines call before each start need not know the other commands."""
    if sys.argv[1:2] == ["cdi-hook"]:
        from yunion_mps.containers.hook import main as hook

        return hook(sys.argv[2:], sys.stdin)
    from yunion_mps.cli.root import run

    return run()
