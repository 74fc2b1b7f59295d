"""`yunion-mps lease`: devices for what is no process of this host: a job of a scheduler, a container."""

from __future__ import annotations

import re
from typing import Any

import click

from yunion_mps.cli.ask import quoted, remove, tell
from yunion_mps.cli.lease_request import RequestCommand, parameters, request_options, take, warn_of_limits
from yunion_mps.cli.output import output_option, pairs, show_pairs
from yunion_mps.cli.suggest import SuggestingGroup
from yunion_mps.cli.table import draw
from yunion_mps.cli.times import Duration
from yunion_mps.leases.bounds import LONGEST_TTL_S, NAME


@click.group("lease", cls=SuggestingGroup, short_help="Take, renew and give back devices by name.")
def command() -> None:
    """Take devices for what is no process of this host, by a name and with a time to live.

    For a command on this host, yunion-mps run is simpler, and gives the device
    back by itself.

    \b
    Examples:
      yunion-mps lease take job-17 --ttl 1h --output json
      yunion-mps lease renew job-17
      yunion-mps lease release job-17
    """


@command.command("take", cls=RequestCommand, short_help="Take devices for a name.")
@click.argument("name")
@request_options
@click.option(
    "--ttl",
    type=Duration(1, LONGEST_TTL_S),
    required=True,
    metavar="DURATION",
    help="Time to live after each renewal: 90, 90s, 10m, 2h, 1d.",
)
@output_option
def take_command(
    name: str, device: str | None, gpu: str | None, count: int, across: bool, spread: bool,
    gpu_mem: str | None, gpu_mem_units: int | None, wait_s: int,
    ttl: int, output: str,
) -> None:  # fmt: skip
    """Take devices for NAME, and print the lease with its id and its environment.

    \b
    Examples:
      yunion-mps lease take job-17 --ttl 1h --count 2
    """
    if not re.fullmatch(NAME.strip("^$"), name):
        raise click.UsageError("NAME has letters, digits and ._:/@-, a letter or digit first, at most 100.")
    wanted = parameters(device, gpu, count, across, spread, gpu_mem, gpu_mem_units)
    lease = take({**wanted, "name": name, "ttl": ttl}, wait_s)
    _show(dict(lease), output)
    warn_of_limits(lease["unenforced_gpus"])


@command.command("renew", short_help="Let a lease live on.")
@click.argument("lease")
@output_option
def renew_command(lease: str, output: str) -> None:
    """Let a lease live for its whole time from now on: by its NAME, its id, or a unique beginning of that.

    NAME finds only your own leases; root renews another owner's lease by its id.

    \b
    Examples:
      yunion-mps lease renew job-17
    """
    _show(tell(f"{_path(lease)}/renew"), output)


@command.command("release", short_help="Give devices back.")
@click.argument("lease")
@output_option
def release_command(lease: str, output: str) -> None:
    """End a lease: by its NAME, its id, or a unique beginning of that.

    Only its owner and root may. NAME finds only your own leases; root ends another owner's lease by its id. A
    process that uses the devices keeps running.

    \b
    Examples:
      yunion-mps lease release job-17
      yunion-mps lease release 7c1f0e7a
    """
    _show(remove(_path(lease)), output)


def _path(lease: str) -> str:
    if not lease:
        raise click.UsageError("LEASE is empty.")
    return f"/v1/leases/{quoted(lease)}"


def _show(lease: dict[str, Any], output: str) -> None:
    show_pairs(lease, output, lambda: draw(("Field", "Value"), pairs(lease)))
