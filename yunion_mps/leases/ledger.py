"""The ledger: which lease has which device, and which device a wish gets. Pure: nothing here waits.

A device is free where it is served and no lease has it, and where its GPU's memory suffices for it beside
what all leases have of that GPU: those of a division before, which go on with what they had, count as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import YunionError
from yunion_mps.models import Device, Lease

BINPACK = "binpack"
SPREAD = "spread"


class NothingFreeError(YunionError):
    """No device is free that would do; the message says what there is."""

    exit_code = 5


class Wish(NamedTuple):
    """What somebody wants: `number` devices, of one GPU or each of another (`across`).

    `device` (id or address) and `gpu` (UUID or address) bound the choice where they are not empty.
    """

    number: int = 1
    device: str = ""
    gpu: str = ""
    across: bool = False
    placement: str = BINPACK

    def takes(self, device: Device) -> bool:
        """Whether the device would do, free or not."""
        gpu_address = device.addr.rpartition("-")[0]
        return self.device in ("", device.id, device.addr) and self.gpu in ("", device.gpu_uuid, gpu_address)

    def __str__(self) -> str:
        """In words: `2 devices on different GPUs`."""
        if self.device:
            return f"device {self.device}"
        what = "1 device" if self.number == 1 else f"{self.number} devices"
        where = f" of GPU {self.gpu}" if self.gpu else ""
        together = " on different GPUs" if self.across else " on one GPU"
        return what + where + (together if self.number > 1 and not self.gpu else "")


class Offer(NamedTuple):
    """A device as it is now: `reason` says why it is not served, empty where it is."""

    device: Device
    reason: str = ""


class Ledger:
    """The leases there are, by id, and what is left beside them."""

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self.leases: dict[str, Lease] = {}
        #: The id of the lease that has a device, by the device's id.
        self.owners: dict[str, str] = {}
        #: Changes with every lease that comes or ends.
        self.version = 0
        self._memory_mib: Counter[str] = Counter()
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
            self._memory_mib[device.gpu_uuid] += device.memory_limit_mib
        self.version += 1

    def remove(self, lease_id: str) -> Lease:
        """Strike a lease out."""
        lease = self.leases.pop(lease_id)
        for device in lease.devices:
            del self.owners[device.id]
            self._memory_mib[device.gpu_uuid] -= device.memory_limit_mib
        self.version += 1
        return lease

    def choose(
        self, wish: Wish, offers: Iterable[Offer], spoken_for: Collection[str] = ()
    ) -> tuple[Device, ...]:
        """The devices that the wish gets now; raises NothingFreeError, which says why it gets none.

        `spoken_for` are ids of devices that are free and kept for somebody who has waited longer.
        """
        matching = [offer for offer in offers if wish.takes(offer.device)]
        by_gpu = self._free_by_gpu(matching, spoken_for)
        chosen = _pick(wish, by_gpu)
        if chosen:
            return chosen
        raise NothingFreeError(*self._why_not(wish, matching, by_gpu, spoken_for))

    def claims(self, wish: Wish, offers: Iterable[Offer], spoken_for: Collection[str] = ()) -> set[str]:
        """The free devices to keep for a wish that cannot be met yet, so that it comes nearer."""
        by_gpu = self._free_by_gpu([offer for offer in offers if wish.takes(offer.device)], spoken_for)
        most_first = sorted(by_gpu.values(), key=len, reverse=True)
        if wish.across:
            return {devices[0].id for devices in most_first[: wish.number]}
        return {device.id for device in most_first[0][: wish.number]} if most_first else set()

    def _free_by_gpu(self, offers: Sequence[Offer], spoken_for: Collection[str]) -> dict[str, list[Device]]:
        """The devices that can be had of each GPU, as many as its memory has room for."""
        found: dict[str, list[Device]] = {}
        left_mib: dict[str, int] = {}
        for device, reason in offers:
            if reason or device.id in spoken_for or device.id in self.owners:
                continue
            gpu = device.gpu_uuid
            if gpu not in left_mib:
                left_mib[gpu] = device.memory_total_mib - self._memory_mib[gpu]
            if device.memory_limit_mib <= left_mib[gpu]:
                left_mib[gpu] -= device.memory_limit_mib
                found.setdefault(gpu, []).append(device)
        return found

    def _why_not(
        self,
        wish: Wish,
        matching: Sequence[Offer],
        by_gpu: Mapping[str, Sequence[Device]],
        spoken_for: Collection[str],
    ) -> tuple[str, str]:
        """What is wrong, and what to do."""
        if not matching:
            return f"{wish} is not there to be had", "see: yunion-mps list"
        ids = {offer.device.id for offer in matching}
        reasons = Counter(offer.reason for offer in matching if offer.reason)
        used, kept, free = (
            len(ids & self.owners.keys()),
            len(ids & set(spoken_for)),
            sum(map(len, by_gpu.values())),
        )
        parts = [f"{used} of {len(ids)} in use"] if used else []
        parts += [f"{kept} kept for those who have waited longer"] if kept else []
        if free:
            parts.append(f"{free} free, at most {max(map(len, by_gpu.values()))} on one GPU")
        for reason, count in reasons.most_common(1):
            parts.append(f"{count} unavailable ({reason})")
        hint = "wait for it: --wait; see who has them: yunion-mps who"
        if sum(reasons.values()) == len(matching):
            hint = "see: yunion-mps status"
        return f"{wish} cannot be had now: {'; '.join(parts)}", hint


def refuse_impossible(wish: Wish, offers: Iterable[Offer]) -> None:
    """Raise NothingFreeError where the wish could not be met if everything were free and served."""
    by_gpu: dict[str, list[Device]] = {}
    for device, _ in offers:
        if wish.takes(device):
            by_gpu.setdefault(device.gpu_uuid, []).append(device)
    if not _pick(wish, by_gpu):
        there = f"{sum(map(len, by_gpu.values()))} such devices on {len(by_gpu)} GPUs"
        raise NothingFreeError(f"{wish} can never be had: there are {there}", "see: yunion-mps list")


def _pick(wish: Wish, by_gpu: Mapping[str, Sequence[Device]]) -> tuple[Device, ...]:
    """As many as are wanted, by the placement: binpack fills the fullest GPU first, spread the emptiest."""
    need = 1 if wish.across else wish.number
    fits = [devices for devices in by_gpu.values() if len(devices) >= need]
    fits.sort(key=len, reverse=wish.placement == SPREAD)
    if not wish.across:
        return tuple(fits[0][: wish.number]) if fits else ()
    if len(fits) < wish.number:
        return ()
    return tuple(devices[0] for devices in fits[: wish.number])
