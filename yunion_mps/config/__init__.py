"""The configuration: host.conf and host_local.conf, shared with Cloudpods' host agent, and the device file.

`load` reads them and collects all problems instead of stopping at the first. Matching the entries to GPUs
needs the host's inventory, and is left to `planning`.
"""

from __future__ import annotations

from yunion_mps.config.device_file import DEVICE_FILE_KEYS, read_devices
from yunion_mps.config.host_conf import KEYS, read_host
from yunion_mps.core.errors import Problem
from yunion_mps.core.paths import Paths
from yunion_mps.core.settings import Config

__all__ = ["DEVICE_FILE_KEYS", "KEYS", "load"]


def load(paths: Paths) -> tuple[Config, list[Problem]]:
    """Read the files; values with problems are replaced by defaults, so that the rest can be checked."""
    config, problems = read_host(paths)
    config, device_problems = read_devices(config, paths)
    return config, [*problems, *device_problems]
