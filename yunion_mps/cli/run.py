"""`yunion-mps run`: runs a command on its own device. `yunion-mps env`: prints a device's environment."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from yunion_mps.cli.common import call, complete_file, daemon, device_argument, one_device
from yunion_mps.cli.output import cell, print_notice, refuse_closed_output
from yunion_mps.cli.request import (
    BUDGET_VARIABLES,
    RequestCommand,
    hints_of_options,
    request_options,
    take,
    warn_of_limits,
)
from yunion_mps.client.retry import RequestMembers, preview, refuse_unreachable
from yunion_mps.client.transport import BlockingTransport, run_blocking
from yunion_mps.errors import HostError, YunionError
from yunion_mps.escaping import command_line, printable
from yunion_mps.http.operations import COMMAND_LENGTH, END_LEASE, GET_DEVICE
from yunion_mps.reasons import CONTROL_DAEMON_SILENT, DAEMON_UNREACHABLE, DISABLED

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord

F = TypeVar("F", bound=Callable[..., Any])

#: Exit statuses of env(1) and shells for commands that cannot be started.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126

#: Reasons for which `--allow-unlimited` starts a command without a device: MPS does not work on this host.
#: Leased devices or an invalid request are no such reasons: the command would take others' memory.
_NOT_SERVED = (DAEMON_UNREACHABLE, DISABLED, CONTROL_DAEMON_SILENT)

STYLES = ("shell", "dotenv", "json", "docker", "systemd")
#: Output that makes its reader fail: a shell's false, and a line that docker and podman reject.
_REFUSED = {"shell": "false", "docker": "=there is none"}


def style_option(function: F) -> F:
    """Add the option `--output` for environments to a command."""
    option = click.option(
        "-o", "--output", type=click.Choice(STYLES), default="shell", metavar="FORMAT",
        help=f"Format of the environment: {', '.join(STYLES)}. Default: shell.",
    )  # fmt: skip
    return option(function)


class EngineCommand(RequestCommand):
    """A command that explains where to write the engine's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        engine = next((engine for engine in ("docker", "podman") if f"--{engine}" in args), "")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not engine:
                raise
            name = error.option_name
            example = f"yunion-mps run --{engine} -- {name} … IMAGE"
            raise click.UsageError(
                f"run has no option {name}; write {engine}'s options after --: {example}", ctx
            ) from None


@click.command(
    "run",
    cls=EngineCommand,
    short_help="Run a command on a device of its own.",
    context_settings={"allow_interspersed_args": False},
)
@request_options
@click.option("--podman", is_flag=True, help='Run a container: COMMAND is what follows "podman run".')
@click.option("--docker", is_flag=True, help='Run a container: COMMAND is what follows "docker run".')
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
def run(
    ctx: click.Context, wanted: RequestMembers, wait_s: int, podman: bool, docker: bool, dry_run: bool,
    print_env: bool, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND on a device of its own. The device is leased until COMMAND ends.

    COMMAND runs within the device's budget or not at all: it is not started if no device is free, if the
    device's control daemon is not ready, or if nothing enforces budgets, as on a GPU older than Volta. Such
    a GPU is used only with --allow-unlimited, which also starts COMMAND without a device if MPS is disabled
    or cannot be reached.

    COMMAND replaces the calling process, so signals, exit status, terminal and process group are its own.
    YUNION_MPS_DEVICE and YUNION_MPS_LEASE are set in its environment.

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
    """
    if podman and docker:
        raise click.UsageError("--podman and --docker are mutually exclusive: use one of them.")
    engine = "podman" if podman else "docker" if docker else ""
    if ctx.get_parameter_source("output") is ParameterSource.COMMANDLINE and not print_env:
        raise click.UsageError("--output requires --print-env.")
    if dry_run or print_env:
        _show(wanted, output if print_env else "")
        return
    if not argv or not argv[0]:
        raise click.UsageError("COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]...")
    command = command_line([engine, "run", *argv] if engine else argv)
    wanted["holder"] = {"command": command[:COMMAND_LENGTH]}
    if engine:
        from yunion_mps.cli.engine import run_container  # not needed by other commands

        run_container(engine, wanted, wait_s, argv, _inherited())
    environment = _inherited()
    try:
        environment.update(_environment_of_lease(wanted, wait_s))
    except YunionError as error:
        if not wanted["allow_unlimited"] or error.code not in _NOT_SERVED:
            raise
        print_notice(f"warning: {cell(argv[0])} runs without limits: {error.message}")
        if error.hint:
            print_notice(error.hint)
    _become(argv, environment)


def _environment_of_lease(wanted: RequestMembers, wait_s: int) -> Mapping[str, str]:
    """Take a lease and return its environment; if this user cannot reach its devices, end it and raise."""
    lease = take(wanted, wait_s)
    try:
        refuse_unreachable(lease["environment"])
    except YunionError:
        with contextlib.suppress(YunionError):  # the lease also ends with this process
            call(END_LEASE, lease=lease["id"])
        raise
    warn_of_limits(lease["unenforced_gpus"])
    return lease["environment"]


def _show(wanted: RequestMembers, output: str) -> None:
    """Print the environment of COMMAND in the format `output`, or a summary if that is empty."""
    refuse_closed_output()
    with _failing_reader(output), hints_of_options(wanted):
        lease = run_blocking(preview(BlockingTransport(daemon()), wanted))
        if output:
            show_environment(lease["environment"], output)
    if not output:
        click.echo(cell(f"would use {', '.join(lease['devices'])}: {_budget(lease)}"))
    warn_of_limits(lease["unenforced_gpus"])


def _inherited() -> dict[str, str]:
    """Return our environment without another device's variables, and without the locale set by Python."""
    inherited = {name: value for name, value in os.environ.items() if name not in BUDGET_VARIABLES}
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        if not any(entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0")):
            inherited.pop("LC_CTYPE", None)
    return inherited


def _budget(lease: LeaseRecord) -> str:
    """Format `5760 MiB of memory, 25 % of the SM threads`; the memory of each GPU if there are several."""
    from yunion_mps.service.holdings import gpu_of  # not needed to run a command

    by_gpu = dict.fromkeys(lease["gpus"], 0)
    for device, memory_mib in zip(lease["devices"], lease["memory_mib"]):
        by_gpu[gpu_of(device)] += memory_mib
    of_each = [f"{memory_mib} MiB of {gpu}" for gpu, memory_mib in by_gpu.items()]
    memory = " and ".join(of_each) if len(of_each) > 1 else f"{sum(lease['memory_mib'])} MiB of memory"
    return f"{memory}, {lease['environment']['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE']} % of the SM threads"


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
    with _failing_reader(output):
        answer = call(GET_DEVICE, id=one_device(device))
        if answer["reason"]:
            raise HostError(
                f"device {answer['addr']} is unavailable: {answer['reason']}", "see: yunion-mps status"
            )
        show_environment(answer["client_environment"], output)
    warn_of_limits([] if answer["budget_enforced"] else [answer["addr"].rpartition("-")[0]])


@contextlib.contextmanager
def _failing_reader(style: str) -> Iterator[None]:
    """If there is no environment, make its reader fail, too; otherwise a job would run without limits.

    For `eval "$(...)" && COMMAND` and for `--env-file <(...)`, empty output is a success.
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
        import json

        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        if not value.isprintable() or _EXPANDED[style].intersection(value):
            what = f"{name}: the format {style} cannot represent {printable(value)}"
            raise HostError(what, "use --output json, or set another directory in host.conf")
    for name, value in environment.items():
        click.echo(_LINES[style](name, value))


def _shell(name: str, value: str) -> str:
    import shlex

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
