"""`yunion-mps show`: one device, and the environment that a process needs to use it."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from yunion_mps.cli.ask import ask, quoted
from yunion_mps.cli.output import cell, output_option, pairs, show_pairs
from yunion_mps.cli.table import draw
from yunion_mps.errors import YunionError


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The addresses of the devices; nothing where the daemon does not answer."""
    del ctx, param
    try:
        devices = ask("/v1/devices?limit=0")["isolated_devices"]
    except YunionError:
        return []
    # Without a description: zsh would look for it behind the address' first colon.
    return [CompletionItem(d["addr"]) for d in devices if d["addr"].startswith(incomplete)]


def one_device(device: str) -> str:
    """Where the daemon tells of the device; raises UsageError where none is named, or several, as a job's."""
    if not device:
        raise click.UsageError("DEVICE is empty.")
    if "," in device:
        raise click.UsageError(f"DEVICE is {device}: name one of them.")
    return f"/v1/devices/{quoted(device)}"


@click.command("show", short_help="Show one device, and how to use it.")
@click.argument("device", envvar="YUNION_MPS_DEVICE", shell_complete=complete_device)
@output_option
def command(device: str, output: str) -> None:
    """Show DEVICE: by id, by address, or by a unique beginning of either.

    Within a job it may be left out: YUNION_MPS_DEVICE in the environment names the job's own,
    where it has only one.

    \b
    Examples:
      yunion-mps show 00:06.0-1
      yunion-mps show 00:06.0-1 --output json
    """
    answer: dict[str, Any] = ask(one_device(device))
    show_pairs(answer, output, lambda: _text(answer))


def _text(answer: dict[str, Any]) -> str:
    """A table, and below it the environment in lines that can be copied as they are."""
    about = {name: value for name, value in answer.items() if name != "client_environment"}
    text = draw(("Field", "Value"), pairs(about))
    if answer["client_environment"]:
        text += "Environment of a process that uses it:\n"
    return text + "".join(f"  {name}={cell(value)}\n" for name, value in answer["client_environment"].items())
