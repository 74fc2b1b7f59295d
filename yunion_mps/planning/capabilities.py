"""What MPS can do on a GPU: whether it runs there, for how many clients, and whether it enforces budgets."""

from __future__ import annotations

from yunion_mps.models import PROHIBITED, Config, Driver, Gpu

VOLTA = (7, 0)
#: MPS needs compute capability 3.5 (nvidia-cuda-mps-control(1)).
_FIRST_WITH_MPS = (3, 5)

#: Clients that MPS serves on one GPU (NVIDIA's MPS documentation): from this compute capability and this
#: driver release on. The first row that fits counts.
MPS_CLIENTS = (
    (VOLTA, 590, 60),
    (VOLTA, 0, 48),
    (_FIRST_WITH_MPS, 0, 16),
)

#: Measured with 535: a control daemon keeps memory limits of devices 0 to 31, and ignores others silently.
MOST_GPUS_OF_A_DOMAIN = 32


def max_clients(gpu: Gpu, driver: Driver, override: int | None) -> int:
    """How many clients, and so devices, the GPU's MPS allows; the fewest where the capability is unknown.

    The operator's override is for newer drivers, none of which changes what a GPU before Volta can do.
    """
    if override and enforces_budgets(gpu):
        return override
    major = driver.version.partition(".")[0]
    release = int(major) if major.isdigit() else 0
    capability = gpu.compute_capability or _FIRST_WITH_MPS
    for lowest, first_release, clients in MPS_CLIENTS:
        if capability >= lowest and release >= first_release:
            return clients
    return MPS_CLIENTS[-1][2]


def enforces_budgets(gpu: Gpu) -> bool:
    """Whether memory limits and percentages are enforced, which no GPU before Volta does."""
    return gpu.compute_capability is not None and gpu.compute_capability >= VOLTA


def reason_against(gpu: Gpu, config: Config) -> str:
    """Why the GPU cannot serve MPS devices, empty where it can."""
    if gpu.reason:
        return gpu.reason
    if gpu.uuid is None or gpu.memory_mib is None:
        return "the driver does not tell the GPU's UUID and memory"
    if gpu.mig_enabled:
        return "the GPU is in MIG mode, which excludes MPS on it as a whole (turn it off: nvidia-smi -mig 0)"
    capability = gpu.compute_capability
    if capability is not None and capability < _FIRST_WITH_MPS:
        return f"MPS needs compute capability 3.5, the GPU has {capability[0]}.{capability[1]}"
    if gpu.compute_mode == PROHIBITED and config.cuda_mps_compute_mode == "keep":
        return "the GPU's compute mode is Prohibited, and cuda_mps_compute_mode is keep"
    return ""
