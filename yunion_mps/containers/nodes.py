"""The driver's device nodes that containers get, also those of MIG instances.

Source: NVIDIA: Multi-Instance GPU User Guide, section "Device Nodes and Capabilities".
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.models import Gpu
from yunion_mps.core.paths import Paths
from yunion_mps.host.files import read_text

#: How many capabilities a MIG instance has: those of the GPU instance and of its compute instance.
INSTANCE_CAPABILITIES = 2
_DRIVER_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class DeviceNode(NamedTuple):
    path: str
    host_path: str


class MissingNodes(NamedTuple):
    """Why a container could not use a MIG instance, and what the operator should do."""

    message: str
    hint: str


def driver_nodes(paths: Paths) -> tuple[DeviceNode, ...]:
    """Return the driver's nodes that exist; an engine refuses to start a container with a missing one."""
    return _existing(paths, _DRIVER_NODES)


def gpu_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, tuple[DeviceNode, ...]]:
    """Return the nodes of each GPU or MIG instance (by UUID) that exist."""
    nodes: dict[str, tuple[DeviceNode, ...]] = {}
    for gpu in gpus:
        if gpu.uuid is not None and gpu.minor is not None:
            names = [f"nvidia{gpu.minor}"]
            names += capability_nodes(paths, gpu.minor, gpu.pci_address)
            nodes[gpu.uuid] = _existing(paths, names)
    return nodes


def missing_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, MissingNodes]:
    """Return the MIG instances (by UUID) whose capabilities have no nodes; engines do not check that."""
    without_nodes: dict[str, MissingNodes] = {}
    for gpu in gpus:
        if gpu.uuid is None or gpu.minor is None or not gpu.is_instance:
            continue
        files = _capability_files(paths, gpu.minor, gpu.pci_address)
        missing = [path for path, name in files.items() if not os.path.exists(paths.under(f"/dev/{name}"))]
        if missing:
            nodes = ", ".join(f"/dev/{files[path]}" for path in missing)
            create = " ".join(f"-f {path}" for path in missing)
            without_nodes[gpu.uuid] = MissingNodes(
                f"MIG instance {gpu.address}: no such device node: {nodes}",
                f"create it: nvidia-modprobe {create}; containers get it within 10 seconds",
            )
        elif len(files) < INSTANCE_CAPABILITIES:
            without_nodes[gpu.uuid] = MissingNodes(
                f"MIG instance {gpu.address}: its capabilities are missing from {paths.capabilities}",
                "wait until the instance exists again: yunion-mps gpus",
            )
    return without_nodes


def capability_nodes(paths: Paths, minor: int, pci_address: str) -> list[str]:
    """Return the nodes, below /dev, that a process has to read to use a MIG instance; none for a GPU."""
    return list(_capability_files(paths, minor, pci_address).values())


def _capability_files(paths: Paths, minor: int, pci_address: str) -> dict[str, str]:
    """Return the capabilities of a GPU instance and of its compute instance.

    The keys are the files in /proc that describe them, and the values their nodes, below /dev.
    """
    _, is_instance, number = pci_address.rpartition("-g")
    if not is_instance:
        return {}
    place = f"{paths.capabilities}/gpu{minor}/mig/gi{number}"
    inside: list[str] = []
    with contextlib.suppress(OSError):  # destroyed meanwhile
        inside = os.listdir(place)
    compute_instances = [name for name in sorted(inside) if name.startswith("ci")]
    nodes: dict[str, str] = {}
    for directory in (place, *(f"{place}/{name}" for name in compute_instances)):
        path = f"{directory}/access"
        match = re.match(r"DeviceFileMinor: (\d+)", read_text(path))
        if match:
            nodes[path] = f"nvidia-caps/nvidia-cap{match[1]}"
    return nodes


def _existing(paths: Paths, names: Sequence[str]) -> tuple[DeviceNode, ...]:
    nodes: list[DeviceNode] = []
    for name in names:
        host_path = paths.under(f"/dev/{name}")
        if _is_device(host_path):
            nodes.append(DeviceNode(f"/dev/{name}", host_path))
    return tuple(nodes)


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
