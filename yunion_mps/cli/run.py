"""`yunion-mps run`: runs a command, or a container, on its own device.

An engine that supports CDI gets the lease's CDI device. Others get options, and a child process of ours holds
the lease until it is bound to the container. What only containers need is imported where it is used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from yunion_mps.cli.calls import add_option_hints, call, preview, take, warn_unenforced_budgets
from yunion_mps.cli.options import RequestCommand, complete_file, request_options, style_option
from yunion_mps.cli.output import cell, print_notice, refuse_closed_output
from yunion_mps.errors import HostError, ShortageError, YunionError
from yunion_mps.http.operations import BIND_LEASE, COMMAND_LENGTH, END_LEASE, GET_GPUS
from yunion_mps.http.transport import RequestMembers, refuse_unreachable
from yunion_mps.reasons import CONTROL_DAEMON_SILENT, DAEMON_UNREACHABLE, DISABLED
from yunion_mps.text import command_line

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord
    from yunion_mps.host.processes import Process

#: Variables that only a device's environment sets.
_BUDGET_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "YUNION_MPS_DEVICE", "YUNION_MPS_LEASE",
)  # fmt: skip
#: Exit statuses of env(1) and shells for commands that cannot be started.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126

#: Reasons for which `--allow-unlimited` starts a command without a device: MPS does not work on this host.
#: Leased devices or an invalid request are no such reasons: the command would take others' memory.
_NOT_SERVED = (DAEMON_UNREACHABLE, DISABLED, CONTROL_DAEMON_SILENT)


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
    ctx: click.Context, request: RequestMembers, wait_s: int, podman: bool, docker: bool, dry_run: bool,
    print_env: bool, output: str, argv: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND on a device of its own. The device is leased until COMMAND ends.

    COMMAND runs within the device's budget or not at all: it is not started if no device is free, if the
    device's control daemon is not ready, or if budgets are not enforced, as on a GPU older than Volta. Such
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
        _show(request, output if print_env else "")
        return
    if not argv or not argv[0]:
        raise click.UsageError("COMMAND is missing: yunion-mps run [OPTIONS] COMMAND [ARG]...")
    command = command_line([engine, "run", *argv] if engine else argv)
    request["holder"] = {"command": command[:COMMAND_LENGTH]}
    if engine:
        run_container(engine, request, wait_s, argv, _inherited())
    environment = _inherited()
    try:
        environment.update(_environment_of_lease(request, wait_s))
    except YunionError as error:
        if not request["allow_unlimited"] or error.code not in _NOT_SERVED:
            raise
        print_notice(f"warning: {cell(argv[0])} runs without limits: {error.message}")
        if error.hint:
            print_notice(error.hint)
    _become(argv, environment)


def _environment_of_lease(request: RequestMembers, wait_s: int) -> Mapping[str, str]:
    """Take a lease and return its environment; if this user cannot reach its devices, end it and raise."""
    lease = take(request, wait_s)
    try:
        refuse_unreachable(lease["environment"])
    except YunionError:
        with contextlib.suppress(YunionError):  # the lease also ends with this process
            call(END_LEASE, lease=lease["id"])
        raise
    warn_unenforced_budgets(lease["unenforced_gpus"])
    return lease["environment"]


def _show(request: RequestMembers, output: str) -> None:
    """Print the environment of COMMAND in the format `output`, or a summary if that is empty."""
    from yunion_mps.cli.lease import failing_reader, show_environment  # not needed to run a command

    refuse_closed_output()
    with failing_reader(output), add_option_hints(request):
        lease = preview(request)
        if output:
            show_environment(lease["environment"], output)
    if not output:
        click.echo(cell(f"would use {', '.join(lease['devices'])}: {_budget(lease)}"))
    warn_unenforced_budgets(lease["unenforced_gpus"])


def _inherited() -> dict[str, str]:
    """Return our environment without another device's variables, and without the locale set by Python."""
    inherited = {name: value for name, value in os.environ.items() if name not in _BUDGET_VARIABLES}
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        if not any(entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0")):
            inherited.pop("LC_CTYPE", None)
    return inherited


def _budget(lease: LeaseRecord) -> str:
    """Format `5760 MiB of memory, 25 % of the SM threads`; the memory of each GPU if there are several."""
    by_gpu = dict.fromkeys(lease["gpus"], 0)
    for one in lease["budgets"]:
        by_gpu[one["gpu"]] += one["memory_mib"]
    of_each = [f"{memory_mib} MiB of {gpu}" for gpu, memory_mib in by_gpu.items()]
    memory = " and ".join(of_each) if len(of_each) > 1 else f"{sum(by_gpu.values())} MiB of memory"
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


#: All variables that a device's environment may set.
_VARIABLES = (*_BUDGET_VARIABLES, "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES")

#: The first podman that supports CDI (release notes of 4.1.0).
_PODMAN_WITH_CDI = [4, 1]
_ENGINE_TIMEOUT_S = 30
#: The shortest and the longest interval between polls for the container, whose image may have to be pulled.
_POLL_S, _MAX_POLL_S = 0.1, 2.0

#: Options of `run` without a value, of docker 26 and 28 and podman 4 (their `run --help`).
_PLAIN = frozenset({
    "detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck", "oom-kill-disable",
    "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "use-api-socket",
    "env-host", "http-proxy", "no-hostname", "no-hosts", "passwd", "read-only-tmpfs", "replace", "rmi",
    "rootfs", "tls-verify", "unsetenv-all",
})  # fmt: skip
_PLAIN_LETTERS = frozenset("diPqt")


def run_container(
    engine: str, request: RequestMembers, wait_s: int, argv: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Take a lease and become `ENGINE run`; raises YunionError if either fails.

    The lease ends with the container: with CDI, our hook binds the lease to it; otherwise, a child process
    remains until the lease is bound.
    """
    from yunion_mps.host.processes import find_program
    from yunion_mps.models import CDI_KIND

    hint = "install it, or run the command without a container: yunion-mps run COMMAND"
    program = find_program(engine, hint, besides=())
    if _supports_cdi(engine, program):
        lease = take({**request, "cdi": True}, wait_s)
        refuse_unreachable(lease["environment"])
        words = ["--device", f"{CDI_KIND}={lease['id']}"]
    else:
        # CDI sets variables after the user's own; without CDI, the user's would silently loosen the budget.
        for name in overridden(argv, _VARIABLES):
            what = (
                f"--env {name} would override the device's value, because this {engine} does not support CDI"
            )
            raise click.UsageError(f"{what}: omit it.")
        with _binder(program) as (pid, lease_ids):
            lease = take({**request, "holder": {**request["holder"], "pid": pid}}, wait_s)
            refuse_unreachable(lease["environment"])
            words = [*_options_without_cdi(lease), "--label", _label(lease["id"])]
            os.write(lease_ids, lease["id"].encode())
    warn_unenforced_budgets(lease["unenforced_gpus"])
    try:
        os.execve(program, [engine, "run", *words, *argv], environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        raise HostError(f"{program} cannot be started: {error.strerror}", "reinstall it") from None


def _supports_cdi(engine: str, program: str) -> bool:
    """Whether the engine itself resolves the names of CDI devices."""
    from yunion_mps.host.processes import output_of

    if engine == "podman":
        version = output_of([program, "version", "--format", "{{.Client.Version}}"], _ENGINE_TIMEOUT_S)
        return [int(part) for part in version.split(".")[:2] if part.isdigit()] >= _PODMAN_WITH_CDI
    # Docker 25 and 26 only if the feature is enabled; earlier versions do not have the field.
    directories = output_of([program, "info", "--format", "{{json .CDISpecDirs}}"], _ENGINE_TIMEOUT_S)
    return directories.startswith('["')


def _options_without_cdi(lease: LeaseRecord) -> list[str]:
    """Return options with the same effect as CDI, except for the driver's libraries."""
    from yunion_mps.containers.spec import driver_nodes, gpu_nodes
    from yunion_mps.models import Gpu
    from yunion_mps.paths import Paths

    paths = Paths.from_environment()
    words = ["--ipc=host", *mount_words(lease["environment"]["CUDA_MPS_PIPE_DIRECTORY"])]
    words += [word for name, value in lease["environment"].items() for word in ("--env", f"{name}={value}")]
    known = [gpu for gpu in call(GET_GPUS)["gpus"] if gpu["addr"] in lease["gpus"]]
    gpus = [Gpu(gpu["pci_address"], gpu["uuid"], minor=gpu["device_minor"]) for gpu in known]
    nodes = [*driver_nodes(paths), *(node for found in gpu_nodes(paths, gpus).values() for node in found)]
    for node in nodes:
        words += ["--device", f"{node.host_path}:{node.path}"]
    return words


def _label(lease_id: str) -> str:
    """Return the label that identifies the lease's container; users may add other labels."""
    from yunion_mps.models import CDI_KIND

    return f"{CDI_KIND}.lease={lease_id}"


@contextlib.contextmanager
def _binder(engine: str) -> Iterator[tuple[int, int]]:
    """Fork a child that binds a lease to its container; yield its PID and the pipe for the lease's id.

    The child holds the lease until then; it exits if it gets no id by the end of the block. The calling
    process is about to execute the engine, whose program has the path `engine`.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        raise ShortageError(f"no process can be started: {error.strerror}") from None
    if not pid:
        os.close(writer)
        _bind_and_exit(engine, reader, os.getppid())
    try:
        yield pid, writer
    finally:
        os.close(reader)
        os.close(writer)


def _bind_and_exit(engine: str, reader: int, engine_pid: int) -> NoReturn:
    """Run the child, and exit without the parent's cleanup."""
    from yunion_mps.host.processes import Process

    status = 1
    try:
        os.setsid()
        with open(os.devnull, "r+b") as nothing:
            for descriptor in (0, 1, 2):
                os.dup2(nothing.fileno(), descriptor)
        engine_process = Process.adopt(engine_pid)
        lease_id = os.read(reader, 1 << 16).decode()
        if lease_id and engine_process:
            _bind(engine, lease_id, engine_process)
        status = 0
    finally:
        os._exit(status)


def _bind(engine: str, lease_id: str, engine_process: Process) -> None:
    """Bind the lease to the container once it runs; if that fails, keep it until the container ends."""
    from yunion_mps.host.processes import output_of

    poll_s = _POLL_S
    while True:
        has_ended = engine_process.status() is not None
        words = ["ps", "--quiet", "--no-trunc", "--filter", f"label={_label(lease_id)}"]
        container = output_of([engine, *words], _ENGINE_TIMEOUT_S)
        words = ["inspect", "--format", "{{.State.Pid}}", container]
        pid = output_of([engine, *words], _ENGINE_TIMEOUT_S) if container else ""
        if pid.isdigit() and pid != "0":  # it is 0 before and after the container runs
            try:
                call(BIND_LEASE, lease=lease_id, pid=int(pid))
            except YunionError:  # for example root's container, started by another user
                output_of([engine, "wait", container])
            return
        if has_ended:
            return
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.2, _MAX_POLL_S)


# Docker and podman parse options as Go's pflag does, and none after the image, where similar words belong to
# the command or are the value of another option.


def overridden(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return which of the variables the options before the image set or remove (`--env X`)."""
    found = {value.partition("=")[0] for option, value in _options(words) if option in ("env", "e")}
    return sorted(found.intersection(names))


def mount_words(path: str) -> list[str]:
    """Return options that mount a directory at the same path, whatever characters it contains."""
    ends = [f"{end}={path}" for end in ("source", "target")]
    if any(char in path for char in ',"\r\n'):  # quoted for Go's encoding/csv
        ends = ['"{}"'.format(end.replace('"', '""')) for end in ends]
    return ["--mount", ",".join(["type=bind", *ends])]


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, "" if it has none."""
    left = iter(words)
    for word in left:
        if word == "--" or len(word) < 2 or not word.startswith("-"):
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals or name in _PLAIN else next(left, "")
            continue
        for index, letter in enumerate(word[1:], start=2):
            rest = word[index:]
            if rest.startswith("="):
                yield letter, rest[1:]
                break
            if letter not in _PLAIN_LETTERS:
                yield letter, rest or next(left, "")
                break
