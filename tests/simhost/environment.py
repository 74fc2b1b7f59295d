"""The environment of programs on a simulated host: the outer one's, less what belongs to its own GPUs."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

# Another Python's settings, the outer host's GPUs and service manager: none of them are this host's. Coverage
# doubles the processor time of a command, and tests/unit/cli measures the commands.
_FOREIGN = (
    "COVERAGE_",
    "PYTHON",
    "VIRTUAL_ENV",
    "CUDA_",
    "NVIDIA_",
    "YUNION_",
    "SIMHOST_",
    "LD_",
    "NOTIFY_SOCKET",
    "WATCHDOG_",
)


def host_environment(root: Path) -> dict[str, str]:
    """Return the environment in which programs see the host under `root`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env["YUNION_MPS_ROOT"] = str(root)
    env["LD_LIBRARY_PATH"] = str(root / "lib")
    env["PATH"] = os.pathsep.join([*_programs(root), env.get("PATH", os.defpath)])
    return env


def _programs(root: Path) -> list[str]:
    nvidia = CHECKOUT / ".nvidia/usr"
    folders = [
        CHECKOUT / ".venv/bin",
        nvidia / "bin",
        nvidia / "sbin",
        nvidia / "lib/nvidia/current",
        root / "bin",
    ]
    return [str(folder) for folder in folders]
