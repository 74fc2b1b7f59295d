"""The control groups of processes (cgroups(7)), and whether root made them.

Any user may name groups below their own ones like root's. So a name proves nothing about another user's
process, unless root made the group; and "in the same group" is decided by the path, which is unique.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.host.files import read_text

#: Where the hierarchies are mounted: that of version 2, or a directory for each.
MOUNTS = "/sys/fs/cgroup"
#: Below these, users' own service managers create groups with arbitrary names.
_USERS = re.compile(r"/user(?:@|\.slice)")


class ControlGroup(NamedTuple):
    """A control group."""

    #: Controllers or `name=…`; empty for version 2.
    hierarchy: str
    #: Its path in the hierarchy.
    path: str

    def contains(self, groups: Iterable[ControlGroup]) -> bool:
        """Return whether one of the groups is this one, or below it."""
        below = self.path.rstrip("/") + "/"
        for group in groups:
            if group.hierarchy == self.hierarchy and f"{group.path}/".startswith(below):
                return True
        return False


def control_groups_of(pid: int, proc: str = "/proc") -> tuple[ControlGroup, ...]:
    """Return the groups of a process, one for each hierarchy; empty if it has ended."""
    return parse_control_groups(read_text(f"{proc}/{pid}/cgroup"))


def parse_control_groups(text: str) -> tuple[ControlGroup, ...]:
    """Parse /proc/PID/cgroup."""
    groups = []
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            groups.append(ControlGroup(hierarchy=fields[1], path=fields[2]))
    return tuple(groups)


def is_made_by_root(group: ControlGroup, mounts: str = MOUNTS) -> bool | None:
    """Return whether root made the group, and all groups above it; None if that cannot be seen from here.

    False also below `user.slice` and `user@`, where users have groups made for them under any name.
    """
    if _USERS.search(group.path):
        return False
    names = [name for name in group.path.split("/") if name]
    if ".." in names:  # it is outside our control group namespace
        return None
    directory = _mount_of(group.hierarchy, mounts)
    for name in names:
        directory = f"{directory}/{name}"
        try:
            owner = os.lstat(directory).st_uid
        except OSError:
            return None
        if owner != 0:
            return False
    return True


def _mount_of(hierarchy: str, mounts: str) -> str:
    if hierarchy:
        return f"{mounts}/{hierarchy.split(',')[0].removeprefix('name=')}"
    beside_version_1 = f"{mounts}/unified"
    return beside_version_1 if os.path.isdir(beside_version_1) else mounts
