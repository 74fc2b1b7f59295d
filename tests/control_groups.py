"""Control groups that tests make, in either version or in both: each has a name that no other test uses.

with ControlGroup(unique_name()).make() as group:
    group.add(pid)                       # this process, and all that it starts from now on
At the end, every process in it is killed, and it is removed with all groups below it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from simhost.host import Closes
from waiting import pause

#: So long that only something that never comes is missed.
_PATIENCE_S = 60.0
_TOP = Path("/sys/fs/cgroup")
#: What version 1 leaves empty in a new group; until it is set, no process can be added.
_NOT_INHERITED = ("cpuset.cpus", "cpuset.mems")
_ENTER = 'for file in $1; do echo $$ >"$file"; done; shift; exec "$@"'
#: What the owner of a group of version 2 may write, beside its directory (cgroups(7), delegation).
_DELEGATED = ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads")


class Hierarchy(NamedTuple):
    """A hierarchy of control groups: each of version 1, or the one of version 2."""

    place: Path
    #: "cgroup" is version 1, and "cgroup2" version 2.
    kind: str
    #: The options with which version 1 is mounted again: its controllers, or its name.
    options: str


def hierarchies() -> list[Hierarchy]:
    """Return what is mounted below /sys/fs/cgroup."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        path = Path(place)
        if kind in ("cgroup", "cgroup2") and (path == _TOP or _TOP in path.parents):
            found.append(Hierarchy(place=path, kind=kind, options=_mount_options(options)))
    return found


def has_only_version_2() -> bool:
    return (_TOP / "cgroup.controllers").exists()


def _mount_options(options: str) -> str:
    """Of the options of a mount, those with which it is mounted elsewhere: controllers, or a name."""
    lines = Path("/proc/cgroups").read_text().splitlines()
    controllers = {line.split()[0] for line in lines}
    words = [word for word in options.split(",") if word in controllers or word.startswith("name=")]
    return ",".join(words)


def unique_name() -> str:
    return f"yunion-mps-test-{uuid.uuid4().hex}"


class ControlGroup(Closes):
    """A group of one name in several hierarchies, in all of them by default. A context manager."""

    def __init__(self, name: str, places: Iterable[Path] | None = None) -> None:
        self.name = name
        if places is None:
            places = [hierarchy.place for hierarchy in hierarchies()]
        self.folders = [place / name for place in places]

    def make(self) -> ControlGroup:
        """Create it unless it exists; raises OSError."""
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            is_version_2 = (folder / "cgroup.controllers").exists()
            for file in _NOT_INHERITED:
                if not is_version_2 and (folder / file).exists():
                    (folder / file).write_text((folder.parent / file).read_text())
        return self

    def enable_controllers(self) -> ControlGroup:
        """Enable all controllers of the parent for its subgroups, which version 2 does not do by itself.

        This changes the parent, and stays when the group is removed.
        """
        for folder in self.folders:
            controllers = folder.parent / "cgroup.controllers"
            names = controllers.read_text().split() if controllers.exists() else []
            for name in names:
                with contextlib.suppress(OSError):  # the parent may have processes of its own
                    (folder.parent / "cgroup.subtree_control").write_text(f"+{name}")
        return self

    def below(self, name: str) -> ControlGroup:
        """Create a group in it."""
        return ControlGroup(name, self.folders).make()

    def delegate(self, uid: int) -> None:
        """Let a user make groups in it, as systemd does for the manager of each user."""
        for folder in self.folders:
            os.chown(folder, uid, uid)
            for file in _DELEGATED:
                os.chown(folder / file, uid, uid)

    def add(self, pid: int) -> None:
        for file in self._files():
            file.write_text(str(pid))

    def command_in(self, *command: str) -> list[str]:
        """Return a command that first enters the group; without arguments, only its beginning."""
        return ["sh", "-ec", _ENTER, "sh", " ".join(map(str, self._files())), *command]

    def _files(self) -> list[Path]:
        """The cgroup.procs files: writing a PID to them moves that process into the group."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def pids(self) -> set[int]:
        """The processes that are in it, or in a group below it."""
        found: set[int] = set()
        for folder in self.folders:
            for path, _, _ in os.walk(folder):
                with contextlib.suppress(OSError):  # it has been removed meanwhile
                    found.update(map(int, Path(path, "cgroup.procs").read_text().split()))
        found.discard(0)  # a process that cannot be seen from here
        return found

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what is in it, and remove it; the kernel takes a moment to forget the processes."""
        begun_s = time.monotonic()
        while not self._is_removed():
            if time.monotonic() > begun_s + _PATIENCE_S:
                raise AssertionError(f"{self.name} cannot be removed; it has the processes {self.pids()}")
            self.kill()
            pause(begun_s)

    def _is_removed(self) -> bool:
        for folder in self.folders:
            for path, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        return not any(folder.exists() for folder in self.folders)
