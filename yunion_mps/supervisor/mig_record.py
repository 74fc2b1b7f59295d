"""MIG layouts in the state file: which instances are ours, and what a GPU had before our first change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from yunion_mps.host.store import Store
from yunion_mps.mig import MigInstance


class MigRecord(NamedTuple):
    """What the state file says of a GPU: its mode and layout before our first change, and what we created.

    `before` is None while nothing was changed. A change of the MIG mode resets the `compute_mode`.
    """

    enabled_before: bool = False
    before: tuple[MigInstance, ...] | None = None
    created: tuple[MigInstance, ...] = ()
    compute_mode: str = ""

    @classmethod
    def read(cls, store: Store, gpu_uuid: str) -> MigRecord:
        """Return the record; an empty one, which owns no instance, if there is none."""
        value = store.recorded_mig(gpu_uuid)
        try:
            before, created = value["before"], _instances_in(value["created"])
            known = None if before is None else _instances_in(before)
            return cls(bool(value["enabled_before"]), known, created, value.get("compute_mode", ""))
        except (TypeError, KeyError, ValueError, AttributeError):
            return cls()

    def write(self, store: Store, gpu_uuid: str) -> None:
        store.record_mig(gpu_uuid, self._asdict())

    def owns(self, instance: MigInstance) -> bool:
        """Whether we created it."""
        return any(one.is_same(instance) for one in self.created)


def _instances_in(rows: Iterable[Iterable[Any]]) -> tuple[MigInstance, ...]:
    return tuple(MigInstance(*row) for row in rows)
