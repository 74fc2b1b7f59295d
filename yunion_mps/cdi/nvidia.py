"""NVIDIA's own CDI specification, which its toolkit makes: the driver's libraries and hooks, by GPU."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from yunion_mps.cdi.spec import VERSION, Nvidia
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths

#: What nvidia-ctk and its service call the file; a file in /run counts before one in /etc, as for engines.
_NAMES = ("nvidia.yaml", "nvidia.json", "nvidia.yml")
_KIND = "nvidia.com/gpu"
#: That of a host with 64 GPUs has some 200 kB.
_MOST_BYTES = 8 << 20

#: What each entry of a part has to say; for one that does not, engines refuse a whole file: all our devices.
_ENTRIES = {
    "env": (),
    "mounts": ("hostPath", "containerPath"),
    "hooks": ("hookName", "path"),
    "deviceNodes": ("path",),
}
#: What an entry may have as a list, of texts alone.
_LISTS = ("options", "args", "env")
#: Parts of later versions of the format, as they come.
_LATER = ("additionalGids", "intelRdt", "netDevices")

#: What tells whether a file is still the same: path, device, inode, size and time of the last change in ns.
Mark = tuple[str, int, int, int, int]


def find(paths: Paths) -> Mark | None:
    """The file that counts, None where there is none. Takes microseconds."""
    for directory in (paths.cdi_directory, paths.under("/etc/cdi")):
        for name in _NAMES:
            path = os.path.join(directory, name)
            try:
                about = os.stat(path)
            except OSError:
                continue
            return (path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
    return None


def read(path: str, gpus: Iterable[Gpu]) -> Nvidia:
    """What the file says of the GPUs; raises OSError, and ValueError with the reason why it is of no use.

    Takes half a second where YAML has no C part, and hundreds of lines are to be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no file")  # reading from a pipe would wait for good
    with open(path, "rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return parse(_loaded(text, path), gpus)


def parse(found: Any, gpus: Iterable[Gpu]) -> Nvidia:
    """What a specification of NVIDIA's says of the GPUs; raises ValueError with the reason."""
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise ValueError(f"it is not of the kind {_KIND}")
    devices = {
        str(device["name"]): _edits(device.get("containerEdits"))
        for device in _list(found.get("devices"))
        if isinstance(device, dict) and "name" in device
    }
    by_gpu = {gpu.uuid: edits for gpu in gpus if gpu.uuid and (edits := _of(gpu, devices)) is not None}
    return Nvidia(_version(found.get("cdiVersion")), _edits(found.get("containerEdits")), by_gpu)


def _of(gpu: Gpu, devices: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The GPU's edits: under its UUID, else the device that has its node and no other GPU's."""
    if gpu.uuid and gpu.uuid in devices:
        return devices[gpu.uuid]
    node = f"/dev/nvidia{gpu.minor}"
    for edits in devices.values():
        nodes = [one["path"] for one in edits.get("deviceNodes", ())]
        if [one for one in nodes if one.startswith("/dev/nvidia") and one[11:].isdigit()] == [node]:
            return edits
    return None


def _edits(found: Any) -> Mapping[str, Any]:
    """Edits as the format has them, without parts that it does not know; raises ValueError."""
    edits = {} if found is None else found
    if not isinstance(edits, dict) or not all(_is_part(name, edits.get(name)) for name in _ENTRIES):
        raise ValueError("its containerEdits cannot be understood")
    known = {name: edits[name] for name in (*_ENTRIES, *_LATER) if edits.get(name)}
    try:
        json.dumps(known)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("its containerEdits are no JSON") from None
    return known


def _is_part(name: str, found: Any) -> bool:
    entries = found or []
    if name == "env":
        return _are_texts(entries)
    return isinstance(entries, list) and all(_is_entry(one, _ENTRIES[name]) for one in entries)


def _is_entry(found: Any, needed: Iterable[str]) -> bool:
    if not isinstance(found, dict):
        return False
    return _are_texts([found.get(name) or None for name in needed]) and all(
        _are_texts(found[name] or []) for name in _LISTS if name in found
    )


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _version(found: Any) -> tuple[int, ...]:
    parts = str(found).split(".")
    return (
        tuple(map(int, parts))
        if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts)
        else VERSION
    )


def _loaded(text: bytes, path: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON") from None
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, loader)  # noqa: S506 - both loaders are safe
    except (yaml.YAMLError, RecursionError):
        raise ValueError("it is no YAML") from None
