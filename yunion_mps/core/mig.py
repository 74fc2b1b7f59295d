"""MIG as frozen values: kinds of GPU instances, instances, and layouts."""

from __future__ import annotations

from typing import NamedTuple

#: Names of layouts, as NVIDIA's mig-parted has them: the one that switches MIG mode off, the mixed one, and
#: what comes before a profile of which a GPU has as many instances as fit.
#: Source: github.com/NVIDIA/mig-parted, pkg/mig/builder.
DISABLED = "all-disabled"
BALANCED = "all-balanced"
ALL = "all-"


class MigProfile(NamedTuple):
    """A kind of GPU instance that the GPU can have, as its driver reports it.

    Source: NVML API Reference, nvmlGpuInstanceProfileInfo_t and nvmlGpuInstancePlacement_t.
    """

    id: int
    name: str
    #: The number of compute slices.
    slices: int
    memory_mib: int
    multiprocessors: int
    #: How many instances of this profile the GPU can have.
    max_count: int
    #: The number of memory slices that an instance occupies.
    size: int
    #: The memory slices from which an instance can begin.
    starts: tuple[int, ...]


class MigInstance(NamedTuple):
    """A GPU instance that exists.

    Source: NVIDIA: Multi-Instance GPU User Guide, section "MIG Device Names", for GPU and compute instances.
    """

    id: int
    #: The name of its profile.
    profile: str
    #: The first memory slice that it occupies.
    start: int
    #: The number of memory slices that it occupies.
    size: int
    #: The UUID of its MIG device; empty if it has none.
    uuid: str = ""
    #: The number of its compute instances; there should be one, which has all of its slices.
    compute_instances: int = 1

    @property
    def place(self) -> tuple[int, str, int]:
        """What stays the same as long as the GPU instance exists."""
        return (self.id, self.profile, self.start)

    @property
    def slices(self) -> range:
        """The memory slices that it occupies."""
        return range(self.start, self.start + self.size)

    @property
    def is_whole(self) -> bool:
        """Whether it is one MIG device, or can become one by creating the compute instance that it lacks."""
        return self.compute_instances == 0 or bool(self.compute_instances == 1 and self.uuid)

    def is_same(self, present: MigInstance) -> bool:
        """Return whether `present` is this instance; this one has no UUID if it was no MIG device yet."""
        return self.place == present.place and self.uuid in ("", present.uuid)


class MigLayout(NamedTuple):
    """Whether a GPU should be in MIG mode, and then with which instances."""

    gpu_uuid: str
    enabled: bool
    #: The profiles of the instances, largest first.
    profiles: tuple[MigProfile, ...] = ()
    #: The layout from before the first change is restored when the daemon stops.
    restore: bool = False
