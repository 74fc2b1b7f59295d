"""The ledger: the pure record of which lease has which device, and of what is free.

A device is free if no lease holds it and its GPU has enough memory left for it beside all leases on that
GPU. Leases of a previous division, which keep their devices, count as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from yunion_mps.addresses import physical_gpu
from yunion_mps.errors import HostError
from yunion_mps.host.proc import user_name
from yunion_mps.leases.request import QueuedRequest, shorten
from yunion_mps.models import Device, Holder, Lease, Pool
from yunion_mps.planning.division import free_units, thread_tenths
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.reasons import LEASE_EXISTS, LEASE_UNREADABLE, hint_of
from yunion_mps.users import LeaseWait, Users

#: The most leases that an error names.
_MAX_NAMED = 3
#: How many characters of a lease's id are enough to identify it.
_ID_LENGTH = 8


class Ledger:
    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self.leases: dict[str, Lease] = {}
        #: Lease ids by device id.
        self.lease_of: dict[str, str] = {}
        #: Incremented whenever a lease is added, replaced or removed.
        self.version = 0
        #: Called after each such change.
        self.changed: Callable[[], None] = lambda: None
        #: The leases (ids) whose devices are not known, so that any device may be theirs.
        self.unknown: set[str] = set()
        self._memory_mib: Counter[str] = Counter()
        #: How many leased devices of each GPU (UUID) have a budget that is not known.
        self._unknown_budgets: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._thread_tenths: Counter[str] = Counter()
        for lease in leases:
            self.add(lease)

    def add(self, lease: Lease) -> None:
        """Add a lease; raises AssertionError if another lease has one of its devices."""
        for device in lease.devices:
            owner = self.lease_of.get(device.id)
            if owner is not None:
                raise AssertionError(f"device {device.addr} is already leased: lease {owner}")
        self.leases[lease.id] = lease
        self.lease_of.update((device.id, lease.id) for device in lease.devices)
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
        self.changed()

    def remove(self, lease_id: str) -> Lease:
        lease = self.leases.pop(lease_id)
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
        planned = {device.id: device for device in devices} if self.leases else {}
        found = []
        for lease in self.leases.values():
            now = tuple(_at_its_place(one, planned.get(one.id, one)) for one in lease.devices)
            if now != lease.devices:
                found.append(_with_devices(lease, now))
        return found

    def find_repeated(self, queued: QueuedRequest) -> Lease | None:
        """The lease that was granted for an earlier attempt of this request, None if there is none."""
        return next((lease for lease in self.leases.values() if queued.is_answered_by(lease)), None)

    def refuse_duplicate(self, holder: Holder, idempotency_key: str) -> None:
        """Raise HostError if the holder's owner has a lease already for the name or the idempotency key."""
        for lease in self.leases.values():
            if lease.holder.owner != holder.owner:
                continue
            if holder.name and lease.holder.name == holder.name:
                what = (
                    f"{holder.name}: a lease with this name already exists, from a different request: "
                    f"{lease.id}"
                )
                hint = f"release it: yunion-mps lease release {holder.name}; or use another name"
                raise HostError(what, hint, LEASE_EXISTS)
            if idempotency_key and lease.idempotency_key == idempotency_key:
                what = f"this idempotency key already belongs to a lease from a different request: {lease.id}"
                raise HostError(what, "use a new idempotency key for another lease", LEASE_EXISTS)

    def free_by_gpu(
        self, devices: Iterable[Device], reserved: Collection[str] = ()
    ) -> dict[str, list[Device]]:
        """The devices that can be leased together, by GPU UUID: as many as fit into its memory.

        The devices with the ids in `reserved` are left out.
        """
        free: dict[str, list[Device]] = {}
        left_mib: dict[str, int] = {}
        for device in devices:
            if device.id in reserved or device.id in self.lease_of:
                continue
            gpu = device.gpu_uuid
            if device.memory_total_mib is None:  # unknown, so only the number of devices is counted
                free.setdefault(gpu, []).append(device)
                continue
            if gpu not in left_mib:
                left_mib[gpu] = self._left_mib(gpu, device.memory_total_mib)
            if needs_mib(device) <= left_mib[gpu]:
                left_mib[gpu] -= needs_mib(device)
                free.setdefault(gpu, []).append(device)
        return free

    def used_shares(self, devices: Iterable[Device]) -> dict[str, float]:
        """How much memory of each physical GPU (address) of the devices is leased, as a share from 0 to 1.

        Of a GPU whose memory is unknown, it is the share of its devices.
        """
        devices = list(devices)
        places = {device.gpu_uuid: (physical_gpu(device.addr), device.memory_total_mib) for device in devices}
        numbers = Counter(device.gpu_uuid for device in devices)
        used, total = Counter[str](), Counter[str]()
        for uuid, (gpu, memory_mib) in places.items():
            is_known = memory_mib is not None
            used[gpu] += self._memory_mib[uuid] if is_known else self._clients[uuid]
            total[gpu] += memory_mib if memory_mib is not None else numbers[uuid]
        return {gpu: used[gpu] / max(1, total[gpu]) for gpu in total}

    def ways_of_sharing(self) -> dict[str, str]:
        """How the GPUs of leased devices are shared, by UUID, as when they were leased."""
        return {device.gpu_uuid: device.sharing for lease in self.leases.values() for device in lease.devices}

    def users_by_gpu(self) -> dict[str, Users]:
        """The leases of each GPU with leased devices, by UUID."""
        leases: dict[str, dict[str, Lease]] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                leases.setdefault(device.gpu_uuid, {})[lease.id] = lease
        return {uuid: _users([*by_id.values()]) for uuid, by_id in leases.items()}

    def leased_gpus(self) -> set[str] | None:
        """The UUIDs of the GPUs with leased devices; None if not all leased devices are known."""
        return None if self.unknown else set(self.ways_of_sharing())

    def set_unknown(self, lease_ids: Iterable[str]) -> None:
        """Set which leases have devices that are not known."""
        self.unknown = set(lease_ids)
        self._note_change()

    def refuse_if_any_is_unknown(self) -> None:
        """Raise HostError if a device that seems to be free may belong to a lease that cannot be read."""
        if self.unknown:
            few = ", ".join(sorted(self.unknown)[:_MAX_NAMED])
            what = f"no device is free for certain: it is not known which devices these leases have: {few}"
            hint = hint_of(LEASE_UNREADABLE, lease=min(self.unknown))
            raise HostError(what, hint, LEASE_UNREADABLE)

    def leases_on(self, gpu_uuid: str) -> list[str]:
        """The ids of the leases with devices of the GPU."""
        leases = self.leases.values()
        return [lease.id for lease in leases if any(one.gpu_uuid == gpu_uuid for one in lease.devices)]

    def free_devices(self, devices: Iterable[Device]) -> set[str]:
        """The ids of the devices that can all be leased together."""
        return {device.id for some in self.free_by_gpu(devices).values() for device in some}

    def free_singly(self, devices: Iterable[Device]) -> list[Device]:
        """The devices that can each be leased alone, though perhaps not all together."""
        return [device for device in devices if device.id not in self.lease_of and self._fits(device)]

    def _fits(self, device: Device) -> bool:
        """Whether the GPU has memory left for the device beside all leases."""
        if device.memory_total_mib is None:
            return True
        return needs_mib(device) <= self._left_mib(device.gpu_uuid, device.memory_total_mib)

    def _left_mib(self, gpu_uuid: str, total_mib: int) -> int:
        """How much of the GPU's memory is left beside all leases; nothing if that of one is not known."""
        return 0 if self._unknown_budgets[gpu_uuid] else total_mib - self._memory_mib[gpu_uuid]

    def free_mib(self, pool: Pool, reserved_mib: int = 0, others: int = 0) -> int:
        """How much memory one more client can get, beside `others` that have `reserved_mib`."""
        if self._unknown_budgets[pool.gpu_uuid]:
            return 0
        taken_mib = self._memory_mib[pool.gpu_uuid] + reserved_mib
        return free_units(pool, taken_mib, self._clients[pool.gpu_uuid] + others) * pool.unit_mib

    def free_tenths(self, pool: Pool, reserved: int = 0) -> int:
        """How many tenths of a percent of the threads more clients can get, beside what is `reserved`."""
        return max(0, thread_tenths(pool) - self._thread_tenths[pool.gpu_uuid] - reserved)

    def lease_waits(self, devices: Sequence[Device]) -> Mapping[str, LeaseWait]:
        """The GPUs, by UUID, with leases from another division than the one into `devices`.

        The devices of these leases are pending, and so are new devices that do not fit beside them. Every
        output counts pending devices from this alone.
        """
        divided = {device.id: device for device in devices}
        gpus = {device.gpu_uuid for device in devices}
        leases: dict[str, dict[str, Lease]] = {}
        pending: dict[str, set[str]] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                here = divided.get(device.id)
                is_same = here is device or (here and _budget(here) == _budget(device))
                if device.gpu_uuid in gpus and not is_same:
                    leases.setdefault(device.gpu_uuid, {})[lease.id] = lease
                    pending.setdefault(device.gpu_uuid, set()).add(device.id)
        concerned = [device for device in devices if device.gpu_uuid in leases]
        fitting = self.free_devices(concerned) | self.lease_of.keys()
        total = {uuid: len(former - divided.keys()) for uuid, former in pending.items()}
        for device in concerned:
            total[device.gpu_uuid] += 1
            if device.id not in fitting:
                pending[device.gpu_uuid].add(device.id)
        return {
            uuid: LeaseWait(frozenset(pending[uuid]), total[uuid], tuple(by_id), _users([*by_id.values()]))
            for uuid, by_id in leases.items()
        }


def group_by_gpu(devices: Iterable[Device]) -> dict[str, list[Device]]:
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.gpu_uuid, []).append(device)
    return groups


def combinable_kind(device: Device) -> tuple[bool, str]:
    """What all devices of a lease have in common: whether they are on MIG instances, and their domain."""
    return device.is_on_instance, device.domain


def groups_across(devices: Iterable[Device]) -> list[list[Device]]:
    """The devices that can be in one lease, one of each physical GPU.

    Whole GPUs come first, because a process can use only one MIG instance.
    """
    groups: dict[tuple[bool, str], list[Device]] = {}
    for device in devices:
        groups.setdefault(combinable_kind(device), []).append(device)
    kinds = sorted(groups, key=lambda kind: kind[0])
    return [of_different_gpus(groups[kind]) for kind in kinds]


def of_different_gpus(devices: Iterable[Device]) -> list[Device]:
    """The first device of each physical GPU, whose MIG instances are not different GPUs."""
    firsts: dict[str, Device] = {}
    for device in devices:
        firsts.setdefault(physical_gpu(device.addr), device)
    return list(firsts.values())


def needs_mib(device: Device) -> int:
    """How much of its GPU's memory a device takes: its budget, plus what is reserved with it.

    Nothing is counted if its budget is unknown; then nothing else is leased of a GPU with a known memory.
    """
    return (device.memory_limit_mib or 0) + device.reserve_mib


def _at_its_place(leased: Device, planned: Device) -> Device:
    """The leased device with the UUID, address and domain of the planned one with its id."""
    is_same = (planned.gpu_uuid, planned.addr) == (leased.gpu_uuid, leased.addr)
    if is_same or planned.sharing != leased.sharing:
        return leased
    return leased._replace(gpu_uuid=planned.gpu_uuid, addr=planned.addr, domain=planned.domain)


def _with_devices(lease: Lease, devices: tuple[Device, ...]) -> Lease:
    """The lease with other UUIDs of its GPUs, after which pipe directories are named, too."""
    environment = dict(lease.environment)
    for old, new in zip(lease.devices, devices):
        environment = {name: value.replace(old.gpu_uuid, new.gpu_uuid) for name, value in environment.items()}
    if DEVICE_VARIABLE in environment:
        environment[DEVICE_VARIABLE] = ",".join(device.addr for device in devices)
    return lease._replace(devices=devices, environment=environment)


def _budget(device: Device) -> tuple[int | None, float, str, str]:
    return device.memory_limit_mib, device.thread_percentage, device.priority, device.sharing


def _users(leases: Sequence[Lease]) -> Users:
    """The leases: `lease job-17 of alice, lease 7c1f0e7a of bob (PID 4260) and 2 more`."""
    texts = []
    for lease in leases[:_MAX_NAMED]:
        holder = lease.holder
        text = f"lease {shorten(holder.name) or lease.id[:_ID_LENGTH]} of {user_name(holder.uid)}"
        texts.append(text if holder.pid is None else f"{text} (PID {holder.pid})")
    return Users(tuple(texts), more_leases=max(0, len(leases) - _MAX_NAMED))
