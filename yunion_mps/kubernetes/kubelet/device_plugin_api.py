"""The kubelet's API for device plugins: its methods, and the values of a device's health.

Source: Kubernetes: Device Plugins, section "Device plugin implementation".
"""

from __future__ import annotations

from yunion_mps.kubernetes.kubelet.grpc import Rpc
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import (
    AllocateRequest,
    AllocateResponse,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    RegisterRequest,
)

VERSION = "v1beta1"
#: The values of a device's health.
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

REGISTER = Rpc("/v1beta1.Registration/Register", RegisterRequest, Empty)
_PLUGIN = "/v1beta1.DevicePlugin"
GET_OPTIONS = Rpc(f"{_PLUGIN}/GetDevicePluginOptions", Empty, DevicePluginOptions)
LIST_AND_WATCH = Rpc(f"{_PLUGIN}/ListAndWatch", Empty, ListAndWatchResponse)
GET_PREFERRED_ALLOCATION = Rpc(
    f"{_PLUGIN}/GetPreferredAllocation", PreferredAllocationRequest, PreferredAllocationResponse
)
ALLOCATE = Rpc(f"{_PLUGIN}/Allocate", AllocateRequest, AllocateResponse)
PRE_START_CONTAINER = Rpc(f"{_PLUGIN}/PreStartContainer", PreStartContainerRequest, PreStartContainerResponse)
