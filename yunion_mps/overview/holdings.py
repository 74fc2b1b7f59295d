"""Who has what: devices, leases and processes joined. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, LeaseRecord, MpsClient

#: A key of a holding: the devices of one lease on one GPU, one device without a lease, or a kind of use
#: that no device stands for, and the GPU.
_Key = tuple[str, str]
_OUTSIDE_MPS, _NO_DEVICE = "outside MPS", "no device"
#: So much of a lease's id tells it from the others.
ID_LENGTH = 8


NO_CLIENTS: ClientList = {"servers": [], "clients": [], "waiting": [], "errors": [], "total": 0}


class ProcessUse(NamedTuple):
    """What one process, or a lease without any, has on one GPU; None for what is not known.

    `sm` is its SM utilization in %.
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
    """What counts against one budget on one GPU: the devices, the lease, if there is one, and the processes.

    Without devices it is what processes use outside MPS, or through MPS and by no device. `free` is whether
    the daemon would give it to a request, although processes without a lease may use it; `pending`, whether
    it waits for leases of a former division or belongs to one.
    """

    gpu: str
    devices: tuple[str, ...]
    budget_mib: int | None
    threads: float | None = None
    lease: LeaseRecord | None = None
    available: bool = True
    free: bool = False
    pending: bool = False
    outside_mps: bool = False
    processes: tuple[ProcessUse, ...] = ()

    @property
    def holders(self) -> tuple[ProcessUse, ...]:
        """The processes, or if none uses the devices yet, the one that has the lease."""
        if self.processes or not self.lease:
            return self.processes
        command = self.lease["command"] or self.lease["name"]
        since, container = self.lease["since"], self.lease["container"]
        return (ProcessUse(self.lease["pid"], self.lease["user"], command, since, 0, container),)

    @property
    def used_mib(self) -> int:
        return sum(process.memory_mib or 0 for process in self.processes)

    @property
    def sm(self) -> int | None:
        """The SM utilization of its processes together in %, None if none is known."""
        known = [process.sm for process in self.processes if process.sm is not None]
        return min(sum(known), 100) if known else None

    @property
    def peak_mib(self) -> int | None:
        """The most memory that was used of its devices since its lease began, None if it is not known."""
        if not self.lease:
            return None
        peaks = dict(zip(self.lease["devices"], self.lease["memory_peak_mib"]))
        known = [mib for device in self.devices if (mib := peaks.get(device)) is not None]
        return sum(known) if known else None

    @property
    def over_mib(self) -> int:
        return 0 if self.budget_mib is None else max(0, self.used_mib - self.budget_mib)

    @property
    def in_use(self) -> bool:
        return bool(self.lease or self.processes)

    @property
    def is_spare(self) -> bool:
        """Whether it is free, and no process uses it either."""
        return self.free and not self.in_use

    @property
    def user(self) -> str:
        if self.lease:
            return str(self.lease["user"])
        users = {process.user for process in self.processes if process.user}
        return users.pop() if len(users) == 1 else f"{len(users)} users" if users else ""

    @property
    def label(self) -> str:
        """What a person knows it by: `job-17: python train.py`.

        The name or container of its holder, if there is one, and the command that the lease was taken for;
        without that, the command of the process with the most memory.
        """
        names = [process.container for process in self.processes]
        commands = [one.command for one in sorted(self.processes, key=lambda one: -(one.memory_mib or 0))]
        if self.lease:
            names = [self.lease["name"], self.lease["container"], *names]
            commands.insert(0, self.lease["command"])
        return in_container(next(filter(None, names), None), next(filter(None, commands), ""))

    @property
    def since(self) -> str | None:
        """The time since when, None if that is not known."""
        if self.lease:
            return self.lease["since"]
        return min((one.started for one in self.processes if one.started is not None), default=None)

    @property
    def named(self) -> str:
        """`00:06.0-1`, `00:06.0-1,00:06.0-2`."""
        return ",".join(self.devices)


def in_container(container: str | None, command: str) -> str:
    """`trainer: python train.py`; the command alone outside of containers."""
    return f"{container}: {command}" if container and command else container or command


def holder_of(lease: LeaseRecord) -> str:
    """`alice (PID 4260)`, `alice (trainer)`, `bob (job-17)`: the user, and the process, container or name."""
    process = f"PID {lease['pid']}" if lease["pid"] else ""
    return f"{lease['user']} ({lease['name'] or lease['container'] or process})"


def folded_addresses(addresses: Sequence[str]) -> str:
    """`00:06.0-2,3`, `00:06.0-0..7`: the devices of each GPU in short."""
    slots: dict[str, list[str]] = {}
    for address in addresses:
        slots.setdefault(gpu_of(address), []).append(address.rpartition("-")[2])
    return ",".join(f"{gpu}-{_folded(found)}" for gpu, found in slots.items())


def _folded(slots: Sequence[str]) -> str:
    """`2,3`, `0..7`: three and more in a row are a range; a pool's `m1` stands as it is."""
    rows: list[list[str]] = []
    for slot in slots:
        last = rows[-1][-1] if rows else ""
        if last.isdigit() and slot.isdigit() and int(slot) == int(last) + 1:
            rows[-1].append(slot)
        else:
            rows.append([slot])
    return ",".join(f"{row[0]}..{row[-1]}" if len(row) > 2 else ",".join(row) for row in rows)


def gpu_of(address: str) -> str:
    """The address of the GPU that a device is a share of."""
    return address.rpartition("-")[0]


def holdings(
    devices: Sequence[Device], leases: Iterable[LeaseRecord], clients: Iterable[MpsClient]
) -> list[Holding]:
    """Every device in the order given, as a part of a holding; then what is used without a device."""
    known = {device["addr"]: device for device in devices}
    found: dict[_Key, Holding] = {}
    place: dict[str, _Key] = {}
    by_pid: dict[int, list[_Key]] = {}
    held = _held(leases)
    for address in [*known, *(address for address in held if address not in known)]:
        key, lease, budget_mib = held.get(address, ((address, gpu_of(address)), None, None))
        device = known.get(address)
        if device and budget_mib is None:
            budget_mib = device["mps_memory_limit"]
        percentage = device["mps_thread_percentage"] if device else None
        if lease and (percentage is None or len(lease["devices"]) == 1):
            percentage = lease["thread_percentage"]  # as it was given, which may be before a reload
        state = device["state"] if device else ""
        one = Holding(
            key[1], (address,), budget_mib, percentage, lease, state != "unavailable",
            device["free"] if device else False, state == "pending",
        )  # fmt: skip
        found[key] = _joined(found[key], one) if key in found else one
        place[address] = key
        if lease and lease["pid"] is not None and key not in by_pid.setdefault(lease["pid"], []):
            by_pid[lease["pid"]].append(key)
    for client in clients:
        if client["uid"] is not None:  # else it has ended meanwhile
            _add(client, found, place, by_pid)
    return list(found.values())


def _held(leases: Iterable[LeaseRecord]) -> dict[str, tuple[_Key, LeaseRecord, int | None]]:
    """By device: the holding that it is a part of, its lease, and its memory in MiB."""
    held = {}
    for lease in leases:
        memory = dict(zip(lease["devices"], lease["memory_mib"]))
        for address in lease["devices"]:
            held[address] = ((lease["id"], gpu_of(address)), lease, memory.get(address))
    return held


def _joined(first: Holding, second: Holding) -> Holding:
    budgets = (first.budget_mib, second.budget_mib)
    return first._replace(
        devices=first.devices + second.devices,
        budget_mib=None if None in budgets else sum(budget or 0 for budget in budgets),
        available=first.available and second.available,
        pending=first.pending or second.pending,
    )


def _add(
    client: MpsClient, found: dict[_Key, Holding], place: dict[str, _Key], by_pid: dict[int, list[_Key]]
) -> None:
    """Count what a process uses where it belongs: by its device, else by the lease that its PID holds."""
    memory: dict[str, int | None] = dict(zip(client["gpus"], client["memory_by_gpu_mib"]))
    sm: dict[str, int | None] = dict(zip(client["gpus"], client["sm_utilization_by_gpu"]))
    names = [name.strip() for name in (client["device"] or "").split(",") if name.strip()]
    keys = [place[name] for name in names if name in place] or by_pid.get(client["pid"], [])
    if client["mps"] is False:
        keys = []
    keys = [key for key in dict.fromkeys(keys) if not memory or key[1] in memory]
    others = [gpu for gpu in memory if all(gpu != key[1] for key in keys)]
    kind = _OUTSIDE_MPS if client["mps"] is False else _NO_DEVICE
    for key in [*keys, *((kind, gpu) for gpu in others or ([] if keys else [""]))]:
        holding = found.get(key) or Holding(key[1], (), None, outside_mps=kind == _OUTSIDE_MPS)
        process = ProcessUse(
            client["pid"], client["user"], client["command"], client["started"], memory.get(key[1]),
            client["container"], sm.get(key[1]),
        )  # fmt: skip
        found[key] = holding._replace(processes=(*holding.processes, process))


def memory_by_gpu(clients: Iterable[MpsClient]) -> dict[str, int]:
    """The MiB that processes have on each GPU, by its address."""
    used: dict[str, int] = {}
    for client in clients:
        for gpu, mib in zip(client["gpus"], client["memory_by_gpu_mib"]):
            used[gpu] = used.get(gpu, 0) + (mib or 0)
    return used


def filled(holding: Holding, budgets: dict[str, int]) -> list[tuple[str, int]]:
    """The MiB used of each of its devices, filled one after the other; the last has all that is left."""
    left = holding.used_mib
    parts = []
    for address in holding.devices:
        last = address == holding.devices[-1]
        part = left if last else min(left, budgets.get(address, 0))
        parts.append((address, part))
        left -= part
    return parts
