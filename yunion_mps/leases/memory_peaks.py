"""The most memory that leased devices have used, kept in the state file across restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from yunion_mps.core.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger


class MemoryPeaks:
    """The most memory that each leased device has used, which the observer of processes notes."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store
        #: By lease id and device address.
        self._mib: dict[tuple[str, str], int] = {}

    def restore(self) -> None:
        """Continue with the previous daemon's peaks, or without them if they cannot be read."""
        with contextlib.suppress(HostError):
            for lease_id, address, mib in self._store.read("SELECT lease, device, mib FROM memory_peak"):
                if isinstance(mib, int):
                    self._mib[lease_id, address] = mib

    def note(self, used_mib: Mapping[str, int]) -> None:
        """Update the peaks from the current use of devices, by address; forget leases that have ended."""
        leases = self._ledger.leases
        ended = {lease_id for lease_id, _ in self._mib if lease_id not in leases}
        for lease_id, address in list(self._mib):
            if lease_id in ended:
                del self._mib[lease_id, address]
        risen = self._risen(used_mib)
        self._mib.update(risen)
        with contextlib.suppress(HostError):  # the next daemon continues from what was stored last
            if ended:
                statement = "DELETE FROM memory_peak WHERE lease = ?"
                self._store.write(statement, [(lease_id,) for lease_id in ended])
            if risen:
                rows = [(lease_id, address, mib) for (lease_id, address), mib in risen.items()]
                statement = "INSERT OR REPLACE INTO memory_peak (lease, device, mib) VALUES (?, ?, ?)"
                self._store.write(statement, rows)

    def _risen(self, used_mib: Mapping[str, int]) -> dict[tuple[str, str], int]:
        """Return what is used by leased devices that use more than ever before."""
        risen: dict[tuple[str, str], int] = {}
        if not used_mib:
            return risen
        for lease in self._ledger.leases.values():
            for device in lease.devices:
                mib = used_mib.get(device.addr, 0)
                if mib > self._mib.get((lease.id, device.addr), 0):
                    risen[lease.id, device.addr] = mib
        return risen

    def of(self, lease_id: str, address: str) -> int | None:
        """Return the peak of a device (address) of the lease, in MiB; None if it was not used yet."""
        return self._mib.get((lease_id, address))

    def by_device(self) -> dict[str, int]:
        """Return the peaks of all leased devices in MiB, by address."""
        peaks: dict[str, int] = {}
        for (lease_id, address), mib in self._mib.items():
            if lease_id in self._ledger.leases:
                peaks[address] = mib
        return peaks
