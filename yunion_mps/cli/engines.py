"""`yunion-mps run --podman` and `--docker`: run a container on its own device.

An engine that supports CDI gets the lease's CDI device. Others get options, and a child process of ours holds
the lease until it is bound to the container.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from yunion_mps.cli.calls import call_daemon, obtain_lease, print_warnings
from yunion_mps.containers import lease_variables
from yunion_mps.containers.command import mount_words, set_variables
from yunion_mps.containers.nodes import driver_nodes, gpu_nodes, missing_nodes
from yunion_mps.core.enums import DEVICE_VARIABLES, NOT_SHARED
from yunion_mps.core.errors import HostError, ShortageError, YunionError
from yunion_mps.core.models import CDI_KIND, Gpu
from yunion_mps.core.paths import Paths
from yunion_mps.host.processes import Process, find_program, output_of
from yunion_mps.http.operations import BIND_LEASE, GET_GPUS
from yunion_mps.http.transport import RequestMembers, refuse_unreachable

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson

#: The first podman that supports CDI (release notes of 4.1.0).
_PODMAN_WITH_CDI = [4, 1]
ENGINE_TIMEOUT_S = 30
#: The shortest and the longest interval between polls for the container, whose image may have to be pulled.
_POLL_S = 0.1
_MAX_POLL_S = 2.0


def run_container(
    engine: str,
    request: RequestMembers,
    *,
    wait_s: int,
    argv: Sequence[str],
    environment: Mapping[str, str],
    report_lease: Callable[[str], object],
) -> NoReturn:
    """Take a lease, report its id and become `ENGINE run`.

    The lease ends with the container: with CDI, our hook binds the lease to it; otherwise, a child process
    remains until the lease is bound.

    argv: what follows `ENGINE run`.
    environment: the engine's own.
    report_lease: called with the lease's id once it is taken.
    Raises YunionError if no lease can be taken or the engine cannot be started, and UsageError.
    """
    hint = "install it, or run the command without a container: yunion-mps run COMMAND"
    program = find_program(engine, hint, besides=())
    if _supports_cdi(engine, program):
        lease = obtain_lease({**request, "cdi": True}, wait_s)
        refuse_unreachable(lease["environment"])
        words = ["--device", f"{CDI_KIND}={lease['id']}", "--label", _label(lease["id"])]
    else:
        # CDI sets variables after the user's own; without CDI, the user's would silently loosen the budget.
        _refuse_overrides(argv, DEVICE_VARIABLES, engine)
        with _binder(program) as (pid, lease_ids):
            lease = obtain_lease({**request, "holder": {**request["holder"], "pid": pid}}, wait_s)
            _refuse_overrides(argv, lease["environment"], engine)  # some devices have more variables
            refuse_unreachable(lease["environment"])
            words = [*_options_without_cdi(lease), "--label", _label(lease["id"])]
            os.write(lease_ids, lease["id"].encode())
    report_lease(lease["id"])
    print_warnings(lease)
    try:
        os.execve(program, [engine, "run", *words, *argv], environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        raise HostError(f"{program} cannot be started: {error.strerror}", "reinstall it") from None


def _refuse_overrides(argv: Sequence[str], variables: Iterable[str], engine: str) -> None:
    for name in sorted(set_variables(argv).intersection(variables)):
        text = f"--env {name} would override the device's value, because this {engine} does not support CDI"
        raise click.UsageError(f"{text}: omit it.")


def _supports_cdi(engine: str, program: str) -> bool:
    """Return whether the engine itself resolves the names of CDI devices."""
    if engine == "podman":
        version = output_of([program, "version", "--format", "{{.Client.Version}}"], ENGINE_TIMEOUT_S)
        numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
        return numbers >= _PODMAN_WITH_CDI
    # Docker 25 and 26 only if the feature is enabled; earlier versions do not have the field.
    directories = output_of([program, "info", "--format", "{{json .CDISpecDirs}}"], ENGINE_TIMEOUT_S)
    return directories.startswith('["')


def _options_without_cdi(lease: LeaseRecordJson) -> list[str]:
    """Return options with the same effect as CDI, except for the driver's libraries."""
    paths = Paths.from_environment()
    pipe_directory = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY")
    words = ["--ipc=host", *mount_words(pipe_directory)] if pipe_directory else []
    shares = [(share["gpu"], share["memory_mib"], share["thread_percentage"]) for share in lease["budgets"]]
    is_shared = lease["sharing"] != NOT_SHARED
    environment = lease_variables(lease["environment"], shares, is_shared=is_shared)
    for name, value in environment.items():
        words += ["--env", f"{name}={value}"]
    gpus: list[Gpu] = []
    for gpu in call_daemon(GET_GPUS)["gpus"]:
        if gpu["addr"] in lease["gpus"]:
            gpus.append(Gpu(gpu["pci_address"], gpu["uuid"], minor=gpu["device_minor"]))
    for message, hint in missing_nodes(paths, gpus).values():
        raise HostError(message, hint)
    nodes = list(driver_nodes(paths))
    for nodes_of_gpu in gpu_nodes(paths, gpus).values():
        nodes += nodes_of_gpu
    for node in nodes:
        words += ["--device", f"{node.host_path}:{node.path}"]
    return words


def _label(lease_id: str) -> str:
    """Return the label that identifies the lease's container; users may add other labels."""
    return f"{CDI_KIND}.lease={lease_id}"


def container_of(engine: str, lease_id: str) -> str:
    """Return the id of the lease's container; empty if it does not run. `engine` is the engine's path."""
    words = ["ps", "--quiet", "--no-trunc", "--filter", f"label={_label(lease_id)}"]
    return output_of([engine, *words], ENGINE_TIMEOUT_S)


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
    poll_s = _POLL_S
    while True:
        has_ended = engine_process.status() is not None
        container = container_of(engine, lease_id)
        words = ["inspect", "--format", "{{.State.Pid}}", container]
        pid = output_of([engine, *words], ENGINE_TIMEOUT_S) if container else ""
        if pid.isdigit() and pid != "0":  # it is 0 before and after the container runs
            try:
                call_daemon(BIND_LEASE, lease=lease_id, pid=int(pid))
            except YunionError:  # for example, if another user has started a container as root
                output_of([engine, "wait", container])
            return
        if has_ended:
            return
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.2, _MAX_POLL_S)
