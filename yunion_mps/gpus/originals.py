"""Originals: what each GPU had before our first change, and which of its MIG instances are ours.

They are written before the change and deleted after the restoration, in the state file and its copies. No
other module reads or writes these records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.gpus.mig_record import MigRecord
from yunion_mps.host.store import FORMER_COMPUTE_MODES, FORMER_SETTINGS, FORMER_TIME_SLICES, MIG, Store

#: The kinds of settings that have tables of their own, which earlier versions read, too.
_TABLES = {"compute_mode": FORMER_COMPUTE_MODES, "time_slice": FORMER_TIME_SLICES}


class UnknownOriginal(NamedTuple):
    """The original value of a setting that this version does not know."""

    kind: str
    gpu_uuid: str
    value: str


class Originals:
    """The originals in a state file; safe to use from several threads.

    Every method raises HostError if the file cannot be used.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- settings that have one value

    def of(self, kind: str) -> dict[str, str]:
        """Return the original values of a kind of setting, by GPU UUID."""
        if kind in _TABLES:
            return self._store.records(_TABLES[kind])
        values = {}
        for key, value in self._store.records(FORMER_SETTINGS).items():
            recorded_kind, _, uuid = key.partition("/")
            if recorded_kind == kind:
                values[uuid] = value
        return values

    def of_other_kinds(self, kinds: Collection[str]) -> list[UnknownOriginal]:
        """Return what is recorded of kinds other than these, by a later version."""
        unknown = []
        for key, value in sorted(self._store.records(FORMER_SETTINGS).items()):
            kind, _, uuid = key.partition("/")
            if kind not in kinds:
                unknown.append(UnknownOriginal(kind, uuid, value))
        return unknown

    def remember(self, kind: str, values: Mapping[str, str]) -> None:
        """Record the values (by GPU UUID) that a setting has before it changes; keeps earlier records."""
        if kind in _TABLES:
            self._store.record(_TABLES[kind], values, keeps_first=True)
            return
        by_key = {f"{kind}/{uuid}": value for uuid, value in values.items()}
        self._store.record(FORMER_SETTINGS, by_key, keeps_first=True)

    def forget(self, kind: str, uuid: str) -> None:
        """Delete a record, because the GPU has its original value again."""
        if kind in _TABLES:
            self._store.forget(_TABLES[kind], uuid)
        else:
            self._store.forget(FORMER_SETTINGS, f"{kind}/{uuid}")

    # -- MIG layouts

    def layout(self, uuid: str) -> MigRecord:
        """Return the record of the GPU's layout; an empty one, which owns no instance, if there is none.

        Raises HostError, too, if the record cannot be read: then it is unknown what is ours, and what was
        there before.
        """
        text = self._store.records(MIG).get(uuid)
        return MigRecord() if text is None else MigRecord.from_text(text)

    def write_layout(self, uuid: str, record: MigRecord) -> None:
        """Record the GPU's layout before a step that changes it."""
        self._store.record(MIG, {uuid: record.to_text()})

    def forget_layout(self, uuid: str) -> None:
        """Delete the record, because the GPU has its original layout again, and no instance is ours."""
        self._store.forget(MIG, uuid)

    def unreadable_layouts(self) -> dict[str, HostError]:
        """Return the errors of the records that cannot be read, by GPU UUID."""
        errors = {}
        for uuid, text in self._store.records(MIG).items():
            try:
                MigRecord.from_text(text)
            except HostError as error:
                errors[uuid] = error
        return errors

    def changed_layouts(self) -> set[str]:
        """Return the GPUs (UUIDs) whose original layout is recorded, or whose record cannot be read."""
        changed = set()
        for uuid, text in self._store.records(MIG).items():
            try:
                if MigRecord.from_text(text).before is not None:
                    changed.add(uuid)
            except HostError:
                changed.add(uuid)
        return changed

    def layouts_to_restore(self) -> set[str]:
        """Return the GPUs (UUIDs) whose last layout said that the original one is to be restored."""
        uuids = set()
        for uuid, text in self._store.records(MIG).items():
            with contextlib.suppress(HostError):
                record = MigRecord.from_text(text)
                if record.restores and record.before is not None:
                    uuids.add(uuid)
        return uuids

    def gpus(self) -> set[str]:
        """Return the GPUs (UUIDs) of which anything is recorded."""
        uuids = {key.partition("/")[2] for key in self._store.records(FORMER_SETTINGS)}
        for table in (*_TABLES.values(), MIG):
            uuids.update(self._store.records(table))
        return uuids
