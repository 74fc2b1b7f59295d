"""The messages of the container runtime interface that the tests send: the parts that they use.

The field numbers are those of k8s.io/cri-api, pkg/apis/runtime/v1/api.proto. The encoding is the plugin's.
"""
# Without `from __future__ import annotations`, like yunion_mps/kubernetes/kubelet_api.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from yunion_mps.kubernetes.kubelet_api import (
    CdiDevice,
    DeviceSpec,
    Empty,
    Message,
    MountSpec,
    Rpc,
    _many,
    _map,
    _one,
)

#: A NamespaceMode: the pod's namespace, which is the default, the container's, or the node's.
CONTAINER, NODE = 1, 2
#: A ContainerState.
CREATED, RUNNING, EXITED = 0, 1, 2


@dataclass(frozen=True)
class VersionResponse(Message):
    version: str = _one(1, str)
    runtime_name: str = _one(2, str)
    runtime_version: str = _one(3, str)
    runtime_api_version: str = _one(4, str)


@dataclass(frozen=True)
class RuntimeCondition(Message):
    type: str = _one(1, str)
    status: bool = _one(2, bool)
    reason: str = _one(3, str)
    message: str = _one(4, str)


@dataclass(frozen=True)
class RuntimeStatus(Message):
    conditions: tuple[RuntimeCondition, ...] = _many(1, RuntimeCondition)


@dataclass(frozen=True)
class StatusResponse(Message):
    status: Optional[RuntimeStatus] = _one(1, RuntimeStatus)


@dataclass(frozen=True)
class NamespaceOption(Message):
    network: int = _one(1, int)
    pid: int = _one(2, int)
    ipc: int = _one(3, int)


@dataclass(frozen=True)
class LinuxSandboxSecurityContext(Message):
    namespace_options: Optional[NamespaceOption] = _one(1, NamespaceOption)


@dataclass(frozen=True)
class LinuxPodSandboxConfig(Message):
    cgroup_parent: str = _one(1, str)
    security_context: Optional[LinuxSandboxSecurityContext] = _one(2, LinuxSandboxSecurityContext)


@dataclass(frozen=True)
class PodSandboxMetadata(Message):
    name: str = _one(1, str)
    uid: str = _one(2, str)
    namespace: str = _one(3, str)
    attempt: int = _one(4, int)


@dataclass(frozen=True)
class PodSandboxConfig(Message):
    metadata: Optional[PodSandboxMetadata] = _one(1, PodSandboxMetadata)
    linux: Optional[LinuxPodSandboxConfig] = _one(8, LinuxPodSandboxConfig)


@dataclass(frozen=True)
class RunPodSandboxRequest(Message):
    config: Optional[PodSandboxConfig] = _one(1, PodSandboxConfig)


@dataclass(frozen=True)
class PodSandboxId(Message):
    """A request or answer that has nothing but the sandbox's id."""

    pod_sandbox_id: str = _one(1, str)


@dataclass(frozen=True)
class ImageSpec(Message):
    image: str = _one(1, str)


@dataclass(frozen=True)
class KeyValue(Message):
    key: str = _one(1, str)
    value: str = _one(2, str)


@dataclass(frozen=True)
class LinuxContainerSecurityContext(Message):
    namespace_options: Optional[NamespaceOption] = _one(3, NamespaceOption)


@dataclass(frozen=True)
class LinuxContainerConfig(Message):
    security_context: Optional[LinuxContainerSecurityContext] = _one(2, LinuxContainerSecurityContext)


@dataclass(frozen=True)
class ContainerMetadata(Message):
    name: str = _one(1, str)
    attempt: int = _one(2, int)


@dataclass(frozen=True)
class ContainerConfig(Message):
    metadata: Optional[ContainerMetadata] = _one(1, ContainerMetadata)
    image: Optional[ImageSpec] = _one(2, ImageSpec)
    command: tuple[str, ...] = _many(3, str)
    envs: tuple[KeyValue, ...] = _many(6, KeyValue)
    mounts: tuple[MountSpec, ...] = _many(7, MountSpec)
    devices: tuple[DeviceSpec, ...] = _many(8, DeviceSpec)
    linux: Optional[LinuxContainerConfig] = _one(15, LinuxContainerConfig)
    cdi_devices: tuple[CdiDevice, ...] = _many(17, CdiDevice)


@dataclass(frozen=True)
class CreateContainerRequest(Message):
    pod_sandbox_id: str = _one(1, str)
    config: Optional[ContainerConfig] = _one(2, ContainerConfig)
    sandbox_config: Optional[PodSandboxConfig] = _one(3, PodSandboxConfig)


@dataclass(frozen=True)
class ContainerId(Message):
    """A request or answer that has nothing but the container's id."""

    container_id: str = _one(1, str)


@dataclass(frozen=True)
class ContainerStatusRequest(Message):
    container_id: str = _one(1, str)
    verbose: bool = _one(2, bool)


@dataclass(frozen=True)
class ContainerStatus(Message):
    id: str = _one(1, str)
    state: int = _one(3, int)
    exit_code: int = _one(7, int)
    reason: str = _one(10, str)
    message: str = _one(11, str)


@dataclass(frozen=True)
class ContainerStatusResponse(Message):
    """`info` is JSON, and only there if the request is verbose."""

    status: Optional[ContainerStatus] = _one(1, ContainerStatus)
    info: Mapping[str, str] = _map(2)


@dataclass(frozen=True)
class ExecSyncRequest(Message):
    container_id: str = _one(1, str)
    cmd: tuple[str, ...] = _many(2, str)
    timeout: int = _one(3, int)


@dataclass(frozen=True)
class ExecSyncResponse(Message):
    """Its texts are bytes in the API."""

    stdout: str = _one(1, str)
    stderr: str = _one(2, str)
    exit_code: int = _one(3, int)


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
