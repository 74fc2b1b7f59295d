"""Find the container of a process: its cgroup has the id, and files of the engine have the name.

No engine is queried, because that needs its socket and may block. If a file cannot be read, the container has
no name, but always its id. A name may change (`podman rename`, `docker rename`), so a file of names is read
again when it has changed; a pod's container is never renamed.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from yunion_mps.host.files import FileVersion, read_text, version_of
from yunion_mps.host.proc import parent_of
from yunion_mps.paths import Paths
from yunion_mps.text import printable

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
    tuple(f"io.kubernetes.cri.{key}" for key in ("sandbox-namespace", "sandbox-name", "container-name")),
    tuple(f"io.kubernetes.{key}" for key in ("pod.namespace", "pod.name", "container.name")),
)


class Container(NamedTuple):
    id: str
    name: str

    @property
    def pod(self) -> tuple[str, ...]:
        """The namespace, pod and container; empty if it is in no pod, or if they are unknown."""
        kind, _, path = self.name.partition(" ")
        parts = tuple(path.split("/"))
        return parts if kind == "pod" and len(parts) == len(_ANNOTATIONS[0]) else ()


class _CgroupMatch(NamedTuple):
    id: str
    engine: str
    pod: str


class Containers:
    def __init__(self, paths: Paths, proc: str = "/proc") -> None:
        self._paths = paths
        self._proc = proc
        #: By id, the latest name in the engine's files or its monitor; empty if there is none.
        self._names: dict[str, str] = {}
        #: By path, the version of a file, and its names by id.
        self._files: dict[str, tuple[FileVersion, dict[str, str]]] = {}

    def of(self, pid: int) -> Container | None:
        """The container of the process; None if it is in none, or has ended."""
        match = container_in(read_text(f"{self._proc}/{pid}/cgroup"))
        return Container(match.id, self._name(pid, match)) if match else None

    def _name(self, pid: int, match: _CgroupMatch) -> str:
        if match.pod:
            return self._name_in_pod(match)
        name = self._name_in_files(match)
        if name or match.id not in self._names:
            monitor_name = "" if name or match.engine == "docker" else self._name_from_monitor(pid, match.id)
            self._remember(match, (name or monitor_name)[:_MAX_LENGTH])
        return self._names[match.id] or match.id[:_SHORT_ID]

    def _name_in_pod(self, match: _CgroupMatch) -> str:
        """The namespace, pod and container, which never change; the pod's uid if they cannot be read."""
        if match.id not in self._names:
            files = (_json(self._paths.under(path.format(id=match.id)), dict) for path in _BUNDLES)
            if not (name := next(filter(None, map(_name_in_bundle, files)), "")):
                return f"pod {match.pod}/{match.id[:_SHORT_ID]}"
            self._remember(match, f"pod {name}")
        return self._names[match.id]

    def _remember(self, match: _CgroupMatch, name: str) -> None:
        if len(self._names) >= _MAX_CACHED:
            self._names.clear()
        self._names[match.id] = printable(name)

    def _name_in_files(self, match: _CgroupMatch) -> str:
        """The current name in the engine's files, empty if there is none."""
        files: list[tuple[str, type]] = [(_DOCKER_CONFIG.format(id=match.id), dict)]
        if match.engine != "docker":
            files[:0] = [(path, list) for path in _CONTAINERS_JSON]
        return next(filter(None, (self._names_in(*file).get(match.id, "") for file in files)), "")

    def _names_in(self, name: str, kind: type) -> dict[str, str]:
        """By id, the names in a file: a list of podman's containers, or docker's configuration of one."""
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
        """The name in the command line of conmon, the parent of podman's and CRI-O's containers.

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


def container_in(cgroups: str) -> _CgroupMatch | None:
    """The innermost container in a /proc/PID/cgroup (cgroups(7), v1 and v2), None if there is none."""
    for line in cgroups.splitlines():
        path = line.split(":", 2)[-1]
        matches = [match for match in _CGROUP.finditer(path) if match["engine"] not in _MONITORS]
        if matches:
            pod = (_POD.findall(path) or [""])[-1].replace("_", "-")
            return _CgroupMatch(matches[-1]["id"], matches[-1]["engine"] or "", pod)
    return None


def _names_of(content: Any) -> dict[str, str]:
    """By id: of podman's storage, or of docker's configuration of one container."""
    if isinstance(content, dict):
        return {str(content.get("ID")): str(content.get("Name") or "").lstrip("/")}
    return {
        str(container.get("id")): str(container["names"][0])
        for container in content
        if isinstance(container, dict) and isinstance(container.get("names"), list) and container["names"]
    }


def _name_in_bundle(config: Any) -> str:
    """The namespace, pod and container of an OCI configuration, empty if it does not name all of them."""
    annotations = config.get("annotations")
    if isinstance(annotations, dict):
        for keys in _ANNOTATIONS:
            parts = [annotations.get(key) for key in keys]
            if all(isinstance(part, str) and part for part in parts):
                return "/".join(map(str, parts))
    return ""


def _json(path: str, kind: type) -> Any:
    """The content of a file, empty if it has another type."""
    try:
        content = json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, kind) else kind()
