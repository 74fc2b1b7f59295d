"""Containers: their devices by the Container Device Interface, and which one a process is in.

`spec` makes a CDI specification, `nodes` finds the device nodes in it, `service/publisher` keeps the files
where podman, docker, containerd and CRI-O find them; the package container_hook is what these call before a
container starts. `lookup` finds the container of a process, and `command` reads the options of `docker run`.

Source: Container Device Interface, SPEC.md (github.com/cncf-tags/container-device-interface).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Optional

from yunion_mps.core.enums import MEMORY_VARIABLE

#: A share of a GPU: its name, its memory in MiB (None if unknown), and the percentage of SM threads.
Share = tuple[str, Optional[int], float]

#: The container's percentage of SM threads, in its environment; CUDA does not read it.
_SM_VARIABLE = "YUNION_MPS_SM_PERCENT"

#: Tells the hook that the CDI device has only the environment and the hook, because its GPU is lost.
UNSERVED_ARGUMENT = "--unserved"
#: Tells the hook that the CDI device lacks nodes: a message and a hint follow.
MISSING_NODES_ARGUMENT = "--missing-nodes"


def budget_variables(shares: Iterable[Share]) -> dict[str, str]:
    """Return what a container may use of each of its GPUs, for frameworks; the least if that differs.

    Memory is left out if that of all GPUs is unknown.
    """
    memory_mib = Counter[str]()
    tenths = Counter[str]()  # of a percent: whole numbers can be added without an error
    for gpu, share_mib, percentage in shares:
        if share_mib is not None:
            memory_mib[gpu] += share_mib
        tenths[gpu] += round(percentage * 10)
    variables: dict[str, str] = {}
    if memory_mib:
        variables[MEMORY_VARIABLE] = str(min(memory_mib.values()))
    least_tenths = min(tenths.values(), default=1000)
    variables[_SM_VARIABLE] = f"{min(1000, least_tenths) / 10:g}"
    return variables


def lease_variables(
    environment: Mapping[str, str], shares: Iterable[Share], *, is_shared: bool
) -> dict[str, str]:
    """Return the environment of a lease's containers, with its budget unless it is of whole MIG instances."""
    budget = budget_variables(shares) if is_shared else {}
    return {**environment, **budget}
