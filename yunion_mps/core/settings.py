"""The contents of the configuration files, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.core.enums import MPS, NORMAL


class Source(NamedTuple):
    """The place of a value in the configuration."""

    file: str
    #: None for a default.
    line: int | None


class Mistake(NamedTuple):
    """What is wrong with a setting, without its place."""

    what: str
    #: What to do; empty if `what` says it (`did you mean …?`).
    hint: str = ""


class SliceEntry(NamedTuple):
    """An item of an entry's `slices`."""

    memory_mib: int
    #: The percentage of SM threads; None if it is derived from the share of memory.
    thread_percentage: float | None = None
    priority: str = NORMAL


class DeviceEntry(NamedTuple):
    """An entry of host_container_device.yml of one of our types, which says how its GPU is shared.

    It divides the GPU into `virtual_number` equal devices or into `slices`, or makes it a pool of
    `memory_unit_mib` units; the other two are 0 or empty.
    """

    path: str
    #: The number of equal devices; of each instance if there is a MIG layout, where 0 means one device.
    virtual_number: int
    path_at: Source
    #: The place of the key that divides the GPU.
    divided_at: Source
    slices: tuple[SliceEntry, ...] = ()
    memory_unit_mib: int = 0
    #: How much of the GPU's memory each client of a pool takes in addition to its units.
    memory_reserve_mib: int = 0
    #: How many times the threads are handed out; if it is None, `cuda_mps_thread_percentage` applies.
    thread_overcommit: float | None = None
    #: What the GPU is reserved for; empty if for nothing.
    reserved_for: str = ""
    #: What happens to a job that exceeds its budget; if it is empty, that of host.conf applies.
    over_budget: str = ""
    #: The percentage of each client of a pool; 0 leaves the threads in proportion to memory.
    thread_percentage: int = 0
    sharing: str = MPS
    #: That of a time-sliced GPU; if it is empty, the driver's is left alone.
    time_slice: str = ""
    #: The profiles of the GPU's MIG instances, or the name of a layout; empty without one.
    mig: tuple[str, ...] = ()
    #: Whether the MIG layout from before is restored when the daemon stops.
    mig_restore: bool = False
    #: Where the MIG layout is configured; None without one.
    mig_at: Source | None = None
    #: If it is empty, that of host.conf applies.
    cuda_mps_compute_mode: str = ""
    #: How much of the GPU's memory is divided; None if all that the driver reports.
    memory_mib: int | None = None
    memory_at: Source | None = None

    @property
    def uses_mps(self) -> bool:
        """Whether a control daemon serves the GPU or its instances."""
        is_divided = bool(self.virtual_number or self.slices or self.memory_unit_mib)
        return self.sharing == MPS and (is_divided or not self.mig)


class Config(NamedTuple):
    """The contents of the files, with the defaults filled in.

    The members without a comment are the keys of host.conf, which `config.KEYS` describes.
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
    #: The place of each key of host.conf and host_local.conf.
    sources: Mapping[str, Source] = {}
    #: The unit in which schedulers request memory, in MiB; from the device file.
    gpu_memory_unit_mib: int = 1024
    gpu_memory_unit_at: Source = Source("default", None)
    #: host.conf and the others that exist, in the order of reading.
    files: tuple[str, ...] = ()

    @property
    def also_disabled(self) -> str:
        """What else is not served while `enable_cuda_mps` is false, to be appended to a message about MPS."""
        has_others = any(not entry.uses_mps for entry in self.devices)
        return "; time-sliced GPUs and MIG instances are not served either" if has_others else ""
