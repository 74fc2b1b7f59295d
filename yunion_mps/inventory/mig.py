"""MIG through NVML: the mode, which GPU instances a GPU can have, which it has, and how they are made.

An instance is listed as a GPU of its own if it is one MIG device, that is if its only compute instance has
all of its slices.

Source: NVML API Reference, section "Multi Instance GPU Management"; NVIDIA: Multi-Instance GPU User Guide,
section "MIG Device Names".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError
from yunion_mps.core.mig import MigInstance, MigProfile
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import hint_of
from yunion_mps.core.text import printable
from yunion_mps.inventory.driver import (
    bounded,
    call_driver,
    driver_error,
    optional,
    printable_text,
    pynvml,
    refuse_if_abandoned,
    whole_mib,
)
from yunion_mps.inventory.nvml import Nvml, handle_of, mig_devices
from yunion_mps.inventory.running import COMPUTE, MPS_CLIENTS, running_processes

#: How nvidia-smi begins the names of profiles.
_PREFIX = "MIG "


class MigMode(NamedTuple):
    """Whether MIG mode is on.

    Source: NVML API Reference, nvmlDeviceGetMigMode, for `enabled` and `pending`.
    """

    enabled: bool
    #: The mode after a reset of the GPU; it differs from `enabled` while a change of it waits.
    pending: bool
    #: The change waits for processes to end, and not for a reset.
    in_use: bool = False


class Mig:
    """MIG of the host's GPUs, through an open NVML; every method raises DriverError."""

    def __init__(self, nvml: Nvml) -> None:
        self.deadline = nvml.deadline

    @bounded
    def read(self, gpu: Gpu) -> tuple[Gpu, ...]:
        """Return the GPU with its profiles and instances, then those that are MIG devices."""
        handle = handle_of(str(gpu.uuid))
        profiles = gpu.mig_profiles or _profiles(handle)
        if not gpu.mig_enabled:
            return (gpu._replace(mig_profiles=profiles, mig_instances=()),)
        instances = _instances(handle, profiles)
        parent = gpu._replace(mig_profiles=profiles, mig_instances=instances)
        gpus = [parent]
        for instance in instances:
            if instance.uuid:
                gpus.append(_as_gpu(parent, instance))
        return tuple(gpus)

    @bounded
    def mode(self, uuid: str) -> MigMode:
        """Return the GPU's MIG mode."""
        return _mode(handle_of(uuid))

    @bounded
    def set_mode(self, uuid: str, enabled: bool) -> MigMode:  # noqa: FBT001 - NVML's call
        """Set the mode and read it back; it stays pending if the GPU is in use or needs a reset.

        Source: NVML API Reference, nvmlDeviceSetMigMode; NVIDIA: Multi-Instance GPU User Guide, section
        "Enable MIG Mode".
        """
        handle = handle_of(uuid)
        message = f"MIG mode cannot be switched {'on' if enabled else 'off'}"
        status = _change(message, pynvml.nvmlDeviceSetMigMode, handle, int(enabled))
        if status not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_IN_USE, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise _refusal(message, pynvml.NVMLError(status))
        return _mode(handle)._replace(in_use=status == pynvml.NVML_ERROR_IN_USE)

    @bounded
    def instances(self, uuid: str, profiles: Sequence[MigProfile]) -> tuple[MigInstance, ...]:
        """Return the GPU instances that the GPU has of these profiles, by their ids."""
        return _instances(handle_of(uuid), profiles)

    @bounded
    def create(self, uuid: str, profile: MigProfile, start: int) -> int:
        """Create a GPU instance at this place and return its id; it has no compute instance yet.

        start: the first memory slice that it occupies.

        Source: NVML API Reference, nvmlDeviceCreateGpuInstanceWithPlacement.
        """
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
        handle = handle_of(uuid)
        text = f"instance {profile.name} cannot be created at slice {start}"
        create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
        instance = _change(text, create, handle, profile.id, pynvml.byref(place))
        return int(call_driver(pynvml.nvmlGpuInstanceGetInfo, instance).id)

    @bounded
    def create_compute(self, uuid: str, instance: int) -> None:
        """Create the compute instance that has all slices of the GPU instance, without which no job runs.

        Source: NVIDIA: Multi-Instance GPU User Guide, section "Creating GPU Instances".
        """
        handle = call_driver(pynvml.nvmlDeviceGetGpuInstanceById, handle_of(uuid), instance)
        largest = max(_compute_profiles(handle), key=lambda profile: int(profile.sliceCount))
        text = f"the compute instance of g{instance} cannot be created"
        _change(text, pynvml.nvmlGpuInstanceCreateComputeInstance, handle, largest.id)

    @bounded
    def destroy(self, uuid: str, instance: int) -> None:
        """Destroy the GPU instance and its compute instances; the driver refuses while a process uses it."""
        handle = call_driver(pynvml.nvmlDeviceGetGpuInstanceById, handle_of(uuid), instance)
        text = f"instance g{instance} cannot be destroyed"
        for profile in _compute_profiles(handle):
            for compute in _listed(pynvml.nvmlGpuInstanceGetComputeInstances, handle, profile):
                _change(text, pynvml.nvmlComputeInstanceDestroy, compute)
        _change(text, pynvml.nvmlGpuInstanceDestroy, handle)

    @bounded
    def processes(self, uuid: str, instance: int | None = None) -> set[int]:
        """Return the PIDs of the processes on a GPU, or on all compute instances of one of its instances."""
        handle = handle_of(uuid)
        if instance is None:
            return _processes(handle)
        pids: set[int] = set()
        for device in mig_devices(handle):
            if _instance_of(device) == instance:
                pids |= _processes(device)
        return pids


#: What the refusals of changes mean, and their reason codes.
#: Source: NVML API Reference, section "Multi Instance GPU Management".
_REFUSALS = {
    pynvml.NVML_ERROR_IN_USE: ("a process uses it", reasons.MIG_IN_USE),
    pynvml.NVML_ERROR_RESET_REQUIRED: ("the GPU must be reset first", reasons.MIG_RESET_REQUIRED),
    pynvml.NVML_ERROR_NO_PERMISSION: ("permission denied", reasons.MIG_NO_PERMISSION),
    pynvml.NVML_ERROR_NOT_SUPPORTED: ("the driver does not support it here", reasons.MIG_NOT_SUPPORTED),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (
        "the GPU has no room for it", reasons.MIG_INSUFFICIENT_RESOURCES
    ),
}  # fmt: skip


def _change(failure: str, function: Any, *arguments: Any) -> Any:
    """Call a function that changes something; its DriverError begins with `failure`."""
    refuse_if_abandoned()
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise _refusal(failure, error) from None


def _refusal(failure: str, error: Any) -> DriverError:
    """Return the error. No job is harmed, because nothing that a process uses is ever changed."""
    if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
        return driver_error(error)
    why, code = _REFUSALS.get(error.value, (f"NVML: {printable(str(error))}", reasons.MIG_REFUSED))
    return DriverError(f"{failure}: {why}; no running job is affected", hint_of(code), code)


def _processes(handle: Any) -> set[int]:
    pids = set()
    for kind in (COMPUTE, MPS_CLIENTS):
        pids |= {process.pid for process in optional(running_processes, handle, kind) or ()}
    return pids


def _instance_of(device: Any) -> int:
    """Return the id of the GPU instance that a MIG device belongs to."""
    return int(call_driver(pynvml.nvmlDeviceGetGpuInstanceId, device))


def _mode(handle: Any) -> MigMode:
    current, pending = call_driver(pynvml.nvmlDeviceGetMigMode, handle)
    return MigMode(bool(current), bool(pending))


def _profiles(handle: Any) -> tuple[MigProfile, ...]:
    """Return what the GPU can have; nothing before driver 510, which names no profiles."""
    profiles: list[MigProfile] = []
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = optional(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number)
        if info is not None:
            profiles.append(_profile(handle, info))
    return tuple(profiles)


def _profile(handle: Any, info: Any) -> MigProfile:
    list_places = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    max_places = _count(list_places, handle, info.id)
    places = _array(list_places, pynvml.c_nvmlGpuInstancePlacement_t, handle, info.id, max_places)
    return MigProfile(
        id=int(info.id),
        name=printable_text(info.name).removeprefix(_PREFIX),
        slices=int(info.sliceCount),
        memory_mib=int(info.memorySizeMB),
        multiprocessors=int(info.multiprocessorCount),
        max_count=int(info.instanceCount),
        size=max((int(place.size) for place in places), default=0),
        starts=tuple(sorted(int(place.start) for place in places)),
    )


def _count(function: Any, handle: Any, number: int) -> int:
    most = pynvml.c_uint(0)
    call_driver(function, handle, number, None, pynvml.byref(most))
    return int(most.value)


def _array(function: Any, kind: Any, handle: Any, number: int, most: int) -> list[Any]:
    items = (kind * max(1, most))()
    filled = pynvml.c_uint(most)
    call_driver(function, handle, number, items, pynvml.byref(filled))
    return list(items[: filled.value])


def _listed(function: Any, handle: Any, profile: Any) -> list[Any]:
    """Return the compute instances of a profile."""
    return _array(function, pynvml.c_nvmlComputeInstance_t, handle, profile.id, int(profile.instanceCount))


def _compute_profiles(instance: Any) -> list[Any]:
    infos = []
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        info = optional(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0, 1)
        if info is not None:
            infos.append(info)
    return infos


def _instances(handle: Any, profiles: Sequence[MigProfile]) -> tuple[MigInstance, ...]:
    """Return the GPU's instances by their ids, each with the UUID of its MIG device if it is whole."""
    devices: dict[int, list[Any]] = {}
    for device in mig_devices(handle):
        devices.setdefault(_instance_of(device), []).append(device)
    instances: list[MigInstance] = []
    list_instances = pynvml.nvmlDeviceGetGpuInstances
    kind = pynvml.c_nvmlGpuInstance_t
    for profile in profiles:
        for instance_handle in _array(list_instances, kind, handle, profile.id, profile.max_count):
            info = call_driver(pynvml.nvmlGpuInstanceGetInfo, instance_handle)
            own_devices = devices.get(int(info.id), [])
            uuid = ""
            if _is_whole(own_devices):
                uuid = printable_text(call_driver(pynvml.nvmlDeviceGetUUID, own_devices[0]))
            instance = MigInstance(
                id=int(info.id),
                profile=profile.name,
                start=int(info.placement.start),
                size=int(info.placement.size),
                uuid=uuid,
                compute_instances=len(own_devices),
            )
            instances.append(instance)
    return tuple(sorted(instances, key=lambda instance: instance.id))


def _is_whole(devices: Sequence[Any]) -> bool:
    if len(devices) != 1:
        return False
    attributes = call_driver(pynvml.nvmlDeviceGetAttributes, devices[0])
    return bool(attributes.computeInstanceSliceCount == attributes.gpuInstanceSliceCount)


def _as_gpu(parent: Gpu, instance: MigInstance) -> Gpu:
    memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle_of(instance.uuid))
    memory_mib = whole_mib(memory.total) if memory else None
    if not memory_mib:
        by_name = {profile.name: profile.memory_mib for profile in parent.mig_profiles}
        memory_mib = by_name[instance.profile]
    return instance_gpu(parent, instance)._replace(uuid=instance.uuid, memory_mib=memory_mib)


def instance_gpu(parent: Gpu, instance: MigInstance) -> Gpu:
    """Return the instance without what only its MIG device reports: its UUID and its memory."""
    sms = {profile.name: profile.multiprocessors for profile in parent.mig_profiles}
    all_sms = max(sms.values())
    tenths = 1000 * sms[instance.profile] // max(1, all_sms)
    return Gpu(
        f"{parent.pci_address}-g{instance.id}",
        name=f"{parent.name} MIG {instance.profile}",
        minor=parent.minor,
        compute_mode=parent.compute_mode,
        mode_is_fixed=parent.mode_is_fixed,
        compute_capability=parent.compute_capability,
        vendor_device_id=parent.vendor_device_id,
        numa_node=parent.numa_node,
        link=parent.link,
        render_node=parent.render_node,
        parent=str(parent.uuid),
        identity=f"{parent.uuid}/{instance.profile}@{instance.start}",
        sm_percentage=tenths / 10,
    )
