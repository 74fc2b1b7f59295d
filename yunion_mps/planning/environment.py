"""The environment of a process that uses devices, and whether its control daemon honours it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from yunion_mps.errors import InfeasibleError
from yunion_mps.models import NORMAL, PRIORITIES, Device, DomainPlan
from yunion_mps.reasons import LIMITS_PENDING, hint_of

#: Lists the addresses of the devices that a process uses; CUDA ignores it.
DEVICE_VARIABLE = "YUNION_MPS_DEVICE"


def client_environment(devices: Sequence[Device], domain: DomainPlan) -> dict[str, str]:
    """Return the environment of a process that uses these devices; it can only tighten the domain's limits.

    Devices of one GPU add up to one budget. The process sees only their GPUs, in this order, and has one
    thread percentage and one priority: the lowest among them.
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
    """Return the environment of a process that has all devices, with the domain's limit for each GPU."""
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
    """Return why a process would get less than the sum of its devices; empty if it gets all.

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


def require_one_budget(devices: Sequence[Device], domain: DomainPlan, planned: DomainPlan | None) -> None:
    """Raise InfeasibleError if the devices cannot form one budget; the limits of `planned` are pending."""
    why = why_not_honoured(devices, domain)
    if not why:
        return
    what = f"{len(devices)} devices cannot form one budget"
    if planned and not why_not_honoured(devices, planned):
        pending = "the new limit takes effect once the MPS servers with the old one have ended"
        raise InfeasibleError(f"{what} yet: {why}; {pending}", hint_of(LIMITS_PENDING), LIMITS_PENDING)
    more = f"set cuda_mps_combine: {len(devices)} in host.conf"
    raise InfeasibleError(f"{what}: {why}", f"request them on different GPUs (across), or {more}")


def decimal(percentage: float) -> str:
    """Format a percentage for NVIDIA's programs: `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")
