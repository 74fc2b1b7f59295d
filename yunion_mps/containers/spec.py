"""The CDI specification of devices and leases, created from values alone.

Version 0.5.0 of the format is the first whose names may begin with a digit, as our addresses do; every podman
since 4.1 and docker since 25 reads it. What NVIDIA's own specification adds may need a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.containers import UNSERVED_ARGUMENT
from yunion_mps.models import ALL, CDI_KIND, LEASE_VARIABLE, Device, DomainPlan, Lease
from yunion_mps.planning.environment import client_environment, whole_environment

#: A mount, a hook or a device node, as the format has it.
Entry = Mapping[str, object]

VERSION = (0, 5, 0)
HOOK_COMMAND = "cdi-hook"
#: How long the hook may delay the start of a container, in s; its own timeouts are shorter.
_HOOK_TIMEOUT_S = 30
#: MPS clients and servers share memory here, but a container has its own by default.
_SHARED_MEMORY = "/dev/shm"


class DeviceNode(NamedTuple):
    path: str
    host_path: str


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
        known = {node["path"] for node in self.device_nodes}
        added: list[Entry] = []
        for node in nodes:
            if node.path not in known:
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

    `nodes` are the driver's nodes, `gpu_nodes` each GPU's nodes by its UUID; `hook` is the program to call
    with `hook_environment`. `nvidia` is None if NVIDIA's toolkit has made no specification.
    """

    nodes: Sequence[DeviceNode] = ()
    gpu_nodes: Mapping[str, Sequence[DeviceNode]] = {}
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
        if device.domain in plans:
            edits = _edits(client_environment([device], plans[device.domain]), device.addr, host)
        elif device.domain in lost:
            edits = _base_edits(
                client_environment([device], lost[device.domain]), host, device.addr, UNSERVED_ARGUMENT
            )
        else:
            continue
        entries += [_named(name, edits) for name in (device.addr, device.id)]
    if plans and {device.domain for device in devices} == plans.keys() and len(plans) == 1:
        environment = whole_environment(list(devices), next(iter(domains)))
        entries.append(_named(ALL, _edits(environment, ALL, host)))
    return _spec(entries, host) if entries else None


def lease_spec(lease: Lease, planned: Collection[str], host: HostFiles) -> dict[str, object]:
    """A lease as a device, named by its id; a device created for it also has its address and id as names.

    `planned` are the ids of the devices that exist without a lease.
    """
    edits = _edits(lease.environment, lease.id, host)
    names = [lease.id]
    if len(lease.devices) == 1 and lease.devices[0].id not in planned:
        names += [lease.devices[0].addr, lease.devices[0].id]
    return _spec([_named(name, edits) for name in names], host)


def _named(name: str, edits: Edits) -> Entry:
    return {"name": name, "containerEdits": edits.as_json()}


def _edits(environment: Mapping[str, str], hook_argument: str, host: HostFiles) -> Edits:
    """The edits of one device; `hook_argument` is the argument of the hook."""
    mounts = (_mount(environment["CUDA_MPS_PIPE_DIRECTORY"]),)
    edits = _base_edits(environment, host, hook_argument)._replace(mounts=mounts)
    gpus = environment["CUDA_VISIBLE_DEVICES"].split(",")
    known = host.nvidia.by_gpu if host.nvidia else {}
    for theirs in [known[gpu] for gpu in gpus if gpu in known]:
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
    common = nvidia.common.followed_by(Edits(mounts=(_mount(_SHARED_MEMORY),))).with_nodes(host.nodes)
    return {
        "cdiVersion": ".".join(map(str, nvidia.version)),
        "kind": CDI_KIND,
        "devices": devices,
        "containerEdits": common.as_json(),
    }


def _mount(path: str) -> Entry:
    return {"hostPath": path, "containerPath": path, "options": ["rw", "nosuid", "nodev", "noexec", "rbind"]}
