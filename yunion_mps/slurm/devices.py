"""What each index of gres.conf stands for: the lines of the configuration, and the record of the devices.

An index is a device or, with gres/shard, a GPU. `gres-conf --install` records the devices, so that the hooks
notice if the host's devices no longer match: an index never stands for a different device than when gres.conf
was written.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.enums import SHARING, SLURM
from yunion_mps.errors import HostError, NotAllowedError, NotFoundError
from yunion_mps.host.files import write_atomically
from yunion_mps.identity import gpu_of
from yunion_mps.paths import Paths
from yunion_mps.reasons import SLURM_DEVICES_CHANGED, hint_of

if TYPE_CHECKING:
    from yunion_mps.answers import Device

#: A major number for local use (Documentation/admin-guide/devices.txt of the kernel): no driver has it, and
#: Slurm only looks at the type of the nodes.
_MAJOR = 60
_DIRECTORY = "/dev/yunion-mps"


class RecordedDevice(NamedTuple):
    """A device as it was when gres.conf was written."""

    addr: str
    memory_mib: int

    @property
    def gpu(self) -> str:
        return gpu_of(self.addr)

    def current_address(self, devices: Sequence[Device]) -> str:
        """Its address; raises NotFoundError unless the device is as it was."""
        now = next((device["memory_mib"] for device in devices if device["addr"] == self.addr), None)
        if now == self.memory_mib:
            return self.addr
        change = "no longer exists" if now is None else f"had {self.memory_mib} MiB, but now has {now} MiB"
        what = f"gres.conf: device {self.addr} {change}"
        raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)


class Record(NamedTuple):
    """The devices of gres.conf in order. With `shards`, each index stands for all devices of a GPU."""

    shards: bool
    devices: Sequence[RecordedDevice]

    @property
    def entries(self) -> list[list[RecordedDevice]]:
        """The devices of each index."""
        if not self.shards:
            return [[device] for device in self.devices]
        return [list(some) for _, some in groupby(self.devices, lambda device: device.gpu)]

    def addresses(self, indices: Sequence[int], devices: Sequence[Device]) -> dict[int, list[str]]:
        """The addresses of the devices of each index; raises NotFoundError unless they are as recorded."""
        entries = self.entries
        if missing := [index for index in indices if index >= len(entries)]:
            what = f"gres.conf: index {missing[0]} is not among the {len(entries)} recorded ones"
            raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)
        return {index: [one.current_address(devices) for one in entries[index]] for index in indices}


def devices_for_slurm(devices: Sequence[Device]) -> list[Device]:
    """The devices that are reserved for Slurm or, if there are none, those that are not reserved.

    They are of one kind, because those of a job cannot be shared in different ways: those of MPS if there are
    any.
    """
    reserved = [device for device in devices if device["reserved_for"] == SLURM]
    suitable = reserved or [device for device in devices if device["reserved_for"] is None]
    sharing = min((device["sharing"] for device in suitable), key=SHARING.index, default="")
    return [device for device in suitable if device["sharing"] == sharing]


def record_of(devices: Sequence[Device], *, shards: bool) -> Record:
    return Record(shards, [RecordedDevice(device["addr"], device["memory_mib"]) for device in devices])


def gres_lines(record: Record, node: str, paths: Paths) -> list[str]:
    """The lines of gres.conf: at least one for each GPU, because Slurm prefers devices of one line."""
    files, lines, first = paths.under(f"{_DIRECTORY}/"), [], 0
    for gpu, (_, some) in enumerate(groupby(record.devices, lambda device: device.gpu)):
        number = len(list(some))
        if record.shards:
            file = f"File={files}gpu{gpu}"
            lines += [f"NodeName={node} Name=gpu {file}", f"NodeName={node} Name=shard Count={number} {file}"]
        else:
            numbers = f"{first}" if number == 1 else f"[{first}-{first + number - 1}]"
            lines.append(f"NodeName={node} Name=gpu Type=mps File={files}mps{numbers}")
        first += number
    return lines


def node_lines(record: Record, node: str) -> list[str]:
    """The lines of slurm.conf; the node's line has to be merged with the existing one."""
    number = len(record.devices)
    if record.shards:
        gres = f"gpu:{len(record.entries)},shard:{number}"
        return ["GresTypes=gpu,shard", f"NodeName={node} Gres={gres}"]
    return ["GresTypes=gpu", f"NodeName={node} Gres=gpu:mps:{number}"]


def install(record: Record, paths: Paths) -> None:
    """Create the device nodes, now and at each boot, and record the devices; raises HostError."""
    names = [
        f"{_DIRECTORY}/{'gpu' if record.shards else 'mps'}{index}" for index in range(len(record.entries))
    ]
    lines = [f"d {_DIRECTORY} 0755 root root -"]
    lines += [f"c {name} 0600 root root - {_MAJOR}:{minor}" for minor, name in enumerate(names)]
    heading = "# Written by yunion-mps slurm gres-conf: gres.conf names these nodes. Nothing opens them.\n"
    try:
        os.makedirs(paths.under(_DIRECTORY), mode=0o755, exist_ok=True)
        for minor, name in enumerate(names):
            _create_node(paths.under(name), minor)
        write_atomically(paths.slurm_tmpfiles, heading + "".join(f"{line}\n" for line in lines))
        write_atomically(paths.slurm_devices, f"{json.dumps(record._asdict())}\n")
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


def read_record(paths: Paths) -> Record | None:
    """The record of this node; None if it has none. Raises HostError."""
    try:
        with open(paths.slurm_devices, encoding="utf-8") as file:
            found = json.load(file)
        devices = [RecordedDevice(str(addr), int(memory_mib)) for addr, memory_mib in found["devices"]]
        return Record(bool(found["shards"]), devices)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{paths.slurm_devices}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HostError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED) from None
