"""A host without a GPU that looks like one with GPUs: NVML, /sys, /dev and configuration under one root.

with SimHost.create([{"kind": "h100", "count": 8}]) as host:
    host.run(["nvidia-smi", "-L"])
    host.gpus[3].lose()
    host.fail("nvmlDeviceGetUUID", "gpu_is_lost", gpu=0, times=1)
"""

from .description import REFERENCE, Description, DescriptionError
from .gpu import MigDevice, SimGpu
from .host import SimHost
from .install import BuildError
from .state import StateError

__all__ = [
    "REFERENCE",
    "BuildError",
    "Description",
    "DescriptionError",
    "MigDevice",
    "SimGpu",
    "SimHost",
    "StateError",
]
