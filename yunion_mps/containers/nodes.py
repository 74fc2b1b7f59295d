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


def missing_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, MissingNodes]:
    """The MIG instances (by UUID) whose capabilities have no nodes; engines do not check that."""
    found = {}
    for gpu in gpus:
        if gpu.uuid is None or gpu.minor is None or not gpu.is_instance:
            continue
        files = _capability_files(paths, gpu.minor, gpu.pci_address)
        missing = {
            path: name for path, name in files.items() if not os.path.exists(paths.under(f"/dev/{name}"))
        }
        if missing:
            nodes = ", ".join(f"/dev/{name}" for name in missing.values())
            create = " ".join(f"-f {path}" for path in missing)
            found[gpu.uuid] = MissingNodes(
                f"MIG instance {gpu.address}: no such device node: {nodes}",
                f"create it: nvidia-modprobe {create}; containers get it within 10 seconds",
            )
        elif len(files) < INSTANCE_CAPABILITIES:
            found[gpu.uuid] = MissingNodes(
                f"MIG instance {gpu.address}: its capabilities are missing from {paths.capabilities}",
                "wait until the instance exists again: yunion-mps gpus",
            )
    return found


def capability_nodes(paths: Paths, minor: int, pci_address: str) -> list[str]:
    """The nodes, below /dev, of which a process needs read access to use a MIG instance; none for a GPU."""
    return [*_capability_files(paths, minor, pci_address).values()]


def _capability_files(paths: Paths, minor: int, pci_address: str) -> dict[str, str]:
    """The capabilities of a GPU instance and of its compute instance, as NVIDIA's MIG User Guide names them.

    The keys are the files in /proc that describe them, and the values their nodes, below /dev.
    """
    _, is_instance, number = pci_address.rpartition("-g")
    if not is_instance:
        return {}
    place = f"{paths.capabilities}/gpu{minor}/mig/gi{number}"
    inside: list[str] = []
    with contextlib.suppress(OSError):  # destroyed meanwhile
        inside = os.listdir(place)
    files = [f"{place}/access", *sorted(f"{place}/{name}/access" for name in inside if name[:2] == "ci")]
    minors = {path: re.match(r"DeviceFileMinor: (\d+)", read_text(path)) for path in files}
    return {path: f"nvidia-caps/nvidia-cap{minor[1]}" for path, minor in minors.items() if minor}


def _existing(paths: Paths, names: Sequence[str]) -> tuple[DeviceNode, ...]:
    nodes = [DeviceNode(f"/dev/{name}", paths.under(f"/dev/{name}")) for name in names]
    return tuple(node for node in nodes if _is_device(node.host_path))


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
