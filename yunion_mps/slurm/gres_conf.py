"""What each index of gres.conf stands for: the lines of the configuration, and the record of the devices.

An index is a device or, with gres/shard, a GPU; a device's type says how it is shared. `gres-conf
--install` records the devices, so that the hooks notice if the host's devices no longer match: an index never
stands for a different device, or type, than when gres.conf was written.

Source: gres.conf(5), File, Type, Count and Name; slurm.conf(5), GresTypes and Gres.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.addresses import gpu_of, physical_gpu
from yunion_mps.core.enums import MPS, PENDING, SLURM, TIME_SLICING, UNAVAILABLE
from yunion_mps.core.errors import HostError, NotAllowedError, NotFoundError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import (
    LAYOUT_NEEDS,
    LAYOUT_WAITS,
    LEASES_PENDING,
    SLURM_DEVICES_CHANGED,
    Reason,
    hint_of,
)
from yunion_mps.host.files import open_regular, write_atomically

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, GpuJson, StatusProblemJson

#: A major number for local use (Documentation/admin-guide/devices.txt of the kernel): no driver has it, and
#: Slurm only looks at the type of the nodes.
_MAJOR = 60
_DIRECTORY = "/dev/yunion-mps"
#: The types of shares in gres.conf, by the way of sharing.
_TYPES = {MPS: "mps", TIME_SLICING: "time-sliced"}
#: Codes of GPUs that will be divided differently, or have other MIG instances.
_CHANGES = {LEASES_PENDING, *LAYOUT_WAITS, *LAYOUT_NEEDS}


class RecordedDevice(NamedTuple):
    """A device as it was when gres.conf was written."""

    addr: str
    #: None if it is unknown.
    memory_mib: int | None
    #: `mps` or `time-sliced`; the profile of a whole MIG instance.
    type: str

    @classmethod
    def of(cls, device: DeviceJson) -> RecordedDevice:
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

    def current_address(self, devices: Sequence[DeviceJson]) -> str:
        """Return its address; raises NotFoundError unless the device is as it was."""
        change = "no longer exists"
        for device in devices:
            if device["addr"] == self.addr:
                current = self.of(device)
                if current == self:
                    return self.addr
                change = f"was {self.budget}, but is now {current.budget}"
                break
        raise _changed(f"gres.conf: device {self.addr} {change}")


class Record(NamedTuple):
    """The devices of gres.conf in order."""

    #: Whether each index stands for all devices of a GPU.
    shards: bool
    devices: Sequence[RecordedDevice]

    @property
    def numbers(self) -> dict[str, int]:
        """How many indices each type has, in order.

        Source: gres.conf(5), Type: Slurm counts type by type, in the order of slurm.conf.
        """
        return Counter(devices[0].type for devices in self.entries)

    @property
    def is_mixed(self) -> bool:
        return len(self.numbers) > 1

    @property
    def entries(self) -> list[list[RecordedDevice]]:
        """The devices of each index."""
        if not self.shards:
            return [[device] for device in self.devices]
        return _runs(self.devices, lambda device: device.gpu)

    def allows_steps(self, indices: Iterable[int]) -> bool:
        """Return whether a step can have one of these indices alone; with `shards`, not if one is a share."""
        if not self.shards:
            return True
        entries = self.entries
        return not any(entries[index][0].is_share for index in indices)

    def require_numbers(self, numbers: Mapping[str, int]) -> None:
        """Raise NotFoundError unless slurm.conf has these numbers of each type in the recorded order."""
        if list(numbers.items()) != list(self.numbers.items()):
            needed = _gres(self.numbers)
            raise _changed(f"slurm.conf: the node has {_gres(numbers)}, but needs {needed} in this order")

    def addresses(self, indices: Sequence[int], devices: Sequence[DeviceJson]) -> dict[int, list[str]]:
        """Return the addresses of the devices of each index.

        Raises NotFoundError unless they are as recorded.
        """
        entries = self.entries
        addresses: dict[int, list[str]] = {}
        for index in indices:
            if index >= len(entries):
                raise _changed(f"gres.conf: index {index} is not among the {len(entries)} recorded ones")
        for index in indices:
            addresses[index] = [recorded.current_address(devices) for recorded in entries[index]]
        return addresses


def _changed(message: str) -> NotFoundError:
    return NotFoundError(message, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED)


def _runs(
    devices: Iterable[RecordedDevice], key: Callable[[RecordedDevice], object]
) -> list[list[RecordedDevice]]:
    """Return the devices in runs of consecutive ones with the same key."""
    return [list(run) for _, run in groupby(devices, key)]


def gpus_for_slurm(gpus: Sequence[GpuJson]) -> list[GpuJson]:
    """Return the GPUs that are reserved for Slurm or, if none is, those that are not reserved."""
    reserved = [gpu for gpu in gpus if gpu["reserved_for"] == SLURM]
    return reserved or [gpu for gpu in gpus if gpu["reserved_for"] is None]


def pending_change(addresses: Iterable[str], problems: Iterable[StatusProblemJson]) -> Reason | None:
    """Return why these GPUs, or those of these devices, will get other devices; None if none will."""
    gpus: set[str] = set()
    for addr in addresses:
        gpus.update((addr, gpu_of(addr), physical_gpu(addr)))
    for problem in problems:
        if problem["gpu"] in gpus and problem["code"] in _CHANGES:
            return Reason(problem["text"], problem["code"])
    return None


def why_no_jobs(
    addresses: Collection[str], devices: Iterable[DeviceJson], problems: Iterable[StatusProblemJson]
) -> Reason | None:
    """Return why the node can run no jobs with the devices of gres.conf now; None if it can.

    addresses: the devices of gres.conf
    devices: the host's devices
    problems: what the daemon says is wrong or pending
    """
    for device in devices:
        if device["addr"] in addresses and _is_refused(device):
            return Reason(f"device {device['addr']}: {device['reason']}", device["reason_code"])
    # If a problem names devices, those that no job can have were found above.
    return pending_change(addresses, [problem for problem in problems if not problem["devices"]])


def _is_refused(device: DeviceJson) -> bool:
    """Return whether no job can have the device.

    Its GPU is unavailable, or changes its type after its leases.
    """
    return device["state"] == UNAVAILABLE or (device["state"] == PENDING and not device["lease"])


def record_of(devices: Sequence[DeviceJson], *, shards: bool) -> Record:
    """Return the record of the devices, type by type.

    A job cannot choose the type of its shards: Slurm 24.11 does not start a node with types of shards.

    Raises HostError if not all shards would be shared in the same way.
    """
    recorded = [RecordedDevice.of(device) for device in devices]
    types = list(dict.fromkeys(device.type for device in recorded))
    recorded.sort(key=lambda device: types.index(device.type))
    ways = [way for way in types if way in _TYPES.values()]
    if shards and len(ways) != 1:
        listed = " and ".join(ways) or "none"
        message = f"--shards: the devices of all shared GPUs must be of one type, but there are {listed}"
        raise HostError(message, f"omit --shards, so that jobs name the type: --gres=gpu:{types[0]}:1")
    return Record(shards, recorded)


def gres_lines(record: Record, node: str, paths: Paths) -> list[str]:
    """Return the lines of gres.conf: at least one for each GPU, because Slurm prefers devices of one line."""
    beginning = f"NodeName={node} Name="
    files = paths.under(f"{_DIRECTORY}/")
    lines: list[str] = []
    if record.shards:
        for index, devices in enumerate(record.entries):
            file = f"File={files}gpu{index}"
            lines.append(f"{beginning}gpu Type={devices[0].type} {file}")
            if devices[0].is_share:
                lines.append(f"{beginning}shard Count={len(devices)} {file}")
        return lines
    first = 0
    for devices in _runs(record.devices, lambda device: (device.addr.rpartition("-")[0], device.type)):
        type_ = devices[0].type
        last = first + len(devices) - 1
        numbers = f"{first}" if first == last else f"[{first}-{last}]"
        lines.append(f"{beginning}gpu Type={type_} File={files}{type_}{numbers}")
        first = last + 1
    return lines


def node_lines(record: Record, node: str) -> list[str]:
    """Return the lines of slurm.conf; the node's line has to be merged with the existing one."""
    gres = _gres(record.numbers)
    if not record.shards:
        return ["GresTypes=gpu", f"NodeName={node} Gres={gres}"]
    shards = sum(device.is_share for device in record.devices)
    return ["GresTypes=gpu,shard", f"NodeName={node} Gres={gres},shard:{shards}"]


def _gres(numbers: Mapping[str, int]) -> str:
    """Return the numbers as slurm.conf has them: `gpu:mps:4,gpu:time-sliced:2`."""
    return ",".join(f"gpu:{type_}:{number}" for type_, number in numbers.items()) or "no gpu"


def install(record: Record, paths: Paths) -> None:
    """Create the device nodes, now and at each boot, and record the devices.

    Raises NotAllowedError for lack of rights, and HostError if a file cannot be written or is another one.

    Source: tmpfiles.d(5), types d and c.
    """
    tmpfiles = "# Written by yunion-mps slurm gres-conf: gres.conf names these nodes. Nothing opens them.\n"
    tmpfiles += f"d {_DIRECTORY} 0755 root root -\n"
    names: list[str] = []
    for minor, devices in enumerate(record.entries):
        kind = "gpu" if record.shards else devices[0].type
        names.append(f"{_DIRECTORY}/{kind}{minor}")
        tmpfiles += f"c {names[minor]} 0600 root root - {_MAJOR}:{minor}\n"
    try:
        os.makedirs(paths.under(_DIRECTORY), mode=0o755, exist_ok=True)
        for minor, name in enumerate(names):
            _create_node(paths.under(name), minor)
        write_atomically(paths.slurm_tmpfiles, tmpfiles)
        write_atomically(paths.slurm_devices, _as_json(record))
    except PermissionError as error:
        message = f"{error.filename}: cannot be created: {error.strerror}"
        raise NotAllowedError(message, "retry as root") from None
    except OSError as error:
        message = f"{error.filename}: cannot be created: {error.strerror}"
        raise HostError(message, "check that its directory exists and is writable") from None


def _as_json(record: Record) -> str:
    """Return the record as `read_record` reads it."""
    devices = [[device.addr, device.memory_mib, device.type] for device in record.devices]
    return json.dumps({"shards": record.shards, "devices": devices}) + "\n"


def _create_node(path: str, minor: int) -> None:
    device = os.makedev(_MAJOR, minor)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, device)
    except FileExistsError:
        existing = os.lstat(path)
        if not stat.S_ISCHR(existing.st_mode) or existing.st_rdev != device:
            message = f"{path}: exists, but is not the character device {_MAJOR}:{minor}"
            raise HostError(message, f"remove it: rm {path}") from None


def read_record(paths: Paths) -> Record | None:
    """Return the record of this node; None if it has none. Raises HostError if it cannot be read."""
    try:
        with open_regular(paths.slurm_devices) as file:
            value = json.load(file)
        devices: list[RecordedDevice] = []
        for addr, memory_mib, type_ in value["devices"]:
            known_mib = None if memory_mib is None else int(memory_mib)
            devices.append(RecordedDevice(str(addr), known_mib, str(type_)))
        return Record(bool(value["shards"]), devices)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"{paths.slurm_devices}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HostError(message, hint_of(SLURM_DEVICES_CHANGED), SLURM_DEVICES_CHANGED) from None
