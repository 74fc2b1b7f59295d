"""Devices, leases and processes, joined into holdings, and the states of these. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

from yunion_mps.addresses import gpu_of
from yunion_mps.enums import (
    FREE,
    IDLE,
    IN_USE,
    LEASE_STATES,
    NO_MEMORY,
    OVER_BUDGET,
    PENDING,
    RESERVED,
    UNAVAILABLE,
)
from yunion_mps.errors import HostError
from yunion_mps.reasons import PROCESSES_UNKNOWN

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, MpsClient, WaitingClient

    AnyClient = Union[MpsClient, WaitingClient]

#: Key of a holding: a lease and a GPU, a device without a lease and its GPU, or a kind of use without a
#: device and the GPU.
_Key = tuple[str, str]
#: The states of use without a device; it has no others.
OUTSIDE_MPS, NO_DEVICE = "outside MPS", "no device"
#: This much of a lease's id distinguishes it.
ID_LENGTH = 8


NO_CLIENTS: ClientList = {"servers": [], "clients": [], "waiting": [], "errors": [], "total": 0}


class ProcessUse(NamedTuple):
    """What a process, or a lease without processes, uses of a GPU; unknown values are None.

    `sm` is the SM utilization in %.
    """

    pid: int | None
    user: str | None
    command: str | None
    started: str | None
    memory_mib: int | None
    container: str | None = None
    sm: int | None = None

    @property
    def shown(self) -> str:
        return in_container(self.container, self.command or "")


class Holding(NamedTuple):
    """What counts against one budget on one GPU: the devices, the lease, if any, and the processes.

    Without devices, it is the use outside MPS, or by MPS clients without a device. `free`: the daemon would
    lease it, although processes without a lease may use it. `pending`: it waits for leases of a former
    division, or belongs to one. `reserved`: the daemon would lease it for what it is reserved for.
    `free_for`: the only user to whom the daemon would lease it, None for everybody. `not_free_for`: users to
    whom it would not.
    """

    gpu: str
    devices: tuple[str, ...]
    budget_mib: int | None
    threads: float | None = None
    lease: LeaseRecord | None = None
    available: bool = True
    free: bool = False
    pending: bool = False
    reserved: bool = False
    outside_mps: bool = False
    processes: tuple[ProcessUse, ...] = ()
    free_for: str | None = None
    not_free_for: tuple[str, ...] = ()

    @property
    def restriction(self) -> str:
        """The users to whom the daemon would lease it: `for alice only`, `not for bob`; empty for all."""
        if self.free_for is not None:
            return f"for {self.free_for} only" if self.free_for else "for no user now"
        return f"not for {', '.join(self.not_free_for)}" if self.not_free_for else ""

    @property
    def holders(self) -> tuple[ProcessUse, ...]:
        """The processes, or if none uses the devices yet, the holder of the lease."""
        if self.processes or not self.lease:
            return self.processes
        command = self.lease["command"] or self.lease["name"]
        since, container = self.lease["since"], self.lease["container"]
        unused_mib = 0 if self.available else None  # a lost GPU reports no processes
        user = user_of(self.lease)
        return (ProcessUse(self.lease["pid"], user, command, since, unused_mib, container),)

    @property
    def used_mib(self) -> int:
        return sum(process.memory_mib or 0 for process in self.processes)

    @property
    def known_mib(self) -> int | None:
        """Like `used_mib`, but None if it is unknown, as on a lost GPU."""
        known = [process.memory_mib for process in self.holders if process.memory_mib is not None]
        return sum(known) if known or not self.holders else None

    @property
    def sm(self) -> int | None:
        """The combined SM utilization of its processes in %; None if it is unknown."""
        percentages = [process.sm for process in self.processes if process.sm is not None]
        return min(sum(percentages), 100) if percentages else None

    @property
    def peak_mib(self) -> int | None:
        """The highest memory use of its devices since the lease began; None if it is unknown."""
        if not self.lease:
            return None
        budgets = (budget for budget in self.lease["budgets"] if budget["addr"] in self.devices)
        peaks_mib = [mib for budget in budgets if (mib := budget["memory_peak_mib"]) is not None]
        return sum(peaks_mib) if peaks_mib else None

    @property
    def state(self) -> str:
        if self.outside_mps:
            return OUTSIDE_MPS
        if not self.devices:
            return NO_DEVICE
        if self.over_mib:
            return OVER_BUDGET
        if self.in_use:
            return IN_USE if self.processes else IDLE
        if self.reserved:
            return RESERVED
        return FREE if self.free else NO_MEMORY if self.pending else UNAVAILABLE

    @property
    def over_mib(self) -> int:
        return 0 if self.budget_mib is None else max(0, self.used_mib - self.budget_mib)

    @property
    def in_use(self) -> bool:
        return bool(self.lease or self.processes)

    @property
    def is_spare(self) -> bool:
        """Whether it can be leased, and no process uses it."""
        return self.free and not self.in_use

    @property
    def user(self) -> str:
        if self.lease:
            return user_of(self.lease)
        users = {process.user for process in self.processes if process.user}
        return users.pop() if len(users) == 1 else f"{len(users)} users" if users else ""

    @property
    def label(self) -> str:
        """A label for people: `job-17: python train.py`.

        The holder's name or container, if any, and the lease's command, or else that of the process with the
        most memory. A process's container is preferred to the lease's name, because pods can share a claim.
        """
        names = [process.container for process in self.processes]
        commands = [
            process.command
            for process in sorted(self.processes, key=lambda process: -(process.memory_mib or 0))
        ]
        if self.lease:
            names = [self.lease["container"], *names, self.lease["name"]]
            commands.insert(0, self.lease["command"])
        return in_container(next(filter(None, names), None), next(filter(None, commands), ""))

    @property
    def since(self) -> str | None:
        """The start of the lease or of its first process; None if it is unknown."""
        if self.lease:
            return self.lease["since"]
        return min(
            (process.started for process in self.processes if process.started is not None), default=None
        )

    @property
    def named(self) -> str:
        return ",".join(self.devices)


def in_container(container: str | None, command: str) -> str:
    """Return for example `trainer: python train.py`; only the command if there is no container."""
    return f"{container}: {command}" if container and command else container or command


def user_of(lease: LeaseRecord) -> str:
    """Return the user whose processes use the devices, as far as that is known, or else the lease's owner."""
    return lease["for_user"] or lease["user"]


def holder_label(lease: LeaseRecord) -> str:
    """Return the user and the process, container or name: `alice (PID 4260)`, `bob (job-17)`."""
    process = f"PID {lease['pid']}" if lease["pid"] else ""
    return f"{user_of(lease)} ({lease['container'] or lease['name'] or process})"


def abbreviate_addresses(addresses: Sequence[str]) -> str:
    """Abbreviate the devices of each GPU: `00:06.0-2,3`, `00:06.0-0..7`."""
    slots: dict[str, list[str]] = {}
    for address in addresses:
        slots.setdefault(gpu_of(address), []).append(address)
    return ",".join(_abbreviate(gpu, found) for gpu, found in slots.items())


def _abbreviate(gpu: str, addresses: Sequence[str]) -> str:
    """Abbreviate `2,3`, `0..7`: three or more consecutive slots become a range; a pool's `m1` is kept."""
    if gpu in addresses:
        return gpu  # a whole MIG instance
    rows: list[list[str]] = []
    slots = [address.rpartition("-")[2] for address in addresses]
    for slot in slots:
        last = rows[-1][-1] if rows else ""
        if last.isdigit() and slot.isdigit() and int(slot) == int(last) + 1:
            rows[-1].append(slot)
        else:
            rows.append([slot])
    short = ",".join(f"{row[0]}..{row[-1]}" if len(row) > 2 else ",".join(row) for row in rows)
    return f"{gpu}-{short}"


def holdings(
    devices: Sequence[Device], leases: Iterable[LeaseRecord], clients: Iterable[MpsClient]
) -> list[Holding]:
    """Return all devices in the given order, grouped into holdings; then the use without a device."""
    found: dict[_Key, Holding] = {}
    keys_by_device: dict[str, _Key] = {}
    by_pid: dict[int, list[_Key]] = {}
    for address, device, lease, budget_mib in _device_uses(devices, leases):
        key = (lease["id"] if lease else address, gpu_of(address))
        if device and budget_mib is None:
            budget_mib = device["memory_mib"]
        percentage = device["thread_percentage"] if device else None
        if lease and (percentage is None or len(lease["devices"]) == 1):
            percentage = lease["thread_percentage"]  # as leased, which may have been before a reload
        state = device["state"] if device else ""
        holding = Holding(
            gpu=key[1],
            devices=(address,),
            budget_mib=budget_mib,
            threads=percentage,
            lease=lease,
            available=state != UNAVAILABLE,
            free=state == FREE,
            pending=state == PENDING,
            reserved=state == RESERVED,
        )
        if device:
            holding = holding._replace(
                free_for=device["free_for"], not_free_for=tuple(device["not_free_for"])
            )
        found[key] = _merge(found[key], holding) if key in found else holding
        keys_by_device.setdefault(address, key)
        if lease and lease["pid"] is not None and key not in by_pid.setdefault(lease["pid"], []):
            by_pid[lease["pid"]].append(key)
    for client in clients:
        if client["uid"] is not None:  # otherwise it has ended
            _add_process(client, found, keys_by_device, by_pid)
    return list(found.values())


class _DeviceUse(NamedTuple):
    """A device that is listed, leased or both; its budget in MiB is that of the lease."""

    address: str
    device: Device | None
    lease: LeaseRecord | None = None
    budget_mib: int | None = None


def _device_uses(devices: Sequence[Device], leases: Iterable[LeaseRecord]) -> Iterator[_DeviceUse]:
    """Yield the listed devices with their leases, then the leased devices that are not listed.

    Two devices can have the same address: one of a card that was replaced, if it is still leased, and one of
    the new card. So a lease is found by its id first.
    """
    leased = {
        (lease["id"], budget["addr"]): (lease, budget["memory_mib"])
        for lease in leases
        for budget in lease["budgets"]
    }
    listed = {(device["lease"], device["addr"]) for device in devices}
    others = {key[1]: leased[key] for key in leased if key not in listed}
    for device in devices:
        address = device["addr"]
        known = leased.get((device["lease"] or "", address))
        if known is None:  # perhaps it was leased after the devices were listed
            known = others.pop(address, None)
        yield _DeviceUse(address, device, *(known or ()))
    for address, (lease, budget_mib) in others.items():
        yield _DeviceUse(address, None, lease, budget_mib)


def _merge(first: Holding, second: Holding) -> Holding:
    budgets = (first.budget_mib, second.budget_mib)
    return first._replace(
        devices=first.devices + second.devices,
        budget_mib=None if None in budgets else sum(budget or 0 for budget in budgets),
        available=first.available and second.available,
        pending=first.pending or second.pending,
    )


def _add_process(
    client: MpsClient,
    found: dict[_Key, Holding],
    keys_by_device: dict[str, _Key],
    by_pid: dict[int, list[_Key]],
) -> None:
    """Add a process to the holdings of its lease, of its devices, or of the lease that its PID holds.

    The names of its devices may be out of date: a card may be in another slot since it was started.
    """
    memory: dict[str, int | None] = dict(zip(client["gpus"], client["memory_by_gpu_mib"]))
    sm: dict[str, int | None] = dict(zip(client["gpus"], client["sm_utilization_by_gpu"]))
    names = device_names(client)
    keys = [key for key in found if key[0] == client["lease"]]
    keys = keys or [keys_by_device[name] for name in names if name in keys_by_device]
    keys = keys or by_pid.get(client["pid"], [])
    if client["mps"] is False:
        keys = []
    keys = [key for key in dict.fromkeys(keys) if not memory or key[1] in memory]
    others = [gpu for gpu in memory if all(gpu != key[1] for key in keys)]
    kind = OUTSIDE_MPS if client["mps"] is False else NO_DEVICE
    for key in [*keys, *((kind, gpu) for gpu in others or ([] if keys else [""]))]:
        holding = found.get(key) or Holding(key[1], (), None, outside_mps=kind == OUTSIDE_MPS)
        process = ProcessUse(
            client["pid"], client["user"], client["command"], client["started"], memory.get(key[1]),
            client["container"], sm.get(key[1]),
        )  # fmt: skip
        found[key] = holding._replace(processes=(*holding.processes, process))


def device_names(client: AnyClient) -> list[str]:
    """Return the addresses of the client's devices, according to its environment."""
    return [name.strip() for name in (client["device"] or "").split(",") if name.strip()]


def clients_of_device(address: str, listed: ClientList) -> list[AnyClient]:
    """Return the processes that were started with this device, including those that wait for a server."""
    return [client for client in _all_clients(listed) if address in device_names(client)]


def clients_of_lease(lease: LeaseRecord, listed: ClientList) -> list[AnyClient]:
    """Return the lease's processes: its holder, and those that belong to it (`service/attribution.py`).

    A process that only names a device may belong to another job.
    """
    return [
        client
        for client in _all_clients(listed)
        if client["lease"] == lease["id"] or client["pid"] == lease["pid"]
    ]


def refuse_if_unknown(pid: int, listed: ClientList) -> None:
    """Raise HostError if the process is not listed, but some processes are unknown: it may be one of them.

    A process that is killed while it is an MPS client can take other jobs with it.
    """
    if listed["errors"] and all(client["pid"] != pid for client in _all_clients(listed)):
        what = f"it is not known whether PID {pid} is an MPS client: {'; '.join(listed['errors'])}"
        hint = "try again once the MPS server answers; or, at the risk of that server's other jobs: "
        raise HostError(what, f"{hint}yunion-mps terminate {pid} --force", PROCESSES_UNKNOWN)


def _all_clients(listed: ClientList) -> list[AnyClient]:
    return [*listed["clients"], *listed["waiting"]]


def lease_states(held: Iterable[Holding]) -> dict[str, str]:
    """Return the state of each lease, by id."""
    by_lease: dict[str, set[str]] = {}
    for holding in held:
        if holding.lease:
            states = {holding.state} if holding.available else {UNAVAILABLE}
            by_lease.setdefault(holding.lease["id"], set()).update(
                states, {PENDING} if holding.pending else ()
            )
    return {lease: min(states, key=LEASE_STATES.index) for lease, states in by_lease.items()}


def reasons_by_gpu(devices: Iterable[Device]) -> Iterable[tuple[str, str]]:
    """Return each GPU with an unavailable or pending device, and the reason."""
    return dict.fromkeys((gpu_of(d["addr"]), d["reason"]) for d in devices if d["reason"])


def memory_by_gpu(clients: Iterable[MpsClient]) -> dict[str, int]:
    """Return the MiB that processes use on each GPU, by address."""
    used: dict[str, int] = {}
    for client in clients:
        for gpu, mib in zip(client["gpus"], client["memory_by_gpu_mib"]):
            used[gpu] = used.get(gpu, 0) + (mib or 0)
    return used


def is_memory_unknown(gpu: Gpu) -> bool:
    """Whether the driver does not report what processes use of the GPU, as for a lost one."""
    return gpu["state"] == UNAVAILABLE and gpu["memory_used_mib"] is None


def distribute(
    addresses: Sequence[str], used_mib: int, budgets_mib: Mapping[str, int | None]
) -> Iterator[tuple[str, int]]:
    """Distribute the MiB used over the devices, filling one after the other; the last gets the rest.

    That is also so if the budgets are unknown.
    """
    for address in addresses:
        part_mib = used_mib if address == addresses[-1] else min(used_mib, budgets_mib.get(address) or 0)
        yield address, part_mib
        used_mib -= part_mib
