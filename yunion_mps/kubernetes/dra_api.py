"""The messages between the kubelet and a driver for dynamic resource allocation (DRA), and its registration.

The field numbers are those of k8s.io/kubelet/pkg/apis: pluginregistration/v1/api.proto, dra/v1/api.proto (in
v1beta1 only Device.share_id is missing), and dra-health/v1/api.proto, which v1alpha1 equals.
"""
# Without `from __future__ import annotations`, like kubelet_api.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from yunion_mps.kubernetes.kubelet_api import Empty, Message, Rpc, _many, _map, _one

#: The type of a DRA driver among the kubelet's plugins.
PLUGIN_TYPE = "DRAPlugin"
#: The services of the driver, as its registration lists them.
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
#: The values of HealthStatus.
UNKNOWN_HEALTH, IS_HEALTHY, IS_UNHEALTHY = 0, 1, 2


@dataclass(frozen=True)
class PluginInfo(Message):
    type: str = _one(1, str)
    name: str = _one(2, str)
    endpoint: str = _one(3, str)
    supported_versions: tuple[str, ...] = _many(4, str)


@dataclass(frozen=True)
class RegistrationStatus(Message):
    plugin_registered: bool = _one(1, bool)
    error: str = _one(2, str)


@dataclass(frozen=True)
class ClaimReference(Message):
    """The API's `Claim`."""

    namespace: str = _one(1, str)
    uid: str = _one(2, str)
    name: str = _one(3, str)


@dataclass(frozen=True)
class NodePrepareResourcesRequest(Message):
    claims: tuple[ClaimReference, ...] = _many(1, ClaimReference)


@dataclass(frozen=True)
class PreparedDevice(Message):
    """The API's `Device`. It belongs to all requests of the claim if no request is named."""

    request_names: tuple[str, ...] = _many(1, str)
    pool_name: str = _one(2, str)
    device_name: str = _one(3, str)
    cdi_device_ids: tuple[str, ...] = _many(4, str)
    share_id: str = _one(5, str)


@dataclass(frozen=True)
class NodePrepareResourceResponse(Message):
    devices: tuple[PreparedDevice, ...] = _many(1, PreparedDevice)
    error: str = _one(2, str)


@dataclass(frozen=True)
class _PreparedEntry(Message):
    key: str = _one(1, str)
    value: Optional[NodePrepareResourceResponse] = _one(2, NodePrepareResourceResponse)


@dataclass(frozen=True)
class NodePrepareResourcesResponse(Message):
    """The result for each claim, by uid."""

    claims: Mapping[str, NodePrepareResourceResponse] = _map(1, _PreparedEntry)


@dataclass(frozen=True)
class NodeUnprepareResourcesRequest(Message):
    claims: tuple[ClaimReference, ...] = _many(1, ClaimReference)


@dataclass(frozen=True)
class NodeUnprepareResourceResponse(Message):
    error: str = _one(1, str)


@dataclass(frozen=True)
class _UnpreparedEntry(Message):
    key: str = _one(1, str)
    value: Optional[NodeUnprepareResourceResponse] = _one(2, NodeUnprepareResourceResponse)


@dataclass(frozen=True)
class NodeUnprepareResourcesResponse(Message):
    """The result for each claim, by uid."""

    claims: Mapping[str, NodeUnprepareResourceResponse] = _map(1, _UnpreparedEntry)


@dataclass(frozen=True)
class DeviceIdentifier(Message):
    pool_name: str = _one(1, str)
    device_name: str = _one(2, str)


@dataclass(frozen=True)
class DeviceHealth(Message):
    """`health` is a HealthStatus, `last_updated_time` is in s since 1970."""

    device: Optional[DeviceIdentifier] = _one(1, DeviceIdentifier)
    health: int = _one(2, int)
    last_updated_time: int = _one(3, int)
    health_check_timeout_seconds: int = _one(4, int)
    message: str = _one(5, str)


@dataclass(frozen=True)
class NodeWatchResourcesResponse(Message):
    devices: tuple[DeviceHealth, ...] = _many(1, DeviceHealth)


_REGISTRATION = "/pluginregistration.Registration"
GET_INFO = Rpc(f"{_REGISTRATION}/GetInfo", Empty, PluginInfo)
NOTIFY = Rpc(f"{_REGISTRATION}/NotifyRegistrationStatus", RegistrationStatus, Empty)
PREPARE, PREPARE_BETA = (
    Rpc(
        f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources",
        NodePrepareResourcesRequest,
        NodePrepareResourcesResponse,
    )
    for version in ("v1", "v1beta1")
)
UNPREPARE, UNPREPARE_BETA = (
    Rpc(
        f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources",
        NodeUnprepareResourcesRequest,
        NodeUnprepareResourcesResponse,
    )
    for version in ("v1", "v1beta1")
)
WATCH_HEALTH, WATCH_HEALTH_ALPHA = (
    Rpc(f"/{version}.DRAResourceHealth/NodeWatchResources", Empty, NodeWatchResourcesResponse)
    for version in ("v1", "v1alpha1")
)
