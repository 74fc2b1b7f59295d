"""`yunion-mps run`: a command with a device of its own, for as long as it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from yunion_mps.cli.ask import remove
from yunion_mps.cli.engine import EngineCommand, engine_options, run_container, the_engine
from yunion_mps.cli.environment import failing_with_us, show_environment, style_option
from yunion_mps.cli.lease_request import (
    parameters,
    request_options,
    take,
    warn_of_limits,
    would_take,
)
from yunion_mps.cli.output import cell, refuse_closed_output
from yunion_mps.cli.patience import say
from yunion_mps.client.taking import refuse_unreachable
from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.leases.bounds import COMMAND_LENGTH

#: The exit statuses of env(1) and shells for a command that cannot be started.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
#: What a device says of a process; what another device said of ours is not COMMAND's.
VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "YUNION_MPS_DEVICE",
    "YUNION_MPS_LEASE",
)


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What the shell itself offers: names of files."""
    return [CompletionItem(incomplete, type="file")]


@click.command(
    "run",
    cls=EngineCommand,
    short_help="Run a command with a device of its own.",
    context_settings={"allow_interspersed_args": False},
)
@request_options
@engine_options
@click.option("--allow-unlimited", is_flag=True, help="Run it also where nothing limits it.")
@click.option("--dry-run", is_flag=True, help="Only say which device it would get.")
@click.option("--print-env", is_flag=True, help="Only print the environment that it would get.")
@style_option
@click.pass_context
@click.argument("argv", metavar="COMMAND [ARG]...", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
def command(
    ctx: click.Context, device: str | None, gpu: str | None, count: int, across: bool, spread: bool,
    gpu_mem: str | None, gpu_mem_units: int | None, wait_s: int, podman: bool, docker: bool,
    allow_unlimited: bool, dry_run: bool, print_env: bool, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Take a device and become COMMAND; it is given back when COMMAND ends.

    COMMAND is started with the budget of the device in its environment, or not at all: where no device is
    free, its control daemon does not serve, or nothing would hold COMMAND to the budget, as on a GPU older
    than Volta, this fails instead. With --allow-unlimited it says so, and starts COMMAND with such a device,
    or with none. Signals, exit status, terminal and process group are COMMAND's own.

    With --podman or --docker, COMMAND is what follows podman run: its options, an image, and what runs in
    it. The device is the container's then, until that ends, also with -d.

    In COMMAND's environment, YUNION_MPS_DEVICE and YUNION_MPS_LEASE name what it got.

    Exits with 5 where nothing is free now; --wait waits for it, first come, first served. Exits with 1 if
    the request could not be met even if everything were free.

    \b
    Examples:
      yunion-mps run python train.py
      yunion-mps run --wait=10m --gpu 00:06.0 -- ./simulate --steps 100
      yunion-mps run --count 2 --across torchrun --nproc-per-node 2 train.py
      yunion-mps run --podman -- --rm IMAGE python train.py
      eval "$(yunion-mps run --print-env)" && python train.py
    """
    engine = the_engine(podman=podman, docker=docker)
    wanted = parameters(device, gpu, count, across, spread, gpu_mem, gpu_mem_units)
    wanted["enforced"] = None if allow_unlimited else "true"
    if ctx.get_parameter_source("output") is ParameterSource.COMMANDLINE and not print_env:
        raise click.UsageError("--output goes with --print-env.")
    if dry_run or print_env:
        _show(wanted, output if print_env else "")
        return
    if not argv or not argv[0]:
        raise click.UsageError("COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]...")
    becomes = " ".join([engine, "run", *argv] if engine else argv)
    wanted["command"] = cell(becomes)[:COMMAND_LENGTH]
    if engine:
        run_container(engine, wanted, wait_s, argv, _inherited())
    given: Mapping[str, Any] | None = None
    try:
        given = take(wanted, wait_s)
        refuse_unreachable(given["environment"])
    except YunionError as error:
        if not allow_unlimited or isinstance(error, NotFoundError):  # a mistyped name does not ask for none
            raise
        say(f"{cell(argv[0])} runs without limits: {error.message}")
        if error.hint:
            say(error.hint)
        _give_back(given)
        given = None
    if given:
        warn_of_limits(given["unenforced_gpus"])
    _become(argv, {**_inherited(), **(given["environment"] if given else {})})


def _show(wanted: Mapping[str, Any], output: str) -> None:
    """Print the environment that COMMAND would have in this format, or a summary if it is empty."""
    refuse_closed_output()
    with failing_with_us(output):
        lease = would_take(wanted)
        if output:
            show_environment(lease["environment"], output)
    if not output:
        click.echo(cell(f"it would get {', '.join(lease['devices'])}: {_budget(lease)}"))
    warn_of_limits(lease["unenforced_gpus"])


def _give_back(lease: Mapping[str, Any] | None) -> None:
    """What runs without limits has no device; that it cannot be given back is no reason not to run."""
    if lease:
        with contextlib.suppress(YunionError):
            remove(f"/v1/leases/{lease['id']}")


def _inherited() -> dict[str, str]:
    """Our environment without what only a device may say, and without the locale that Python has put in."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        if not any(entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0")):
            inherited.pop("LC_CTYPE", None)
    return inherited


def _budget(lease: Mapping[str, Any]) -> str:
    """`5760 MiB of memory, 25 % of the threads`; the memory of each GPU where there are several."""
    from yunion_mps.overview.uses import gpu_of  # which a command that is run need not wait for

    by_gpu = dict.fromkeys(lease["gpus"], 0)
    for device, memory_mib in zip(lease["devices"], lease["memory"]):
        by_gpu[gpu_of(device)] += memory_mib
    of_each = [f"{memory_mib} MiB of {gpu}" for gpu, memory_mib in by_gpu.items()]
    memory = " and ".join(of_each) if len(of_each) > 1 else f"{sum(lease['memory'])} MiB of memory"
    return f"{memory}, {lease['environment']['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE']} % of the threads"


def _become(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    name = cell(argv[0])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and so would COMMAND
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell is the point
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        say(f"{name} cannot be started: {why}")
        if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
            say("a script begins with #! and its program, as #!/bin/sh; or start that: sh SCRIPT")
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        raise click.exceptions.Exit(status) from None
