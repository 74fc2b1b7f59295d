"""The driver's device nodes that containers get, also those of MIG instances."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yunion_mps.host.files import read_text
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths

_DRIVER_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class DeviceNode(NamedTuple):
    path: str
    host_path: str


def driver_nodes(paths: Paths) -> tuple[DeviceNode, ...]:
    """The driver's nodes that exist; an engine refuses to start a container with a missing one."""
    return _existing(paths, _DRIVER_NODES)


def gpu_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, tuple[DeviceNode, ...]]:
    """The nodes of each GPU or MIG instance (by UUID) that exist."""
    return {
        gpu.uuid: _existing(
            paths, (f"nvidia{gpu.minor}", *capability_nodes(paths, gpu.minor, gpu.pci_address))
        )
        for gpu in gpus
        if gpu.uuid is not None and gpu.minor is not None
    }


def capability_nodes(paths: Paths, minor: int, pci_address: str) -> list[str]:
    """The nodes of which a process needs read access to use a MIG instance, as NVIDIA's MIG User Guide says.

    They are those of the GPU instance and of its compute instance, below /dev; none for a whole GPU.
    """
    _, is_instance, number = pci_address.rpartition("-g")
    if not is_instance:
        return []
    place = f"{paths.capabilities}/gpu{minor}/mig/gi{number}"
    inside: list[str] = []
    with contextlib.suppress(OSError):  # destroyed meanwhile
        inside = os.listdir(place)
    parts = ["", *sorted(f"{name}/" for name in inside if name.startswith("ci"))]
    minors = (re.match(r"DeviceFileMinor: (\d+)", read_text(f"{place}/{part}access")) for part in parts)
    return [f"nvidia-caps/nvidia-cap{minor[1]}" for minor in minors if minor]


def _existing(paths: Paths, names: Sequence[str]) -> tuple[DeviceNode, ...]:
    nodes = [DeviceNode(f"/dev/{name}", paths.under(f"/dev/{name}")) for name in names]
    return tuple(node for node in nodes if _is_device(node.host_path))


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
