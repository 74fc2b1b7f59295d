"""`yunion-mps run`: a command with a device of its own, for as long as it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from yunion_mps.cli.environment import show_environment, style_option
from yunion_mps.cli.patience import say
from yunion_mps.cli.wish import WishCommand, parameters, seconds, take, wish_options, would_take
from yunion_mps.client.taking import refuse_unreachable
from yunion_mps.errors import YunionError

#: The exit statuses of env(1) and shells for a command that cannot be started.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What the shell itself offers: names of files."""
    return [CompletionItem(incomplete, type="file")]


@click.command(
    "run",
    cls=WishCommand,
    short_help="Run a command with a device of its own.",
    context_settings={"allow_interspersed_args": False},
)
@wish_options
@click.option("--allow-unlimited", is_flag=True, help="Run it without limits where it can get no device.")
@click.option("--dry-run", is_flag=True, help="Only say which device it would get.")
@click.option("--print-env", is_flag=True, help="Only print the environment that it would get.")
@style_option
@click.argument("argv", metavar="COMMAND [ARG]...", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
def command(
    device: str | None, gpu: str | None, count: int, across: bool, spread: bool,
    gpu_mem: str | None, gpu_mem_units: int | None, wait: str | None,
    allow_unlimited: bool, dry_run: bool, print_env: bool, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Take a device and become COMMAND; it is given back when COMMAND ends.

    COMMAND is started with the budget of the device in its environment, or not at all: where no device is
    free, its control daemon does not serve, or it could not keep to the budget, this fails instead. Signals,
    exit status, terminal and process group are COMMAND's own.

    In COMMAND's environment, YUNION_MPS_DEVICE and YUNION_MPS_LEASE name what it got.

    Exits with 5 where nothing is free; --wait waits for it, first come, first served.

    \b
    Examples:
      yunion-mps run python train.py
      yunion-mps run --wait=600 --gpu 00:06.0 -- ./simulate --steps 100
      yunion-mps run --count 2 --across torchrun --nproc-per-node 2 train.py
      eval "$(yunion-mps run --print-env)"
    """
    wait_s = seconds(wait)
    wanted = parameters(device, gpu, count, across, spread, gpu_mem, gpu_mem_units)
    if dry_run or print_env:
        lease = would_take(wanted)
        if print_env:
            show_environment(lease["environment"], output)
        else:
            click.echo(f"it would get {', '.join(lease['devices'])}: {_budget(lease)}")
        return
    if not argv:
        raise click.UsageError("COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]...")
    try:
        environment = take(wanted, wait_s)["environment"]
        refuse_unreachable(environment)
    except YunionError as error:
        if not allow_unlimited:
            raise
        say(f"{argv[0]} runs without limits: {error.message}")
        environment = {}
    _become(argv, {**os.environ, **environment})


def _budget(lease: Mapping[str, Any]) -> str:
    environment = lease["environment"]
    threads = environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    return f"{environment['CUDA_MPS_PINNED_DEVICE_MEM_LIMIT']} of memory, {threads} % of the threads"


def _become(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        say(f"{argv[0]} cannot be started: {error.strerror}")
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        raise click.exceptions.Exit(status) from None
