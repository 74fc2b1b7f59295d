"""The ledger: the pure record of which lease has which device, and of what is free.

A device is free if no lease holds it and its GPU has enough memory left for it beside all leases on that
GPU. Leases of a previous division, which keep their devices, count as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import MPS
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import Device, Holder, Lease, Pool
from yunion_mps.core.reasons import LEASE_EXISTS, LEASE_UNREADABLE, hint_of
from yunion_mps.core.waits import NO_USERS, LeaseWait, Users, all_of
from yunion_mps.host.proc import user_name
from yunion_mps.leases.request import QueuedRequest, shorten
from yunion_mps.planning.division import free_units, thread_tenths
from yunion_mps.planning.environment import DEVICE_VARIABLE

#: The way of sharing of a lease whose row in the state file cannot be read.
UNKNOWN = ""
#: The most leases that an error names.
_MAX_NAMED = 3
#: How many characters of a lease's id are enough to identify it.
_ID_LENGTH = 8


class Hold(NamedTuple):
    """A GPU or MIG instance that a lease keeps as it is."""

    #: What `yunion-mps lease release` calls the lease.
    lease: str
    #: The address of the leased device; the UUID of its GPU if the address is not known.
    device: str
    gpu_uuid: str
    #: How the GPU is shared; `UNKNOWN` if the lease's row cannot be read.
    sharing: str


class Amounts(NamedTuple):
    """An amount of all that a pool hands out."""

    #: The reserve of each client included.
    memory_mib: int
    #: Tenths of a percent of the SM threads.
    thread_tenths: int
    clients: int

    def without(self, other: Amounts) -> Amounts:
        """Return what is left without `other`; never less than nothing."""
        return Amounts(
            memory_mib=max(0, self.memory_mib - other.memory_mib),
            thread_tenths=max(0, self.thread_tenths - other.thread_tenths),
            clients=max(0, self.clients - other.clients),
        )

    def covers(self, other: Amounts) -> bool:
        """Return whether this is at least as much as `other` of everything."""
        has_memory = self.memory_mib >= other.memory_mib
        return has_memory and self.thread_tenths >= other.thread_tenths and self.clients >= other.clients


NOTHING = Amounts(memory_mib=0, thread_tenths=0, clients=0)


class Ledger:
    """The leases and what they take of each GPU.

    The supervisor has the daemon's only one. At its start it has the leases that the state file has; from
    then on the lease service is the only one that changes it.
    """

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self.leases: dict[str, Lease] = {}
        #: Lease ids by device id.
        self.lease_of: dict[str, str] = {}
        #: Incremented whenever a lease is added, replaced or removed.
        self.version = 0
        self._listeners: list[Callable[[], None]] = []
        #: The leases (ids) whose rows cannot be read, and the GPUs (UUIDs) that these rows name.
        self._unreadable: dict[str, tuple[str, ...]] = {}
        self._memory_mib: Counter[str] = Counter()
        #: How many leased devices of each GPU (UUID) have a budget that is not known.
        self._unknown_budgets: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._thread_tenths: Counter[str] = Counter()
        for lease in leases:
            self.add(lease)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a lease was added, replaced or removed."""
        self._listeners.append(listener)

    def clear(self) -> None:
        """Forget all leases, those that cannot be read included."""
        self.leases.clear()
        self.lease_of.clear()
        self._unreadable.clear()
        self._memory_mib.clear()
        self._unknown_budgets.clear()
        self._clients.clear()
        self._thread_tenths.clear()
        self._note_change()

    def add(self, lease: Lease) -> None:
        """Add a lease.

        Raises AssertionError if another lease has one of its devices.
        """
        for device in lease.devices:
            owner = self.lease_of.get(device.id)
            if owner is not None:
                raise AssertionError(f"device {device.addr} is already leased: lease {owner}")
        self.leases[lease.id] = lease
        for device in lease.devices:
            self.lease_of[device.id] = lease.id
        self._count(lease, 1)
        self._note_change()

    def _count(self, lease: Lease, sign: int) -> None:
        for device in lease.devices:
            self._memory_mib[device.gpu_uuid] += sign * needs_mib(device)
            self._unknown_budgets[device.gpu_uuid] += sign * int(device.memory_limit_mib is None)
            self._clients[device.gpu_uuid] += sign
            self._thread_tenths[device.gpu_uuid] += sign * round(device.thread_percentage * 10)

    def _note_change(self) -> None:
        self.version += 1
        for listener in self._listeners:
            listener()

    def remove(self, lease_id: str) -> Lease:
        """Remove the lease of this id, and return it."""
        lease = self.leases.pop(lease_id)
        self._unreadable.pop(lease_id, None)
        for device in lease.devices:
            del self.lease_of[device.id]
        self._count(lease, -1)
        self._note_change()
        return lease

    def replace(self, lease: Lease) -> None:
        """Replace the lease of this id; its devices have the same ids."""
        self._count(self.leases[lease.id], -1)
        self.leases[lease.id] = lease
        self._count(lease, 1)
        self._note_change()

    def moved(self, devices: Iterable[Device]) -> list[Lease]:
        """Return the leases whose devices have moved, with the new addresses.

        A card is in another slot, or a MIG instance was created again, perhaps with another UUID. `devices`
        are those of the plan. A lease does not continue on one that is now shared in another way.
        """
        if not self.leases:  # the plan may have thousands of devices
            return []
        planned = {device.id: device for device in devices}
        moved: list[Lease] = []
        for lease in self.leases.values():
            present = tuple(_at_its_place(device, planned.get(device.id, device)) for device in lease.devices)
            if present != lease.devices:
                moved.append(_with_devices(lease, present))
        return moved

    def find_repeated(self, queued: QueuedRequest) -> Lease | None:
        """Return the lease that was granted for an earlier attempt of this request; None if there is none."""
        for lease in self.leases.values():
            if queued.is_answered_by(lease):
                return lease
        return None

    def refuse_duplicate(self, holder: Holder, idempotency_key: str) -> None:
        """Raise HostError if the holder's owner has a lease already for the name or the idempotency key."""
        for lease in self.leases.values():
            if lease.holder.owner != holder.owner:
                continue
            if holder.name and lease.holder.name == holder.name:
                text = f"{holder.name}: a lease with this name already exists, from a different request"
                text += f": {lease.id}"
                hint = f"release it: yunion-mps lease release {holder.name}; or use another name"
                raise HostError(text, hint, LEASE_EXISTS)
            if idempotency_key and lease.idempotency_key == idempotency_key:
                text = f"this idempotency key already belongs to a lease from a different request: {lease.id}"
                raise HostError(text, "use a new idempotency key for another lease", LEASE_EXISTS)

    def free_by_gpu(
        self,
        devices: Iterable[Device],
        reserved: Collection[str] = (),
        reserved_mib: Mapping[str, int] = {},
    ) -> dict[str, list[Device]]:
        """Return the devices that can be leased together, by GPU UUID: as many as fit into its memory.

        reserved: ids of devices that are left out.
        reserved_mib: the memory that is left out, by GPU UUID.
        """
        free: dict[str, list[Device]] = {}
        for uuid, of_gpu in group_by_gpu(devices).items():
            free_of_gpu = self.free_of_gpu(of_gpu, reserved, reserved_mib.get(uuid, 0))
            if free_of_gpu:
                free[uuid] = free_of_gpu
        return free

    def free_of_gpu(
        self, devices: Sequence[Device], reserved: Collection[str] = (), reserved_mib: int = 0
    ) -> list[Device]:
        """Return the devices of one GPU that can be leased together: as many as fit into its memory.

        devices: devices of the GPU, at least one.
        reserved: ids of devices that are left out.
        reserved_mib: the memory of the GPU that is left out.
        """
        lease_of = self.lease_of
        unleased = [device for device in devices if device.id not in lease_of and device.id not in reserved]
        total_mib = devices[0].memory_total_mib
        if total_mib is None:  # unknown, so only the number of devices is counted
            return unleased
        left_mib = self.left_mib(devices[0].gpu_uuid, total_mib) - reserved_mib
        free: list[Device] = []
        for device in unleased:
            needed_mib = needs_mib(device)
            if needed_mib <= left_mib:
                left_mib -= needed_mib
                free.append(device)
        return free

    def used_shares(self, devices: Iterable[Device]) -> dict[str, float]:
        """Return how much memory of each physical GPU (address) of the devices is leased, from 0 to 1.

        Of a GPU whose memory is unknown, it is the share of its devices. Without leases nothing is returned.
        """
        if not self.leases:
            return {}
        by_uuid = group_by_gpu(devices)
        used = Counter[str]()
        total = Counter[str]()
        for uuid, of_gpu in by_uuid.items():
            gpu = physical_gpu(of_gpu[-1].addr)
            memory_mib = of_gpu[-1].memory_total_mib
            if memory_mib is None:
                used[gpu] += self._clients[uuid]
                total[gpu] += len(of_gpu)
            else:
                used[gpu] += self._memory_mib[uuid]
                total[gpu] += memory_mib
        return {gpu: used[gpu] / max(1, total[gpu]) for gpu in total}

    def ways_of_sharing(self) -> dict[str, str]:
        """Return how the GPUs of leased devices are shared, by UUID, as when they were leased."""
        ways: dict[str, str] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                ways[device.gpu_uuid] = device.sharing
        return ways

    def users_by_gpu(self) -> dict[str, Users]:
        """Return the leases of each GPU with leased devices, by UUID."""
        leases: dict[str, dict[str, Lease]] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                leases.setdefault(device.gpu_uuid, {})[lease.id] = lease
        users = {uuid: _users(list(by_id.values())) for uuid, by_id in leases.items()}
        for lease_id in sorted(self.unknown):
            for uuid in self._unreadable[lease_id]:
                unknown = Users((f"lease {lease_id[:_ID_LENGTH]}",))
                users[uuid] = all_of([users.get(uuid, NO_USERS), unknown])
        return users

    @property
    def unknown(self) -> set[str]:
        """The leases (ids) whose devices are not known, so that any device may be theirs."""
        return self._unreadable.keys() - self.leases.keys()

    def set_unreadable(self, rows: Mapping[str, Iterable[str]]) -> None:
        """Set which leases (ids) have rows that cannot be read, and the GPUs (UUIDs) that each names."""
        self._unreadable = {lease_id: tuple(uuids) for lease_id, uuids in rows.items()}
        self._note_change()

    def forget_unknown(self, lease_id: str) -> None:
        """Forget a lease whose devices were not known, because its row was deleted."""
        del self._unreadable[lease_id]
        self._note_change()

    def holds(self) -> list[Hold]:
        """Return what leases keep as it is; a row that cannot be read keeps every GPU that it names.

        Which way of sharing such a lease needs is unknown, unless the row says that it is not MPS.
        """
        holds = []
        for lease_id, uuids in self._unreadable.items():
            if lease_id not in self.leases:
                holds += [Hold(lease_id, uuid, uuid, UNKNOWN) for uuid in uuids]
        for lease in self.leases.values():
            name = lease.holder.name if lease.holder.binding == "name" else lease.id
            for device in lease.devices:
                is_unknown = lease.id in self._unreadable and device.sharing == MPS
                sharing = UNKNOWN if is_unknown else device.sharing
                holds.append(Hold(name, device.addr, device.gpu_uuid, sharing))
        return holds

    def ways_kept(self) -> dict[str, str]:
        """Return how the GPUs (UUIDs) that leases keep are shared: through MPS if that is unknown."""
        return {hold.gpu_uuid: hold.sharing or MPS for hold in self.holds()}

    def refuse_if_any_is_unknown(self) -> None:
        """Raise HostError if a device that seems to be free may belong to a lease that cannot be read."""
        if self.unknown:
            few = ", ".join(sorted(self.unknown)[:_MAX_NAMED])
            message = f"no device is free for certain: it is not known which devices these leases have: {few}"
            hint = hint_of(LEASE_UNREADABLE, lease=min(self.unknown))
            raise HostError(message, hint, LEASE_UNREADABLE)

    def has_leases_on(self, gpu_uuid: str) -> bool:
        """Return whether a lease has a device of the GPU."""
        return self._clients.get(gpu_uuid, 0) > 0

    def leases_on(self, gpu_uuid: str) -> list[str]:
        """Return the ids of the leases with devices of the GPU."""
        ids: list[str] = []
        for lease in self.leases.values():
            if any(device.gpu_uuid == gpu_uuid for device in lease.devices):
                ids.append(lease.id)
        return ids

    def free_devices(self, devices: Iterable[Device]) -> set[str]:
        """Return the ids of the devices that can all be leased together."""
        ids: set[str] = set()
        for free in self.free_by_gpu(devices).values():
            ids.update(device.id for device in free)
        return ids

    def free_singly(self, devices: Iterable[Device]) -> list[Device]:
        """Return the devices that can each be leased alone, though perhaps not all together."""
        return [device for device in devices if device.id not in self.lease_of and self._fits(device)]

    def _fits(self, device: Device) -> bool:
        """Return whether the GPU has memory left for the device beside all leases."""
        if device.memory_total_mib is None:
            return True
        return needs_mib(device) <= self.left_mib(device.gpu_uuid, device.memory_total_mib)

    def left_mib(self, gpu_uuid: str, total_mib: int) -> int:
        """Return how much of the GPU's memory is left beside all leases; 0 if that of one is not known."""
        return 0 if self._unknown_budgets[gpu_uuid] else total_mib - self._memory_mib[gpu_uuid]

    def free_mib(self, pool: Pool, reserved: Amounts = NOTHING) -> int:
        """Return how much memory one more client can get beside what is reserved."""
        if self._unknown_budgets[pool.gpu_uuid]:
            return 0
        taken_mib = self._memory_mib[pool.gpu_uuid] + reserved.memory_mib
        clients = self._clients[pool.gpu_uuid] + reserved.clients
        return free_units(pool, taken_mib, clients) * pool.unit_mib

    def free_tenths(self, pool: Pool) -> int:
        """Return how many tenths of a percent of the threads more clients can get."""
        return max(0, thread_tenths(pool) - self._thread_tenths[pool.gpu_uuid])

    def left_of(self, pool: Pool, reserved: Amounts = NOTHING) -> Amounts:
        """Return what the leases leave of the pool beside what is reserved; never less than nothing."""
        uuid = pool.gpu_uuid
        left_mib = self.left_mib(uuid, pool.memory_total_mib) - reserved.memory_mib
        left_tenths = thread_tenths(pool) - self._thread_tenths.get(uuid, 0) - reserved.thread_tenths
        left_clients = pool.clients - self._clients.get(uuid, 0) - reserved.clients
        return Amounts(
            memory_mib=max(0, left_mib), thread_tenths=max(0, left_tenths), clients=max(0, left_clients)
        )

    def lease_waits(self, devices: Sequence[Device]) -> Mapping[str, LeaseWait]:
        """Return the GPUs, by UUID, with leases from another division than the one into `devices`.

        The devices of these leases are pending, and so are new devices that do not fit beside them. Every
        output counts pending devices from this alone.
        """
        by_gpu = group_by_gpu(devices)
        divided = {device.id: device for device in devices}
        waits: dict[str, LeaseWait] = {}
        for uuid, former in self._former_divisions(by_gpu, divided).items():
            fitting = self.free_devices(by_gpu[uuid])
            pending = set(former.device_ids)
            for device in by_gpu[uuid]:
                if device.id not in fitting and device.id not in self.lease_of:
                    pending.add(device.id)
            waits[uuid] = LeaseWait(
                pending=frozenset(pending),
                total=len(by_gpu[uuid]) + len(former.device_ids - divided.keys()),
                leases=tuple(former.leases),
                users=_users(list(former.leases.values())),
            )
        return waits

    def _former_divisions(
        self, gpus: Collection[str], divided: Mapping[str, Device]
    ) -> dict[str, _FormerDivision]:
        """Return what leases have of another division of each GPU (UUID).

        gpus: UUIDs of the GPUs that count.
        divided: the devices of the present division, by id.
        """
        former: dict[str, _FormerDivision] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                present = divided.get(device.id)
                # Most leased devices are the plan's own objects: comparing thousands of budgets takes long.
                is_same = present is device
                if present is not None and not is_same:
                    is_same = _budget(present) == _budget(device)
                if device.gpu_uuid in gpus and not is_same:
                    division = former.setdefault(device.gpu_uuid, _FormerDivision({}, set()))
                    division.leases[lease.id] = lease
                    division.device_ids.add(device.id)
        return former


class _FormerDivision(NamedTuple):
    """What leases have of an earlier division of a GPU."""

    #: The leases, by their ids.
    leases: dict[str, Lease]
    device_ids: set[str]


def group_by_gpu(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Return the devices of each GPU, by UUID."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.gpu_uuid, []).append(device)
    return groups


def combinable_kind(device: Device) -> tuple[bool, str]:
    """Return what all devices of a lease have in common: whether they are on MIG instances, and their domain.

    A process sees one MIG instance or whole GPUs, and connects to one control daemon.

    Source: NVIDIA: Multi-Instance GPU User Guide, section "CUDA Device Enumeration".
    """
    return device.is_on_instance, device.domain


def groups_across(devices: Iterable[Device]) -> list[list[Device]]:
    """Return the devices that can be in one lease, one of each physical GPU.

    Whole GPUs come first, because a process can use only one MIG instance.
    """
    groups: dict[tuple[bool, str], list[Device]] = {}
    for device in devices:
        groups.setdefault(combinable_kind(device), []).append(device)
    kinds = sorted(groups, key=lambda kind: kind[0])
    return [of_different_gpus(groups[kind]) for kind in kinds]


def of_different_gpus(devices: Iterable[Device]) -> list[Device]:
    """Return the first device of each physical GPU, whose MIG instances are not different GPUs."""
    firsts: dict[str, Device] = {}
    for device in devices:
        firsts.setdefault(physical_gpu(device.addr), device)
    return list(firsts.values())


def needs_mib(device: Device) -> int:
    """Return how much of its GPU's memory a device takes in MiB: its budget, plus what is reserved with it.

    Nothing is counted if its budget is unknown; then nothing else is leased of a GPU with a known memory.
    """
    return (device.memory_limit_mib or 0) + device.reserve_mib


def _at_its_place(leased: Device, planned: Device) -> Device:
    """Return the leased device with the UUID, address and domain of the planned one with its id."""
    is_same = planned.gpu_uuid == leased.gpu_uuid and planned.addr == leased.addr
    if is_same or planned.sharing != leased.sharing:
        return leased
    return leased._replace(gpu_uuid=planned.gpu_uuid, addr=planned.addr, domain=planned.domain)


def _with_devices(lease: Lease, devices: tuple[Device, ...]) -> Lease:
    """Return the lease with these devices instead of its own, in the same order.

    Its environment names their GPUs by UUID, also in the path of the pipe directory.
    """
    environment = dict(lease.environment)
    for leased, present in zip(lease.devices, devices):
        for name, value in environment.items():
            environment[name] = value.replace(leased.gpu_uuid, present.gpu_uuid)
    if DEVICE_VARIABLE in environment:
        environment[DEVICE_VARIABLE] = ",".join(device.addr for device in devices)
    return lease._replace(devices=devices, environment=environment)


def _budget(device: Device) -> tuple[int | None, float, str, str]:
    return device.memory_limit_mib, device.thread_percentage, device.priority, device.sharing


def _users(leases: Sequence[Lease]) -> Users:
    """Return the leases: `lease job-17 of alice, lease 7c1f0e7a of bob (PID 4260) and 2 more`."""
    texts = []
    for lease in leases[:_MAX_NAMED]:
        holder = lease.holder
        text = f"lease {shorten(holder.name) or lease.id[:_ID_LENGTH]} of {user_name(holder.uid)}"
        texts.append(text if holder.pid is None else f"{text} (PID {holder.pid})")
    return Users(tuple(texts), more_leases=max(0, len(leases) - _MAX_NAMED))
