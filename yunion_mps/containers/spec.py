"""The CDI specification of devices and leases, with what the driver and NVIDIA's own specification offer.

Version 0.5.0 of the format is the first whose names may begin with a digit, as our addresses do; every podman
since 4.1 and docker since 25 reads it. What NVIDIA's own specification adds may need a later one.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from yunion_mps.containers import MISSING_NODES_ARGUMENT, UNSERVED_ARGUMENT, lease_variables
from yunion_mps.containers.nodes import DeviceNode, MissingNodes
from yunion_mps.enums import NOT_SHARED
from yunion_mps.host.files import FileVersion, version_of
from yunion_mps.models import ALL, CDI_KIND, LEASE_VARIABLE, Device, DomainPlan, Gpu, Lease
from yunion_mps.paths import Paths
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
        """Both edits; of two that contradict each other, the later one counts."""
        return Edits(
            self.env + others.env,
            self.mounts + others.mounts,
            self.hooks + others.hooks,
            self.device_nodes + others.device_nodes,
            self.additional_gids + others.additional_gids,
        )

    def with_nodes(self, nodes: Iterable[DeviceNode]) -> Edits:
        """Add the nodes that are missing."""
        present = {node["path"] for node in self.device_nodes}
        added: list[Entry] = []
        for node in nodes:
            if node.path not in present:
                other = {} if node.host_path == node.path else {"hostPath": node.host_path}
                added.append({"path": node.path, **other})
        return self._replace(device_nodes=(*self.device_nodes, *added))

    def as_json(self) -> dict[str, object]:
        parts = {
            "env": self.env,
            "mounts": self.mounts,
            "hooks": self.hooks,
            "deviceNodes": self.device_nodes,
            "additionalGids": self.additional_gids,
        }
        return {name: list(part) for name, part in parts.items() if part}


class Nvidia(NamedTuple):
    """The edits of NVIDIA's own specification: common edits, and each GPU's edits by its UUID."""

    #: The first version of the format that has all its parts, whatever version it declares.
    version: tuple[int, ...] = VERSION
    common: Edits = Edits()
    by_gpu: Mapping[str, Edits] = {}


class HostFiles(NamedTuple):
    """The files and programs of the host that a container needs.

    `nodes` are the driver's nodes, `gpu_nodes` each GPU's nodes by its UUID, and `missing` has the MIG
    instances without theirs. `hook` is the program to call with `hook_environment`. `nvidia` is None if
    NVIDIA's toolkit has made no specification.
    """

    nodes: Sequence[DeviceNode] = ()
    gpu_nodes: Mapping[str, Sequence[DeviceNode]] = {}
    missing: Mapping[str, MissingNodes] = {}
    hook: str = "/usr/bin/yunion-mps"
    hook_environment: Mapping[str, str] = {}
    nvidia: Nvidia | None = None


def devices_spec(
    devices: Collection[Device],
    domains: Collection[DomainPlan],
    host: HostFiles,
    parked: Collection[DomainPlan] = (),
) -> dict[str, object] | None:
    """The devices of the plan, each by its address and by its id; None if there are none.

    Unserved devices are included, because the hook can refuse them with the reason; an engine could only say
    that there is no such device. Devices of `parked` domains, which have no control daemon while their GPUs
    are lost, have only the environment and the hook, because an engine would report a missing pipe directory.
    """
    plans = {domain.name: domain for domain in domains}
    lost = {domain.name: domain for domain in parked}
    entries = []
    for device in devices:
        if not device.domain or device.domain in plans:
            environment = client_environment([device], plans.get(device.domain))
            edits = _device_edits(environment, device.addr, host)
        elif device.domain in lost:
            edits = _base_edits(
                client_environment([device], lost[device.domain]), host, device.addr, UNSERVED_ARGUMENT
            )
        else:
            continue
        entries += [_named(name, edits) for name in (device.addr, device.id)]
    if plans and {device.domain for device in devices} == plans.keys() and len(plans) == 1:
        environment = whole_environment(list(devices), next(iter(domains)))
        entries.append(_named(ALL, _device_edits(environment, ALL, host)))
    return _spec(entries, host) if entries else None


def lease_spec(lease: Lease, planned: Collection[str], host: HostFiles) -> dict[str, object]:
    """A lease as a device with its name; a device created for it also has its address and id as names.

    `planned` are the ids of the devices that exist without a lease.
    """
    shares = [
        (device.gpu_uuid, device.memory_limit_mib, device.thread_percentage) for device in lease.devices
    ]
    is_shared = sharing_of(lease.devices) != NOT_SHARED
    environment = lease_variables(lease.environment, shares, is_shared=is_shared)
    edits = _device_edits(environment, lease.id, host)
    names = [lease.cdi_name]
    if len(lease.devices) == 1 and lease.devices[0].id not in planned:
        names += [lease.devices[0].addr, lease.devices[0].id]
    return _spec([_named(name, edits) for name in names], host)


def _named(name: str, edits: Edits) -> Entry:
    return {"name": name, "containerEdits": edits.as_json()}


def _device_edits(environment: Mapping[str, str], hook_argument: str, host: HostFiles) -> Edits:
    """The edits of one device; `hook_argument` is the argument of the hook."""
    pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY")  # none if its GPU is shared without MPS
    mounts = (_mount(pipe_directory), _mount(SHARED_MEMORY)) if pipe_directory else ()
    gpus = environment["CUDA_VISIBLE_DEVICES"].split(",")
    by_gpu = host.nvidia.by_gpu if host.nvidia else {}
    missing = next((host.missing[gpu] for gpu in gpus if gpu in host.missing and gpu not in by_gpu), None)
    refusal = (MISSING_NODES_ARGUMENT, *missing) if missing else ()
    edits = _base_edits(environment, host, hook_argument, *refusal)._replace(mounts=mounts)
    for theirs in [by_gpu[gpu] for gpu in gpus if gpu in by_gpu]:
        edits = theirs.followed_by(edits)
    return edits.with_nodes(node for gpu in gpus for node in host.gpu_nodes.get(gpu, ()))


def _base_edits(environment: Mapping[str, str], host: HostFiles, *hook_argument: str) -> Edits:
    """The environment and the hook, without files that may be missing."""
    hook: dict[str, object] = {
        "hookName": "createRuntime",
        "path": host.hook,
        "args": [host.hook.rpartition("/")[2], HOOK_COMMAND, *hook_argument],
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
    """The path and version of NVIDIA's file that has precedence, None if there is none; in microseconds."""
    for directory in (paths.cdi_directory, paths.under("/etc/cdi")):
        for name in _NAMES:
            path = os.path.join(directory, name)
            if version := version_of(path):
                return path, version
    return None


def read_nvidia_spec(path: str, gpus: Iterable[Gpu]) -> Nvidia:
    """Read the GPUs' edits from the file; raises OSError, and ValueError with the reason if it is unusable.

    Takes half a second if YAML has no C part and the file has hundreds of lines.
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
    if gpu.is_instance:
        return None  # another instance has the same node
    node = f"/dev/nvidia{gpu.minor}"
    for edits in devices.values():
        nodes = [str(entry["path"]) for entry in edits.device_nodes]
        if [path for path in nodes if path.startswith("/dev/nvidia") and path[11:].isdigit()] == [node]:
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
    return ValueError("containerEdits cannot be parsed")


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
            raise ValueError(f"containerEdits are larger than {_MAX_BYTES >> 20} MiB")


def _load(text: bytes, path: str) -> Any:
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
