"""Leases, and the requests that wait for devices."""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps import enums
from yunion_mps.answers.processes import ContainerFields
from yunion_mps.fields import (
    Count,
    Field,
    Mib,
    Percentage,
    Pid,
    Time,
    UtilizationList,
)


class HolderFields(ContainerFields):
    """Who holds or waits for devices."""

    pid: Annotated[Pid | None, Field("Its process; null if it is bound to a name.")]
    uid: Count
    user: Annotated[str, Field("Its user's name, or the id if it has none.")]
    command: Annotated[str | None, Field("The process's command line, truncated to 100 characters.")]
    name: Annotated[str | None, Field("Its name; null unless it is bound to a name.")]
    since: Time


class LeaseRecord(HolderFields):
    """Devices that belong to one holder until the lease ends."""

    id: Annotated[str, Field("A random UUID.")]
    devices: Annotated[list[str], Field("The devices' addresses.")]
    gpus: Annotated[list[str], Field("Their GPUs' addresses.")]
    memory_mib: Annotated[list[Mib], Field("Each device's memory.")]
    memory_peak_mib: Annotated[list[Mib | None], Field("Each device's highest use since the lease began.")]
    sm_utilization: Annotated[UtilizationList, Field("The SM utilization of each device.")]
    thread_percentage: Annotated[Percentage, Field("The smallest percentage among the devices.")]
    budget_enforced: Annotated[bool, Field("Whether MPS enforces their budgets: only from Volta on.")]
    unenforced_gpus: Annotated[list[str], Field("Addresses of its GPUs that are older than Volta.")]
    binding: Annotated[str, Field("What ends it.", enum=enums.BINDINGS)]
    expires: Annotated[Time | None, Field("When it ends unless it is renewed; null if it does not expire.")]
    cdi: Annotated[str | None, Field("Its CDI device, for podman run --device.")]
    environment: Annotated[dict[str, str], Field("The environment of a process that uses the devices.")]


class LeaseDetails(LeaseRecord):
    """A lease, and how its devices are used now."""

    state: Annotated[
        str | None,
        Field("`idle`: no process uses its devices. Null: unknown.", enum=[*enums.LEASE_STATES, None]),
    ]
    reason: Annotated[str, Field("Why its devices are unavailable or pending.")]


class QueuedRequest(HolderFields):
    """A request that waits for devices."""

    wants: Annotated[str, Field("What it requests.")]


class LeaseList(TypedDict):
    """All leases, and the queued requests."""

    leases: list[LeaseDetails]
    waiting: Annotated[list[QueuedRequest], Field("In order of arrival.")]
    errors: Annotated[list[str], Field("What could not be found out about their use, and why.")]
    total: Annotated[Count, Field("The number of leases.")]
