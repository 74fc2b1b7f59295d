"""Leases in the state file: what a daemon has given away, the next one knows."""

from __future__ import annotations

import json
from typing import Any

from yunion_mps.models import Device, Holder, Lease
from yunion_mps.store import Store


class Book:
    """The leases of one state file; everything here raises HostError where that cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, lease: Lease) -> None:
        """Keep a lease, in the place of what was kept of it."""
        value = {
            **lease._asdict(),
            "devices": [device._asdict() for device in lease.devices],
            "holder": lease.holder._asdict(),
        }
        row = (lease.id, json.dumps(value, separators=(",", ":")))
        self._store.write("INSERT OR REPLACE INTO lease VALUES (?, ?)", [row])

    def strike(self, lease_id: str) -> None:
        """Forget a lease."""
        self._store.write("DELETE FROM lease WHERE id = ?", [(lease_id,)])

    def read(self) -> list[Lease]:
        """All that are kept; what nobody can understand, such as another release's, is passed over."""
        rows = self._store.read("SELECT value FROM lease ORDER BY rowid")
        return [lease for row in rows if (lease := _lease(row[0]))]


def _lease(text: str) -> Lease | None:
    try:
        value: dict[str, Any] = json.loads(text)
        value["devices"] = tuple(Device(**device) for device in value["devices"])
        value["holder"] = Holder(**value["holder"])
        return Lease(**value)
    except (ValueError, TypeError, KeyError):
        return None
