"""`yunion-mps env`: the environment of a device, in the form that whoever takes it wants."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from yunion_mps.cli.ask import ask
from yunion_mps.cli.lease_request import warn_of_limits
from yunion_mps.cli.show import complete_device, one_device
from yunion_mps.errors import HostError, YunionError
from yunion_mps.escaping import printable

F = TypeVar("F", bound=Callable[..., Any])

STYLES = ("shell", "dotenv", "json", "docker", "systemd")


def style_option(function: F) -> F:
    """Give a command the option `--output` for environments."""
    option = click.option(
        "-o", "--output", type=click.Choice(STYLES), default="shell", show_default=True,
        help="How to print an environment.",
    )  # fmt: skip
    return option(function)


@click.command("env", short_help="Print the environment of a device.")
@click.argument("device", envvar="YUNION_MPS_DEVICE", shell_complete=complete_device)
@style_option
def command(device: str, output: str) -> None:
    """Print the environment of a process that uses DEVICE.

    It takes no lease, so others may be given the same device: to have it for
    yourself, use yunion-mps run. Where it cannot be used now, eval and docker
    fail as well.

    \b
    Examples:
      yunion-mps env 00:06.0-1 --output dotenv > job.env
      eval "$(yunion-mps env 00:06.0-1)" && python train.py
      docker run --env-file <(yunion-mps env 00:06.0-1 -o docker) IMAGE
    """
    with failing_with_us(output):
        answer = ask(one_device(device))
        if answer["reason"]:
            raise HostError(
                f"device {answer['addr']} cannot be used now: {answer['reason']}",
                "see: yunion-mps status",
            )
        show_environment(answer["client_environment"], output)
    warn_of_limits([] if answer["budget_enforced"] else [answer["addr"].rpartition("-")[0]])


@contextlib.contextmanager
def failing_with_us(style: str) -> Iterator[None]:
    """Where there is no environment, have what reads it fail as well, and not run a job without limits.

    To `eval "$(...)" && COMMAND` no text at all is a success, and so it is to `--env-file <(...)`.
    """
    try:
        yield
    except (YunionError, click.UsageError):
        if style in _REFUSED and not sys.stdout.isatty():
            click.echo(_REFUSED[style])
        raise


def show_environment(environment: Mapping[str, str], style: str) -> None:
    """Print the variables in one of `STYLES`; raises HostError where it cannot hold one of them."""
    if style == "json":
        import json

        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        if not value.isprintable() or _EXPANDED[style].intersection(value):
            what = f"{name}: the format {style} cannot represent {printable(value)}"
            raise HostError(what, "use --output json, or name another directory in host.conf")
    for name, value in environment.items():
        click.echo(_LINES[style](name, value))


def _shell(name: str, value: str) -> str:
    import shlex

    return f"export {name}={shlex.quote(value)}"


def _in_quotes(value: str) -> str:
    """The value in double quotes, as dotenv files and systemd.syntax(7) read it."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


#: What makes whoever reads it fail: a shell's false, and a line that docker and podman call no variable.
_REFUSED = {"shell": "false", "docker": "=there is none"}

#: Characters that readers of a format expand, some of them even after a backslash.
_EXPANDED = {style: frozenset("$`" if style == "dotenv" else "") for style in STYLES}

_LINES: dict[str, Callable[[str, str], str]] = {
    "shell": _shell,
    "dotenv": lambda name, value: f"{name}={_in_quotes(value)}",
    "docker": lambda name, value: f"{name}={value}",  # taken literally: --env-file knows no quotes
    "systemd": lambda name, value: f"Environment={_in_quotes(f'{name}={value}'.replace('%', '%%'))}",
}
