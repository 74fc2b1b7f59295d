"""The options of a lease request, and sending it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from yunion_mps.cli.ask import daemon
from yunion_mps.cli.patience import say
from yunion_mps.cli.show import complete_device
from yunion_mps.cli.times import Duration
from yunion_mps.client import LeaseRecord, taking
from yunion_mps.leases.bounds import LONGEST_WAIT_S, MOST_DEVICES, MOST_MIB

F = TypeVar("F", bound=Callable[..., Any])
Json = dict[str, Any]


#: What is meant as a duration, and is no command's name.
_A_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[0-9]+)?[a-z]?")
_WAIT_NEEDS_EQUALS = "--wait takes a duration only after =: write --wait={0}, or --wait -- {0} to run {0}."


class _WaitOption(click.Option):
    """`--wait[=DURATION]`: no space stands before its value."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Click's record, without the space before the value."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


def request_options(function: F) -> F:
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
            "--wait", "wait_s", cls=_WaitOption, type=Duration(1, LONGEST_WAIT_S), default=0,
            metavar="[=DURATION]", help="Wait for the devices, at most this long: 90, 90s, 10m, 2h, 1d.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


class RequestCommand(click.Command):
    """A command whose `--wait` takes a value after `=` only, because COMMAND may follow it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare `--wait` the value that it means; raises UsageError where a duration follows it."""
        options = [one for one in self.params if isinstance(one, click.Option)]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        place = 0
        while place < len(args) and args[place] != "--":
            word, follower = args[place], args[place + 1 : place + 2]
            if word == "--wait":
                if follower and _A_NUMBER.fullmatch(follower[0]) and not ctx.resilient_parsing:
                    raise click.UsageError(_WAIT_NEEDS_EQUALS.format(follower[0]), ctx)
                args[place] = f"--wait={LONGEST_WAIT_S}"
            elif word in valued:
                place += 1
            elif not word.startswith("-") and not ctx.allow_interspersed_args:
                break
            place += 1
        return super().parse_args(ctx, args)


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
            "--device, --count, --gpu-mem and --gpu-mem-units exclude each other: give one."
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


def warn_of_limits(unenforced_gpus: Sequence[str]) -> None:
    """Say so, beside the output, if some of the GPUs hold no process to its budget."""
    if unenforced_gpus:
        gpus = ", ".join(unenforced_gpus)
        say(f"budgets are not enforced on GPU {gpus}, older than Volta: it could use all of its memory")
