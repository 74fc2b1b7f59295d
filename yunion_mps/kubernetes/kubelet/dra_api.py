"""The kubelet's API for drivers of dynamic resource allocation (DRA), and for their registration.

Source: k8s.io/kubelet/pkg/apis: dra/v1, dra-health/v1 and pluginregistration/v1, api.proto of each. The
messages of the older versions, v1beta1 and v1alpha1, are the same.
"""

from __future__ import annotations

from yunion_mps.kubernetes.kubelet.grpc import Rpc
from yunion_mps.kubernetes.kubelet.protos.dra_health_pb2 import (
    NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
)
from yunion_mps.kubernetes.kubelet.protos.dra_pb2 import (
    NodePrepareResourcesRequest,
    NodePrepareResourcesResponse,
    NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
)
from yunion_mps.kubernetes.kubelet.protos.plugin_registration_pb2 import (
    InfoRequest,
    PluginInfo,
    RegistrationStatus,
    RegistrationStatusResponse,
)

#: The type of a DRA driver among the kubelet's plugins.
PLUGIN_TYPE = "DRAPlugin"
#: The services of the driver, as its registration lists them.
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

_REGISTRATION = "/pluginregistration.Registration"
GET_INFO = Rpc(f"{_REGISTRATION}/GetInfo", InfoRequest, PluginInfo)
NOTIFY = Rpc(f"{_REGISTRATION}/NotifyRegistrationStatus", RegistrationStatus, RegistrationStatusResponse)


def _prepare(version: str) -> Rpc[NodePrepareResourcesRequest, NodePrepareResourcesResponse]:
    path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources"
    return Rpc(path, NodePrepareResourcesRequest, NodePrepareResourcesResponse)


def _unprepare(version: str) -> Rpc[NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse]:
    path = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources"
    return Rpc(path, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse)


def _watch_health(version: str) -> Rpc[NodeWatchResourcesRequest, NodeWatchResourcesResponse]:
    path = f"/{version}.DRAResourceHealth/NodeWatchResources"
    return Rpc(path, NodeWatchResourcesRequest, NodeWatchResourcesResponse)


PREPARE = _prepare("v1")
PREPARE_BETA = _prepare("v1beta1")
UNPREPARE = _unprepare("v1")
UNPREPARE_BETA = _unprepare("v1beta1")
WATCH_HEALTH = _watch_health("v1")
WATCH_HEALTH_ALPHA = _watch_health("v1alpha1")
