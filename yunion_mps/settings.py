"""The contents of the configuration files, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.enums import MPS, NORMAL


class Source(NamedTuple):
    """The place of a value in the configuration; `line` is None for a default."""

    file: str
    line: int | None


class SliceEntry(NamedTuple):
    """An item of an entry's `slices`; a percentage of None is derived from the share of memory."""

    memory_mib: int
    thread_percentage: float | None = None
    priority: str = NORMAL


class DeviceEntry(NamedTuple):
    """An entry of host_container_device.yml of one of our types, which says how its GPU is shared.

    It divides the GPU into `virtual_number` equal devices or into `slices`, or makes it a pool of
    `memory_unit_mib` units; the other two are 0 or empty. `divided_at` is the place of that key. If
    `thread_overcommit` is None, `cuda_mps_thread_percentage` applies, and if `over_budget` is empty,
    that of host.conf. `reserved_for` may be empty. A `thread_percentage` of 0 leaves the threads of a pool in
    proportion to memory. `time_slice` is that of a time-sliced GPU; if it is empty, it is left alone.

    If `cuda_mps_compute_mode` is empty, that of host.conf applies. `memory_mib` is how much of the GPU's
    memory is divided, None if all that the driver reports; `memory_at` is the place of that key.

    `mig` has the profiles of the GPU's instances, or the name of a layout; each instance is divided, or one
    device if `virtual_number` is 0. `mig_at` is where the layout is configured, None without one.
    """

    path: str
    virtual_number: int
    path_at: Source
    divided_at: Source
    slices: tuple[SliceEntry, ...] = ()
    memory_unit_mib: int = 0
    memory_reserve_mib: int = 0
    thread_overcommit: float | None = None
    reserved_for: str = ""
    over_budget: str = ""
    thread_percentage: int = 0
    sharing: str = MPS
    time_slice: str = ""
    mig: tuple[str, ...] = ()
    mig_restore: bool = False
    mig_at: Source | None = None
    cuda_mps_compute_mode: str = ""
    memory_mib: int | None = None
    memory_at: Source | None = None

    @property
    def uses_mps(self) -> bool:
        is_divided = bool(self.virtual_number or self.slices or self.memory_unit_mib)
        return self.sharing == MPS and (is_divided or not self.mig)


class Config(NamedTuple):
    """The contents of the files, with the defaults filled in.

    `sources` has the place of each key of host.conf and host_local.conf. `gpu_memory_unit_mib` is from the
    device file. `files` has host.conf and the others that exist, in the order of reading.
    """

    enable_cuda_mps: bool
    local_config_file: str
    container_device_config_file: str
    cuda_mps_pipe_directory: str
    cuda_mps_log_directory: str
    cuda_mps_replicas: int
    cuda_mps_compute_mode: str
    cuda_mps_scope: str
    cuda_mps_thread_percentage: str
    cuda_mps_combine: int
    cuda_mps_max_clients: int | None
    cuda_mps_stop_timeout_s: int
    cuda_mps_multiuser: bool
    metrics_listen: str | None
    metrics_allow_public: bool
    metrics_textfile: str | None
    web_listen: str | None
    web_allow_public: bool
    cuda_mps_pipe_group: str | None
    max_leases_per_user: int | None
    max_devices_per_user: int | None
    max_lease_ttl_s: int
    over_budget: str
    over_budget_grace_s: int
    devices: tuple[DeviceEntry, ...] = ()
    sources: Mapping[str, Source] = {}
    gpu_memory_unit_mib: int = 1024
    gpu_memory_unit_at: Source = Source("default", None)
    files: tuple[str, ...] = ()

    @property
    def also_disabled(self) -> str:
        """What else is not served while `enable_cuda_mps` is false, to be appended to a message about MPS."""
        has_others = any(not entry.uses_mps for entry in self.devices)
        return "; time-sliced GPUs and MIG instances are not served either" if has_others else ""
