"""The ledger: which lease has which device, and which device a wish gets. Pure: nothing here waits.

A device is free where it is served and no lease has it, and where its GPU's memory suffices for it beside
what all leases have of that GPU: those of a division before, which go on with what they had, count as well.
Of a GPU whose memory is handed out in units, a device of any size is made when somebody wishes for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import HostError, NothingFreeError
from yunion_mps.models import ALL, Device, Lease, Pool
from yunion_mps.planning.pools import free_units, units_for

BINPACK = "binpack"
SPREAD = "spread"
UNENFORCED_HINT = "take it all the same: --allow-unlimited (in Python: allow_unlimited=True)"


class Wish(NamedTuple):
    """What somebody wants: `number` devices, of one GPU or each of another (`across`), or so much memory.

    `device` (id or address, or all) and `gpu` (UUID or address) bound the choice where they are not empty,
    and `enforced` bounds it to GPUs that hold their clients to the budget.
    """

    number: int = 1
    device: str = ""
    gpu: str = ""
    across: bool = False
    placement: str = BINPACK
    memory_mib: int = 0
    enforced: bool = False

    def takes(self, device: Device) -> bool:
        """Whether the device would do, free or not."""
        if device.memory_limit_mib < self.memory_mib or (self.enforced and not device.budget_enforced):
            return False
        if self.device not in ("", ALL, device.id, device.addr):
            return False
        return not self.gpu or self.gpu in (device.gpu_uuid, device.addr.rpartition("-")[0])

    def __str__(self) -> str:
        """In words: `2 devices on different GPUs`."""
        if self.device:
            return "all devices" if self.device == ALL else f"device {self.device}"
        where = f" of GPU {self.gpu}" if self.gpu else ""
        if self.memory_mib:
            return f"{self.memory_mib} MiB{where}"
        what = "1 device" if self.number == 1 else f"{self.number} devices"
        together = " on different GPUs" if self.across else " on one GPU"
        return what + where + (together if self.number > 1 and not self.gpu else "")


class Offer(NamedTuple):
    """A device as it is now: `reason` says why it is not served, empty where it is.

    `sliced`: it is one of a GPU's unequal slices, so whoever wishes for memory may get it.
    """

    device: Device
    reason: str = ""
    sliced: bool = False


class PoolOffer(NamedTuple):
    """A GPU's memory in units, as it is now: `make` makes the device of so many units in a slot."""

    pool: Pool
    gpu: str  # its address
    make: Callable[[int, int], Device]
    reason: str = ""


def _no_reason(devices: Sequence[Device]) -> str:
    del devices
    return ""


class Offers(NamedTuple):
    """All that can be given; `unenforced` names, by UUID, the GPUs that hold nobody to a budget.

    `why_apart` says why several devices cannot be one budget, empty where they can.
    """

    devices: Sequence[Offer] = ()
    pools: Sequence[PoolOffer] = ()
    unenforced: Mapping[str, str] = {}
    why_apart: Callable[[Sequence[Device]], str] = _no_reason


class Kept(NamedTuple):
    """What is free and kept for those who have waited longer: ids of devices, and MiB by GPU UUID."""

    devices: set[str]
    memory_mib: Counter[str]

    def __or__(self, other: Kept) -> Kept:
        """Both together."""
        return Kept(self.devices | other.devices, self.memory_mib + other.memory_mib)


NOTHING_KEPT = Kept(set(), Counter())


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
            self._memory_mib[device.gpu_uuid] += _needs_mib(device)
            self._clients[device.gpu_uuid] += 1
        self.version += 1

    def remove(self, lease_id: str) -> Lease:
        """Strike a lease out."""
        lease = self.leases.pop(lease_id)
        for device in lease.devices:
            del self.owners[device.id]
            self._memory_mib[device.gpu_uuid] -= _needs_mib(device)
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
            and _needs_mib(device) <= device.memory_total_mib - self._memory_mib[device.gpu_uuid]
        ]

    def replace(self, lease: Lease) -> None:
        """Have it in the place of the one of its id, which has the same devices."""
        self.leases[lease.id] = lease
        self.version += 1

    def free_mib(self, pool: Pool) -> int:
        """How much of the pool one more client can get."""
        gpu = pool.gpu_uuid
        return free_units(pool, self._memory_mib[gpu], self._clients[gpu]) * pool.unit_mib

    def choose(self, wish: Wish, offers: Offers, kept: Kept = NOTHING_KEPT) -> tuple[Device, ...]:
        """The devices that the wish gets now; raises NothingFreeError, which says why it gets none."""
        if wish.memory_mib:
            chosen = self._of_a_pool(wish, offers, kept)
            if chosen:
                return (chosen,)
        matching = _matching(wish, offers)
        by_gpu = self._free_by_gpu(matching, kept)
        if wish.device == ALL:
            free = [device for devices in by_gpu.values() for device in devices]
            picked = tuple(free) if len(free) == len(matching) else ()
        else:
            picked = _pick(wish, by_gpu, offers)
        if picked:
            return picked
        raise NothingFreeError(*self._why_not(wish, offers, matching, by_gpu, kept))

    def claims(self, wish: Wish, offers: Offers, kept: Kept = NOTHING_KEPT) -> Kept:
        """What to keep of what is free for a wish that cannot be met yet, so that it comes nearer."""
        if wish.memory_mib:
            left = {
                one.pool.gpu_uuid: self._left_mib(one, kept) for one in _pools(wish, offers) if not one.reason
            }
            most = max(left, key=lambda gpu: left[gpu], default="")
            mib = min(left.get(most, 0), wish.memory_mib)
            return Kept(set(), Counter({most: mib} if mib > 0 else {}))
        by_gpu = self._free_by_gpu(_matching(wish, offers), kept)
        if wish.device == ALL:
            return Kept({device.id for devices in by_gpu.values() for device in devices}, Counter())
        most_first = sorted(by_gpu.values(), key=len, reverse=True)
        if wish.across:
            return Kept({devices[0].id for devices in most_first[: wish.number]}, Counter())
        return Kept(
            {device.id for device in most_first[0][: wish.number]} if most_first else set(), Counter()
        )

    def _of_a_pool(self, wish: Wish, offers: Offers, kept: Kept) -> Device | None:
        """A device of the memory that is wished for: binpack takes the pool that has the least left.

        One on a GPU that enforces budgets goes before one that is just numbers.
        """
        fits = []
        for one in _pools(wish, offers):
            units = units_for(one.pool, wish.memory_mib)
            left_mib = self._left_mib(one, kept)
            if not one.reason and units * one.pool.unit_mib <= left_mib:
                fits.append((left_mib, units, one))
        if not fits:
            return None
        sign = -1 if wish.placement == SPREAD else 1
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
            if _needs_mib(device) <= left_mib[gpu]:
                left_mib[gpu] -= _needs_mib(device)
                found.setdefault(gpu, []).append(device)
        return found

    def _why_not(
        self,
        wish: Wish,
        offers: Offers,
        matching: Sequence[Offer],
        by_gpu: Mapping[str, Sequence[Device]],
        kept: Kept,
    ) -> tuple[str, str]:
        """What is wrong, and what to do."""
        pools = _pools(wish, offers) if wish.memory_mib else []
        if not matching and not pools:
            return f"{wish} is not there to be had", "see: yunion-mps list"
        ids = {offer.device.id for offer in matching}
        reasons = Counter(
            [one.reason for one in matching if one.reason] + [one.reason for one in pools if one.reason]
        )
        used, free = len(ids & self.owners.keys()), sum(map(len, by_gpu.values()))
        parts = [f"{self._left_mib(one, kept)} MiB free on GPU {one.gpu}" for one in pools if not one.reason]
        parts += [f"{used} of {len(ids)} in use"] if used else []
        if kept.devices & ids:
            parts.append(f"{len(kept.devices & ids)} kept for those who have waited longer")
        if free:
            parts.append(f"{free} free, at most {max(map(len, by_gpu.values()))} on one GPU")
        for reason, count in reasons.most_common(1):
            parts.append(f"{count} unavailable ({reason})")
        if not parts:
            parts.append("leases of a division before hold the memory of its GPU")
        hint = "wait for it: --wait; see who has them: yunion-mps who"
        if sum(reasons.values()) == len(matching) + len(pools):
            hint = "see: yunion-mps status"
        return f"{wish} cannot be had now: {'; '.join(parts)}", hint


def refuse_impossible(wish: Wish, offers: Offers) -> None:
    """Raise NothingFreeError where the wish could not be met if everything were free and served.

    Raises HostError where it could, by GPUs that enforce no budget.
    """
    pools = _pools(wish, offers) if wish.memory_mib else []
    if any(units_for(one.pool, wish.memory_mib) <= free_units(one.pool) for one in pools):
        return
    by_gpu: dict[str, list[Device]] = {}
    for offer in _matching(wish, offers):
        by_gpu.setdefault(offer.device.gpu_uuid, []).append(offer.device)
    if _pick(wish, by_gpu, offers):
        return
    if wish.enforced:
        anywhere = wish._replace(enforced=False)
        refuse_impossible(anywhere, offers)
        raise HostError(_unenforced(anywhere, offers), UNENFORCED_HINT)
    there = f"{sum(map(len, by_gpu.values()))} such devices on {len(by_gpu)} GPUs"
    hint = "see: yunion-mps list"
    if not by_gpu and _pools(wish, offers):
        hint = "memory is handed out in units here: --gpu-mem 2GiB"
    if wish.memory_mib:
        sizes = [f"at most {one.pool.memory_mib} MiB of GPU {one.gpu}" for one in pools]
        there = ", ".join(sizes) or "no GPUs whose memory is handed out in units, and no slices of that size"
        hint = "see memory_unit and slices: man yunion-mps-host_container_device.yml"
    raise NothingFreeError(f"{wish} can never be had: there are {there}", hint)


def least(wish: Wish, offers: Offers) -> Iterator[tuple[Device, ...]]:
    """Yield the smallest devices that several are wished for could be, if everything were free and served.

    They are of each GPU that has enough, or, where they are to be across GPUs, of each control daemon.
    """
    if wish.number == 1:
        return
    by_gpu: dict[str, list[Device]] = {}
    for offer in offers.devices:
        if wish.takes(offer.device):
            by_gpu.setdefault(offer.device.gpu_uuid, []).append(offer.device)
    if not by_gpu:
        return
    groups = [sorted(devices, key=_needs_mib) for devices in by_gpu.values()]
    if wish.across:
        by_domain: dict[str, list[Device]] = {}
        for smallest, *_ in groups:
            by_domain.setdefault(smallest.domain, []).append(smallest)
        yield tuple(smallest for smallest, *_ in groups)[: wish.number]
        groups = list(by_domain.values())
    for devices in groups:
        if len(devices) >= wish.number:
            yield tuple(devices[: wish.number])


def _unenforced(wish: Wish, offers: Offers) -> str:
    of = {one.device.gpu_uuid for one in _matching(wish, offers)}
    of |= {one.pool.gpu_uuid for one in _pools(wish, offers)}
    names = [name for uuid, name in offers.unenforced.items() if uuid in of]
    which = f"GPU {names[0]}, which is" if len(names) == 1 else f"GPUs {', '.join(names)}, which are"
    return f"no budget is enforced on {which} older than Volta: a command could use all of the memory"


def _matching(wish: Wish, offers: Offers) -> list[Offer]:
    """The devices that would do; whoever wishes for memory gets no equal share, and the smallest slice.

    Several are of no GPU whose devices can never be one budget.
    """
    found = [one for one in offers.devices if wish.takes(one.device) and (one.sliced or not wish.memory_mib)]
    if wish.number > 1 and not wish.across:
        apart = {some[0].gpu_uuid for some in least(wish, offers) if offers.why_apart(some)}
        found = [one for one in found if one.device.gpu_uuid not in apart]
    if wish.memory_mib:
        found.sort(key=lambda one: one.device.memory_limit_mib)
    return found


def _pools(wish: Wish, offers: Offers) -> list[PoolOffer]:
    return [
        one
        for one in offers.pools
        if wish.gpu in ("", one.pool.gpu_uuid, one.gpu)
        and not (wish.enforced and one.pool.gpu_uuid in offers.unenforced)
    ]


def _needs_mib(device: Device) -> int:
    return device.memory_limit_mib + device.reserve_mib


def _pick(wish: Wish, by_gpu: Mapping[str, Sequence[Device]], offers: Offers) -> tuple[Device, ...]:
    """As many as are wanted, by the placement: binpack fills the fullest GPU first, spread the emptiest.

    GPUs that enforce budgets go before others.
    """
    need = 1 if wish.across else wish.number
    fits = [devices for devices in by_gpu.values() if len(devices) >= need]
    sign = -1 if wish.placement == SPREAD else 1
    fits.sort(key=lambda devices: (not devices[0].budget_enforced, sign * len(devices)))
    if not wish.across:
        return next(filter(None, (_together(devices, wish.number, offers) for devices in fits)), ())
    if len(fits) < wish.number:
        return ()
    return tuple(devices[0] for devices in fits[: wish.number])


def _together(devices: Sequence[Device], number: int, offers: Offers) -> tuple[Device, ...]:
    """So many that can be one budget, the first ones or the smallest; empty where these cannot."""
    if number == 1:
        return (devices[0],)
    for ordered in (devices, sorted(devices, key=_needs_mib)):
        if not offers.why_apart(ordered[:number]):
            return tuple(ordered[:number])
    return ()
