"""The kubelet's list of pods and of what their containers have.

Source: Kubernetes: Device Plugins, section "Monitoring device plugin resources".
"""

from __future__ import annotations

from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.kubelet.grpc import Rpc, call_rpc
from yunion_mps.kubernetes.kubelet.protos.pod_resources_pb2 import (
    ContainerResources,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
)

#: How long the kubelet has to answer, in s.
_KUBELET_S = 10.0

LIST_POD_RESOURCES = Rpc("/v1.PodResourcesLister/List", ListPodResourcesRequest, ListPodResourcesResponse)


async def list_containers(paths: Paths) -> list[ContainerResources]:
    """Return the containers of the kubelet's pods; it does not list init containers.

    Raises RpcError if the kubelet does not answer, or if its answer cannot be read.
    """
    answer = await call_rpc(paths.pod_resources, LIST_POD_RESOURCES, ListPodResourcesRequest(), _KUBELET_S)
    containers: list[ContainerResources] = []
    for pod in answer.pod_resources:
        containers += pod.containers
    return containers
