"""The driver's files for containers: device nodes, and the CDI specification of NVIDIA's toolkit."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from yunion_mps.containers.spec import VERSION, DeviceNode, Edits, Entry, Nvidia
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths

_DRIVER_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

#: The file names that nvidia-ctk and its service use; /run has precedence over /etc, as for engines.
_NAMES = ("nvidia.yaml", "nvidia.json", "nvidia.yml")
_KIND = "nvidia.com/gpu"
#: On a host with 64 GPUs it has about 200 kB.
_MAX_BYTES = 8 << 20

#: The version of the format that has groups; all else is in ours.
_WITH_GROUPS = (0, 7, 0)

#: The reader of each field of an entry.
_Fields = Mapping[str, Callable[[Any], object]]


def driver_nodes(paths: Paths) -> tuple[DeviceNode, ...]:
    """The driver's nodes that exist; an engine refuses to start a container with a missing one."""
    return _existing(paths, _DRIVER_NODES)


def gpu_nodes(paths: Paths, gpus: Iterable[Gpu]) -> dict[str, tuple[DeviceNode, ...]]:
    """The nodes of each GPU (by UUID) that exist."""
    return {
        gpu.uuid: _existing(paths, (f"nvidia{gpu.minor}",))
        for gpu in gpus
        if gpu.uuid is not None and gpu.minor is not None
    }


def _existing(paths: Paths, names: Sequence[str]) -> tuple[DeviceNode, ...]:
    nodes = [DeviceNode(f"/dev/{name}", paths.under(f"/dev/{name}")) for name in names]
    return tuple(node for node in nodes if _is_device(node.host_path))


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def find(paths: Paths) -> tuple[str, FileVersion] | None:
    """The path and version of NVIDIA's file that has precedence, None if there is none; in microseconds."""
    for directory in (paths.cdi_directory, paths.under("/etc/cdi")):
        for name in _NAMES:
            path = os.path.join(directory, name)
            if version := version_of(path):
                return path, version
    return None


def read(path: str, gpus: Iterable[Gpu]) -> Nvidia:
    """Read the GPUs' edits from the file; raises OSError, and ValueError with the reason if it is unusable.

    Takes half a second if YAML has no C part and the file has hundreds of lines.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")  # reading from a pipe could block forever
    with open(path, "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
    return parse(_loaded(text, path), gpus)


def parse(spec: Any, gpus: Iterable[Gpu]) -> Nvidia:
    """Parse the GPUs' edits of NVIDIA's specification; raises ValueError with the reason."""
    if not isinstance(spec, dict) or spec.get("kind") != _KIND:
        raise ValueError(f"its kind is not {_KIND}")
    devices = {
        str(device["name"]): _edits(device.get("containerEdits"))
        for device in _list(spec.get("devices"))
        if isinstance(device, dict) and "name" in device
    }
    by_gpu = {gpu.uuid: edits for gpu in gpus if gpu.uuid and (edits := _of(gpu, devices)) is not None}
    common = _edits(spec.get("containerEdits"))
    has_groups = any(edits.additional_gids for edits in (common, *by_gpu.values()))
    return Nvidia(_WITH_GROUPS if has_groups else VERSION, common, by_gpu)


def _of(gpu: Gpu, devices: Mapping[str, Edits]) -> Edits | None:
    """The GPU's edits: of the device with its UUID, or otherwise of the one with only its node."""
    if gpu.uuid and gpu.uuid in devices:
        return devices[gpu.uuid]
    node = f"/dev/nvidia{gpu.minor}"
    for edits in devices.values():
        nodes = [str(one["path"]) for one in edits.device_nodes]
        if [one for one in nodes if one.startswith("/dev/nvidia") and one[11:].isdigit()] == [node]:
            return edits
    return None


def _edits(value: Any) -> Edits:
    """The edits, without unknown parts and fields; raises ValueError."""
    parts = {} if value is None else value
    if not isinstance(parts, dict):
        raise _not_understood()
    edits = Edits(
        tuple(_variables(parts.get("env"))),
        _entries(parts.get("mounts"), _MOUNT),
        _entries(parts.get("hooks"), _HOOK),
        _entries(parts.get("deviceNodes"), _DEVICE_NODE),
        tuple(_number(gid) for gid in _list(parts.get("additionalGids"))),
    )
    _refuse_too_large(edits)
    return edits


def _entries(value: Any, fields: _Fields) -> tuple[Entry, ...]:
    entries = []
    for entry in _list(value):
        if not isinstance(entry, dict):
            raise _not_understood()
        present = [name for name, read in fields.items() if entry.get(name) is not None or read in _NEEDED]
        entries.append({name: fields[name](entry.get(name)) for name in present})
    return tuple(entries)


def _text(value: Any, pattern: str = ".*") -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
        raise _not_understood()
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise _not_understood()
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) and value is not None:
        raise _not_understood()
    return value or []


def _not_understood() -> ValueError:
    return ValueError("its containerEdits cannot be parsed")


def _texts(value: Any) -> list[str]:
    return [_text(text) for text in _list(value)]


def _variables(value: Any) -> list[str]:
    return [_text(text, "[^=]+=.*") for text in _list(value)]


_needed = partial(_text, pattern=".+")
_hook_name = partial(_text, pattern="prestart|create(Runtime|Container)|startContainer|poststart|poststop")
_node_type, _permissions = partial(_text, pattern="[bcup]?"), partial(_text, pattern="[rwm]*")
#: Readers of required fields: they refuse a missing value.
_NEEDED = (_needed, _hook_name)
#: The fields of each part's entries (pkg/cdi/container-edits.go of the format's library); other
#: fields do not exist. Engines that cannot read a field refuse the whole file, and so all our devices.
_MOUNT: _Fields = {"hostPath": _needed, "containerPath": _needed, "type": _text, "options": _texts}
_HOOK: _Fields = {
    "hookName": _hook_name,
    "path": _needed,
    "args": _texts,
    "env": _variables,
    "timeout": _number,
}
_DEVICE_NODE: _Fields = {
    "path": _needed,
    "hostPath": _text,
    "type": _node_type,
    "permissions": _permissions,
    **dict.fromkeys(("major", "minor", "fileMode", "uid", "gid"), _number),
}


def _refuse_too_large(edits: Edits) -> None:
    """Raise ValueError if the edits are too large: a small YAML file can expand to fill all memory."""
    size = 0
    for piece in json.JSONEncoder().iterencode(edits):
        size += len(piece)
        if size > _MAX_BYTES:
            raise ValueError(f"its containerEdits are larger than {_MAX_BYTES >> 20} MiB")


def _loaded(text: bytes, path: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, loader)  # noqa: S506 - both loaders are safe
    except (yaml.YAMLError, RecursionError):
        raise ValueError("it is not YAML") from None
