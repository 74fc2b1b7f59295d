"""Find the container of a process: its cgroup has the id, and files of the engine have the name.

A control group that a user made may have any id in its name. It is shown, because rootless engines make such
groups, but gets no name from root's files, and no pod.

No engine is queried, because that needs its socket and may block. If a file cannot be read, the container has
no name, but always its id. A name may change (`podman rename`, `docker rename`), so a file of names is read
again when it has changed; a pod's container is never renamed.

Source: runc, libcontainer/cgroups/systemd/common.go, getUnitName (PREFIX-ID.scope); Kubernetes,
pkg/kubelet/cm/pod_container_manager_linux.go and cgroup_manager_linux.go, for the groups of pods, and
pkg/kubelet/types/labels.go, for CRI-O's annotations; containerd, pkg/cri/annotations/annotations.go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from yunion_mps.core.paths import Paths
from yunion_mps.core.text import printable
from yunion_mps.host.control_groups import MOUNTS, ControlGroup, control_groups_of, is_made_by_root
from yunion_mps.host.files import FileVersion, read_text, version_of
from yunion_mps.host.proc import parent_of

#: The names of containers' cgroups: `libpod-ID.scope`, `docker-ID.scope`, `cri-containerd-ID.scope`,
#: `crio-ID.scope`; with the cgroupfs driver the bare id; nested, `SLICE:cri-containerd:ID`.
_CGROUP = re.compile(r"(?:^|[/:])(?:(?P<engine>[a-z][a-z-]*?)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?(?=/|$)")
#: The cgroups of monitors, which are not in the container.
_MONITORS = ("libpod-conmon", "crio-conmon")
#: A pod's uid, as the kubelet names its cgroup; systemd's names have `_` for `-`.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
#: How much of an id is shown if there is no name, as engines do.
_SHORT_ID = 12
#: The longest name: any user may start a process called conmon with a container name of megabytes.
_MAX_LENGTH = 100
_MAX_CACHED = 1024
#: How many ancestors of a process are searched for its engine's monitor.
_MAX_ANCESTORS = 32
_CONTAINERS_JSON = (
    "/var/lib/containers/storage/overlay-containers/containers.json",
    "/var/lib/containers/storage/vfs-containers/containers.json",
)
_DOCKER_CONFIG = "/var/lib/docker/containers/{id}/config.v2.json"
#: The OCI configuration of a pod's container: of containerd, of that of k3s and RKE2, and of CRI-O.
_TASK = "containerd/io.containerd.runtime.v2.task/k8s.io/{id}/config.json"
_BUNDLES = (
    f"/run/{_TASK}",
    f"/run/k3s/{_TASK}",
    "/run/containers/storage/overlay-containers/{id}/userdata/config.json",
)
#: The annotations there with the namespace, pod and container: of containerd, and of CRI-O.
_ANNOTATIONS = (
    (
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ),
    ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"),
)


class Container(NamedTuple):
    id: str
    name: str

    @property
    def pod(self) -> tuple[str, ...]:
        """The namespace, pod and container; empty if it is in no pod, or if they are unknown."""
        kind, _, path = self.name.partition(" ")
        parts = tuple(path.split("/"))
        if kind != "pod" or len(parts) != len(_ANNOTATIONS[0]):
            return ()
        return parts


class ContainerGroup(NamedTuple):
    """The control group of a container, with what its path says about it; the path may lie."""

    id: str
    engine: str
    pod: str
    group: ControlGroup
    #: Whether root made the group; None if that cannot be seen.
    is_made_by_root: bool | None = None


class Containers:
    """Finds the containers of processes, and keeps the names that it has read."""

    def __init__(self, paths: Paths, proc: str = "/proc", mounts: str = MOUNTS) -> None:
        self._paths = paths
        self._proc = proc
        self._mounts = mounts
        #: By id, the latest name in the engine's files or its monitor; empty if there is none.
        self._names: dict[str, str] = {}
        #: By path, the version of a file, and its names by id.
        self._files: dict[str, tuple[FileVersion, dict[str, str]]] = {}

    def of(self, pid: int) -> Container | None:
        """Return the container of the process; None if it is in none, or has ended."""
        match = self.group_of(pid)
        return Container(match.id, self._name(pid, match)) if match else None

    def group_of(self, pid: int) -> ContainerGroup | None:
        """Return the control group of the process's container, without its name; None if it is in none."""
        return container_in(control_groups_of(pid, self._proc), self._mounts)

    def _name(self, pid: int, match: ContainerGroup) -> str:
        if match.is_made_by_root is False:
            name = self._name_from_monitor(pid, match.id)
            return printable(name[:_MAX_LENGTH]) or match.id[:_SHORT_ID]
        if match.pod:
            return self._name_in_pod(match)
        name = self._name_in_files(match)
        if name or match.id not in self._names:
            monitor_name = "" if name or match.engine == "docker" else self._name_from_monitor(pid, match.id)
            self._remember(match, (name or monitor_name)[:_MAX_LENGTH])
        return self._names[match.id] or match.id[:_SHORT_ID]

    def _name_in_pod(self, match: ContainerGroup) -> str:
        """Return the namespace, pod and container, which never change; the pod's uid if they are unknown."""
        if match.id not in self._names:
            name = self._name_in_bundles(match.id)
            if not name:
                return f"pod {match.pod}/{match.id[:_SHORT_ID]}"
            self._remember(match, f"pod {name}")
        return self._names[match.id]

    def _name_in_bundles(self, container_id: str) -> str:
        for path in _BUNDLES:
            name = _name_in_bundle(_json(self._paths.under(path.format(id=container_id)), dict))
            if name:
                return name
        return ""

    def _remember(self, match: ContainerGroup, name: str) -> None:
        if len(self._names) >= _MAX_CACHED:
            self._names.clear()
        self._names[match.id] = printable(name)

    def _name_in_files(self, match: ContainerGroup) -> str:
        """Return the current name in the engine's files, empty if there is none."""
        if match.engine != "docker":
            for path in _CONTAINERS_JSON:
                name = self._names_in(path, list).get(match.id, "")
                if name:
                    return name
        return self._names_in(_DOCKER_CONFIG.format(id=match.id), dict).get(match.id, "")

    def _names_in(self, name: str, kind: type) -> dict[str, str]:
        """Return the names in a file by id: podman's list of containers, or docker's configuration of one."""
        path = self._paths.under(name)
        version = version_of(path)
        if version is None:
            self._files.pop(path, None)
            return {}
        cached = self._files.get(path)
        if cached is None or cached[0] != version:
            if len(self._files) >= _MAX_CACHED:
                self._files.clear()
            cached = version, _names_of(_json(path, kind))
            self._files[path] = cached
        return cached[1]

    def _name_from_monitor(self, pid: int, container_id: str) -> str:
        """Return the name in the command line of conmon, the parent of podman's and CRI-O's containers.

        This works for every user's storage, wherever it is.
        """
        for _ in range(_MAX_ANCESTORS):
            pid = parent_of(pid, self._proc)
            argv = read_text(f"{self._proc}/{pid}/cmdline").split("\0")
            if argv[0].endswith("conmon") and container_id in argv and "-n" in argv[:-1]:
                return argv[argv.index("-n") + 1]
            if pid <= 1:
                break
        return ""


def container_in(groups: Iterable[ControlGroup], mounts: str = MOUNTS) -> ContainerGroup | None:
    """Return the innermost container among a process's control groups; None if there is none.

    The groups of version 1 are in several hierarchies. One that root made takes precedence.
    """
    first = None
    for group in groups:
        matches = [match for match in _CGROUP.finditer(group.path) if match["engine"] not in _MONITORS]
        if not matches:
            continue
        innermost = matches[-1]
        pods = _POD.findall(group.path)
        own = group._replace(path=group.path[: innermost.end()])
        container = ContainerGroup(
            id=innermost["id"],
            engine=innermost["engine"] or "",
            pod=pods[-1].replace("_", "-") if pods else "",
            group=own,
            is_made_by_root=is_made_by_root(own, mounts),
        )
        if container.is_made_by_root:
            return container
        first = first or container
    return first


def _names_of(content: Any) -> dict[str, str]:
    """Return the names by id: of podman's storage, or of docker's configuration of one container."""
    if isinstance(content, dict):
        return {str(content.get("ID")): str(content.get("Name") or "").lstrip("/")}
    names: dict[str, str] = {}
    for container in content:
        its_names = container.get("names") if isinstance(container, dict) else None
        if isinstance(its_names, list) and its_names:
            names[str(container.get("id"))] = str(its_names[0])
    return names


def _name_in_bundle(config: Any) -> str:
    """Return the namespace, pod and container of an OCI configuration, empty if it lacks one of them."""
    annotations = config.get("annotations")
    if isinstance(annotations, dict):
        for keys in _ANNOTATIONS:
            parts = [annotations.get(key) for key in keys]
            if all(isinstance(part, str) and part for part in parts):
                return "/".join(map(str, parts))
    return ""


def _json(path: str, kind: type) -> Any:
    """Return the content of a file, empty if it has another type."""
    try:
        content = json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, kind) else kind()
