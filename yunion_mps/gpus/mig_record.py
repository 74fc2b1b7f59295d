"""MIG layouts in the state file: which instances are ours, and what a GPU had before our first change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.core.mig import MigInstance
from yunion_mps.core.reasons import MIG_RECORD_DAMAGED, hint_of


class MigIntent(NamedTuple):
    """An instance that is about to be created, recorded before the driver is called.

    If that is the last that is known, because the daemon was killed, the call hung or the disk was full, then
    an empty instance at exactly this place is ours if its id was not there before.
    """

    #: The name of its profile.
    profile: str
    #: The first memory slice that it occupies.
    start: int
    #: The ids of the instances that the GPU had.
    ids_before: tuple[int, ...]

    def is_for(self, instance: MigInstance) -> bool:
        """Whether this is the instance: we never add the compute instance before the creation is recorded."""
        is_at_its_place = (instance.profile, instance.start) == (self.profile, self.start)
        return is_at_its_place and not instance.compute_instances and instance.id not in self.ids_before


class MigRecord(NamedTuple):
    """What the state file says of a GPU: its mode and layout before our first change, and what we created.

    `before` is None while nothing was changed. A change of the MIG mode resets the `compute_mode`. Whether
    `before` is to be restored is what the last layout said, also after the entry has none anymore.
    """

    enabled_before: bool = False
    before: tuple[MigInstance, ...] | None = None
    created: tuple[MigInstance, ...] = ()
    compute_mode: str = ""
    intent: MigIntent | None = None
    restores: bool = False

    @classmethod
    def from_text(cls, text: str) -> MigRecord:
        """Parse a record, also one of an earlier version; raises HostError if it cannot be read."""
        try:
            value = json.loads(text)
            before = value["layout_before"] if "layout_before" in value else value["before"]
            ours = value["ours"] if "ours" in value else value["created"]
            return cls(
                enabled_before=bool(value["enabled_before"]),
                before=None if before is None else _instances_in(before),
                created=_instances_in(ours),
                compute_mode=value.get("compute_mode", ""),
                intent=_intent_in(value.get("intent")),
                restores=bool(value.get("restores", False)),  # which earlier versions do not record
            )
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            message = "the record of which MIG instances the daemon created and found cannot be read"
            raise HostError(message, hint_of(MIG_RECORD_DAMAGED), MIG_RECORD_DAMAGED) from None

    def to_text(self) -> str:
        """Return the record as the state file has it.

        Instances are stored by the names of their fields. An earlier version, which stored them by position
        in `before` and `created`, finds neither, and changes nothing on the GPU.
        """
        before = None if self.before is None else [instance._asdict() for instance in self.before]
        value = {
            "enabled_before": self.enabled_before,
            "layout_before": before,
            "ours": [instance._asdict() for instance in self.created],
            "compute_mode": self.compute_mode,
            "intent": self.intent._asdict() if self.intent else None,
            "restores": self.restores,
        }
        return json.dumps(value, separators=(",", ":"))

    def owns(self, instance: MigInstance) -> bool:
        """Whether we created it."""
        if self.intent and self.intent.is_for(instance):
            return True
        return any(created.is_same(instance) for created in self.created)


def _instances_in(rows: Iterable[Any]) -> tuple[MigInstance, ...]:
    instances = []
    for row in rows:
        instances.append(MigInstance(**row) if isinstance(row, dict) else MigInstance(*row))
    return tuple(instances)


def _intent_in(value: Any) -> MigIntent | None:
    if value is None:
        return None
    return MigIntent(str(value["profile"]), int(value["start"]), tuple(map(int, value["ids_before"])))
