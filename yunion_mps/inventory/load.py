"""What GPUs and the processes on them do at the moment, as NVML measures it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from yunion_mps.errors import DriverError
from yunion_mps.inventory.nvml import MIB, Nvml, handle_of, of_each_gpu, optional, pynvml


class GpuLoad(NamedTuple):
    """What one GPU does; None if the driver does not tell.

    `utilization` is the percentage of the time in which any kernel ran, over the driver's last sample period
    of up to a second.
    """

    utilization: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class Load(NamedTuple):
    """The load of each GPU that answers, by its UUID, and the SM utilization in % by GPU UUID and PID.

    A process is missing if the driver has no sample of it: it tells only of those that have run something.
    """

    gpus: Mapping[str, GpuLoad] = {}
    processes: Mapping[str, Mapping[int, int]] = {}


def read_load(nvml: Nvml, busy: Collection[str], since_s: float) -> Load:
    """The load of all GPUs, and of the processes on `busy` ones (UUIDs) after `since_s` (in s since 1970).

    Raises DriverError if the driver as a whole does not answer in time. None of this wakes a GPU: the driver
    answers for one in low power, too.
    """

    def read() -> Load:
        return Load(of_each_gpu(_load), {uuid: _sm_utilization(uuid, since_s) for uuid in busy})

    return nvml.deadline.call(read)


def _load(handle: Any) -> GpuLoad:
    rates = optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    # As nvidia-smi has it: without what the driver reserves. Before 510 there is only the first version.
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
    """The newest sample of each process after that moment; empty if the driver has none, or does not tell."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle_of(uuid), int(since_s * 1_000_000))
    except DriverError:  # the GPU is lost
        return {}
    except pynvml.NVMLError:  # NOT_FOUND: no samples; NOT_SUPPORTED; or more processes than a moment ago
        return {}
    newest = sorted(samples, key=lambda sample: sample.timeStamp)
    # Drivers have been seen to tell 2147483632 % (https://github.com/NVIDIA/DCGM/issues/83).
    return {sample.pid: sample.smUtil for sample in newest if sample.smUtil <= 100}
