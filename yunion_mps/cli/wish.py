"""Options that say which devices are wanted, and the question for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.core import augment_usage_errors

from yunion_mps.cli.ask import daemon
from yunion_mps.cli.patience import say
from yunion_mps.cli.show import complete_device
from yunion_mps.client import LeaseRecord, taking
from yunion_mps.leases.bounds import LONGEST_WAIT_S, MOST_DEVICES, MOST_MIB

F = TypeVar("F", bound=Callable[..., Any])
Json = dict[str, Any]


def wish_options(function: F) -> F:
    """Give a command the options that say which devices are wanted."""
    options = (
        click.option(
            "--device", metavar="DEVICE", shell_complete=complete_device,
            help="Just this one, by id or address.",
        ),
        click.option("--gpu", metavar="GPU", help="Of this GPU, by UUID or address."),
        click.option(
            "--count", type=click.IntRange(1, MOST_DEVICES), default=1, metavar="N",
            help="So many, as one budget.",
        ),
        click.option(
            "--gpu-mem", metavar="SIZE", help="So much of a GPU's memory, as in 2GiB, where that is open."
        ),
        click.option(
            "--gpu-mem-units", type=click.IntRange(1, MOST_MIB), metavar="N",
            help="The same, in units of gpu_memory_unit.",
        ),
        click.option("--across", is_flag=True, help="With --count: each on another GPU."),
        click.option("--spread", is_flag=True, help="Of the GPU with the most free, not the fewest."),
        click.option(
            "--wait", is_flag=False, flag_value="forever", metavar="[SECONDS]",
            help="Wait until it can be had, or so long.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


class WishCommand(click.Command):
    """A command for which `--wait` takes a value after `=` only, for COMMAND may follow it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare `--wait` the value that it means."""
        valued = {name for option in self.params if _takes_value(option) for name in option.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            if args[place] == "--wait":
                args[place] = "--wait=forever"
            elif args[place].startswith("--wait="):
                with augment_usage_errors(ctx):  # click takes a value of -1 for another option
                    seconds(args[place].partition("=")[2])
            place += 2 if args[place] in valued else 1
        return super().parse_args(ctx, args)


def _takes_value(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.is_flag and parameter.name != "wait"


def seconds(wait: str | None) -> int:
    """How long to wait, in s; raises UsageError."""
    if wait is None:
        return 0
    if wait == "forever":
        return LONGEST_WAIT_S
    if not (wait.isascii() and wait.isdigit() and 1 <= int(wait) <= LONGEST_WAIT_S):
        raise click.UsageError(f"--wait is {wait!r}: write a whole number of seconds, as in --wait=60.")
    return int(wait)


def parameters(
    device: str | None,
    gpu: str | None,
    count: int,
    across: bool,
    spread: bool,
    gpu_mem: str | None,
    gpu_mem_units: int | None,
) -> Json:
    """What is wanted, as parameters of the question; raises UsageError."""
    if device == "" or gpu == "":
        raise click.UsageError("--device and --gpu want a name: what was given is empty.")
    if sum((bool(device), count > 1, gpu_mem is not None, gpu_mem_units is not None)) > 1:
        raise click.UsageError(
            "--device, --count, --gpu-mem and --gpu-mem-units are different wishes: give one."
        )
    if device and gpu:
        raise click.UsageError("--device names one device: leave out --gpu.")
    if across and count < 2:
        raise click.UsageError("--across goes with --count.")
    if across and gpu:
        raise click.UsageError("--gpu names one GPU, and --across wants several.")
    given: Json = {"device": device, "gpu": gpu, "count": count if count > 1 else None}
    given.update(memory=None if gpu_mem is None else mebibytes(gpu_mem), units=gpu_mem_units)
    return {**given, "across": "true" if across else None, "placement": "spread" if spread else None}


def mebibytes(text: str) -> int:
    """An amount of memory in MiB, as people write it: `2GiB`, `512MiB`; raises UsageError."""
    import re

    found = re.fullmatch(r"([0-9]{1,9})(MiB|GiB|M|G)", text)
    mib = int(found[1]) * (1024 if found[2][0] == "G" else 1) if found else 0
    if not mib:
        raise click.UsageError(f"--gpu-mem is {text!r}: write a whole number of MiB or GiB, as in 2GiB.")
    return mib


def take(wanted: Mapping[str, Any], wait_s: int) -> LeaseRecord:
    """The lease; raises YunionError, NothingFreeError among them, where there is none within `wait_s`."""
    return taking.take(daemon(), wanted, wait_s, say)


def would_take(wanted: Mapping[str, Any]) -> LeaseRecord:
    """The lease that one would get now; raises as `take` does."""
    return taking.would_take(daemon(), wanted)


def warn_of_limits(lease: Mapping[str, Any]) -> None:
    """Say so, beside the output, where nothing holds a process to the lease's budget."""
    if not lease["budget_enforced"]:
        gpus = ", ".join(lease["gpus"])
        say(f"budgets are not enforced on GPU {gpus}, older than Volta: it could use all of its memory")
