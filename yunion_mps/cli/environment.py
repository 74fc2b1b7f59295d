"""`env`: the variables of a device, in the formats of shells, units and containers."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping

import click

from yunion_mps.cli.calls import call_daemon, warn_unenforced
from yunion_mps.cli.devices import describe_state, is_free
from yunion_mps.cli.options import STYLES, device_argument, one_device, style_option
from yunion_mps.cli.output import print_notice
from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import DEVICE_VARIABLES, FREE, JAX_VARIABLE, MEMORY_VARIABLE
from yunion_mps.core.errors import HostError, YunionError
from yunion_mps.core.text import printable
from yunion_mps.http.operations import GET_DEVICE

#: Output that makes its reader fail: a shell's false, and a line that docker and podman reject.
_REFUSED = {"shell": "false", "docker": "=no-device-available"}


@click.command("env", short_help="Print the environment variables of a device.")
@device_argument
@style_option
def print_environment(device: str, output: str) -> None:
    """Print the environment variables that a process needs to use DEVICE.

    This takes no lease, so another job may get the same device; to have a device to yourself, use
    yunion-mps run. If the device is unavailable, env prints a line that makes eval and docker fail as well.

    \b
    Examples:
      yunion-mps env 00:06.0-1 --output dotenv > job.env
      eval "$(yunion-mps env 00:06.0-1)" && python train.py
      docker run --env-file <(yunion-mps env 00:06.0-1 -o docker) IMAGE
    """
    with failing_reader(output):
        answer = call_daemon(GET_DEVICE, id=one_device(device))
        if answer["reason"]:
            text = f"device {answer['addr']} is unavailable: {answer['reason']}"
            raise HostError(text, "see: yunion-mps status", answer["reason_code"])
        show_environment(answer["client_environment"], output)
    if answer["state"] == FREE and not is_free(answer):
        text = f"device {answer['addr']} is {describe_state(answer)}, so your job may wait for others' jobs"
        print_notice(f"{text}; to get it in turn: yunion-mps run --wait --device {answer['addr']} COMMAND")
    warn_unenforced([] if answer["budget_enforced"] else [gpu_of(answer["addr"])], answer["sharing"])


@contextlib.contextmanager
def failing_reader(style: str) -> Iterator[None]:
    """Make the reader of the environment fail if there is none: otherwise a job would run without limits.

    For `eval "$(...)" && COMMAND` and for `--env-file <(...)`, empty output is a success.
    Raises the error of the block.
    """
    try:
        yield
    except (YunionError, click.UsageError):
        if style in _REFUSED and not sys.stdout.isatty():
            click.echo(_REFUSED[style])
        raise


def show_environment(environment: Mapping[str, str], style: str) -> None:
    """Print the variables in one of `STYLES`; raises HostError if the format cannot represent a value."""
    if style == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        if not value.isprintable() or _EXPANDED[style].intersection(value):
            message = f"{name}: the format {style} cannot represent {printable(value)}"
            raise HostError(message, "use --output json, or set another directory in host.conf")
    if style == "shell":
        for line in _unset_others(environment):
            click.echo(line)
    for name, value in environment.items():
        click.echo(_LINES[style](name, value))


def _unset_others(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield commands that unset what another device's environment may have set, but this one does not."""
    if JAX_VARIABLE not in environment:
        yield f'[ -z "${{{MEMORY_VARIABLE}-}}" ] || unset {JAX_VARIABLE}'
    for name in DEVICE_VARIABLES:
        if name not in environment:
            yield f"unset {name}"


def _shell(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


def _in_quotes(value: str) -> str:
    """Quote the value for dotenv files and systemd.syntax(7)."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


#: Characters that readers of a format expand, some even after a backslash.
_EXPANDED = {style: frozenset("$`" if style == "dotenv" else "") for style in STYLES}

_LINES: dict[str, Callable[[str, str], str]] = {
    "shell": _shell,
    "dotenv": lambda name, value: f"{name}={_in_quotes(value)}",
    "docker": lambda name, value: f"{name}={value}",  # taken literally: --env-file supports no quotes
    "systemd": lambda name, value: f"Environment={_in_quotes(f'{name}={value}'.replace('%', '%%'))}",
}
