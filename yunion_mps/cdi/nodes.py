"""The device nodes that a CUDA program opens: those of the driver, and of each GPU."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence

from yunion_mps.cdi.spec import Node
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths

_DRIVER = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def driver_nodes(paths: Paths) -> tuple[Node, ...]:
    """The nodes of the driver that there are; an engine refuses a container for one that is not there."""
    return _there(paths, _DRIVER)


def gpu_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, tuple[Node, ...]]:
    """The nodes of each GPU (by UUID) that there are."""
    return {
        gpu.uuid: _there(paths, (f"nvidia{gpu.minor}",))
        for gpu in gpus
        if gpu.uuid is not None and gpu.minor is not None
    }


def _there(paths: Paths, names: Sequence[str]) -> tuple[Node, ...]:
    found = [Node(f"/dev/{name}", paths.under(f"/dev/{name}")) for name in names]
    return tuple(node for node in found if _is_device(node.host_path))


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
