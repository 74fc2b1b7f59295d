"""The edge: errors become one line of what is wrong and one of what to do, never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys

import click

from yunion_mps.cli.output import cell, refuse_closed_output, unwritable
from yunion_mps.cli.root import cli
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable

_PROGRAM = "yunion-mps"


def run() -> int:
    """Run the command that the arguments name; returns its exit status."""
    try:
        status = _main()
    except YunionError as error:
        return _fail(error)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _fail(_wrong_usage(error))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        _forget_output()
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the same, where click saw it first
            return 0
        raise
    except OSError as error:
        _forget_output()
        return _fail(unwritable(error.strerror))
    return status if isinstance(status, int) else 0  # click hands on what an Exit asked for


def _main() -> object:
    if sys.argv[1:2] != ["run"]:  # what it runs may well have no output, as under exec(1)
        refuse_closed_output()
    status: object = cli.main(prog_name=_PROGRAM, standalone_mode=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _wrong_usage(error: click.ClickException) -> YunionError:
    """Click's words for it, in one line, and the help of the command that it met."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else _PROGRAM
    found = YunionError(cell(" ".join(error.format_message().split())), f"see: {path} --help")
    found.exit_code = error.exit_code
    return found


def _forget_output() -> None:
    """Python would try once more to write what is left, at its end, and complain."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: YunionError) -> int:
    reason_code = f" [{error.code}]" if error.code else ""
    texts = (f"{error.message}{reason_code}", error.hint)
    lines = [printable(line) for text in texts if text for line in text.split("\n")]
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the exit status says it even where nothing can be written
            print("\n".join(f"{_PROGRAM}: {line}" for line in lines), file=sys.stderr)
    return error.exit_code
