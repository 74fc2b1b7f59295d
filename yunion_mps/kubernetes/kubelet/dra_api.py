"""The messages between the kubelet and a driver for dynamic resource allocation (DRA), and its registration.

Source: k8s.io/kubelet/pkg/apis: pluginregistration/v1/api.proto, dra/v1/api.proto (in v1beta1 only
Device.share_id is missing), and dra-health/v1/api.proto, which v1alpha1 equals.
"""
# Without `from __future__ import annotations`, like protobuf: a field's type says how it is encoded.

from collections.abc import Mapping
from typing import Optional

from yunion_mps.kubernetes.kubelet.protobuf import Empty, Message, field_number
from yunion_mps.kubernetes.kubelet.rpc import Rpc

#: The type of a DRA driver among the kubelet's plugins.
PLUGIN_TYPE = "DRAPlugin"
#: The services of the driver, as its registration lists them.
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
#: The values of HealthStatus.
UNKNOWN_HEALTH = 0
IS_HEALTHY = 1
IS_UNHEALTHY = 2


class PluginInfo(Message):
    type: str = field_number(1)
    name: str = field_number(2)
    endpoint: str = field_number(3)
    supported_versions: tuple[str, ...] = field_number(4)


class RegistrationStatus(Message):
    plugin_registered: bool = field_number(1)
    error: str = field_number(2)


class ClaimReference(Message):
    """The API's `Claim`."""

    namespace: str = field_number(1)
    uid: str = field_number(2)
    name: str = field_number(3)


class NodePrepareResourcesRequest(Message):
    claims: tuple[ClaimReference, ...] = field_number(1)


class PreparedDevice(Message):
    """The API's `Device`. It belongs to all requests of the claim if no request is named."""

    request_names: tuple[str, ...] = field_number(1)
    pool_name: str = field_number(2)
    device_name: str = field_number(3)
    cdi_device_ids: tuple[str, ...] = field_number(4)
    share_id: str = field_number(5)


class NodePrepareResourceResponse(Message):
    devices: tuple[PreparedDevice, ...] = field_number(1)
    error: str = field_number(2)


class NodePrepareResourcesResponse(Message):
    """The result for each claim, by uid."""

    claims: Mapping[str, NodePrepareResourceResponse] = field_number(1)


class NodeUnprepareResourcesRequest(Message):
    claims: tuple[ClaimReference, ...] = field_number(1)


class NodeUnprepareResourceResponse(Message):
    error: str = field_number(1)


class NodeUnprepareResourcesResponse(Message):
    """The result for each claim, by uid."""

    claims: Mapping[str, NodeUnprepareResourceResponse] = field_number(1)


class DeviceIdentifier(Message):
    pool_name: str = field_number(1)
    device_name: str = field_number(2)


class DeviceHealth(Message):
    """`health` is a HealthStatus, `last_updated_time` is in s since 1970."""

    device: Optional[DeviceIdentifier] = field_number(1)
    health: int = field_number(2)
    last_updated_time: int = field_number(3)
    health_check_timeout_seconds: int = field_number(4)
    message: str = field_number(5)


class NodeWatchResourcesResponse(Message):
    devices: tuple[DeviceHealth, ...] = field_number(1)


_REGISTRATION = "/pluginregistration.Registration"
GET_INFO = Rpc(f"{_REGISTRATION}/GetInfo", Empty, PluginInfo)
NOTIFY = Rpc(f"{_REGISTRATION}/NotifyRegistrationStatus", RegistrationStatus, Empty)


def _prepare(version: str) -> Rpc[NodePrepareResourcesRequest, NodePrepareResourcesResponse]:
    path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources"
    return Rpc(path, NodePrepareResourcesRequest, NodePrepareResourcesResponse)


def _unprepare(version: str) -> Rpc[NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse]:
    path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources"
    return Rpc(path, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse)


def _watch_health(version: str) -> Rpc[Empty, NodeWatchResourcesResponse]:
    path = f"/{version}.DRAResourceHealth/NodeWatchResources"
    return Rpc(path, Empty, NodeWatchResourcesResponse)


PREPARE = _prepare("v1")
PREPARE_BETA = _prepare("v1beta1")
UNPREPARE = _unprepare("v1")
UNPREPARE_BETA = _unprepare("v1beta1")
WATCH_HEALTH = _watch_health("v1")
WATCH_HEALTH_ALPHA = _watch_health("v1alpha1")
