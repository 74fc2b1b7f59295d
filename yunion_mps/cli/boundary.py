"""The edge: errors become one line of what is wrong and one of what to do, never a traceback."""

from __future__ import annotations

import os
import sys

import click

from yunion_mps.cli.root import cli
from yunion_mps.errors import YunionError

_PROGRAM = "yunion-mps"


def run() -> int:
    """Run the command that the arguments name; returns its exit status."""
    try:
        cli.main(prog_name=_PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except YunionError as error:
        return _fail(error)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(
            YunionError(f"the output cannot be written: {error.strerror}", "look at where it goes: df")
        )
    return 0


def _fail(error: YunionError) -> int:
    for line in error.message.splitlines():
        print(f"{_PROGRAM}: {line}", file=sys.stderr)
    if error.hint:
        print(f"{_PROGRAM}: {error.hint}", file=sys.stderr)
    return error.exit_code
