"""The environment of a process that uses devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from yunion_mps.core.enums import JAX_VARIABLE, MEMORY_VARIABLE, NORMAL, NOT_SHARED, PRIORITIES
from yunion_mps.core.errors import InfeasibleError
from yunion_mps.core.models import Device, DomainPlan
from yunion_mps.core.reasons import LIMITS_PENDING, hint_of

#: Lists the addresses of the devices that a process uses; CUDA ignores it.
DEVICE_VARIABLE = "YUNION_MPS_DEVICE"
#: Variables of MPS clients.
#: Source: NVIDIA: Multi-Process Service, section "Appendix: Environment Variables".
_THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY_LIMIT_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def limit_mib(device: Device) -> int:
    """Return the memory of a device that is shared through MPS, which is always known, in MiB.

    Raises AssertionError if the device has no limit.
    """
    if device.memory_limit_mib is None:
        raise AssertionError(f"device {device.addr} has no memory limit")
    return device.memory_limit_mib


def process_percentage(devices: Sequence[Device], environment: Mapping[str, str]) -> float:
    """Return what a process with this environment may use of the SM threads of each of its GPUs.

    Under MPS, devices of one GPU add up; devices that are not shared through MPS do not.
    """
    limit = environment.get(_THREADS_VARIABLE)
    if limit:
        return float(limit)
    return min((device.thread_percentage for device in devices), default=0.0)


def sharing_of(devices: Sequence[Device]) -> str:
    """Return how the devices of one process are shared; not at all only if each is a whole MIG instance.

    A process can use whole instances together with time-sliced devices, but neither together with MPS.

    Source: NVIDIA: Multi-Instance GPU User Guide, section "CUDA Device Enumeration".
    """
    for device in devices:
        if device.sharing != NOT_SHARED:
            return device.sharing
    return NOT_SHARED


def client_environment(devices: Sequence[Device], domain: DomainPlan | None) -> dict[str, str]:
    """Return the environment of a process that uses these devices; it can only tighten the domain's limits.

    Devices of one GPU add up to one budget. The process sees only their GPUs, in this order, and has one
    thread percentage and one priority: the lowest among them. If nothing enforces the budgets, frameworks are
    told what they may use.

    domain: None if the GPUs are shared without MPS.

    Source: NVIDIA: Multi-Process Service, section "Appendix: Environment Variables"; for the order, CUDA
    Programming Guide, section "CUDA Environment Variables".
    """
    environment = {**_mps_variables(devices, domain), **_advice(devices)}
    return dict(sorted(environment.items()))


def _mps_variables(devices: Sequence[Device], domain: DomainPlan | None) -> dict[str, str]:
    gpus = ",".join(dict.fromkeys(device.gpu_uuid for device in devices))
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": gpus,
        DEVICE_VARIABLE: ",".join(device.addr for device in devices),
    }
    if domain is None:
        return environment
    memory_mib, percentages = _sums(devices)
    environment |= {
        _THREADS_VARIABLE: decimal(min(percentages.values())),
        _MEMORY_LIMIT_VARIABLE: _memory_limits(memory_mib.values()),
        "CUDA_MPS_PIPE_DIRECTORY": domain.pipe_directory,
    }
    priority = max(PRIORITIES.index(device.priority) for device in devices)
    if priority != PRIORITIES.index(NORMAL):
        environment["CUDA_MPS_CLIENT_PRIORITY"] = str(priority)
    return environment


def _memory_limits(limits_mib: Iterable[int]) -> str:
    """Return `0=4096M,1=8192M`: the limits of the visible GPUs by their CUDA ordinals, from 0."""
    return ",".join(f"{ordinal}={limit_mib}M" for ordinal, limit_mib in enumerate(limits_mib))


def _advice(devices: Sequence[Device]) -> dict[str, str]:
    """Return what frameworks may allocate of each GPU if nothing enforces it; the least if that differs.

    Nothing if the memory of all GPUs is unknown.
    """
    if all(device.budget_enforced for device in devices):
        return {}
    memory_mib = Counter[str]()
    total_mib = Counter[str]()
    for device in devices:
        if device.memory_limit_mib is not None and device.memory_total_mib is not None:
            memory_mib[device.gpu_uuid] += device.memory_limit_mib
            total_mib[device.gpu_uuid] = device.memory_total_mib
    if not memory_mib:
        return {}
    fraction = min(mib / max(total_mib[gpu], mib) for gpu, mib in memory_mib.items())
    return {
        MEMORY_VARIABLE: str(min(memory_mib.values())),
        JAX_VARIABLE: f"{int(fraction * 1000) / 1000:g}",
    }


def whole_environment(devices: Sequence[Device], domain: DomainPlan | None) -> dict[str, str]:
    """Return the environment of a process that has all devices, with the domain's limit for each GPU."""
    if domain is None:
        return client_environment(devices, domain)
    sums_mib, _ = _sums(devices)
    limits_mib = [domain.memory_limit_of(uuid) or sum_mib for uuid, sum_mib in sums_mib.items()]
    return {
        **client_environment(devices, domain),
        _MEMORY_LIMIT_VARIABLE: _memory_limits(limits_mib),
        _THREADS_VARIABLE: decimal(domain.thread_percentage),
    }


def why_not_honoured(devices: Sequence[Device], domain: DomainPlan | None) -> str:
    """Return why a process would get less than the sum of its devices; empty if it gets all.

    A client's environment can only tighten the domain's limits.
    """
    if domain is None:
        return ""
    memory_mib, percentages = _sums(devices)
    addresses = {device.gpu_uuid: device.gpu_address for device in devices}
    for uuid, requested_mib in memory_mib.items():
        gpu = f"GPU {addresses[uuid]}"
        most_mib = domain.memory_limit_of(uuid)
        if most_mib is not None and requested_mib > most_mib:
            return (
                f"the control daemon limits each process to {most_mib} MiB of {gpu}, not {requested_mib} MiB"
            )
        if percentages[uuid] > domain.thread_percentage:
            limit = f"{decimal(domain.thread_percentage)} % of the threads of {gpu}"
            return f"the control daemon limits each process to {limit}, not {decimal(percentages[uuid])} %"
    return ""


def _sums(devices: Iterable[Device]) -> tuple[dict[str, int], dict[str, float]]:
    """Return the memory in MiB and the percentage of SM threads of the devices of each GPU, by UUID."""
    memory_mib: dict[str, int] = {}
    percentages: dict[str, float] = {}
    for device in devices:
        uuid = device.gpu_uuid
        memory_mib[uuid] = memory_mib.get(uuid, 0) + limit_mib(device)
        percentages[uuid] = min(100.0, round(percentages.get(uuid, 0.0) + device.thread_percentage, 1))
    return memory_mib, percentages


def require_one_budget(
    devices: Sequence[Device], domain: DomainPlan | None, planned: DomainPlan | None
) -> None:
    """Raise InfeasibleError if the devices cannot form one budget.

    domain: the domain with the limits in effect, None if the devices are not shared through MPS.
    planned: the domain with the limits that will be in effect, None if that is unknown.
    """
    why = why_not_honoured(devices, domain)
    if not why:
        return
    message = f"{len(devices)} devices cannot be combined into one budget"
    if planned and not why_not_honoured(devices, planned):
        pending = "the new limit takes effect once the MPS servers with the old one have ended"
        raise InfeasibleError(f"{message} yet: {why}; {pending}", hint_of(LIMITS_PENDING), LIMITS_PENDING)
    more = f"set cuda_mps_combine: {len(devices)} in host.conf"
    raise InfeasibleError(f"{message}: {why}", f"request them on different GPUs, or {more}")


def decimal(percentage: float) -> str:
    """Format a percentage for NVIDIA's programs, which keep one decimal (measured with 535): `25`, `33.3`."""
    return f"{percentage:.1f}".removesuffix(".0")
