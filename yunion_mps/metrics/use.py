"""How much of each GPU and device is used: what NVML tells of processes, put to their devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from yunion_mps.usage.by_device import Budget, used_by_device

MIB = 1 << 20


class Served(NamedTuple):
    """One domain: its GPUs (UUIDs), its servers (PIDs), and the start of its control daemon."""

    name: str
    gpu_uuids: tuple[str, ...]
    servers: frozenset[int]
    started_s: float | None


class Seen(NamedTuple):
    """What NVML and the kernel tell.

    `memory` is in MiB by GPU UUID and PID, `through_mps` the clients of MPS by GPU UUID (a GPU that does not
    tell is missing), `devices` the addresses that a process was given, and `others` the MPS servers that no
    domain knows and processes that have ended meanwhile, which are nobody's use of a GPU past MPS.
    """

    taken_s: float
    domains: tuple[Served, ...]
    memory: Mapping[str, Mapping[int, int | None]]
    through_mps: Mapping[str, Collection[int]]
    devices: Mapping[int, tuple[str, ...]]
    others: frozenset[int] = frozenset()


class OfGpu(NamedTuple):
    """The use of one GPU; `past_mps` is None where the driver does not tell who uses it through MPS."""

    bytes: int
    clients: int
    past_mps: int | None


class OfDevice(NamedTuple):
    """The use of one device."""

    bytes: int
    clients: int


class OfDomain(NamedTuple):
    """The use of one domain; `started_s` is when its control daemon was started, in s since 1970."""

    servers: int
    clients: int
    started_s: float | None


class Use(NamedTuple):
    """The use of GPUs (by UUID), devices that somebody uses (by address), and domains (by name)."""

    taken_s: float
    gpus: Mapping[str, OfGpu]
    devices: Mapping[str, OfDevice]
    domains: Mapping[str, OfDomain]


def use_of(seen: Seen, budgets: Mapping[str, Budget]) -> Use:
    """Who uses how much; `budgets` are those of all devices, by address."""
    servers = {pid for domain in seen.domains for pid in domain.servers}
    clients = {uuid: _clients(uuid, seen, servers) for uuid in {*seen.memory, *seen.through_mps}}
    return Use(
        seen.taken_s,
        {uuid: _of_gpu(uuid, seen, servers, clients[uuid]) for uuid in seen.memory},
        _of_devices(seen, clients, budgets),
        {
            one.name: OfDomain(
                len(one.servers),
                len(set().union(*(clients.get(uuid, ()) for uuid in one.gpu_uuids))),
                one.started_s,
            )
            for one in seen.domains
        },
    )


def _past_mps(uuid: str, seen: Seen, servers: Collection[int]) -> set[int]:
    if uuid not in seen.through_mps:
        return set()
    return set(seen.memory.get(uuid, ())) - set(seen.through_mps[uuid]) - set(servers) - seen.others


def _clients(uuid: str, seen: Seen, servers: Collection[int]) -> set[int]:
    there = {*seen.memory.get(uuid, ()), *seen.through_mps.get(uuid, ())}
    return there - set(servers) - seen.others - _past_mps(uuid, seen, servers)


def _of_gpu(uuid: str, seen: Seen, servers: Collection[int], clients: Collection[int]) -> OfGpu:
    used_mib = sum(mib or 0 for mib in seen.memory[uuid].values())
    past = len(_past_mps(uuid, seen, servers)) if uuid in seen.through_mps else None
    return OfGpu(used_mib * MIB, len(clients), past)


def _of_devices(
    seen: Seen, clients: Mapping[str, Collection[int]], budgets: Mapping[str, Budget]
) -> dict[str, OfDevice]:
    memory = {
        uuid: {pid: seen.memory.get(uuid, {}).get(pid) for pid in pids} for uuid, pids in clients.items()
    }
    used = used_by_device(memory, seen.devices, budgets)
    return {name: OfDevice(one.mib * MIB, one.clients) for name, one in used.items()}
