"""Devices, leases and processes, joined into holdings, and the states of these. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import (
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
from yunion_mps.core.errors import HostError
from yunion_mps.core.reasons import PROCESSES_UNKNOWN

if TYPE_CHECKING:
    from yunion_mps.answers import (
        ClientListJson,
        DeviceJson,
        GpuJson,
        LeaseRecordJson,
        MpsClientJson,
        WaitingClientJson,
    )

    AnyClient = Union[MpsClientJson, WaitingClientJson]

#: Key of a holding: a lease and a GPU, a device without a lease and its GPU, or a kind of use without a
#: device and the GPU.
_Key = tuple[str, str]
#: The states of use without a device; it has no others.
OUTSIDE_MPS = "outside MPS"
NO_DEVICE = "no device"
#: This much of a lease's id distinguishes it.
ID_LENGTH = 8


NO_CLIENTS: ClientListJson = {"servers": [], "clients": [], "waiting": [], "errors": [], "total": 0}


def start_order(started: str | None, pid: int | None) -> tuple[str, int]:
    """Return a key that is the greatest for the process that started last (RFC 3339)."""
    return started or "", pid or 0


class ProcessUse(NamedTuple):
    """What a process, or a lease without processes, uses of a GPU; unknown values are None."""

    pid: int | None
    #: The user's name.
    user: str | None
    #: The command line; for a lease without a process, its name.
    command: str | None
    #: The start of the process or lease, as an RFC 3339 time.
    started: str | None
    memory_mib: int | None
    #: The name of its container; None if it is in none.
    container: str | None = None
    #: The SM utilization in %.
    sm: int | None = None

    @property
    def shown(self) -> str:
        """Its container and command, for people."""
        return in_container(self.container, self.command or "")


class Holding(NamedTuple):
    """What counts against one budget on one GPU: the devices, the lease, if any, and the processes.

    Without devices, it is the use outside MPS, or by MPS clients without a device.
    """

    #: The GPU's address.
    gpu: str
    #: The addresses of the devices.
    devices: tuple[str, ...]
    #: The memory that the processes share; None if it is not limited or not known.
    budget_mib: int | None
    #: The percentage of the SM threads that each process gets; None if it is not limited or not known.
    threads: float | None = None
    lease: LeaseRecordJson | None = None
    #: Whether the devices can be used.
    available: bool = True
    #: Whether the daemon would lease it, although processes without a lease may use it.
    free: bool = False
    #: Whether it waits for leases of a former division, or belongs to one.
    pending: bool = False
    #: Whether the daemon would lease it for what it is reserved for.
    reserved: bool = False
    outside_mps: bool = False
    processes: tuple[ProcessUse, ...] = ()
    #: The only user to whom the daemon would lease it, empty for none, None for everybody.
    free_for: str | None = None
    #: Users to whom the daemon would not lease it.
    not_free_for: tuple[str, ...] = ()

    @property
    def restriction(self) -> str:
        """The users to whom the daemon would lease it: `for alice only`, `not for bob`; empty for all."""
        if self.free_for:
            return f"for {self.free_for} only"
        if self.free_for is not None:
            return "for no user now"
        if self.not_free_for:
            return f"not for {', '.join(self.not_free_for)}"
        return ""

    @property
    def holders(self) -> tuple[ProcessUse, ...]:
        """The processes, or if none uses the devices yet, the holder of the lease."""
        if self.processes or not self.lease:
            return self.processes
        holder = ProcessUse(
            pid=self.lease["pid"],
            user=user_of(self.lease),
            command=self.lease["command"] or self.lease["name"],
            started=self.lease["since"],
            memory_mib=0 if self.available else None,  # a lost GPU reports no processes
            container=self.lease["container"],
        )
        return (holder,)

    @property
    def used_mib(self) -> int:
        """The memory that the processes use, as far as it is known."""
        return sum(process.memory_mib or 0 for process in self.processes)

    @property
    def known_mib(self) -> int | None:
        """Like `used_mib`, but None if it is unknown, as on a lost GPU."""
        known_mib = [process.memory_mib for process in self.holders if process.memory_mib is not None]
        return sum(known_mib) if known_mib or not self.holders else None

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
        total_mib: int | None = None
        for budget in self.lease["budgets"]:
            peak_mib = budget["memory_peak_mib"]
            if budget["addr"] in self.devices and peak_mib is not None:
                total_mib = (total_mib or 0) + peak_mib
        return total_mib

    @property
    def state(self) -> str:
        """Its state: a device's, or one of OUTSIDE_MPS, NO_DEVICE, OVER_BUDGET, IN_USE, IDLE, NO_MEMORY."""
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
        if self.free:
            return FREE
        return NO_MEMORY if self.pending else UNAVAILABLE

    @property
    def over_mib(self) -> int:
        """By how much the processes exceed the budget."""
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
        """The user whose processes use it, or how many do; empty if that is not known."""
        if self.lease:
            return user_of(self.lease)
        users = {process.user for process in self.processes if process.user}
        if len(users) > 1:
            return f"{len(users)} users"
        return users.pop() if users else ""

    @property
    def label(self) -> str:
        """A label for people: `job-17: python train.py`.

        The holder's name or container, if any, and the lease's command, or else that of the process with the
        most memory. A process's container is preferred to the lease's name, because pods can share a claim.
        """
        names = [process.container for process in self.processes]
        by_memory = sorted(self.processes, key=lambda process: -(process.memory_mib or 0))
        commands = [process.command for process in by_memory]
        if self.lease:
            names = [self.lease["container"], *names, self.lease["name"]]
            commands.insert(0, self.lease["command"])
        container = next(filter(None, names), None)
        command = next(filter(None, commands), "")
        return in_container(container, command)

    @property
    def since(self) -> str | None:
        """The start of the lease or of its first process; None if it is unknown."""
        if self.lease:
            return self.lease["since"]
        starts = [process.started for process in self.processes if process.started is not None]
        return min(starts, default=None)

    @property
    def named(self) -> str:
        """The addresses of its devices, as the environment of a process names them."""
        return ",".join(self.devices)


def in_container(container: str | None, command: str) -> str:
    """Return for example `trainer: python train.py`; only the command if there is no container."""
    return f"{container}: {command}" if container and command else container or command


def user_of(lease: LeaseRecordJson) -> str:
    """Return the user whose processes use the devices, as far as that is known, or else the lease's owner."""
    return lease["for_user"] or lease["user"]


def holder_label(lease: LeaseRecordJson) -> str:
    """Return the user and the process, container or name: `alice (PID 4260)`, `bob (job-17)`."""
    process = f"PID {lease['pid']}" if lease["pid"] else ""
    return f"{user_of(lease)} ({lease['container'] or lease['name'] or process})"


def abbreviate_addresses(addresses: Sequence[str]) -> str:
    """Abbreviate the devices of each GPU: `00:06.0-2,3`, `00:06.0-0..7`."""
    slots: dict[str, list[str]] = {}
    for address in addresses:
        slots.setdefault(gpu_of(address), []).append(address)
    return ",".join(_abbreviate(gpu, of_gpu) for gpu, of_gpu in slots.items())


def _abbreviate(gpu: str, addresses: Sequence[str]) -> str:
    """Abbreviate `2,3`, `0..7`: three or more consecutive slots become a range; a pool's `m1` is kept."""
    if gpu in addresses:
        return gpu  # a whole MIG instance
    ranges: list[list[str]] = []
    for address in addresses:
        slot = address.rpartition("-")[2]
        last = ranges[-1][-1] if ranges else ""
        if last.isdigit() and slot.isdigit() and int(slot) == int(last) + 1:
            ranges[-1].append(slot)
        else:
            ranges.append([slot])
    parts: list[str] = []
    for slots in ranges:
        if len(slots) > 2:
            parts.append(f"{slots[0]}..{slots[-1]}")
        else:
            parts.extend(slots)
    return f"{gpu}-{','.join(parts)}"


def holdings(
    devices: Sequence[DeviceJson], leases: Iterable[LeaseRecordJson], clients: Iterable[MpsClientJson]
) -> list[Holding]:
    """Return all devices in the given order, grouped into holdings; then the use without a device."""
    joined: dict[_Key, Holding] = {}
    keys_by_device: dict[str, _Key] = {}
    keys_by_pid: dict[int, list[_Key]] = {}
    for use in _device_uses(devices, leases):
        lease = use.lease
        key = (lease["id"] if lease else use.address, gpu_of(use.address))
        holding = _holding_of(use)
        joined[key] = _merge(joined[key], holding) if key in joined else holding
        keys_by_device.setdefault(use.address, key)
        if lease and lease["pid"] is not None:
            keys = keys_by_pid.setdefault(lease["pid"], [])
            if key not in keys:
                keys.append(key)
    for client in clients:
        if client["uid"] is not None:  # otherwise it has ended
            _add_process(client, joined, keys_by_device, keys_by_pid)
    return list(joined.values())


class _DeviceUse(NamedTuple):
    """A device that is listed, leased or both."""

    address: str
    #: As listed; None if it is not.
    device: DeviceJson | None
    lease: LeaseRecordJson | None = None
    #: That of the lease; None if it is not leased, or the budget is unknown.
    budget_mib: int | None = None


class _Leased(NamedTuple):
    """A device's lease and its budget there."""

    lease: LeaseRecordJson
    budget_mib: int | None


def _device_uses(devices: Sequence[DeviceJson], leases: Iterable[LeaseRecordJson]) -> Iterator[_DeviceUse]:
    """Yield the listed devices with their leases, then the leased devices that are not listed.

    Two devices can have the same address: one of a card that was replaced, if it is still leased, and one of
    the new card. So a lease is found by its id first.
    """
    listed = {(device["lease"], device["addr"]) for device in devices}
    #: By the lease's id and the device's address.
    leased: dict[tuple[str, str], _Leased] = {}
    #: Those that are not listed with their lease, by the device's address.
    others: dict[str, _Leased] = {}
    for lease in leases:
        for budget in lease["budgets"]:
            address = budget["addr"]
            leased[lease["id"], address] = _Leased(lease, budget["memory_mib"])
            if (lease["id"], address) not in listed:
                others[address] = leased[lease["id"], address]
    for device in devices:
        address = device["addr"]
        known = leased.get((device["lease"] or "", address))
        if known is None:  # perhaps it was leased after the devices were listed
            known = others.pop(address, None)
        if known is None:
            yield _DeviceUse(address, device)
        else:
            yield _DeviceUse(address, device, known.lease, known.budget_mib)
    for address, other in others.items():
        yield _DeviceUse(address, None, other.lease, other.budget_mib)


def _holding_of(use: _DeviceUse) -> Holding:
    """Return the device as a holding, yet without processes."""
    device = use.device
    lease = use.lease
    budget_mib = use.budget_mib
    if device and budget_mib is None:
        budget_mib = device["memory_mib"]
    percentage = device["thread_percentage"] if device else None
    if lease and (percentage is None or len(lease["devices"]) == 1):
        percentage = lease["thread_percentage"]  # as leased, which may have been before a reload
    state = device["state"] if device else ""
    return Holding(
        gpu=gpu_of(use.address),
        devices=(use.address,),
        budget_mib=budget_mib,
        threads=percentage,
        lease=lease,
        available=state != UNAVAILABLE,
        free=state == FREE,
        pending=state == PENDING,
        reserved=state == RESERVED,
        free_for=device["free_for"] if device else None,
        not_free_for=tuple(device["not_free_for"]) if device else (),
    )


def _merge(first: Holding, second: Holding) -> Holding:
    """Return both as one holding, which shares their budgets; unknown if one of these is."""
    budget_mib: int | None = None
    if first.budget_mib is not None and second.budget_mib is not None:
        budget_mib = first.budget_mib + second.budget_mib
    return first._replace(
        devices=first.devices + second.devices,
        budget_mib=budget_mib,
        available=first.available and second.available,
        pending=first.pending or second.pending,
    )


def _add_process(
    client: MpsClientJson,
    joined: dict[_Key, Holding],
    keys_by_device: Mapping[str, _Key],
    keys_by_pid: Mapping[int, Sequence[_Key]],
) -> None:
    """Add a process to the holdings of its lease, of its devices, or of the lease that its PID holds.

    The names of its devices may be out of date: a card may be in another slot since it was started.
    """
    used_mib: dict[str, int | None] = dict(zip(client["gpus"], client["memory_by_gpu_mib"]))
    sm: dict[str, int | None] = dict(zip(client["gpus"], client["sm_utilization_by_gpu"]))
    keys: list[_Key] = []
    kind = OUTSIDE_MPS
    if client["mps"] is not False:
        kind = NO_DEVICE
        keys = [key for key in joined if key[0] == client["lease"]]
        if not keys:
            keys = [keys_by_device[name] for name in device_names(client) if name in keys_by_device]
        if not keys:
            keys = list(keys_by_pid.get(client["pid"], ()))
    keys = [key for key in dict.fromkeys(keys) if not used_mib or key[1] in used_mib]
    on_gpus = {gpu for _, gpu in keys}
    for gpu in used_mib:
        if gpu not in on_gpus:
            keys.append((kind, gpu))
    if not keys:
        keys.append((kind, ""))
    for key in keys:
        gpu = key[1]
        process = ProcessUse(
            pid=client["pid"],
            user=client["user"],
            command=client["command"],
            started=client["started"],
            memory_mib=used_mib.get(gpu),
            container=client["container"],
            sm=sm.get(gpu),
        )
        holding = joined.get(key)
        if holding is None:
            holding = Holding(gpu=gpu, devices=(), budget_mib=None, outside_mps=kind == OUTSIDE_MPS)
        joined[key] = holding._replace(processes=(*holding.processes, process))


def device_names(client: AnyClient) -> list[str]:
    """Return the addresses of the client's devices, according to its environment."""
    return [name.strip() for name in (client["device"] or "").split(",") if name.strip()]


def client_with_pid(pid: int, listed: ClientListJson) -> AnyClient | None:
    """Return the client, served or waiting for a server, with this PID; None if there is none."""
    for client in _all_clients(listed):
        if client["pid"] == pid:
            return client
    return None


def clients_of_device(address: str, listed: ClientListJson) -> list[AnyClient]:
    """Return the processes that were started with this device, including those that wait for a server."""
    return [client for client in _all_clients(listed) if address in device_names(client)]


def clients_of_lease(lease: LeaseRecordJson, listed: ClientListJson) -> list[AnyClient]:
    """Return the lease's processes: its holder, and those that belong to it (`attribution.py`).

    A process that only names a device may belong to another job.
    """
    clients: list[AnyClient] = []
    for client in _all_clients(listed):
        if client["lease"] == lease["id"] or client["pid"] == lease["pid"]:
            clients.append(client)
    return clients


def refuse_if_unknown(pid: int, listed: ClientListJson) -> None:
    """Raise HostError if the process is not listed, but some processes are unknown: it may be one of them.

    A process that is killed while it is an MPS client can take other jobs with it.
    """
    if client_with_pid(pid, listed) is None and listed["errors"]:
        message = f"it is not known whether PID {pid} is an MPS client: {'; '.join(listed['errors'])}"
        hint = "try again once the MPS server answers; or, at the risk of that server's other jobs: "
        raise HostError(message, f"{hint}yunion-mps terminate {pid} --force", PROCESSES_UNKNOWN)


def _all_clients(listed: ClientListJson) -> list[AnyClient]:
    return [*listed["clients"], *listed["waiting"]]


def lease_states(held: Iterable[Holding]) -> dict[str, str]:
    """Return the state of each lease, by id."""
    by_lease: dict[str, set[str]] = {}
    for holding in held:
        if holding.lease:
            states = by_lease.setdefault(holding.lease["id"], set())
            states.add(holding.state if holding.available else UNAVAILABLE)
            if holding.pending:
                states.add(PENDING)
    return {lease: min(states, key=LEASE_STATES.index) for lease, states in by_lease.items()}


def reasons_by_gpu(devices: Iterable[DeviceJson]) -> Iterable[tuple[str, str]]:
    """Return each GPU with an unavailable or pending device, and the reason."""
    reasons: dict[tuple[str, str], None] = {}  # each once, in this order
    for device in devices:
        if device["reason"]:
            reasons[gpu_of(device["addr"]), device["reason"]] = None
    return reasons


def memory_by_gpu(clients: Iterable[MpsClientJson]) -> dict[str, int]:
    """Return the MiB that processes use on each GPU, by address."""
    used: dict[str, int] = {}
    for client in clients:
        for gpu, mib in zip(client["gpus"], client["memory_by_gpu_mib"]):
            used[gpu] = used.get(gpu, 0) + (mib or 0)
    return used


def is_memory_unknown(gpu: GpuJson) -> bool:
    """Return whether the driver does not report what processes use of the GPU, as for a lost one."""
    return gpu["state"] == UNAVAILABLE and gpu["memory_used_mib"] is None


def distribute(
    addresses: Sequence[str], used_mib: int, budgets_mib: Mapping[str, int | None]
) -> Iterator[tuple[str, int]]:
    """Distribute the MiB used over the devices, filling one after the other; the last gets the rest.

    That is also so if the budgets are unknown.
    """
    for address in addresses:
        part_mib = used_mib
        if address != addresses[-1]:
            part_mib = min(used_mib, budgets_mib.get(address) or 0)
        yield address, part_mib
        used_mib -= part_mib
