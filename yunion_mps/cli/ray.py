"""`yunion-mps ray`: starts nodes of a Ray cluster that offer the devices of their hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.calls import call_daemon, listed_devices
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.core.enums import UNAVAILABLE
from yunion_mps.core.errors import HostError
from yunion_mps.http.operations import GET_POOLS
from yunion_mps.ray import DEVICES, MEMORY

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, PoolJson

_OPTION = "--resources"
#: Makes Ray terminate workers that have been idle for a second, and start none in advance: such workers would
#: hold devices that Ray counts as free.
_NO_IDLE_WORKERS = {"RAY_num_workers_soft_limit": "0"}


@click.group("ray", cls=SuggestingGroup, short_help="Let Ray assign devices to tasks and actors.")
def ray_group() -> None:
    """Let Ray assign devices to tasks and actors: start nodes that offer the devices of their hosts.

    A task requires a resource, and its runtime environment leases the device; in Python,
    yunion_mps.ray.options() returns both.

    \b
    Examples:
      yunion-mps ray start --head --num-gpus=0
      yunion-mps ray resources
    """


@ray_group.command("resources", short_help="Print the resources of this host for Ray.")
def resources() -> None:
    """Print the resources of this host as JSON, for the option --resources of "ray start".

    yunion_mps is the number of devices; yunion_mps_memory is the memory, in MiB, of GPUs that are divided by
    memory_unit. Devices are left out if they are unavailable or reserved (reserved_for), or if their budgets
    are not enforced.

    \b
    Examples:
      export RAY_num_workers_soft_limit=0
      ray start --head --num-gpus=0 --resources="$(yunion-mps ray resources)"
    """
    click.echo(json.dumps(_resources()))


@ray_group.command(
    "start",
    short_help="Start a node of a Ray cluster.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@click.argument("options", metavar="[OPTION]...", nargs=-1, type=click.UNPROCESSED)
def start_ray_node(options: tuple[str, ...]) -> None:
    """Run "ray start" with the resources of this host, as yunion-mps ray resources prints them.

    All options are passed to "ray start". Resources in its option --resources are added, and replace those of
    the same name.

    Unless RAY_num_workers_soft_limit is set, it is set to 0: then Ray starts no workers in advance and
    terminates idle ones after a second. Otherwise, they would keep devices that Ray considers free.

    \b
    Examples:
      yunion-mps ray start --head --num-gpus=0
      yunion-mps ray start --block --address=head:6379 --num-gpus=0
      yunion-mps ray start --head --resources='{"yunion_mps": 2}'
    """
    resources, others = _split(options)
    merged = json.dumps({**_resources(), **resources})
    argv = ["ray", "start", f"{_OPTION}={merged}", *others]
    try:
        os.execvpe("ray", argv, {**_NO_IDLE_WORKERS, **os.environ})  # noqa: S606 - no shell is the point
    except OSError as error:
        hint = "install Ray, or run this in its virtual environment: pip install ray"
        raise HostError(f"ray: cannot be started: {error.strerror}", hint) from None


def _resources() -> dict[str, int]:
    """Return this host's resources; raises HostError if there are none."""
    offered = resources_of(listed_devices(), call_daemon(GET_POOLS)["pools"])
    if not offered:
        hint = "see which are unavailable or reserved: yunion-mps list"
        raise HostError("this host has no devices for Ray", hint)
    return offered


def resources_of(devices: Sequence[DeviceJson], pools: Sequence[PoolJson]) -> dict[str, int]:
    """Return the number of devices and the memory of the pools, except what Ray's workers cannot lease.

    A pool's devices are only created for leases, so they are not counted.
    """
    in_units = {pool["gpu_uuid"] for pool in pools}
    number = sum(_is_offered(device) for device in devices if device["gpu_uuid"] not in in_units)
    memory_mib = sum(pool["memory_mib"] for pool in pools if _is_offered(pool))
    offered: dict[str, int] = {}
    if number:
        offered[DEVICES] = number
    if memory_mib:
        offered[MEMORY] = memory_mib
    return offered


def _is_offered(record: DeviceJson | PoolJson) -> bool:
    return record["state"] != UNAVAILABLE and not record["reserved_for"] and record["budget_enforced"]


def _split(options: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the resources in `options`, and the other options; raises UsageError."""
    resources: dict[str, object] = {}
    others = []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if name == _OPTION:
            resources.update(_json_object(value if equals else next(words, "")))
        else:
            others.append(word)
    return resources, others


def _json_object(text: str) -> dict[str, object]:
    try:
        resources = json.loads(text)
    except ValueError:
        resources = None
    if not isinstance(resources, dict):
        raise click.UsageError(f'{_OPTION}: {text!r} is not a JSON object such as {{"special": 1}}.')
    return resources
