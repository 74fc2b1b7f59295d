"""What our programs' command lines have in common: --help, --version, wrong usage and printed errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, Union

import click

from yunion_mps import version_line
from yunion_mps.core.errors import WrongUsageError, YunionError
from yunion_mps.core.text import printable

F = TypeVar("F", bound=Union[Callable[..., Any], click.Command])

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
#: The similarity from which a word is suggested for another: `clients` is not close to `events`.
_CLOSE = 0.7


def version_option(program: str) -> Callable[[F], F]:
    """Return the decorator that adds `--version` to a command."""

    def show_version(context: click.Context, _: click.Parameter, value: object) -> None:
        if value and not context.resilient_parsing:
            click.echo(version_line(program))
            context.exit()

    return click.option(
        "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version,
        help="Show the version and revision, and exit.",
    )  # fmt: skip


def program_command(
    name: str,
    callback: Callable[..., Any],
    about: str,
    statuses: str,
    options: Iterable[Callable[[click.Command], click.Command]],
) -> click.Command:
    """Return the command of a program without subcommands, with these options and `--version`.

    about: what `--help` says of the program.
    statuses: what `--help` says of its exit statuses.
    """
    command = click.Command(
        name, callback=callback, help=about, epilog=statuses, context_settings=CONTEXT_SETTINGS
    )
    for option in options:
        option(command)
    return version_option(name)(command)


def run_command(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> object:
    """Return the result of the callback, or 0 after `--help` and `--version`.

    arguments: by default those of the process.
    Raises YunionError, also for wrong usage.
    """
    try:
        result: object = command.main(arguments, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        raise wrong_usage(error, program) from None
    return result


def wrong_usage(error: click.ClickException, program: str) -> YunionError:
    """Return click's message on one line (`no such option: --foo`), with a hint at the command's help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else program
    if isinstance(error, click.NoSuchOption):
        message = error.message + suggestion(error.option_name, error.possibilities or ())
    else:
        message = error.format_message()
    words = printable(" ".join(message.split()))
    if not words.endswith("..."):
        words = words.removesuffix(".")
    if not words[:2].isupper():  # unlike DEVICE
        words = words[:1].lower() + words[1:]
    return WrongUsageError(words, f"see: {path} --help", error.exit_code)


def suggestion(word: str, words: Sequence[str]) -> str:
    """Return ` (did you mean WORD?)` with the nearest of the words; "" if none is close."""
    from difflib import get_close_matches  # needed for errors only

    near = get_close_matches(word, words, n=1, cutoff=_CLOSE)
    return f" (did you mean {near[0]}?)" if near else ""


def print_error(program: str, error: YunionError) -> int:
    """Print the error and its hint; return its exit status."""
    write_error("".join(f"{program}: {printable(line)}\n" for line in error.lines))
    return error.exit_code


def write_error(text: str) -> None:
    """Write to standard error; if nothing can be written, the program's exit status still tells."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
