"""The environment of a process that uses devices, and what of it its control daemon will not give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from yunion_mps.models import NORMAL, PRIORITIES, Device, DomainPlan

#: Names the devices that a process uses, by their addresses; it means nothing to CUDA.
DEVICE_VARIABLE = "YUNION_MPS_DEVICE"


def client_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """The environment of a process that uses the domain's devices: it can only tighten what that has set.

    Devices of one GPU are one budget, their sum. The process sees just their GPUs, in this order, and has one
    percentage for all of them, the smallest. Its priority is the lowest of them.
    """
    memory_mib: dict[str, int] = {}
    percentage: dict[str, float] = {}
    for device in devices:
        gpu = device.gpu_uuid
        memory_mib[gpu] = memory_mib.get(gpu, 0) + device.memory_limit_mib
        percentage[gpu] = min(100.0, round(percentage.get(gpu, 0.0) + device.thread_percentage, 1))
    limits = (f"{number}={mib}M" for number, mib in enumerate(memory_mib.values()))
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": decimal(min(percentage.values())),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(limits),
        "CUDA_MPS_PIPE_DIRECTORY": domain.pipe_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(memory_mib),
        DEVICE_VARIABLE: ",".join(device.addr for device in devices),
    }
    priority = max(PRIORITIES.index(device.priority) for device in devices)
    if priority != PRIORITIES.index(NORMAL):
        environment["CUDA_MPS_CLIENT_PRIORITY"] = str(priority)
    return dict(sorted(environment.items()))


def whole_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """The environment of a process that has all devices: each GPU up to what one client may get of it.

    A client cannot get more than its control daemon gives, so more is not promised. A GPU that this control
    daemon does not serve now is named with the sum of its devices.
    """
    sums = Counter[str]()
    for device in devices:
        sums[device.gpu_uuid] += device.memory_limit_mib
    most = [domain.memory_limit_of(gpu) or mib for gpu, mib in sums.items()]
    return {
        **client_environment(devices, domain),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(f"{number}={mib}M" for number, mib in enumerate(most)),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": decimal(domain.thread_percentage),
    }


def why_not_honoured(devices: Sequence[Device], domain: DomainPlan) -> str:
    """Why a process would get less than the devices' sum, empty if it gets all of it.

    A client's environment can only tighten the domain's limits.
    """
    for uuid in dict.fromkeys(device.gpu_uuid for device in devices):
        own = [device for device in devices if device.gpu_uuid == uuid]
        wanted_mib = sum(device.memory_limit_mib for device in own)
        most_mib = domain.memory_limit_of(uuid)
        if most_mib is not None and wanted_mib > most_mib:
            return (
                f"the control daemon limits each process to {most_mib} MiB of GPU "
                f"{own[0].gpu_address}, not {wanted_mib} MiB"
            )
        wanted = min(100.0, sum(device.thread_percentage for device in own))
        if round(wanted, 1) > domain.thread_percentage:
            most = decimal(domain.thread_percentage)
            instead = f"{most} % of the threads of GPU {own[0].gpu_address}, not {decimal(wanted)} %"
            return f"the control daemon limits each process to {instead}"
    return ""


def decimal(percentage: float) -> str:
    """A percentage as NVIDIA's programs take it: `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")
