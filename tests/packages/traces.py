"""What is on a machine, compared with what was there before."""

from __future__ import annotations

import os

from packages.machine import Machine

#: What every installation of anything writes, and what the machine writes by itself.
_OTHERS: tuple[str, ...] = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "root",
    "var/cache",
    "var/lib/dpkg",
    "var/lib/apt",
    "var/lib/rpm",
)
_OTHERS += ("var/log", "var/lib/systemd", "var/tmp", "etc/machine-id")
_BACKUPS = ("etc/group-", "etc/gshadow-", "etc/passwd-", "etc/shadow-", "etc/.pwd.lock", "etc/ld.so.cache")


class Traces:
    """The machine's files and users at two times."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._before: dict[str, str] = {}

    def take(self) -> None:
        """Take note of what is there now."""
        self._before = self._now()

    def left(self) -> list[str]:
        """What is there now and was not, is gone and was, or is another; and whatever has our name."""
        now = self._now()
        paths = sorted(now.keys() | self._before.keys())
        return [path for path in paths if now.get(path) != self._before.get(path)] + self._ours()

    def programs(self) -> list[str]:
        return [path for path in self._ours() if path.startswith("/usr/")]

    def _ours(self) -> list[str]:
        found = self._machine.shell(
            "find / -xdev -name '*yunion*'; find /run /tmp -name '*yunion*' -o -name 'nvidia-mps'"
        )
        known = ("/root/", "/var/cache/", "/var/lib/dpkg/info/", "/var/lib/systemd/", "/var/log/")
        return [path for path in found.splitlines() if not path.startswith(known)]

    def _now(self) -> dict[str, str]:
        root = str(self._machine.root)
        found: dict[str, str] = {}
        for folder, folders, files in os.walk(root):
            place = os.path.relpath(folder, root)
            folders[:] = [name for name in folders if os.path.normpath(f"{place}/{name}") not in _OTHERS]
            for name in [*files, *folders]:
                path = os.path.normpath(f"{place}/{name}")
                if path not in (*_OTHERS, *_BACKUPS) and "__pycache__" not in path:
                    found[path] = self._told(f"{folder}/{name}")
        return found

    def _told(self, path: str) -> str:
        info = os.lstat(path)
        if os.path.islink(path):
            return os.readlink(path)
        return f"{info.st_mode:o} {info.st_uid}:{info.st_gid}" + (
            "" if os.path.isdir(path) else f" {info.st_size}"
        )
