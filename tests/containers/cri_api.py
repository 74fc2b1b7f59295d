"""The messages of the container runtime interface that the tests send: the parts that they use.

The field numbers are those of k8s.io/cri-api, pkg/apis/runtime/v1/api.proto. The encoding is the plugin's.
"""
# Without `from __future__ import annotations`, like yunion_mps/kubernetes/device_plugin_api.

from collections.abc import Mapping
from typing import Optional

from yunion_mps.kubernetes.kubelet.device_plugin_api import CdiDevice, DeviceSpec, MountSpec
from yunion_mps.kubernetes.kubelet.protobuf import Empty, Message, field_number
from yunion_mps.kubernetes.kubelet.rpc import Rpc

#: A NamespaceMode: the pod's namespace, which is the default, the container's, or the node's.
CONTAINER, NODE = 1, 2
#: A ContainerState.
CREATED, RUNNING, EXITED = 0, 1, 2


class VersionResponse(Message):
    version: str = field_number(1)
    runtime_name: str = field_number(2)
    runtime_version: str = field_number(3)
    runtime_api_version: str = field_number(4)


class RuntimeCondition(Message):
    type: str = field_number(1)
    status: bool = field_number(2)
    reason: str = field_number(3)
    message: str = field_number(4)


class RuntimeStatus(Message):
    conditions: tuple[RuntimeCondition, ...] = field_number(1)


class StatusResponse(Message):
    status: Optional[RuntimeStatus] = field_number(1)


class NamespaceOption(Message):
    network: int = field_number(1)
    pid: int = field_number(2)
    ipc: int = field_number(3)


class LinuxSandboxSecurityContext(Message):
    namespace_options: Optional[NamespaceOption] = field_number(1)


class LinuxPodSandboxConfig(Message):
    cgroup_parent: str = field_number(1)
    security_context: Optional[LinuxSandboxSecurityContext] = field_number(2)


class PodSandboxMetadata(Message):
    name: str = field_number(1)
    uid: str = field_number(2)
    namespace: str = field_number(3)
    attempt: int = field_number(4)


class PodSandboxConfig(Message):
    metadata: Optional[PodSandboxMetadata] = field_number(1)
    linux: Optional[LinuxPodSandboxConfig] = field_number(8)


class RunPodSandboxRequest(Message):
    config: Optional[PodSandboxConfig] = field_number(1)


class PodSandboxId(Message):
    """A request or answer that has nothing but the sandbox's id."""

    pod_sandbox_id: str = field_number(1)


class ImageSpec(Message):
    image: str = field_number(1)


class KeyValue(Message):
    key: str = field_number(1)
    value: str = field_number(2)


class LinuxContainerSecurityContext(Message):
    namespace_options: Optional[NamespaceOption] = field_number(3)


class LinuxContainerConfig(Message):
    security_context: Optional[LinuxContainerSecurityContext] = field_number(2)


class ContainerMetadata(Message):
    name: str = field_number(1)
    attempt: int = field_number(2)


class ContainerConfig(Message):
    metadata: Optional[ContainerMetadata] = field_number(1)
    image: Optional[ImageSpec] = field_number(2)
    command: tuple[str, ...] = field_number(3)
    envs: tuple[KeyValue, ...] = field_number(6)
    mounts: tuple[MountSpec, ...] = field_number(7)
    devices: tuple[DeviceSpec, ...] = field_number(8)
    linux: Optional[LinuxContainerConfig] = field_number(15)
    cdi_devices: tuple[CdiDevice, ...] = field_number(17)


class CreateContainerRequest(Message):
    pod_sandbox_id: str = field_number(1)
    config: Optional[ContainerConfig] = field_number(2)
    sandbox_config: Optional[PodSandboxConfig] = field_number(3)


class ContainerId(Message):
    """A request or answer that has nothing but the container's id."""

    container_id: str = field_number(1)


class ContainerStatusRequest(Message):
    container_id: str = field_number(1)
    verbose: bool = field_number(2)


class ContainerStatus(Message):
    id: str = field_number(1)
    state: int = field_number(3)
    exit_code: int = field_number(7)
    reason: str = field_number(10)
    message: str = field_number(11)


class ContainerStatusResponse(Message):
    """`info` is JSON, and only there if the request is verbose."""

    status: Optional[ContainerStatus] = field_number(1)
    info: Mapping[str, str] = field_number(2)


class ExecSyncRequest(Message):
    container_id: str = field_number(1)
    cmd: tuple[str, ...] = field_number(2)
    timeout: int = field_number(3)


class ExecSyncResponse(Message):
    """Its texts are bytes in the API."""

    stdout: str = field_number(1)
    stderr: str = field_number(2)
    exit_code: int = field_number(3)


_RUNTIME = "/runtime.v1.RuntimeService"
VERSION = Rpc(f"{_RUNTIME}/Version", Empty, VersionResponse)
STATUS = Rpc(f"{_RUNTIME}/Status", Empty, StatusResponse)
RUN_POD_SANDBOX = Rpc(f"{_RUNTIME}/RunPodSandbox", RunPodSandboxRequest, PodSandboxId)
STOP_POD_SANDBOX = Rpc(f"{_RUNTIME}/StopPodSandbox", PodSandboxId, Empty)
REMOVE_POD_SANDBOX = Rpc(f"{_RUNTIME}/RemovePodSandbox", PodSandboxId, Empty)
CREATE_CONTAINER = Rpc(f"{_RUNTIME}/CreateContainer", CreateContainerRequest, ContainerId)
START_CONTAINER = Rpc(f"{_RUNTIME}/StartContainer", ContainerId, Empty)
#: Without a timeout, the container is killed at once.
STOP_CONTAINER = Rpc(f"{_RUNTIME}/StopContainer", ContainerId, Empty)
REMOVE_CONTAINER = Rpc(f"{_RUNTIME}/RemoveContainer", ContainerId, Empty)
EXEC_SYNC = Rpc(f"{_RUNTIME}/ExecSync", ExecSyncRequest, ExecSyncResponse)
CONTAINER_STATUS = Rpc(f"{_RUNTIME}/ContainerStatus", ContainerStatusRequest, ContainerStatusResponse)
