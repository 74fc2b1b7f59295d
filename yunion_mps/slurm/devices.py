"""Which device each index of gres.conf is: the lines of the configuration, and the record of them.

`gres-conf --install` records the devices, so that the hooks notice if the host's devices no longer match: an
index never stands for a different device than when gres.conf was written.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.enums import SLURM
from yunion_mps.errors import HostError, NotAllowedError, NotFoundError
from yunion_mps.host.files import write_atomically
from yunion_mps.paths import Paths
from yunion_mps.reasons import SLURM_DEVICES_CHANGED, hint_of

if TYPE_CHECKING:
    from yunion_mps.answers import Device

#: A major number for local use (Documentation/admin-guide/devices.txt of the kernel): no driver has it, and
#: Slurm only looks at the type of the nodes.
_MAJOR = 60
_DIRECTORY, _NODE = "/dev/yunion-mps", "/dev/yunion-mps/mps"


class RecordedDevice(NamedTuple):
    """The device that an index of gres.conf stands for, as it was when gres.conf was written."""

    addr: str
    memory_mib: int


def devices_for_slurm(devices: Sequence[Device]) -> list[Device]:
    """The devices that are reserved for Slurm or, if there are none, those that are not reserved."""
    reserved = [device for device in devices if device["reserved_for"] == SLURM]
    return reserved or [device for device in devices if device["reserved_for"] is None]


def recorded(devices: Sequence[Device]) -> list[RecordedDevice]:
    return [RecordedDevice(device["addr"], device["memory_mib"]) for device in devices]


def gres_lines(devices: Sequence[Device], node: str, paths: Paths) -> list[str]:
    """The lines of gres.conf: one for each GPU, so that index N is the N-th device."""
    lines, first = [], 0
    for _, some in groupby(devices, lambda device: device["gpu_uuid"]):
        last = first + len(list(some)) - 1
        numbers = f"{first}" if first == last else f"[{first}-{last}]"
        lines.append(f"NodeName={node} Name=gpu Type=mps File={paths.under(_NODE)}{numbers}")
        first = last + 1
    return lines


def node_lines(number: int, node: str) -> list[str]:
    """The lines of slurm.conf; the node's line has to be merged with the existing one."""
    return ["GresTypes=gpu", f"NodeName={node} Gres=gpu:mps:{number}"]


def install(devices: Sequence[Device], paths: Paths) -> None:
    """Create the device nodes, now and at each boot, and record the devices; raises HostError."""
    lines = [f"d {_DIRECTORY} 0755 root root -"]
    lines += [f"c {_NODE}{index} 0600 root root - {_MAJOR}:{index}" for index in range(len(devices))]
    heading = "# Written by yunion-mps slurm gres-conf: gres.conf names these nodes. Nothing opens them.\n"
    try:
        os.makedirs(paths.under(_DIRECTORY), mode=0o755, exist_ok=True)
        for index in range(len(devices)):
            _create_node(f"{paths.under(_NODE)}{index}", index)
        write_atomically(paths.slurm_tmpfiles, heading + "".join(f"{line}\n" for line in lines))
        write_atomically(paths.slurm_devices, f"{json.dumps(recorded(devices))}\n")
    except PermissionError as error:
        what = f"{error.filename}: cannot be created: {error.strerror}"
        raise NotAllowedError(what, "retry as root") from None
    except OSError as error:
        raise HostError(
            f"{error.filename}: cannot be created: {error.strerror}",
            "check that its directory exists and is writable",
        ) from None


def _create_node(path: str, minor: int) -> None:
    device = os.makedev(_MAJOR, minor)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, device)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != device:
            what = f"{path}: exists, but is not the character device {_MAJOR}:{minor}"
            raise HostError(what, f"remove it: rm {path}") from None


def read_record(paths: Paths) -> list[RecordedDevice] | None:
    """The recorded devices by index; None if none were recorded on this node. Raises HostError."""
    try:
        with open(paths.slurm_devices, encoding="utf-8") as file:
            return [RecordedDevice(str(addr), int(memory_mib)) for addr, memory_mib in json.load(file)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        what = f"{paths.slurm_devices}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HostError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED) from None


def device_at(index: int, record: Sequence[RecordedDevice], devices: Sequence[Device]) -> str:
    """The address of the device with this index; raises NotFoundError unless it is as recorded."""
    if index >= len(record):
        what = f"gres.conf: device {index} is not among the {len(record)} recorded devices"
        raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)
    addr, memory_mib = record[index]
    now = next((device["memory_mib"] for device in devices if device["addr"] == addr), None)
    if now != memory_mib:
        change = "no longer exists" if now is None else f"had {memory_mib} MiB, but now has {now} MiB"
        what = f"device {index} of gres.conf: {addr} {change}"
        raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)
    return addr
