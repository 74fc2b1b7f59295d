"""Storage: the leases in the state file, for the next daemon."""

from __future__ import annotations

import time
from collections.abc import Callable

from yunion_mps.core.errors import HostError
from yunion_mps.core.identity import gpu_uuids_in
from yunion_mps.core.models import Lease
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.store import Store
from yunion_mps.leases.lease_row import lease_text, read_lease_row
from yunion_mps.leases.ledger import Ledger


def _wall_clock_ahead_s() -> float:
    return time.time() - time.monotonic()


class LeaseStorage:
    """The leases in the state file, which the lease service writes and the next daemon reads.

    ahead_s: returns the wall clock minus the monotonic one, in s.

    Every method raises HostError if the state file cannot be used.
    """

    def __init__(self, store: Store, ahead_s: Callable[[], float] = _wall_clock_ahead_s) -> None:
        self._store = store
        self._ahead_s = ahead_s
        self._ended: set[str] = set()
        #: The leases, by id, whose stored versions are out of date.
        self._unwritten: dict[str, Lease] = {}
        #: By lease id, what of its row this version cannot read. Such a row is kept as it is, for the version
        #: that wrote it, until the lease is deleted.
        self.unreadable: dict[str, str] = {}
        #: By lease id, the GPUs and MIG instances (UUIDs) that such a row names, each of which it may hold.
        self.named: dict[str, list[str]] = {}

    def write(self, lease: Lease) -> None:
        """Store a lease, or replace its stored version, unless that is of another version."""
        self._delete_ended()  # otherwise the next daemon would find a device in two leases
        if lease.id in self.unreadable:
            return
        text = lease_text(lease, self._store.boot_id, self._ahead_s())
        self._store.record_lease(lease.id, text)
        self._unwritten.pop(lease.id, None)

    def replace(self, lease: Lease) -> bool:
        """Replace the stored version of a lease, and return whether that succeeded.

        If not, `flush` does it later.
        """
        try:
            self.write(lease)
        except HostError:
            self._unwritten[lease.id] = lease
        return lease.id not in self._unwritten

    def flush(self) -> None:
        """Write and delete what could not be written or deleted before."""
        self._delete_ended()
        for lease in list(self._unwritten.values()):
            self.write(lease)

    def delete(self, lease_id: str) -> None:
        """Delete a lease; if that fails, it is deleted before the next one is stored."""
        self._ended.add(lease_id)
        self._unwritten.pop(lease_id, None)
        self.unreadable.pop(lease_id, None)
        self.named.pop(lease_id, None)
        self._delete_ended()

    def read(self, *, of_every_boot: bool = False) -> list[Lease]:
        """Read all leases whose devices are known, and note in `unreadable` what cannot be read.

        If only the devices of a row can be read, because a newer version wrote it or it is damaged, its lease
        ends with its process if that is known, or else by a release.

        PIDs are reused after a reboot, so a lease held by a process is valid only within its boot, like
        monotonic times: a lease from an earlier boot expires by the wall clock.

        of_every_boot: also those that processes of other boots hold. In a container, a daemon can have
            another boot id than a shell (measured with systemd-nspawn).
        """
        boot_id = None if of_every_boot else self._store.boot_id
        ahead_s = self._ahead_s()
        leases: list[Lease] = []
        self.unreadable.clear()
        self.named.clear()
        for lease_id, text in self._store.read("SELECT id, value FROM lease ORDER BY rowid"):
            row = read_lease_row(lease_id, text, boot_id, ahead_s)
            if row.lease:
                leases.append(row.lease)
            if row.problem:
                self.unreadable[lease_id] = row.problem
                self.named[lease_id] = gpu_uuids_in(text)
        return leases

    def _delete_ended(self) -> None:
        if self._ended:
            self._store.forget_leases(sorted(self._ended))
            self._ended.clear()


def recorded_ledger(store: Store) -> Ledger:
    """Return the leases in the state file, except those whose process has ended; raises HostError."""
    ledger = Ledger()
    add_recorded(ledger, store)
    return ledger


def add_recorded(ledger: Ledger, store: Store) -> None:
    """Add the leases in the state file, except those whose process has ended, to an empty ledger.

    They keep GPUs as they are before the event loop watches the leases and reports problems, and after it.

    Raises HostError, with nothing added, if the state file cannot be used.
    """
    storage = LeaseStorage(store)
    for lease in storage.read(of_every_boot=True):
        holder = lease.holder
        is_kept = holder.binding == "name" or holder.pid is None
        if is_kept or started_ticks(holder.pid or 0) == holder.started:
            try:
                ledger.add(lease)
            except AssertionError:  # it shares a device with another one, but not all
                storage.named[lease.id] = [device.gpu_uuid for device in lease.devices]
        else:
            storage.named.pop(lease.id, None)
    ledger.set_unreadable(storage.named)
