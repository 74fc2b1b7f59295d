"""The control group in which a machine's systemd is at home, where no other systemd gives it one."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_LOOK_S = 0.02
_PATIENCE_S = 10.0


class ControlGroup:
    """A group of its own, by name, in every hierarchy that systemd uses here."""

    def __init__(self, name: str) -> None:
        #: Whether this machine was booted with systemd, which then makes a scope.
        self.is_systemds = os.path.isdir("/run/systemd/system")
        self._folders = (
            [] if self.is_systemds else [folder / f"yunion-mps-test-{name}" for folder in hierarchies()]
        )

    def enter(self) -> list[str]:
        """The beginning of a command that is then run in the group."""
        if self.is_systemds:
            return []
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        joined = " ".join(f"{folder}/cgroup.procs" for folder in self._folders)
        return ["sh", "-ec", f'for file in {joined}; do echo $$ >"$file"; done; exec "$@"', "sh"]

    def remove(self) -> None:
        """Remove it; the kernel takes a moment to forget the processes that were in it."""
        end_s = time.monotonic() + _PATIENCE_S
        while any(not _removed(folder) for folder in self._folders) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)


def hierarchies() -> list[Path]:
    """Where version 2 is mounted, and version 1's named one for systemd, where there is that as well."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.setdefault(kind, Path(place))
    if "cgroup2" not in found:
        raise OSError("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup")
    return list(found.values())


def _removed(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return not folder.exists()
