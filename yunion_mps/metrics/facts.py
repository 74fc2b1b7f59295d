"""What the metrics are made of: taken at one moment, and never changed after it.

`use_of` is the one decision here: how much of each GPU and device is used, by what NVML tells of processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from yunion_mps.http.counting import Counted
from yunion_mps.models import DomainStatus
from yunion_mps.service.usage import Budget, used_by_device

Json = dict[str, Any]

MIB = 1 << 20


class Moment(NamedTuple):
    """Now: the wall clock's time in s since 1970, and that of the clock that domains count by."""

    wall_s: float
    clock_s: float


class Queue(NamedTuple):
    """The leases by binding, and the queued requests; `longest_s` is how long the first has waited."""

    leases: Mapping[str, int] = {}
    waiting: int = 0
    longest_s: float = 0.0


class ServedDomain(NamedTuple):
    """One domain: its GPUs (UUIDs), its servers (PIDs), and the start of its control daemon."""

    name: str
    gpu_uuids: tuple[str, ...]
    servers: frozenset[int]
    started_s: float | None


class Observation(NamedTuple):
    """What NVML and the kernel tell of processes.

    `memory` is in MiB by GPU UUID and PID, `through_mps` the clients of MPS by GPU UUID (a GPU that does not
    tell is missing), `devices` the addresses that a process was given, and `others` the MPS servers that no
    domain knows and processes that have ended since, none of which count as use past MPS.
    """

    taken_s: float
    domains: tuple[ServedDomain, ...]
    memory: Mapping[str, Mapping[int, int | None]]
    through_mps: Mapping[str, Collection[int]]
    devices: Mapping[int, tuple[str, ...]]
    others: frozenset[int] = frozenset()


class GpuUse(NamedTuple):
    """The use of one GPU; `past_mps` is None if the driver does not tell which processes use MPS."""

    bytes: int
    clients: int
    past_mps: int | None


class DeviceUse(NamedTuple):
    """The use of one device."""

    bytes: int
    clients: int


class DomainUse(NamedTuple):
    """The use of one domain; `started_s` is when its control daemon was started, in s since 1970."""

    servers: int
    clients: int
    started_s: float | None


class Use(NamedTuple):
    """The use of GPUs (by UUID), of devices in use (by address), and of domains (by name)."""

    taken_s: float
    gpus: Mapping[str, GpuUse]
    devices: Mapping[str, DeviceUse]
    domains: Mapping[str, DomainUse]


class Facts(NamedTuple):
    """All of it: `status`, `gpus` and `devices` are the service's answers.

    `unusable` are the addresses of GPUs that cannot be used themselves. `leased_budgets` are the budgets (MiB
    and percent) of leased devices by address, because a reload may have changed them for the next lease.
    `probe_s` is how long each domain's control daemon took to answer last, `events` how many were recorded
    since the start by kind and severity. `use` is None before the driver has told.
    """

    now: Moment
    revision: str
    status: Json
    gpus: Sequence[Json]
    devices: Sequence[Json]
    domains: Sequence[DomainStatus]
    probe_s: Mapping[str, float]
    queue: Queue
    events: Mapping[tuple[str, str], int]
    requests: Counted
    use: Use | None = None
    unusable: Collection[str] = ()
    leased_budgets: Mapping[str, tuple[int, float]] = {}


def use_of(seen: Observation, budgets: Mapping[str, Budget]) -> Use:
    """How much is used, and by how many; `budgets` are those of all devices, by address."""
    servers = {pid for domain in seen.domains for pid in domain.servers}
    past_mps = {
        uuid: set(processes) - set(seen.through_mps[uuid]) - servers - seen.others
        for uuid, processes in seen.memory.items()
        if uuid in seen.through_mps
    }
    clients = {
        uuid: {*seen.memory.get(uuid, ()), *seen.through_mps.get(uuid, ())}
        - servers
        - seen.others
        - past_mps.get(uuid, set())
        for uuid in {*seen.memory, *seen.through_mps}
    }
    memory = {
        uuid: {pid: seen.memory.get(uuid, {}).get(pid) for pid in pids} for uuid, pids in clients.items()
    }
    used = used_by_device(memory, seen.devices, budgets)
    return Use(
        seen.taken_s,
        {
            uuid: GpuUse(
                sum(mib or 0 for mib in processes.values()) * MIB,
                len(clients[uuid]),
                len(past_mps[uuid]) if uuid in past_mps else None,
            )
            for uuid, processes in seen.memory.items()
        },
        {name: DeviceUse(one.mib * MIB, one.clients) for name, one in used.items()},
        {
            domain.name: DomainUse(
                len(domain.servers),
                len(set().union(*(clients.get(uuid, ()) for uuid in domain.gpu_uuids))),
                domain.started_s,
            )
            for domain in seen.domains
        },
    )
