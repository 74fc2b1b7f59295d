"""MIG as frozen values: kinds of GPU instances, instances, and layouts."""

from __future__ import annotations

from typing import NamedTuple

#: Names of layouts, as NVIDIA's mig-parted has them: the one that switches MIG mode off, the mixed one, and
#: what comes before a profile of which a GPU has as many instances as fit.
DISABLED, BALANCED, ALL = "all-disabled", "all-balanced", "all-"


class MigProfile(NamedTuple):
    """A kind of GPU instance that the GPU can have, as its driver reports it.

    `slices` are of compute; an instance occupies `size` memory slices, from one of `starts` on.
    """

    id: int
    name: str
    slices: int
    memory_mib: int
    multiprocessors: int
    max_count: int
    size: int
    starts: tuple[int, ...]


class MigInstance(NamedTuple):
    """A GPU instance that exists: its profile's name, and the memory slices that it occupies.

    `uuid` is that of its MIG device, empty if it has none; `compute_instances` counts all, of which it
    should have one that has all of its slices.
    """

    id: int
    profile: str
    start: int
    size: int
    uuid: str = ""
    compute_instances: int = 1

    @property
    def place(self) -> tuple[int, str, int]:
        """What stays the same as long as the GPU instance exists."""
        return (self.id, self.profile, self.start)

    @property
    def is_whole(self) -> bool:
        """Whether it is one MIG device, or can become one by creating the compute instance that it lacks."""
        return self.compute_instances == 0 or bool(self.compute_instances == 1 and self.uuid)

    def is_same(self, now: MigInstance) -> bool:
        """Whether `now` is this instance; one that was noted before it was a MIG device had no UUID yet."""
        place = (self.id, self.profile, self.start)
        return place == (now.id, now.profile, now.start) and self.uuid in ("", now.uuid)


class MigLayout(NamedTuple):
    """Whether a GPU should be in MIG mode, and then with which instances, largest first.

    `restore`: the layout from before the first change is restored when the daemon stops.
    """

    gpu_uuid: str
    enabled: bool
    profiles: tuple[MigProfile, ...] = ()
    restore: bool = False
