"""`yunion-mps run`: runs a command on its own device; with an engine, a container (`cli.engines`)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from yunion_mps.cli.calls import add_option_hints, call_daemon, obtain_lease, obtain_preview, print_warnings
from yunion_mps.cli.options import (
    Duration,
    DurationOption,
    RequestCommand,
    complete_file,
    request_options,
    style_option,
)
from yunion_mps.cli.output import cell, print_notice, refuse_closed_output
from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import CONTROL_DAEMON_SILENT, DAEMON_UNREACHABLE, DISABLED
from yunion_mps.core.text import command_line
from yunion_mps.core.units import total_mib
from yunion_mps.http.operations import COMMAND_LENGTH, END_LEASE, MAX_WAIT_S
from yunion_mps.http.transport import RequestMembers, refuse_unreachable, with_devices, without_devices

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson

#: The default of `--safe-stop`, shorter than the grace periods of systemd, Kubernetes and Slurm.
_GRACE_S = 10

#: Exit statuses of env(1) and shells for commands that cannot be started.
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126

#: Reasons for which `--allow-unlimited` starts a command without a device: MPS does not work on this host.
#: Leased devices or an invalid request are no such reasons: the command would take others' memory.
_NOT_SERVED = (DAEMON_UNREACHABLE, DISABLED, CONTROL_DAEMON_SILENT)


class EngineCommand(RequestCommand):
    """A command that explains where to write the engine's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; raises UsageError."""
        words = list(args)  # click removes what it has parsed
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for engine in ("docker", "podman"):
                if f"--{engine}" in words:
                    name = error.option_name
                    example = f"yunion-mps run --{engine} -- {name} … IMAGE"
                    message = f"run has no option {name}; write {engine}'s options after --: {example}"
                    raise click.UsageError(message, ctx) from None
            raise


@click.command(
    "run",
    cls=EngineCommand,
    short_help="Run a command on a device of its own.",
    context_settings={"allow_interspersed_args": False},
)
@request_options
@click.option("--podman", is_flag=True, help='Run a container: COMMAND is what follows "podman run".')
@click.option("--docker", is_flag=True, help='Run a container: COMMAND is what follows "docker run".')
@click.option(
    "--safe-stop", "grace_s", cls=DurationOption, bare_s=_GRACE_S, type=Duration(0, MAX_WAIT_S),
    metavar="[=DURATION]",
    help="After SIGTERM, give COMMAND DURATION (10s by default) to exit; then disconnect it from MPS and "
    "kill it.",
)  # fmt: skip
@click.option(
    "--inherit", is_flag=True,
    help="Use the device that the environment names, as in a Slurm job, without taking a lease.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only print which device COMMAND would get.")
@click.option(
    "--print-env", is_flag=True,
    help="Only print the environment that COMMAND would get; takes no lease.",
)  # fmt: skip
@style_option
@click.pass_context
@click.argument(
    "argv", metavar="COMMAND [ARG]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_file
)
def run_job(
    ctx: click.Context, request: RequestMembers, wait_s: int, podman: bool, docker: bool,
    grace_s: int | None, inherit: bool, dry_run: bool, print_env: bool, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND on a device of its own. The device is leased until COMMAND ends.

    COMMAND runs within the device's budget or not at all: it is not started if no device is free, if the
    device's control daemon is not ready, or if budgets are not enforced, as on a time-sliced GPU or one older
    than Volta. Such a GPU is used only with --allow-unlimited, which also starts COMMAND without a device if
    MPS is disabled or cannot be reached.

    COMMAND replaces the calling process, so signals, exit status, terminal and process group are its own.
    YUNION_MPS_DEVICE and YUNION_MPS_LEASE are set in its environment.

    With --safe-stop, run remains as the parent: it passes signals on and exits with COMMAND's status, or with
    128+N if signal N killed it. After SIGTERM, COMMAND and the processes that it has started have DURATION to
    exit. Then the daemon disconnects those that use the GPU from their MPS server, so that killing them harms
    no other job, and run kills them. If run itself is killed, COMMAND continues and keeps its device.

    With --podman or --docker, COMMAND is what follows "podman run" or "docker run": options, image and
    command. The device is leased until the container ends, even with -d.

    If no device is free, run exits with 5; with --wait, it waits in a queue, first come, first served. If the
    request could not be satisfied even on an idle host, it exits with 1. If COMMAND does not exist, run exits
    with 127; if it cannot be executed, with 126.

    \b
    Examples:
      yunion-mps run python train.py
      yunion-mps run --wait=10m --gpu 00:06.0 -- ./simulate --steps 100
      yunion-mps run --count 2 --across torchrun --nproc-per-node 2 train.py
      yunion-mps run --podman -- --rm IMAGE python train.py
      yunion-mps run --safe-stop=2m python train.py
    """
    engine = _engine(ctx, podman=podman, docker=docker, inherit=inherit, print_env=print_env)
    if dry_run or print_env:
        _show(request, output if print_env else "")
        return
    if not argv or not argv[0]:
        raise click.UsageError("COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]...")
    command = command_line([engine, "run", *argv] if engine else argv)
    request["holder"] = {"command": command[:COMMAND_LENGTH]}
    inherited: Mapping[str, str] = {}
    if inherit:
        from yunion_mps.cli.inherit import inherited_devices  # with what only --inherit needs

        inherited = inherited_devices()
    report_lease: Callable[[str], None] = _ignore_lease
    if grace_s is not None:
        from yunion_mps.cli.safe_stop import remain_as_parent  # imports what only a parent needs

        report_lease = remain_as_parent(grace_s, engine)
    if inherit:
        _become(argv, with_devices(_inherit_environment(), inherited))
    if engine:
        from yunion_mps.cli.engines import run_container  # with what only containers need

        run_container(
            engine,
            request,
            wait_s=wait_s,
            argv=argv,
            environment=_inherit_environment(),
            report_lease=report_lease,
        )
    _become(argv, with_devices(_inherit_environment(), _environment_of_command(argv, request, wait_s)))


def _engine(ctx: click.Context, *, podman: bool, docker: bool, inherit: bool, print_env: bool) -> str:
    """Return the container engine, if any; raises UsageError for options that exclude each other."""
    if podman and docker:
        raise click.UsageError("--podman and --docker are mutually exclusive: use one of them.")
    if ctx.get_parameter_source("output") is ParameterSource.COMMANDLINE and not print_env:
        raise click.UsageError("--output requires --print-env.")
    if inherit:
        _refuse_with_inherit(ctx)
    if podman:
        return "podman"
    return "docker" if docker else ""


def _refuse_with_inherit(ctx: click.Context) -> None:
    """Raise UsageError for options that make no sense with `--inherit`."""
    for option in ctx.command.params:
        if not isinstance(option, click.Option) or option.name in (None, "inherit", "grace_s"):
            continue
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            message = f"--inherit uses a device that has been leased already: omit {option.opts[0]}."
            raise click.UsageError(message)


def _environment_of_command(argv: Sequence[str], request: RequestMembers, wait_s: int) -> Mapping[str, str]:
    """Return the environment of a new lease; empty if COMMAND has to run without a device, and may."""
    try:
        return _environment_of_lease(request, wait_s)
    except YunionError as error:
        if not request["allow_unlimited"] or error.code not in _NOT_SERVED:
            raise
        print_notice(f"warning: {cell(argv[0])} runs without limits: {error.message}")
        if error.hint:
            print_notice(error.hint)
    return {}


def _environment_of_lease(request: RequestMembers, wait_s: int) -> Mapping[str, str]:
    """Take a lease and return its environment; if this user cannot reach its devices, end it and raise."""
    lease = obtain_lease(request, wait_s)
    try:
        refuse_unreachable(lease["environment"])
    except YunionError:
        with contextlib.suppress(YunionError):  # the lease also ends with this process
            call_daemon(END_LEASE, lease=lease["id"])
        raise
    print_warnings(lease)
    return lease["environment"]


def _show(request: RequestMembers, output: str) -> None:
    """Print the environment of COMMAND in the format `output`, or a summary if that is empty."""
    from yunion_mps.cli.environment import failing_reader, show_environment  # not needed to run a command

    refuse_closed_output()
    with failing_reader(output), add_option_hints(request):
        lease = obtain_preview(request)
        if output:
            show_environment(lease["environment"], output)
    if not output:
        click.echo(cell(f"would use {', '.join(lease['devices'])}: {_budget(lease)}"))
    print_warnings(lease)


def _ignore_lease(lease_id: str) -> None:
    """Do nothing: this process becomes COMMAND."""


def _inherit_environment() -> dict[str, str]:
    """Return our environment without the locale set by Python, and without a device's variables."""
    inherited = without_devices(os.environ)
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        if not any(entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0")):
            inherited.pop("LC_CTYPE", None)
    return inherited


def _budget(lease: LeaseRecordJson) -> str:
    """Format `5760 MiB of memory, 25 % of the SM threads`; the memory of each GPU if there are several."""
    amounts: list[str] = []
    for gpu in lease["gpus"]:
        memory_mib = total_mib(budget["memory_mib"] for budget in lease["budgets"] if budget["gpu"] == gpu)
        amount = "an unknown amount" if memory_mib is None else f"{memory_mib} MiB"
        of_what = gpu if len(lease["gpus"]) > 1 else "memory"
        amounts.append(f"{amount} of {of_what}")
    memory = " and ".join(amounts)
    percentage = lease["environment"].get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if percentage:
        return f"{memory}, {percentage} % of the SM threads"
    if lease["sharing"] == NOT_SHARED:
        return f"{memory}, a whole MIG instance"
    return f"{memory}, {lease['sharing']}"


def _become(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    name = cell(argv[0])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and COMMAND would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell is the point
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        print_notice(f"{name} cannot be started: {cause}")
        if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
            print_notice("begin the script with #!/bin/sh, or run it with its interpreter: sh SCRIPT")
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        raise click.exceptions.Exit(status) from None
