"""`yunion-mps run --podman`: a container with a device of its own, by CDI or, without that, by options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import click

from yunion_mps.cli.ask import ask
from yunion_mps.cli.engine_words import environment_words, mount_words, overridden
from yunion_mps.cli.lease_request import RequestCommand, take, warn_of_limits
from yunion_mps.cli.watcher import Watcher, label
from yunion_mps.client.taking import refuse_unreachable
from yunion_mps.containers.nvidia import driver_nodes, gpu_nodes
from yunion_mps.errors import HostError
from yunion_mps.host.processes import find_program, output_of
from yunion_mps.models import CDI_KIND, Gpu
from yunion_mps.paths import Paths

F = TypeVar("F", bound=Callable[..., Any])

ENGINES = ("docker", "podman")

#: All that a device may say of a process.
VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "YUNION_MPS_DEVICE",
    "YUNION_MPS_LEASE",
)

#: The first podman that reads CDI (release notes of 4.1.0).
_PODMAN_WITH_CDI = (4, 1)
_PATIENCE_S = 30


class EngineCommand(RequestCommand):
    """A command with these options, after which people write the engine's own as they are used to."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say where the engine's own options belong."""
        given = [engine for engine in ENGINES if f"--{engine}" in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not given:
                raise
            name = error.option_name
            example = f"yunion-mps run --{given[0]} -- {name} … IMAGE"
            raise click.UsageError(
                f"{name} is no option of run; {given[0]}'s come after --: {example}", ctx
            ) from None


def engine_options(function: F) -> F:
    """Give a command the options that name a container engine."""
    for engine in ENGINES:
        about = f"Run a container: COMMAND is what follows {engine} run."
        function = click.option(f"--{engine}", is_flag=True, help=about)(function)
    return function


def the_engine(**given: bool) -> str | None:
    """The engine that the options name; raises UsageError where both are given."""
    named = [engine for engine, is_given in given.items() if is_given]
    if len(named) > 1:
        raise click.UsageError("a container has one engine: leave one of --podman and --docker out.")
    return named[0] if named else None


def run_container(
    engine: str, wanted: Mapping[str, Any], wait_s: int, argv: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Take a device and become `ENGINE run`; raises YunionError where either cannot be.

    The lease ends with the container: an engine that reads CDI has our hook bind it, for another one a
    process of ours stays behind until the container has been bound.
    """
    hint = "install it; without a container, the command alone comes after run: yunion-mps run COMMAND"
    program = find_program(engine, hint, besides=())
    if _reads_cdi(engine, program):
        lease = take({**wanted, "cdi": "true"}, wait_s)
        refuse_unreachable(lease["environment"])
        words = ["--device", f"{CDI_KIND}={lease['id']}"]
    else:
        _refuse_overridden(engine, argv)
        with Watcher(program) as watcher:
            lease = take({**wanted, "pid": watcher.pid}, wait_s)
            refuse_unreachable(lease["environment"])
            words = [*_without_cdi(lease), "--label", label(lease["id"])]
            watcher.begin(lease["id"])
    warn_of_limits(lease["unenforced_gpus"])
    try:
        os.execve(program, [engine, "run", *words, *argv], environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        raise HostError(f"{program} cannot be started: {error.strerror}", "install it anew") from None


def _reads_cdi(engine: str, program: str) -> bool:
    """Whether the engine resolves names of CDI devices by itself."""
    if engine == "podman":
        numbers = output_of([program, "version", "--format", "{{.Client.Version}}"], _PATIENCE_S).split(".")
        return [int(one) for one in numbers[:2] if one.isdigit()] >= list(_PODMAN_WITH_CDI)
    # Docker 25 and 26 only where the feature is switched on; there is nothing of it in earlier ones' answer.
    return output_of([program, "info", "--format", "{{json .CDISpecDirs}}"], _PATIENCE_S).startswith('["')


def _refuse_overridden(engine: str, argv: Sequence[str]) -> None:
    """What CDI sets comes after the user's own; without it, that would loosen the budget unnoticed."""
    for name in overridden(argv, VARIABLES):
        raise click.UsageError(
            f"--env {name} would take the place of the device's own, for this {engine} reads no CDI: "
            "leave it out."
        )


def _without_cdi(lease: Mapping[str, Any]) -> list[str]:
    """The options that give a container the same without CDI, but for the driver's libraries."""
    paths = Paths.from_environment()
    place = lease["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
    words = ["--ipc=host", *mount_words(place), *environment_words(lease["environment"])]
    known = [one for one in ask("/v1/gpus")["gpus"] if one["addr"] in lease["gpus"]]
    gpus = [Gpu(one["pci_address"], one["uuid"], minor=one["device_minor"]) for one in known]
    nodes = [*driver_nodes(paths), *(node for found in gpu_nodes(paths, gpus).values() for node in found)]
    for node in nodes:
        words += ["--device", f"{node.host_path}:{node.path}"]
    return words
