"""The host: its state, control daemons, events, usage and changes; and problems."""

from __future__ import annotations

from typing import Annotated, TypedDict

from yunion_mps.answers.devices import MpsClientJson
from yunion_mps.answers.fields import (
    Count,
    Field,
    Mib,
    MibByMinute,
    Percentage,
    Pid,
    PolledByMinute,
    ReasonCode,
    Time,
    UtilizationByMinute,
    Uuid,
)
from yunion_mps.core import enums


class ServedUserJson(TypedDict):
    """The user whom a control daemon serves, because MPS serves one user at a time."""

    user: Annotated[str, Field("Their name.")]
    uid: Count
    because_of: Annotated[str, Field("Their lease, or the MPS server with their jobs.")]
    since: Annotated[Time, Field("When that began.")]


class DomainJson(TypedDict):
    """One of NVIDIA's control daemons, its GPUs and the limits in effect."""

    name: Annotated[str, Field("`host`, or the GPU's address with one control daemon per GPU.")]
    state: Annotated[str, Field(enum=enums.DOMAIN_STATES)]
    reason: Annotated[str, Field("Why it is not ready; empty if it is.")]
    reason_code: ReasonCode
    pending: Annotated[str, Field("What has not taken effect yet, and what it is waiting for.")]
    waits_for: Annotated[list[int], Field("PIDs of the MPS servers that the pending change waits for.")]
    pid: Annotated[Pid | None, Field("The control daemon's PID.")]
    restarts: Annotated[Count, Field("How often it had to be restarted.")]
    pipe_directory: str
    log_directory: str
    gpus: Annotated[list[str], Field("UUIDs of its GPUs, in CUDA's order.")]
    memory_limits_mib: Annotated[
        list[Mib | None], Field("A client's default memory limit on each GPU; null if no longer configured.")
    ]
    thread_percentage: Annotated[
        Percentage,
        Field("A client's default share of the SM threads, on all its GPUs: that of the largest device."),
    ]
    multiuser: Annotated[bool, Field("Whether it serves all users at once.")]
    serves: Annotated[
        ServedUserJson | None,
        Field("The user that it serves now; null if it serves no user yet, or all users."),
    ]


class DriverJson(TypedDict):
    """The NVIDIA driver; its fields are null if it could not be read."""

    version: str | None
    cuda_version: Annotated[str | None, Field("The version of the CUDA driver API.")]


class DeviceCountsJson(TypedDict):
    """How many devices there are."""

    total: Count
    available: Count
    unavailable: Count
    pending: Count
    reserved: Annotated[Count, Field("Reserved by `reserved_for`, and not leased.")]
    used: Annotated[Count, Field("Leased, or used by a process.")]
    free: Annotated[Count, Field("Can be leased now, and no process uses them.")]


class GpuCountsJson(TypedDict):
    """How many GPUs there are."""

    total: Count
    unavailable: Count


class StatusProblemJson(TypedDict):
    """Something that an operator should know, and the GPU, devices and process that it is about, if any."""

    level: Annotated[str, Field("Only a `problem` makes the state `degraded`.", enum=enums.PROBLEM_LEVELS)]
    code: Annotated[str, Field("A reason code.")]
    text: str
    hint: Annotated[str, Field("What to do.")]
    gpu: Annotated[str | None, Field("The GPU's address.")]
    devices: Annotated[list[str], Field("The devices' addresses.")]
    pid: Pid | None
    kind: Annotated[str, Field("What it is about.", enum=enums.CONDITION_KINDS)]
    subject: Annotated[
        str,
        Field("The GPU's address, the domain's name, the entry's path, the lease's id or the PID, if any."),
    ]
    waits_for: Annotated[str, Field("The leases, MPS servers and processes that it waits for, if any.")]


class LeaseCountsJson(TypedDict):
    """How many leases there are, and how many queued requests."""

    total: Count
    waiting: Count


class ServiceFieldsJson(TypedDict):
    """The daemon, its control daemons, GPUs and devices, as of the last change."""

    notice: Annotated[str, Field("Why the host offers no devices; empty if it does.")]
    notice_code: ReasonCode
    version: Annotated[str, Field("The daemon's version.")]
    pid: Pid
    started: Time
    host_id: Uuid
    driver: DriverJson
    devices: DeviceCountsJson
    gpus: GpuCountsJson
    domains: list[DomainJson]


class StatusJson(ServiceFieldsJson):
    """The state of the host: its GPUs, control daemons and devices, and what its jobs do."""

    state: Annotated[
        str,
        Field(
            "`degraded`: there is a problem; `failed`: no control daemon is ready.", enum=enums.HOST_STATES
        ),
    ]
    problems: Annotated[list[StatusProblemJson], Field("Worst first.")]
    leases: LeaseCountsJson
    clients: Annotated[Count, Field("The number of processes that use GPUs through MPS.")]
    outside_mps: Annotated[Count, Field("The number of processes that use GPUs outside MPS.")]
    errors: Annotated[list[str], Field("What could not be determined, and why.")]


class EventJson(TypedDict):
    """Something that changed, why, and the consequence for devices and jobs."""

    id: Annotated[int, Field("Increasing, and never reused; there can be gaps.", minimum=1)]
    time: Time
    severity: Annotated[str, Field(enum=enums.SEVERITIES)]
    kind: Annotated[str, Field("The category of the event.", enum=enums.EVENT_KINDS)]
    subject: Annotated[str, Field("The name of the object that changed.")]
    what: str
    cause: Annotated[str, Field("Empty if unknown.")]
    consequence: Annotated[str, Field("Empty if there is none.")]
    code: ReasonCode
    count: Annotated[
        int, Field("How many events it stands for: many of one cause are counted in one.", minimum=1)
    ]
    last_time: Annotated[Time, Field("The time of the last of them.")]
    rank: Annotated[
        int,
        Field(
            "Which events to show if there is not room for all: those of the lowest rank, and of one rank "
            "the newest. 0: errors; 1: warnings; 2, 3: errors and warnings that users can cause at will; "
            "4: all others, and those that are older than a day, or than `since`.",
            minimum=0,
            maximum=4,
        ),
    ]


class EventListJson(TypedDict):
    """Events, the oldest first, and where to continue."""

    events: list[EventJson]
    last: Annotated[Count, Field("The value of `after` to continue from; 0 before the first event.")]
    omitted: Annotated[
        Count, Field("How many events after the first one listed are not listed, because of `severe_first`.")
    ]


class MinuteUseJson(TypedDict):
    """The usage of a GPU or a device; a lease's memory counts for its devices in order."""

    addr: Annotated[str, Field("The address of the GPU or device.")]
    memory_used_mib: MibByMinute
    utilization: UtilizationByMinute


class UsageJson(TypedDict):
    """The usage by minute; the last value is the current minute. What is not listed was not used."""

    begin: Annotated[Time, Field("When the first minute began.")]
    step_s: Annotated[int, Field("Seconds between values.", const=60)]
    polled: PolledByMinute
    gpus: list[MinuteUseJson]
    devices: Annotated[
        list[MinuteUseJson], Field("Attributed by each process's YUNION_MPS_DEVICE, or else by its lease.")
    ]


class ChangeJson(TypedDict):
    """One difference between the state in effect and the desired state."""

    kind: Annotated[str, Field(enum=enums.CHANGE_KINDS)]
    subject: Annotated[str, Field("A GPU's address, a domain's name or a key.")]
    before: Annotated[str, Field("Empty if it is new.")]
    after: Annotated[str, Field("Empty if it is removed.")]
    effect: Annotated[str, Field("When it takes effect, and for which devices.")]
    at_once: Annotated[bool, Field("False if it is delayed for at least some devices.")]


class PendingJson(TypedDict):
    """What a domain is waiting for."""

    domain: str
    pending: Annotated[str, Field("What has not taken effect yet, and what it is waiting for.")]
    leases: Annotated[list[str], Field("Ids of the leases that it waits for, if any.")]


class LossJson(TypedDict):
    """A leased device, or another program's MIG instance, that a new MIG layout removes."""

    subject: Annotated[str, Field("The address of the device, or of the instance.")]
    lease: Annotated[str | None, Field("The lease that has the device; null for an instance.")]
    holder: Annotated[
        str, Field("The holder of the lease; for an instance, `another program`, and the profile.")
    ]


class ChangeListJson(TypedDict):
    """What a reload changes, and when it takes effect."""

    changes: list[ChangeJson]
    pending: Annotated[list[PendingJson], Field("What has not taken effect yet.")]
    losses: Annotated[list[LossJson], Field("What a reload with the mode `now` would also remove.")]
    clients: Annotated[list[MpsClientJson], Field("Clients that a reload with the mode `now` would end.")]
    errors: Annotated[
        list[str],
        Field(
            "Why `clients` may be incomplete; after the mode `now`, also which jobs may have ended "
            "without a confirmation."
        ),
    ]
    confirmation: Annotated[
        str, Field("Accepts these losses in a reload with the mode `now`; empty if there are none.")
    ]


class ReexecJson(TypedDict):
    """The daemon is about to run the installed version in the same process."""

    pid: Pid


class ProblemFieldsJson(TypedDict):
    """The members of every problem."""

    type: Annotated[str, Field(const="about:blank")]
    title: Annotated[str, Field("The status in words.")]
    status: Annotated[int, Field("The HTTP status.", minimum=400, maximum=599)]
    detail: Annotated[str, Field("What is wrong.")]
    code: Annotated[str, Field("A reason code.")]


class ProblemDetailsJson(ProblemFieldsJson, total=False):
    """What is wrong (RFC 9457)."""

    hint: Annotated[str, Field("What to do.")]
