"""Which container a process is in: its cgroup has the id, and files that engines leave have the name.

No engine is asked: that would wait for another daemon, and needs its socket. What cannot be read leaves a
container without a name, never without its id. A name may change (`podman rename`, `docker rename`), so a
file of names is read again when it has changed.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

from yunion_mps.escaping import printable
from yunion_mps.host.files import read_beginning
from yunion_mps.paths import Paths

#: What engines call a container's cgroup: `libpod-ID.scope`, `docker-ID.scope`, `cri-containerd-ID.scope`,
#: `crio-ID.scope`; with the cgroupfs driver the bare id; nested, `SLICE:cri-containerd:ID`.
_CGROUP = re.compile(r"(?:^|[/:])(?:(?P<engine>[a-z][a-z-]*?)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?(?=/|$)")
#: The cgroups of monitors, which are beside the container and not in it.
_BESIDE = ("libpod-conmon", "crio-conmon")
#: A pod's uid, as the kubelet names its cgroup; systemd's names have `_` for `-`.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
#: So much of an id is shown if there is no name, as by the engines themselves.
_SHORT = 12
#: So much of a name is of use; any user may call a process conmon, and a container by a name of megabytes.
_LONGEST = 100
_MAX_KNOWN = 1024
#: A process has its engine's monitor among its ancestors, which nest no deeper than this.
_MAX_ANCESTORS = 32
_CONTAINERS_JSON = (
    "/var/lib/containers/storage/overlay-containers/containers.json",
    "/var/lib/containers/storage/vfs-containers/containers.json",
)
_DOCKER_CONFIG = "/var/lib/docker/containers/{id}/config.v2.json"


class Container(NamedTuple):
    """A container: its whole id, and its name."""

    id: str
    name: str


class _Found(NamedTuple):
    id: str
    engine: str
    pod: str


#: What tells whether a file is still the same: inode, size and time of the last change in ns.
_Mark = tuple[int, int, int]


class Containers:
    """Finds containers, and remembers their names."""

    def __init__(self, paths: Paths, proc: str = "/proc") -> None:
        """`proc` is proc(5), as it is mounted."""
        self._paths = paths
        self._proc = proc
        #: By id: as the engine's files or its monitor last had it, empty if none of them has.
        self._names: dict[str, str] = {}
        #: By path: the names by id in a file, as they were when it had this mark.
        self._files: dict[str, tuple[_Mark, dict[str, str]]] = {}

    def of(self, pid: int) -> Container | None:
        """The container that the process is in; None if it is in none, or is gone."""
        found = container_in(read_beginning(f"{self._proc}/{pid}/cgroup"))
        return Container(found.id, self._name(pid, found)) if found else None

    def _name(self, pid: int, found: _Found) -> str:
        if found.pod:
            return f"pod {found.pod}/{found.id[:_SHORT]}"
        name = self._written(found)
        if name or found.id not in self._names:
            if len(self._names) >= _MAX_KNOWN:
                self._names.clear()
            monitor_name = "" if name or found.engine == "docker" else self._by_monitor(pid, found.id)
            self._names[found.id] = printable(name or monitor_name)[:_LONGEST]
        return self._names[found.id] or found.id[:_SHORT]

    def _written(self, found: _Found) -> str:
        """The name in the engine's files, which have a changed one."""
        files: list[tuple[str, type]] = [(_DOCKER_CONFIG.format(id=found.id), dict)]
        if found.engine != "docker":
            files[:0] = [(path, list) for path in _CONTAINERS_JSON]
        return next(filter(None, (self._names_in(*file).get(found.id, "") for file in files)), "")

    def _names_in(self, name: str, kind: type) -> dict[str, str]:
        """By id, the names in a file: a list of podman's containers, or docker's configuration of one."""
        path = self._paths.under(name)
        mark = _mark(path)
        if mark is None:
            self._files.pop(path, None)
            return {}
        known = self._files.get(path)
        if known is None or known[0] != mark:
            if len(self._files) >= _MAX_KNOWN:
                self._files.clear()
            known = mark, _names_of(_json(path, kind))
            self._files[path] = known
        return known[1]

    def _by_monitor(self, pid: int, container_id: str) -> str:
        """The name by the command line of conmon, the parent of podman's and CRI-O's containers.

        It is there for every user's storage, wherever that lies.
        """
        for _ in range(_MAX_ANCESTORS):
            fields = read_beginning(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
            pid = int(fields[1]) if len(fields) > 1 else 0
            words = read_beginning(f"{self._proc}/{pid}/cmdline").split("\0")
            if words[0].endswith("conmon") and container_id in words and "-n" in words[:-1]:
                return words[words.index("-n") + 1]
            if pid <= 1:
                break
        return ""


def container_in(cgroups: str) -> _Found | None:
    """The innermost container of a /proc/PID/cgroup (cgroups(7), v1 and v2), None if it names none."""
    for line in cgroups.splitlines():
        path = line.split(":", 2)[-1]
        inside = [found for found in _CGROUP.finditer(path) if found["engine"] not in _BESIDE]
        if inside:
            pod = (_POD.findall(path) or [""])[-1].replace("_", "-")
            return _Found(inside[-1]["id"], inside[-1]["engine"] or "", pod)
    return None


def _mark(path: str) -> _Mark | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _names_of(found: Any) -> dict[str, str]:
    """By id: of podman's storage, or of docker's configuration of one container."""
    if isinstance(found, dict):
        return {str(found.get("ID")): str(found.get("Name") or "").lstrip("/")}
    return {
        str(one.get("id")): str(one["names"][0])
        for one in found
        if isinstance(one, dict) and isinstance(one.get("names"), list) and one["names"]
    }


def _json(path: str, kind: type) -> Any:
    """What a file holds, empty if that is not of the kind."""
    try:
        found = json.loads(read_beginning(path) or "null")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, kind) else kind()
