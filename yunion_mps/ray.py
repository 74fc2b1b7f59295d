"""Options of `@ray.remote` for tasks and actors that have a device. Neither needs nor imports Ray.

`py_executable` of a runtime environment is the command that starts a worker. So `yunion-mps run` becomes the
worker, and the lease of its device ends with it. The driver needs neither the daemon nor a GPU.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from yunion_mps.client.lease import LeaseArguments, LeaseMethod

#: The resources of a node, as `yunion-mps ray start` registers them: the number of its devices, and the MiB
#: of the GPUs whose memory is leased in units.
DEVICES = "yunion_mps"
MEMORY = "yunion_mps_memory"
#: Ray sets CUDA_VISIBLE_DEVICES in a worker of a task with `num_gpus`, which would hide the leased device.
_KEEP_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def options(
    memory: str | None = None,
    *,
    count: int = 1,
    runtime_env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the resources and the runtime environment of a task with devices: `@ray.remote(**options())`.

    The arguments are those of `runtime_env`; its other keys are in the argument `runtime_env`. With `memory`,
    the task requires `yunion_mps_memory`, a resource of nodes with GPUs that are divided by memory_unit;
    without it, `yunion_mps`.

    Raises YunionError if an argument is invalid.

    Source: Ray: Resources, section "Custom Resources".
    """
    request = _ARGUMENTS.lease(memory=memory, count=count)
    amount = request.members["memory_mib"]
    return {
        "resources": {DEVICES: count} if amount is None else {MEMORY: amount * count},
        "runtime_env": _environment(request, runtime_env or {}),
    }


def runtime_env(memory: str | None = None, *, count: int = 1, **others: Any) -> dict[str, Any]:
    """Return the runtime environment of a worker that has devices of its own.

    `memory` and `count` are those of `Client.lease`. `others` are other keys of Ray's, such as `pip` or
    `env_vars`; `py_executable` is the Python of the worker.

    The worker waits for its devices, because Ray retries a worker that exits before it has started only after
    a minute.

    Raises YunionError if an argument is invalid.

    Source: Ray: Environment Dependencies, section "API Reference".
    """
    request = _ARGUMENTS.lease(memory=memory, count=count)
    return _environment(request, others)


class _Arguments(LeaseMethod[LeaseArguments]):
    """Checks the arguments of a lease without taking one."""

    def _take(self, request: LeaseArguments) -> LeaseArguments:
        return request


_ARGUMENTS = _Arguments()


def _environment(request: LeaseArguments, others: Mapping[str, Any]) -> dict[str, Any]:
    members = request.members
    words = ["yunion-mps", "run", "--wait"]
    if members["memory_mib"]:
        words.append(f"--gpu-mem={members['memory_mib']}MiB")
    if members["count"]:
        words.append(f"--count={members['count']}")
    python = others.get("py_executable", "python")  # a command, as Ray takes it
    return {
        **others,
        "py_executable": f"{shlex.join(words)} -- {python}",
        "env_vars": {**_KEEP_VARIABLES, **others.get("env_vars", {})},
    }
