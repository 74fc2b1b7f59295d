"""The kubelet's list of pods and of what their containers have: the parts that are used here.

Source: Kubernetes: Device Plugins, section "Monitoring device plugin resources"; the field numbers are those
of k8s.io/kubelet/pkg/apis/podresources/v1/api.proto.
"""
# Without `from __future__ import annotations`, like protobuf: a field's type says how it is encoded.

from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.kubelet.protobuf import Empty, Message, field_number
from yunion_mps.kubernetes.kubelet.rpc import Rpc, call_rpc

#: How long the kubelet has to answer, in s.
_KUBELET_S = 10.0


class ContainerDevices(Message):
    resource_name: str = field_number(1)
    device_ids: tuple[str, ...] = field_number(2)


class DynamicResource(Message):
    """A resource claim of a container."""

    claim_name: str = field_number(2)
    claim_namespace: str = field_number(3)


class ContainerResources(Message):
    name: str = field_number(1)
    devices: tuple[ContainerDevices, ...] = field_number(2)
    dynamic_resources: tuple[DynamicResource, ...] = field_number(5)


class PodResources(Message):
    name: str = field_number(1)
    namespace: str = field_number(2)
    containers: tuple[ContainerResources, ...] = field_number(3)


class ListPodResourcesResponse(Message):
    pod_resources: tuple[PodResources, ...] = field_number(1)


LIST_POD_RESOURCES = Rpc("/v1.PodResourcesLister/List", Empty, ListPodResourcesResponse)


async def list_containers(paths: Paths) -> list[ContainerResources]:
    """Return the containers of the kubelet's pods; it does not list init containers.

    Raises RpcError if the kubelet does not answer, and DecodeError if its answer cannot be read.
    """
    answer = await call_rpc(paths.pod_resources, LIST_POD_RESOURCES, Empty(), _KUBELET_S)
    containers: list[ContainerResources] = []
    for pod in answer.pod_resources:
        containers += pod.containers
    return containers
