"""The processes that use the GPUs."""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps.fields import (
    Count,
    Field,
    Mib,
    Pid,
    Time,
    UtilizationList,
)


class ProcessFields(TypedDict):
    """A process; all fields except its PID are null if it has just ended."""

    pid: Pid
    uid: Count | None
    user: Annotated[str | None, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("Its command line, truncated to 500 characters.", maxLength=500)]
    started: Time | None


class MpsServer(ProcessFields):
    """One MPS server."""

    domain: Annotated[str, Field("The control daemon that it belongs to.")]
    state: Annotated[
        str | None, Field("Null if the control daemon does not list it (before 550). FAULT: its jobs failed.")
    ]


class ContainerFields(TypedDict):
    """The container that a process runs in; null if there is none."""

    container: Annotated[str | None, Field("The container's name, or the beginning of its id.")]
    container_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None


class MpsClient(ProcessFields, ContainerFields):
    """One process that uses GPUs."""

    mps: Annotated[bool | None, Field("False: outside MPS, so no budget limits it. Null: unknown.")]
    server: Annotated[Pid | None, Field("The PID of its MPS server.")]
    domain: Annotated[str, Field("The control daemon that serves it.")]
    device: Annotated[str | None, Field("Its device, by YUNION_MPS_DEVICE in its environment.")]
    gpus: Annotated[list[str], Field("Addresses of the GPUs on which it has memory.")]
    memory_by_gpu_mib: Annotated[list[Mib | None], Field("Its memory on each of these.")]
    memory_used_mib: Annotated[Mib | None, Field("Its memory on all GPUs of its domain.")]
    sm_utilization_by_gpu: Annotated[UtilizationList, Field("Its SM utilization on each of its GPUs.")]


class WaitingClient(ProcessFields):
    """One process that waits for an MPS server because another user's server is running."""

    since: Annotated[Time, Field("When it asked for a server.")]
    server: Annotated[Pid, Field("The PID of the MPS server that it waits for.")]
    server_user: Annotated[str, Field("That server's user: a name, or the id if there is none.")]
    domain: Annotated[str, Field("The control daemon that keeps it waiting.")]


class ClientList(TypedDict):
    """The clients and servers of MPS."""

    servers: list[MpsServer]
    clients: Annotated[list[MpsClient], Field("Clients, and other processes on their GPUs.")]
    waiting: Annotated[list[WaitingClient], Field("In order of arrival.")]
    errors: Annotated[list[str], Field("What could not be found out, and why.")]
    total: Annotated[Count, Field("The number of clients.")]


class Termination(TypedDict):
    """How a client was ended."""

    pid: Pid
    ended: Annotated[bool, Field("Whether it has ended.")]
    how: Annotated[str, Field("What was done.")]
