"""The messages between the kubelet and a device plugin: the parts that are used here.

Source: Kubernetes: Device Plugins, section "Device plugin implementation"; the field numbers are those of
k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto.
"""
# Without `from __future__ import annotations`, like protobuf: a field's type says how it is encoded.

from collections.abc import Mapping
from typing import Optional

from yunion_mps.kubernetes.kubelet.protobuf import Empty, Message, field_number
from yunion_mps.kubernetes.kubelet.rpc import Rpc

VERSION = "v1beta1"
#: The values of a device's health.
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


class DevicePluginOptions(Message):
    pre_start_required: bool = field_number(1)
    get_preferred_allocation_available: bool = field_number(2)


class RegisterRequest(Message):
    version: str = field_number(1)
    endpoint: str = field_number(2)
    resource_name: str = field_number(3)
    options: Optional[DevicePluginOptions] = field_number(4)


class NumaNode(Message):
    id: int = field_number(1)


class TopologyInfo(Message):
    nodes: tuple[NumaNode, ...] = field_number(1)


class PluginDevice(Message):
    """The API's `Device`. Its id has at most 63 characters."""

    id: str = field_number(1)
    health: str = field_number(2)
    topology: Optional[TopologyInfo] = field_number(3)


class ListAndWatchResponse(Message):
    devices: tuple[PluginDevice, ...] = field_number(1)


class ContainerPreferredAllocationRequest(Message):
    available_device_ids: tuple[str, ...] = field_number(1)
    must_include_device_ids: tuple[str, ...] = field_number(2)
    allocation_size: int = field_number(3)


class PreferredAllocationRequest(Message):
    container_requests: tuple[ContainerPreferredAllocationRequest, ...] = field_number(1)


class ContainerPreferredAllocationResponse(Message):
    device_ids: tuple[str, ...] = field_number(1)


class PreferredAllocationResponse(Message):
    container_responses: tuple[ContainerPreferredAllocationResponse, ...] = field_number(1)


class ContainerAllocateRequest(Message):
    device_ids: tuple[str, ...] = field_number(1)


class AllocateRequest(Message):
    container_requests: tuple[ContainerAllocateRequest, ...] = field_number(1)


class CdiDevice(Message):
    name: str = field_number(1)


class MountSpec(Message):
    """The API's `Mount`."""

    container_path: str = field_number(1)
    host_path: str = field_number(2)
    read_only: bool = field_number(3)


class DeviceSpec(Message):
    container_path: str = field_number(1)
    host_path: str = field_number(2)
    permissions: str = field_number(3)


class ContainerAllocateResponse(Message):
    envs: Mapping[str, str] = field_number(1)
    mounts: tuple[MountSpec, ...] = field_number(2)
    devices: tuple[DeviceSpec, ...] = field_number(3)
    cdi_devices: tuple[CdiDevice, ...] = field_number(5)


class AllocateResponse(Message):
    container_responses: tuple[ContainerAllocateResponse, ...] = field_number(1)


class PreStartContainerRequest(Message):
    device_ids: tuple[str, ...] = field_number(1)


REGISTER = Rpc("/v1beta1.Registration/Register", RegisterRequest, Empty)
_PLUGIN = "/v1beta1.DevicePlugin"
GET_OPTIONS = Rpc(f"{_PLUGIN}/GetDevicePluginOptions", Empty, DevicePluginOptions)
LIST_AND_WATCH = Rpc(f"{_PLUGIN}/ListAndWatch", Empty, ListAndWatchResponse)
GET_PREFERRED_ALLOCATION = Rpc(
    f"{_PLUGIN}/GetPreferredAllocation", PreferredAllocationRequest, PreferredAllocationResponse
)
ALLOCATE = Rpc(f"{_PLUGIN}/Allocate", AllocateRequest, AllocateResponse)
PRE_START_CONTAINER = Rpc(f"{_PLUGIN}/PreStartContainer", PreStartContainerRequest, Empty)
