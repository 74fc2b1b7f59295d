"""Peak memory use of each leased device since its lease began."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Lease


class MemoryPeaks:
    """The peaks of leased devices in MiB, updated by polls and stored for the next daemon."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store
        #: By lease id and device address.
        self._mib: dict[tuple[str, str], int] = {}

    def restore(self) -> None:
        """Continue with the previous daemon's peaks, or without them if they cannot be read."""
        with contextlib.suppress(HostError):
            rows = self._store.read("SELECT lease, device, mib FROM memory_peak")
            self._mib = {(row[0], row[1]): row[2] for row in rows}

    def note(self, used_mib: Mapping[str, int]) -> None:
        """Update the peaks from the current use of devices, by address; forget leases that have ended."""
        leases = self._ledger.leases
        ended = {lease_id for lease_id, _ in self._mib if lease_id not in leases}
        self._mib = {key: mib for key, mib in self._mib.items() if key[0] not in ended}
        risen = {
            (lease.id, device.addr): mib
            for lease in (leases.values() if used_mib else ())
            for device in lease.devices
            if (mib := used_mib.get(device.addr, 0)) > self._mib.get((lease.id, device.addr), 0)
        }
        self._mib.update(risen)
        with contextlib.suppress(HostError):  # the next daemon continues from what was stored last
            if ended:
                self._store.write("DELETE FROM memory_peak WHERE lease = ?", [(one,) for one in ended])
            if risen:
                rows = [(*key, mib) for key, mib in risen.items()]
                self._store.write("INSERT OR REPLACE INTO memory_peak VALUES (?, ?, ?)", rows)

    def of(self, lease: Lease) -> list[int | None]:
        """The peak of each device of the lease; None if it was not used yet."""
        return [self._mib.get((lease.id, device.addr)) for device in lease.devices]

    def by_device(self) -> dict[str, int]:
        """The peaks of all leased devices, by address."""
        return {
            device: mib for (lease_id, device), mib in self._mib.items() if lease_id in self._ledger.leases
        }
