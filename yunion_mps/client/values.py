"""The daemon's answers as frozen values: an attribute for each member of the types in answers/.

An attribute has the name of its member. Lists are tuples, and times are datetimes in UTC. Unknown members of
a newer daemon are ignored; a member that an older daemon lacks raises VersionError.
"""
# Without `from __future__ import annotations`, because the types of the fields determine how they are made.

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar, Union, get_args, get_origin

from yunion_mps.core.enums import FREE
from yunion_mps.core.errors import VersionError
from yunion_mps.core.units import seconds
from yunion_mps.host.proc import user_name

if TYPE_CHECKING:
    from yunion_mps import answers  # noqa: F401 - the types in quotes, whose import takes 3 ms

AnswerT = TypeVar("AnswerT")
ValueT = TypeVar("ValueT", bound="AnswerValue[Any]")


class AnswerValue(Generic[AnswerT]):
    """A frozen value, made from an answer of the daemon."""

    @classmethod
    def of(cls: type[ValueT], answer: AnswerT) -> ValueT:  # noqa: PYI019 - there is no Self before 3.11
        """Return the value of an answer; raises VersionError if a member is missing or of another type."""
        kind: Any = cls
        value: ValueT = _converter_for(kind)(answer)
        return value


def members(kind: Any) -> dict[str, Any]:
    """Return the types of the members of the answer, by name."""
    return {member.name: member.type for member in fields(kind)}


@cache
def _converter_for(kind: Any) -> Callable[[Any], Any]:
    if get_origin(kind) is Union:  # Optional
        convert = _converter_for(get_args(kind)[0])
        return lambda json: None if json is None else convert(json)
    if get_origin(kind) is tuple:
        convert = _converter_for(get_args(kind)[0])
        return lambda json: tuple(map(convert, json))
    if kind is datetime:
        return lambda json: datetime.fromtimestamp(seconds(json), timezone.utc)
    if not issubclass(get_origin(kind) or kind, AnswerValue):
        return lambda json: json
    converters = [(name, _converter_for(type_)) for name, type_ in members(kind).items()]

    def convert_members(json: Any) -> Any:
        values = {name: _convert(convert, json, name) for name, convert in converters}
        return kind(**values)

    return convert_members


def _convert(convert: Callable[[Any], Any], answer: Mapping[str, Any], member: str) -> Any:
    try:
        return convert(answer[member])
    except KeyError:
        message = f"the daemon's answer has no member {member}"
    except (TypeError, ValueError):
        message = f"the daemon's answer has a member {member} of the wrong type"
    raise VersionError(f"{message}: its version differs from this client's")


@dataclass(frozen=True)
class PcieLinkInfo(AnswerValue["answers.PcieLinkJson"]):
    """The best PCI Express link that a GPU supports."""

    lane_width: int
    throughput: str
    transfer_rate_per_lane: str
    version: str


@dataclass(frozen=True)
class DeviceInfo(AnswerValue["answers.DeviceJson"]):
    """One MPS device: a share of a GPU. `memory_mib` is its budget, `lease` its lease's id.

    Its memory is None if that of a time-sliced GPU is unknown.
    """

    id: str
    addr: str
    model: Optional[str]
    gpu_uuid: str
    vendor_device_id: Optional[str]
    host_id: str
    numa_node: Optional[int]
    pcie_info: Optional[PcieLinkInfo]
    memory_mib: Optional[int]
    gpu_memory_mib: Optional[int]
    thread_percentage: float
    state: str
    reason: str
    reason_code: str
    budget_enforced: bool
    mig_profile: Optional[str]
    sharing: str
    reserved_for: Optional[str]
    free_for: Optional[str]
    not_free_for: tuple[str, ...]
    lease: Optional[str]
    holder: Optional[str]

    @property
    def free(self) -> bool:
        """Whether this process's user can lease it now: `free_for` names the only one who can."""
        user = user_name(os.geteuid())
        return self.state == FREE and self.free_for in (None, user) and user not in self.not_free_for


@dataclass(frozen=True)
class DeviceDetails(DeviceInfo):
    """One device, and the environment of a process that uses it."""

    slot: int
    domain: str
    client_environment: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class GpuInfo(AnswerValue["answers.GpuJson"]):
    """One physical GPU, or a MIG instance of the GPU `parent` (a UUID).

    `memory_free_mib` is None unless its memory is handed out in units.

    `utilization` is the percentage of the time in which kernels ran.
    """

    uuid: Optional[str]
    name: Optional[str]
    addr: str
    pci_address: str
    memory_mib: Optional[int]
    memory_free_mib: Optional[int]
    free_for: Optional[str]
    memory_used_mib: Optional[int]
    utilization: Optional[int]
    temperature_c: Optional[int]
    power_w: Optional[float]
    power_limit_w: Optional[float]
    compute_mode: Optional[str]
    compute_capability: Optional[str]
    mig_enabled: Optional[bool]
    vendor_device_id: Optional[str]
    numa_node: Optional[int]
    pcie_info: Optional[PcieLinkInfo]
    render_node: Optional[str]
    index: Optional[int]
    device_minor: Optional[int]
    devices: int
    state: str
    reason: str
    reason_code: str
    budget_enforced: bool
    sharing: Optional[str]
    time_slice: Optional[str]
    mig_layout: Optional[str]
    parent: Optional[str]
    mig_profile: Optional[str]
    reserved_for: Optional[str]


@dataclass(frozen=True)
class PoolInfo(AnswerValue["answers.PoolJson"]):
    """A GPU whose memory is leased in units; another lease can get at most `memory_free_mib` now."""

    gpu_uuid: str
    addr: str
    model: Optional[str]
    numa_node: Optional[int]
    memory_unit_mib: int
    memory_reserve_mib: int
    memory_mib: int
    memory_free_mib: int
    gpu_memory_mib: int
    thread_overcommit: Optional[float]
    thread_percentage: Optional[int]
    thread_percentage_total: Optional[float]
    thread_percentage_free: Optional[float]
    state: str
    reason: str
    reason_code: str
    budget_enforced: bool
    reserved_for: Optional[str]
    free_for: Optional[str]


@dataclass(frozen=True)
class ServedUserInfo(AnswerValue["answers.ServedUserJson"]):
    """The user whom a control daemon serves: because of what, and since when."""

    user: str
    uid: int
    because_of: str
    since: datetime


@dataclass(frozen=True)
class DomainInfo(AnswerValue["answers.DomainJson"]):
    """One of NVIDIA's control daemons, its GPUs and the limits in effect."""

    name: str
    state: str
    reason: str
    reason_code: str
    pending: str
    waits_for: tuple[int, ...]
    pid: Optional[int]
    restarts: int
    pipe_directory: str
    log_directory: str
    gpus: tuple[str, ...]
    memory_limits_mib: tuple[Optional[int], ...]
    thread_percentage: float
    multiuser: bool
    serves: Optional[ServedUserInfo]


@dataclass(frozen=True)
class DriverInfo(AnswerValue["answers.DriverJson"]):
    """The NVIDIA driver; None if it was not read."""

    version: Optional[str]
    cuda_version: Optional[str]


@dataclass(frozen=True)
class DeviceCounts(AnswerValue["answers.DeviceCountsJson"]):
    """How many devices there are; a used one is leased, or a process uses it without a lease."""

    total: int
    available: int
    unavailable: int
    pending: int
    reserved: int
    used: int
    free: int


@dataclass(frozen=True)
class GpuCounts(AnswerValue["answers.GpuCountsJson"]):
    """How many GPUs there are."""

    total: int
    unavailable: int


@dataclass(frozen=True)
class StatusProblem(AnswerValue["answers.StatusProblemJson"]):
    """Something that an operator should know; only one of level `problem` degrades the state."""

    level: str
    code: str
    text: str
    hint: str
    gpu: Optional[str]
    devices: tuple[str, ...]
    pid: Optional[int]
    kind: str
    subject: str
    waits_for: str


@dataclass(frozen=True)
class LeaseCounts(AnswerValue["answers.LeaseCountsJson"]):
    """How many leases there are, and how many queued requests."""

    total: int
    waiting: int


@dataclass(frozen=True)
class Status(AnswerValue["answers.StatusJson"]):
    """The state of the host: its GPUs, control daemons and devices, and what its jobs do."""

    state: str
    problems: tuple[StatusProblem, ...]
    notice: str
    notice_code: str
    version: str
    pid: int
    started: datetime
    host_id: str
    driver: DriverInfo
    devices: DeviceCounts
    gpus: GpuCounts
    domains: tuple[DomainInfo, ...]
    leases: LeaseCounts
    clients: int
    outside_mps: int
    errors: tuple[str, ...]


@dataclass(frozen=True)
class EventInfo(AnswerValue["answers.EventJson"]):
    """Something that changed, why, and what that means for devices and jobs.

    Many events of one cause are one, with their `count` and the time of the last of them. Those who follow
    events get a warning or an error again, with the same id, if it happens again.
    """

    id: int
    time: datetime
    severity: str
    kind: str
    subject: str
    what: str
    cause: str
    consequence: str
    code: str
    count: int
    last_time: datetime


@dataclass(frozen=True)
class HolderFields(AnswerValue["answers.HolderFieldsJson"]):
    """The holder of a lease, or of a queued request; `for_user` is the user whose processes use the devices.

    It is None unless root has named that user.
    """

    pid: Optional[int]
    uid: int
    user: str
    for_user: Optional[str]
    command: Optional[str]
    name: Optional[str]
    since: datetime
    container: Optional[str]
    container_id: Optional[str]


@dataclass(frozen=True)
class DeviceBudget(AnswerValue["answers.DeviceBudgetJson"]):
    """The budget of one leased device, and its use so far: its peak memory, and its SM utilization in %."""

    addr: str
    gpu: str
    memory_mib: Optional[int]
    thread_percentage: float
    memory_peak_mib: Optional[int]
    sm_utilization: Optional[int]


@dataclass(frozen=True)
class LeaseRecord(HolderFields):
    """Devices that belong to one holder until the lease ends."""

    id: str
    devices: tuple[str, ...]
    gpus: tuple[str, ...]
    budgets: tuple[DeviceBudget, ...]
    thread_percentage: float
    budget_enforced: bool
    unenforced_gpus: tuple[str, ...]
    sharing: str
    binding: str
    expires: Optional[datetime]
    cdi: Optional[str]
    environment: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class LeaseDetails(LeaseRecord):
    """A lease, and how its devices are used now; `state` is None if that is unknown."""

    state: Optional[str]
    reason: str
    reason_code: str


@dataclass(frozen=True)
class QueuedRequestInfo(HolderFields):
    """A request that waits for devices, and why; the reason of one far behind in the queue is empty."""

    requested: str
    reason: str
    reason_code: str
