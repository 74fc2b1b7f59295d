"""The two configuration files: host.conf, shared with Cloudpods' host agent, and the device file.

`load` reads both and collects all problems instead of stopping at the first. Matching the entries to GPUs
needs the host's inventory, and is left to `planning`.
"""

from __future__ import annotations

from yunion_mps.config.devices import read_devices
from yunion_mps.config.host import KEYS, read_host
from yunion_mps.config.values import max_devices
from yunion_mps.errors import Problem
from yunion_mps.models import Config
from yunion_mps.paths import Paths

__all__ = ["KEYS", "load"]


def load(paths: Paths) -> tuple[Config, list[Problem]]:
    """Read both files; values with problems are replaced by defaults, so that the rest can be checked."""
    values, sources, problems = read_host(paths)
    device_file = paths.under(str(values["container_device_config_file"]))
    named = sources["container_device_config_file"].line is not None
    devices, device_problems = read_devices(
        device_file, must_exist=named, max_devices=max_devices(values["cuda_mps_max_clients"])
    )
    config = Config(
        devices=devices.entries,
        sources=sources,
        gpu_memory_unit_mib=devices.memory_unit_mib,
        gpu_memory_unit_at=devices.memory_unit_at,
        **values,
    )
    return config, [*problems, *device_problems]
