"""What each index of gres.conf stands for: the lines of the configuration, and the record of the devices.

An index is a device or, with gres/shard, a GPU; a device's type says how it is shared. `gres-conf
--install` records the devices, so that the hooks notice if the host's devices no longer match: an index never
stands for a different device, or type, than when gres.conf was written.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.addresses import gpu_of, physical_gpu
from yunion_mps.enums import MPS, SLURM, TIME_SLICING
from yunion_mps.errors import HostError, NotAllowedError, NotFoundError
from yunion_mps.host.files import open_regular, write_atomically
from yunion_mps.paths import Paths
from yunion_mps.reasons import (
    LAYOUT_NEEDS,
    LAYOUT_WAITS,
    LEASES_PENDING,
    SLURM_DEVICES_CHANGED,
    Reason,
    hint_of,
)

if TYPE_CHECKING:
    from yunion_mps.answers import Device, Gpu, StatusProblem

#: A major number for local use (Documentation/admin-guide/devices.txt of the kernel): no driver has it, and
#: Slurm only looks at the type of the nodes.
_MAJOR = 60
_DIRECTORY = "/dev/yunion-mps"
#: The types of shares in gres.conf, by the way of sharing.
_TYPES = {MPS: "mps", TIME_SLICING: "time-sliced"}
#: Codes of GPUs that will be divided differently, or have other MIG instances.
_CHANGES = {LEASES_PENDING, *LAYOUT_WAITS, *LAYOUT_NEEDS}


class RecordedDevice(NamedTuple):
    """A device as it was when gres.conf was written.

    Its type is `mps` or `time-sliced`; for a whole MIG instance, it is the profile.
    """

    addr: str
    memory_mib: int | None
    type: str

    @classmethod
    def of(cls, device: Device) -> RecordedDevice:
        profile = (device["mig_profile"] or "").replace("+", ".")
        return cls(device["addr"], device["memory_mib"], _TYPES.get(device["sharing"], profile))

    @property
    def gpu(self) -> str:
        return gpu_of(self.addr)

    @property
    def budget(self) -> str:
        memory = "unknown memory" if self.memory_mib is None else f"{self.memory_mib} MiB"
        return f"{self.type} with {memory}"

    @property
    def is_share(self) -> bool:
        return self.type in _TYPES.values()

    def current_address(self, devices: Sequence[Device]) -> str:
        """Its address; raises NotFoundError unless the device is as it was."""
        now = next((self.of(device) for device in devices if device["addr"] == self.addr), None)
        if now == self:
            return self.addr
        change = f"was {self.budget}, but is now {now.budget}" if now else "no longer exists"
        what = f"gres.conf: device {self.addr} {change}"
        raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)


class Record(NamedTuple):
    """The devices of gres.conf in order. With `shards`, each index stands for all devices of a GPU."""

    shards: bool
    devices: Sequence[RecordedDevice]

    @property
    def numbers(self) -> dict[str, int]:
        """How many indices each type has, in order: Slurm counts type by type, as slurm.conf lists them."""
        return Counter(devices[0].type for devices in self.entries)

    @property
    def is_mixed(self) -> bool:
        return len(self.numbers) > 1

    @property
    def entries(self) -> list[list[RecordedDevice]]:
        """The devices of each index."""
        if not self.shards:
            return [[device] for device in self.devices]
        return [list(some) for _, some in groupby(self.devices, lambda device: device.gpu)]

    def allows_steps(self, indices: Iterable[int]) -> bool:
        """Whether a step can have a single one of these indices; with `shards`, not if one is a share."""
        return not self.shards or not any(self.entries[index][0].is_share for index in indices)

    def require_numbers(self, numbers: Mapping[str, int]) -> None:
        """Raise NotFoundError unless slurm.conf has these numbers of each type in the recorded order."""
        if [*numbers.items()] != [*self.numbers.items()]:
            what = f"slurm.conf: the node has {_gres(numbers)}, but needs {_gres(self.numbers)} in this order"
            raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)

    def addresses(self, indices: Sequence[int], devices: Sequence[Device]) -> dict[int, list[str]]:
        """The addresses of the devices of each index; raises NotFoundError unless they are as recorded."""
        entries = self.entries
        if missing := [index for index in indices if index >= len(entries)]:
            what = f"gres.conf: index {missing[0]} is not among the {len(entries)} recorded ones"
            raise NotFoundError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)
        return {index: [one.current_address(devices) for one in entries[index]] for index in indices}


def gpus_for_slurm(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that are reserved for Slurm or, if none is, those that are not reserved."""
    reserved = [gpu for gpu in gpus if gpu["reserved_for"] == SLURM]
    return reserved or [gpu for gpu in gpus if gpu["reserved_for"] is None]


def pending_change(addresses: Iterable[str], problems: Iterable[StatusProblem]) -> Reason | None:
    """Why these GPUs, or the GPUs of these devices, will get other devices; None if nothing is pending."""
    gpus = {gpu for addr in addresses for gpu in (addr, gpu_of(addr), physical_gpu(addr))}
    for problem in problems:
        if problem["gpu"] in gpus and problem["code"] in _CHANGES:
            return Reason(problem["text"], problem["code"])
    return None


def record_of(devices: Sequence[Device], *, shards: bool) -> Record:
    """Record the devices; raises HostError if not all shards would be shared in the same way.

    A job cannot choose the type of its shards: Slurm 24.11 does not start a node with types of shards.
    """
    found = [RecordedDevice.of(device) for device in devices]
    types = [*dict.fromkeys(device.type for device in found)]
    record = Record(shards, sorted(found, key=lambda device: types.index(device.type)))
    ways = [way for way in types if way in _TYPES.values()]
    if shards and len(ways) != 1:
        listed = " and ".join(ways) or "none"
        what = f"--shards: the devices of all shared GPUs must be of one type, but there are {listed}"
        raise HostError(what, f"omit --shards, so that jobs name the type: --gres=gpu:{types[0]}:1")
    return record


def gres_lines(record: Record, node: str, paths: Paths) -> list[str]:
    """The lines of gres.conf: at least one for each GPU, because Slurm prefers devices of one line."""
    beginning, files = f"NodeName={node} Name=", paths.under(f"{_DIRECTORY}/")
    if record.shards:
        lines = []
        for index, devices in enumerate(record.entries):
            file = f"File={files}gpu{index}"
            lines.append(f"{beginning}gpu Type={devices[0].type} {file}")
            if devices[0].is_share:
                lines.append(f"{beginning}shard Count={len(devices)} {file}")
        return lines
    lines, first = [], 0
    for (_, type_), some in groupby(record.devices, lambda one: (one.addr.rpartition("-")[0], one.type)):
        number = len(list(some))
        numbers = f"{first}" if number == 1 else f"[{first}-{first + number - 1}]"
        lines.append(f"{beginning}gpu Type={type_} File={files}{type_}{numbers}")
        first += number
    return lines


def node_lines(record: Record, node: str) -> list[str]:
    """The lines of slurm.conf; the node's line has to be merged with the existing one."""
    gres = _gres(record.numbers)
    if not record.shards:
        return ["GresTypes=gpu", f"NodeName={node} Gres={gres}"]
    shards = sum(device.is_share for device in record.devices)
    return ["GresTypes=gpu,shard", f"NodeName={node} Gres={gres},shard:{shards}"]


def _gres(numbers: Mapping[str, int]) -> str:
    return ",".join(f"gpu:{type_}:{number}" for type_, number in numbers.items()) or "no gpu"


def install(record: Record, paths: Paths) -> None:
    """Create the device nodes, now and at each boot, and record the devices; raises HostError."""
    kinds = ["gpu" if record.shards else devices[0].type for devices in record.entries]
    names = [f"{_DIRECTORY}/{kind}{index}" for index, kind in enumerate(kinds)]
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
        with open_regular(paths.slurm_devices) as file:
            found = json.load(file)
        devices = [
            RecordedDevice(str(addr), None if memory_mib is None else int(memory_mib), str(type_))
            for addr, memory_mib, type_ in found["devices"]
        ]
        return Record(bool(found["shards"]), devices)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{paths.slurm_devices}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HostError(what, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED) from None
