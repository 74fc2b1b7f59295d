"""The CDI specification of devices and leases, with what the driver and NVIDIA's own specification offer.

Version 0.5.0 of the format is the first whose names may begin with a digit, as our addresses do; every podman
since 4.1 and docker since 25 reads it. What NVIDIA's own specification adds may need a later one.

Source: Container Device Interface, SPEC.md, sections "Released versions" and "CDI JSON Specification".
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import yaml

from yunion_mps.containers import MISSING_NODES_ARGUMENT, UNSERVED_ARGUMENT, Share, lease_variables
from yunion_mps.containers.nodes import DeviceNode, MissingNodes
from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.models import ALL, CDI_KIND, LEASE_VARIABLE, Device, DomainPlan, Gpu, Lease
from yunion_mps.core.paths import Paths
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.planning.environment import client_environment, sharing_of, whole_environment

#: A mount, a hook or a device node, as the format has it.
Entry = Mapping[str, object]

VERSION = (0, 5, 0)
HOOK_COMMAND = "cdi-hook"
#: How long the hook may delay the start of a container, in s; its own timeouts are shorter.
_HOOK_TIMEOUT_S = 30
#: MPS clients and servers share memory here, but a container has its own by default.
SHARED_MEMORY = "/dev/shm"

#: The file names that nvidia-ctk and its service use; /run has precedence over /etc, as for engines.
_NAMES = ("nvidia.yaml", "nvidia.json", "nvidia.yml")
_KIND = "nvidia.com/gpu"
#: On a host with 64 GPUs it has about 200 kB.
_MAX_BYTES = 8 << 20

#: The version of the format that has groups; all else is in ours.
_WITH_GROUPS = (0, 7, 0)

#: The reader of each field of an entry.
_Fields = Mapping[str, Callable[[Any], object]]


class Edits(NamedTuple):
    """The `containerEdits` of a device, or of all."""

    env: tuple[str, ...] = ()
    mounts: tuple[Entry, ...] = ()
    hooks: tuple[Entry, ...] = ()
    device_nodes: tuple[Entry, ...] = ()
    additional_gids: tuple[int, ...] = ()

    def followed_by(self, others: Edits) -> Edits:
        """Return both edits; of two that contradict each other, the later one counts."""
        return Edits(
            env=self.env + others.env,
            mounts=self.mounts + others.mounts,
            hooks=self.hooks + others.hooks,
            device_nodes=self.device_nodes + others.device_nodes,
            additional_gids=self.additional_gids + others.additional_gids,
        )

    def with_nodes(self, nodes: Iterable[DeviceNode]) -> Edits:
        """Return the edits with those of these nodes added that they lack."""
        present = {node["path"] for node in self.device_nodes}
        device_nodes = list(self.device_nodes)
        for node in nodes:
            if node.path not in present:
                entry = {"path": node.path}
                if node.host_path != node.path:
                    entry["hostPath"] = node.host_path
                device_nodes.append(entry)
        return self._replace(device_nodes=tuple(device_nodes))

    def as_json(self) -> dict[str, object]:
        """Return the edits as the format has them, without empty parts."""
        parts = {
            "env": self.env,
            "mounts": self.mounts,
            "hooks": self.hooks,
            "deviceNodes": self.device_nodes,
            "additionalGids": self.additional_gids,
        }
        return {name: list(part) for name, part in parts.items() if part}


class Nvidia(NamedTuple):
    """The edits of NVIDIA's own specification."""

    #: The first version of the format that has all its parts, whatever version it declares.
    version: tuple[int, ...] = VERSION
    #: The edits of all containers with one of its devices.
    common: Edits = Edits()
    #: Each GPU's edits, by its UUID.
    by_gpu: Mapping[str, Edits] = {}


class HostFiles(NamedTuple):
    """The files and programs of the host that a container needs."""

    #: The driver's nodes.
    nodes: Sequence[DeviceNode] = ()
    #: Each GPU's nodes, by its UUID.
    gpu_nodes: Mapping[str, Sequence[DeviceNode]] = {}
    #: The MIG instances without their nodes, by UUID.
    missing: Mapping[str, MissingNodes] = {}
    #: The program that engines call, and the environment in which they do.
    hook: str = "/usr/bin/yunion-mps"
    hook_environment: Mapping[str, str] = {}
    #: None if NVIDIA's toolkit has made no specification.
    nvidia: Nvidia | None = None


def devices_spec(
    devices: Collection[Device],
    domains: Collection[DomainPlan],
    host: HostFiles,
    parked: Collection[DomainPlan] = (),
) -> dict[str, object] | None:
    """Return the devices of the plan, each by its address and by its id; None if there are none.

    Unserved devices are included, because the hook can refuse them with the reason; an engine could only say
    that there is no such device. Devices of `parked` domains, which have no control daemon while their GPUs
    are lost, have only the environment and the hook, because an engine would report a missing pipe directory.
    """
    plans = {domain.name: domain for domain in domains}
    lost = {domain.name: domain for domain in parked}
    entries: list[Entry] = []
    for device in devices:
        if not device.domain or device.domain in plans:
            environment = client_environment([device], plans.get(device.domain))
            edits = _device_edits(environment, device.addr, host)
        elif device.domain in lost:
            environment = client_environment([device], lost[device.domain])
            edits = _base_edits(environment, host, (device.addr, UNSERVED_ARGUMENT))
        else:
            continue
        entries.append(_named(device.addr, edits))
        entries.append(_named(device.id, edits))
    # A process can have all devices only if one control daemon serves them.
    if len(plans) == 1 and {device.domain for device in devices} == plans.keys():
        environment = whole_environment(list(devices), next(iter(domains)))
        entries.append(_named(ALL, _device_edits(environment, ALL, host)))
    return _spec(entries, host) if entries else None


def lease_spec(lease: Lease, planned: Collection[str], host: HostFiles) -> dict[str, object]:
    """Return a lease as a device with its name; a device created for it also has its address and id as names.

    `planned` are the ids of the devices that exist without a lease.
    """
    shares = [_share_of(device) for device in lease.devices]
    is_shared = sharing_of(lease.devices) != NOT_SHARED
    environment = lease_variables(lease.environment, shares, is_shared=is_shared)
    edits = _device_edits(environment, lease.id, host)
    names = [lease.cdi_name]
    if len(lease.devices) == 1 and lease.devices[0].id not in planned:
        names += [lease.devices[0].addr, lease.devices[0].id]
    return _spec([_named(name, edits) for name in names], host)


def _share_of(device: Device) -> Share:
    return device.gpu_uuid, device.memory_limit_mib, device.thread_percentage


def _named(name: str, edits: Edits) -> Entry:
    return {"name": name, "containerEdits": edits.as_json()}


def _device_edits(environment: Mapping[str, str], hook_argument: str, host: HostFiles) -> Edits:
    """Return the edits of one device, or of a lease; `hook_argument` names it for the hook."""
    pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY")  # none if its GPU is shared without MPS
    mounts = (_mount(pipe_directory), _mount(SHARED_MEMORY)) if pipe_directory else ()
    gpus = environment["CUDA_VISIBLE_DEVICES"].split(",")
    by_gpu = host.nvidia.by_gpu if host.nvidia else {}
    arguments = [hook_argument]
    for gpu in gpus:
        if gpu in host.missing and gpu not in by_gpu:  # NVIDIA's specification has its nodes
            arguments += [MISSING_NODES_ARGUMENT, host.missing[gpu].message, host.missing[gpu].hint]
            break
    edits = _base_edits(environment, host, arguments)._replace(mounts=mounts)
    nodes: list[DeviceNode] = []
    for gpu in gpus:
        if gpu in by_gpu:
            edits = by_gpu[gpu].followed_by(edits)
        nodes += host.gpu_nodes.get(gpu, ())
    return edits.with_nodes(nodes)


def _base_edits(environment: Mapping[str, str], host: HostFiles, hook_arguments: Sequence[str]) -> Edits:
    """Return the environment and the hook, without files that may be missing.

    Source: Container Device Interface, SPEC.md, "hooks"; OCI Runtime Specification, config.json, section
    "POSIX-platform Hooks".
    """
    hook: dict[str, object] = {
        "hookName": "createRuntime",
        "path": host.hook,
        "args": [host.hook.rpartition("/")[2], HOOK_COMMAND, *hook_arguments],
        "timeout": _HOOK_TIMEOUT_S,
    }
    if host.hook_environment:
        hook["env"] = [f"{name}={value}" for name, value in host.hook_environment.items()]
    # An empty id for a device without a lease: an engine may hand on the environment of a job that has one.
    variables = {LEASE_VARIABLE: "", **environment}
    return Edits(env=tuple(f"{name}={value}" for name, value in variables.items()), hooks=(hook,))


def _spec(devices: Sequence[Entry], host: HostFiles) -> dict[str, object]:
    nvidia = host.nvidia or Nvidia()
    common = nvidia.common.with_nodes(host.nodes)
    return {
        "cdiVersion": ".".join(map(str, nvidia.version)),
        "kind": CDI_KIND,
        "devices": devices,
        "containerEdits": common.as_json(),
    }


def _mount(path: str) -> Entry:
    return {"hostPath": path, "containerPath": path, "options": ["rw", "nosuid", "nodev", "noexec", "rbind"]}


# -- the specification of NVIDIA's toolkit


def find_nvidia_spec(paths: Paths) -> tuple[str, FileVersion] | None:
    """Return the path and version of NVIDIA's file that has precedence, None if there is none.

    Takes microseconds.
    """
    for directory in (paths.cdi_directory, paths.under("/etc/cdi")):
        for name in _NAMES:
            path = os.path.join(directory, name)
            version = version_of(path)
            if version:
                return path, version
    return None


def read_nvidia_spec(path: str, gpus: Iterable[Gpu]) -> Nvidia:
    """Read the GPUs' edits from the file.

    Takes half a second if YAML has no C part and the file has hundreds of lines.

    Raises OSError, and ValueError with the reason if the file cannot be used.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")  # reading from a pipe could block forever
    with open(path, "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
    return parse_nvidia_spec(_load(text, path), gpus)


def parse_nvidia_spec(spec: Any, gpus: Iterable[Gpu]) -> Nvidia:
    """Parse the GPUs' edits of NVIDIA's specification; raises ValueError with the reason."""
    if not isinstance(spec, dict) or spec.get("kind") != _KIND:
        raise ValueError(f"kind is not {_KIND}")
    devices: dict[str, Edits] = {}
    for device in _list(spec.get("devices")):
        if isinstance(device, dict) and "name" in device:
            devices[str(device["name"])] = _edits(device.get("containerEdits"))
    by_gpu: dict[str, Edits] = {}
    for gpu in gpus:
        edits = _of(gpu, devices)
        if gpu.uuid and edits is not None:
            by_gpu[gpu.uuid] = edits
    common = _edits(spec.get("containerEdits"))
    has_groups = bool(common.additional_gids) or any(edits.additional_gids for edits in by_gpu.values())
    return Nvidia(_WITH_GROUPS if has_groups else VERSION, common, by_gpu)


def _of(gpu: Gpu, devices: Mapping[str, Edits]) -> Edits | None:
    """Return the GPU's edits: of the device with its UUID, or otherwise of the one with only its node."""
    if gpu.uuid and gpu.uuid in devices:
        return devices[gpu.uuid]
    if gpu.is_instance:
        return None  # another instance has the same node
    node = f"/dev/nvidia{gpu.minor}"
    for edits in devices.values():
        paths = [str(entry["path"]) for entry in edits.device_nodes]
        if [path for path in paths if re.fullmatch(r"/dev/nvidia[0-9]+", path)] == [node]:
            return edits
    return None


def _edits(value: Any) -> Edits:
    """Return the edits, without unknown parts and fields; raises ValueError."""
    parts = {} if value is None else value
    if not isinstance(parts, dict):
        raise _not_understood()
    edits = Edits(
        env=tuple(_variables(parts.get("env"))),
        mounts=_entries(parts.get("mounts"), _MOUNT),
        hooks=_entries(parts.get("hooks"), _HOOK),
        device_nodes=_entries(parts.get("deviceNodes"), _DEVICE_NODE),
        additional_gids=tuple(_number(gid) for gid in _list(parts.get("additionalGids"))),
    )
    _refuse_too_large(edits)
    return edits


def _entries(value: Any, fields: _Fields) -> tuple[Entry, ...]:
    entries = []
    for entry in _list(value):
        if not isinstance(entry, dict):
            raise _not_understood()
        values: dict[str, object] = {}
        for name, parse in fields.items():
            if entry.get(name) is not None or parse in _NEEDED:
                values[name] = parse(entry.get(name))
        entries.append(values)
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
    return ValueError("containerEdits cannot be parsed")


def _texts(value: Any) -> list[str]:
    return [_text(text) for text in _list(value)]


def _variables(value: Any) -> list[str]:
    return [_text(text, "[^=]+=.*") for text in _list(value)]


_needed = partial(_text, pattern=".+")
_hook_name = partial(_text, pattern="prestart|create(Runtime|Container)|startContainer|poststart|poststop")
_node_type = partial(_text, pattern="[bcup]?")
_permissions = partial(_text, pattern="[rwm]*")
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
            raise ValueError(f"containerEdits are larger than {_MAX_BYTES >> 20} MiB")


def _load(text: bytes, path: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, loader)  # noqa: S506 - both loaders are safe
    except (yaml.YAMLError, RecursionError):
        raise ValueError("it is not YAML") from None
