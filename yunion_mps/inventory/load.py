"""The current load of GPUs and of the processes on them, measured by NVML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from yunion_mps.errors import DriverError
from yunion_mps.inventory.nvml import MIB, Nvml, handle_of, of_each_gpu, optional, pynvml


class GpuLoad(NamedTuple):
    """The load of one GPU; None for values that the driver does not report.

    `utilization` is the percentage of time in which any kernel ran, over the driver's last sample period of
    up to a second.
    """

    utilization: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class Load(NamedTuple):
    """The load of each GPU that answers, by UUID, and the SM utilization in % by GPU UUID and PID.

    Processes without a sample are missing: the driver only samples those that have run kernels.
    """

    gpus: Mapping[str, GpuLoad] = {}
    processes: Mapping[str, Mapping[int, int]] = {}


def read_load(nvml: Nvml, busy: Collection[str], since_s: float) -> Load:
    """Read the load of all GPUs, and of processes on `busy` ones (UUIDs) since `since_s` (s since 1970).

    Raises DriverError if the driver does not answer in time. This wakes no GPU: the driver also answers for
    one in low power.
    """

    def read() -> Load:
        return Load(of_each_gpu(_load), {uuid: _sm_utilization(uuid, since_s) for uuid in busy})

    return nvml.deadline.call(read)


def _load(handle: Any) -> GpuLoad:
    rates = optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    # Like nvidia-smi: without the memory that the driver reserves. Before 510 there is only the first
    # version.
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory = memory or optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        rates and rates.gpu,
        memory and memory.used // MIB,
        optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        None if power_mw is None else power_mw / 1000,
        None if limit_mw is None else limit_mw / 1000,
    )


def _sm_utilization(uuid: str, since_s: float) -> dict[int, int]:
    """Return each process's newest sample since `since_s`; empty if the driver has or reports none."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle_of(uuid), int(since_s * 1_000_000))
    except DriverError:  # the GPU is lost
        return {}
    except pynvml.NVMLError:  # NOT_FOUND: no samples; NOT_SUPPORTED; or more processes than a moment ago
        return {}
    newest = sorted(samples, key=lambda sample: sample.timeStamp)
    # Drivers have reported 2147483632 % (https://github.com/NVIDIA/DCGM/issues/83).
    return {sample.pid: sample.smUtil for sample in newest if sample.smUtil <= 100}
