"""The ledger: which lease has which device, and which device a request gets. Pure: nothing here waits.

A device is free where it is served and no lease has it, and where its GPU's memory suffices for it beside
what all leases have of that GPU: those of a division before, which go on with what they had, count as well.
Of a GPU whose memory is handed out in units, a device of any size is made when it is requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import NothingFreeError
from yunion_mps.host.proc import user_name
from yunion_mps.leases.matching import devices_for, needs_mib, pools_for
from yunion_mps.leases.names import cut
from yunion_mps.leases.offers import Offer, Offers, PoolOffer
from yunion_mps.leases.placement import pick
from yunion_mps.leases.request import SPREAD, LeaseRequest
from yunion_mps.models import ALL, Device, Lease, Pool
from yunion_mps.planning import free_units, units_for
from yunion_mps.supervisor.changes import LeaseWait


class Kept(NamedTuple):
    """What is free and kept for those who have waited longer: ids of devices, and MiB by GPU UUID."""

    devices: set[str]
    memory_mib: Counter[str]

    def __or__(self, other: Kept) -> Kept:
        """Both together."""
        return Kept(self.devices | other.devices, self.memory_mib + other.memory_mib)


NOTHING_KEPT = Kept(set(), Counter())
#: The most GPUs, and the most reasons, that an error names.
_MOST_NAMED = 4
_MOST_LEASES_NAMED = 3
#: So much of a lease's id tells it from the others.
_ID_LENGTH = 8


class FormerLeases(NamedTuple):
    """The leases of a GPU that were given under a former division, and the ids of the pending devices.

    Pending are the devices of these leases, and the devices of the new division that do not fit beside them.
    """

    leases: tuple[Lease, ...]
    pending: frozenset[str]

    @property
    def waits(self) -> str:
        """What the pending devices wait for."""
        return f"the new division of its GPU waits for {self} to end"

    def __str__(self) -> str:
        """The leases: `lease job-17 of alice, lease 7c1f0e7a of bob (PID 4260) and 2 more`."""
        text = ", ".join(_named(lease) for lease in self.leases[:_MOST_LEASES_NAMED])
        more = len(self.leases) - _MOST_LEASES_NAMED
        return f"{text} and {more} more" if more > 0 else text


class Ledger:
    """The leases there are, by id, and what is left beside them."""

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self.leases: dict[str, Lease] = {}
        #: The id of the lease that has a device, by the device's id.
        self.owners: dict[str, str] = {}
        #: Changes with every lease that comes or ends.
        self.version = 0
        self._memory_mib: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        for lease in leases:
            self.add(lease)

    def add(self, lease: Lease) -> None:
        """Enter a lease; raises AssertionError where a device of it is another's."""
        for device in lease.devices:
            owner = self.owners.get(device.id)
            if owner is not None:
                raise AssertionError(f"device {device.addr} has an owner: lease {owner}")
        self.leases[lease.id] = lease
        for device in lease.devices:
            self.owners[device.id] = lease.id
            self._memory_mib[device.gpu_uuid] += needs_mib(device)
            self._clients[device.gpu_uuid] += 1
        self.version += 1

    def remove(self, lease_id: str) -> Lease:
        """Strike a lease out."""
        lease = self.leases.pop(lease_id)
        for device in lease.devices:
            del self.owners[device.id]
            self._memory_mib[device.gpu_uuid] -= needs_mib(device)
            self._clients[device.gpu_uuid] -= 1
        self.version += 1
        return lease

    def free_devices(self, offers: Sequence[Offer]) -> set[str]:
        """The ids of the devices that can be had, all of them together."""
        return {
            device.id for devices in self._free_by_gpu(offers, NOTHING_KEPT).values() for device in devices
        }

    def free_singly(self, offers: Sequence[Offer]) -> list[Device]:
        """The devices of which any one could be had; perhaps not all of them together."""
        return [
            device
            for device, reason, _ in offers
            if not reason
            and device.id not in self.owners
            and needs_mib(device) <= device.memory_total_mib - self._memory_mib[device.gpu_uuid]
        ]

    def former_leases(self, devices: Sequence[Device]) -> Mapping[str, FormerLeases]:
        """By UUID, the GPUs with leases that were not given by the division into `devices`."""
        divided = {device.id: _budget(device) for device in devices}
        gpus = {device.gpu_uuid for device in devices}
        leases: dict[str, dict[str, Lease]] = {}
        pending: dict[str, set[str]] = {}
        for lease in self.leases.values():
            for device in lease.devices:
                if device.gpu_uuid in gpus and divided.get(device.id) != _budget(device):
                    leases.setdefault(device.gpu_uuid, {})[lease.id] = lease
                    pending.setdefault(device.gpu_uuid, set()).add(device.id)
        concerned = [device for device in devices if device.gpu_uuid in leases]
        had = self.free_devices([Offer(device) for device in concerned]) | self.owners.keys()
        for device in concerned:
            if device.id not in had:
                pending[device.gpu_uuid].add(device.id)
        return {
            uuid: FormerLeases(tuple(found.values()), frozenset(pending[uuid]))
            for uuid, found in leases.items()
        }

    def lease_waits(self, devices: Sequence[Device]) -> Mapping[str, LeaseWait]:
        """By GPU UUID, how many of `devices` wait for leases of a former division, and for which."""
        ids = {device.id for device in devices}
        return {
            uuid: LeaseWait(number, tuple(lease.id for lease in former.leases), str(former))
            for uuid, former in self.former_leases(devices).items()
            if (number := len(former.pending & ids))
        }

    def replace(self, lease: Lease) -> None:
        """Have it in the place of the one of its id, which has the same devices."""
        self.leases[lease.id] = lease
        self.version += 1

    def free_mib(self, pool: Pool) -> int:
        """How much of the pool one more client can get."""
        gpu = pool.gpu_uuid
        return free_units(pool, self._memory_mib[gpu], self._clients[gpu]) * pool.unit_mib

    def choose(
        self, request: LeaseRequest, offers: Offers, kept: Kept = NOTHING_KEPT, *, has_waited: bool = False
    ) -> tuple[Device, ...]:
        """The devices that the request gets now; raises NothingFreeError, which says why it gets none."""
        if request.memory_mib:
            chosen = self._of_a_pool(request, offers, kept)
            if chosen:
                return (chosen,)
        matching = devices_for(request, offers)
        by_gpu = self._free_by_gpu(matching, kept)
        if request.device == ALL:
            free = [device for devices in by_gpu.values() for device in devices]
            picked = tuple(free) if len(free) == len(matching) else ()
        else:
            picked = pick(request, by_gpu, offers)
        if picked:
            return picked
        raise NothingFreeError(*self._why_not(request, offers, matching, by_gpu, kept, has_waited=has_waited))

    def claims(self, request: LeaseRequest, offers: Offers, kept: Kept = NOTHING_KEPT) -> Kept:
        """What to keep of what is free for a request that cannot be met yet, so that it comes nearer."""
        if request.memory_mib:
            left = {
                one.pool.gpu_uuid: self._left_mib(one, kept)
                for one in pools_for(request, offers)
                if not one.reason
            }
            most = max(left, key=lambda gpu: left[gpu], default="")
            mib = min(left.get(most, 0), request.memory_mib)
            return Kept(set(), Counter({most: mib} if mib > 0 else {}))
        by_gpu = self._free_by_gpu(devices_for(request, offers), kept)
        if request.device == ALL:
            return Kept({device.id for devices in by_gpu.values() for device in devices}, Counter())
        most_first = sorted(by_gpu.values(), key=len, reverse=True)
        if request.across:
            return Kept({devices[0].id for devices in most_first[: request.number]}, Counter())
        return Kept(
            {device.id for device in most_first[0][: request.number]} if most_first else set(), Counter()
        )

    def _of_a_pool(self, request: LeaseRequest, offers: Offers, kept: Kept) -> Device | None:
        """A device of the memory that is requested: binpack takes the pool that has the least left.

        One on a GPU that enforces budgets goes before one that is just numbers.
        """
        fits = []
        for one in pools_for(request, offers):
            units = units_for(one.pool, request.memory_mib)
            left_mib = self._left_mib(one, kept)
            if not one.reason and units * one.pool.unit_mib <= left_mib:
                fits.append((left_mib, units, one))
        if not fits:
            return None
        sign = -1 if request.placement == SPREAD else 1
        _, units, best = min(fits, key=lambda fit: (fit[2].pool.gpu_uuid in offers.unenforced, sign * fit[0]))
        slot = 0
        while (device := best.make(units, slot)).id in self.owners:
            slot += 1
        return device

    def _left_mib(self, one: PoolOffer, kept: Kept) -> int:
        gpu = one.pool.gpu_uuid
        taken_mib = self._memory_mib[gpu] + kept.memory_mib[gpu]
        return free_units(one.pool, taken_mib, self._clients[gpu]) * one.pool.unit_mib

    def _free_by_gpu(self, offers: Sequence[Offer], kept: Kept) -> dict[str, list[Device]]:
        """The devices that can be had of each GPU, as many as its memory has room for."""
        found: dict[str, list[Device]] = {}
        left_mib: dict[str, int] = {}
        for device, reason, _ in offers:
            if reason or device.id in kept.devices or device.id in self.owners:
                continue
            gpu = device.gpu_uuid
            if gpu not in left_mib:
                left_mib[gpu] = device.memory_total_mib - self._memory_mib[gpu]
            if needs_mib(device) <= left_mib[gpu]:
                left_mib[gpu] -= needs_mib(device)
                found.setdefault(gpu, []).append(device)
        return found

    def _why_not(
        self,
        request: LeaseRequest,
        offers: Offers,
        matching: Sequence[Offer],
        by_gpu: Mapping[str, Sequence[Device]],
        kept: Kept,
        *,
        has_waited: bool,
    ) -> tuple[str, str]:
        """What is wrong, and what to do."""
        pools = pools_for(request, offers) if request.memory_mib else []
        if not matching and not pools:
            return f"{request} is not there to be had", "see: yunion-mps list"
        ids = {offer.device.id for offer in matching}
        unavailable = [(one.reason, one.device.gpu_address) for one in matching if one.reason]
        unavailable += [(one.reason, one.gpu) for one in pools if one.reason]
        former = self.former_leases([one.device for one in offers.devices])
        able = {one.device.id for one in matching if not one.reason}
        pending = [(one, able & one.pending) for one in former.values() if able & one.pending]
        used = len(ids & self.owners.keys() - {name for _, names in pending for name in names})
        free = sum(map(len, by_gpu.values()))
        parts = [f"{self._left_mib(one, kept)} MiB free on GPU {one.gpu}" for one in pools if not one.reason]
        parts += [f"{used} of {len(ids)} in use"] if used else []
        parts += [f"{len(names)} pending ({one.waits})" for one, names in pending[:_MOST_NAMED]]
        if kept.devices & ids:
            parts.append(f"{len(kept.devices & ids)} kept for those who have waited longer")
        if free:
            parts.append(f"{free} free, at most {max(map(len, by_gpu.values()))} on one GPU")
        for reason, count in Counter(reason for reason, _ in unavailable).most_common(_MOST_NAMED):
            gpus = list(dict.fromkeys(gpu for why, gpu in unavailable if why == reason))
            parts.append(f"{count} unavailable (GPU {_listed(gpus)}: {reason})")
        hint = ("" if has_waited else "wait for it: --wait; ") + "see who has them: yunion-mps who"
        if len(unavailable) == len(matching) + len(pools):
            hint = "see: yunion-mps status"
        return f"{request} cannot be had now: {'; '.join(parts)}", hint


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _budget(device: Device) -> tuple[int, float, str]:
    return device.memory_limit_mib, device.thread_percentage, device.priority


def _named(lease: Lease) -> str:
    holder = lease.holder
    text = f"lease {cut(holder.name) or lease.id[:_ID_LENGTH]} of {user_name(holder.uid)}"
    return text if holder.pid is None else f"{text} (PID {holder.pid})"
