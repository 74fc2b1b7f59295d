"""GPUs that are time-sliced or not shared: how an entry divides them, and their devices."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.identity import uuid5
from yunion_mps.core.models import Device, DirectGpu, Gpu, gpus_by_uuid
from yunion_mps.core.settings import DeviceEntry


def divide_directly(entry: DeviceEntry, gpu: Gpu) -> DirectGpu:
    """Divide the GPU, which is not shared through MPS, into the equal devices of a valid entry."""
    uuid = str(gpu.uuid)
    count = entry.virtual_number
    if entry.sharing == NOT_SHARED:
        percentage = gpu.sm_percentage or 100.0
        return DirectGpu(uuid, gpu.memory_mib, 1, NOT_SHARED, percentage)
    share_mib = None if gpu.memory_mib is None else gpu.memory_mib // count
    return DirectGpu(uuid, share_mib, count, entry.sharing)


def direct_devices(host_id: str, direct: Iterable[DirectGpu], gpus: Iterable[Gpu]) -> list[Device]:
    """Return the devices of these GPUs, in the order of slots, as far as the GPUs are among `gpus`."""
    by_uuid = gpus_by_uuid(gpus)
    devices: list[Device] = []
    for shared in direct:
        gpu = by_uuid.get(shared.uuid)
        if gpu is None:
            continue
        for slot in range(shared.device_count):
            device = Device(
                id=uuid5(host_id, f"{gpu.identity or shared.uuid}/{slot}"),
                addr=gpu.address if shared.sharing == NOT_SHARED else f"{gpu.address}-{slot}",
                gpu_uuid=shared.uuid,
                slot=slot,
                memory_limit_mib=shared.memory_limit_mib,
                memory_total_mib=gpu.memory_mib,
                thread_percentage=shared.thread_percentage,
                budget_enforced=shared.sharing == NOT_SHARED,
                domain="",
                sharing=shared.sharing,
            )
            devices.append(device)
    return devices
