"""The kubelet's API of pods and their devices: the parts that the plugin uses.

The field numbers are those of k8s.io/kubelet/pkg/apis, podresources/v1/api.proto.
"""
# Without `from __future__ import annotations`, like protobuf.

from yunion_mps.kubernetes.kubelet import grpc
from yunion_mps.kubernetes.kubelet.protobuf import Empty, Message, field_number
from yunion_mps.kubernetes.kubelet.rpc import Rpc
from yunion_mps.paths import Paths

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
    """The containers of the kubelet's pods, except init containers; raises RpcError and DecodeError."""
    data = await grpc.call_unary(paths.pod_resources, LIST_POD_RESOURCES.path, b"", _KUBELET_S)
    pods = LIST_POD_RESOURCES.answer.decode(data).pod_resources
    return [container for pod in pods for container in pod.containers]
