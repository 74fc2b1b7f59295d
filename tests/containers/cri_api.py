"""The methods of the container runtime interface that the tests call; cri.proto has the messages."""

from __future__ import annotations

from yunion_mps.kubernetes.kubelet.grpc import Rpc

from containers.cri_pb2 import (
    ContainerId,
    ContainerStatusRequest,
    ContainerStatusResponse,
    CreateContainerRequest,
    Empty,
    ExecSyncRequest,
    ExecSyncResponse,
    PodSandboxId,
    RunPodSandboxRequest,
    StatusResponse,
    VersionResponse,
)

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
