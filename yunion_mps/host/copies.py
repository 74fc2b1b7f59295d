"""Copies of records of the state file, in the run directory.

They have what says what is ours, and what was there before us. A reboot deletes them, like most of what they
are about, so they are valid until then, whatever becomes of the state file. Each has the revision of the
records that it was made of, so the newer one of the two is known.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps.host.files import UNFINISHED, write_atomically

#: What is copied together: the GPUs' original settings, MIG records and limits in effect; and the leases.
SETTINGS = "settings"
LEASES = "leases"
#: The table of the leases, and its rows: the text of each lease by its id.
LEASE_TABLE = "lease"

#: Recorded texts by their key, of each table.
Tables = Mapping[str, Mapping[str, str]]


class Revision(NamedTuple):
    """A state of the records."""

    boot_id: str
    #: How many records had been changed; every change of a record adds one.
    number: int

    def is_newer_than(self, other: Revision) -> bool:
        """Return whether it is a later revision of the same boot; other boots' are never newer."""
        return self.boot_id == other.boot_id and self.number > other.number


class Copy(NamedTuple):
    revision: Revision
    tables: Tables


class SettingsCopy:
    """One file with all records of its tables; a write raises OSError."""

    name = SETTINGS

    def __init__(self, file: str) -> None:
        self._file = file

    def read(self) -> Copy | None:
        """Return the copy; None if there is none or it cannot be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            value = _load(self._file)
            tables = {}
            for table, rows in value["tables"].items():
                tables[str(table)] = {str(key): str(text) for key, text in rows.items()}
            return Copy(_revision_in(value), tables)
        return None

    def exists(self) -> bool:
        return os.path.exists(self._file)

    def is_expected(self) -> bool:
        """Return True, because a copy is written when the state file is opened."""
        return True

    def write(self, copy: Copy) -> None:
        value = {**copy.revision._asdict(), "tables": copy.tables}
        write_atomically(self._file, json.dumps(value))


class LeaseCopies:
    """One file for each lease, and one with their revision, because there may be thousands of leases.

    The revision is written last, and only if the copies are complete. A write raises OSError.
    """

    name = LEASES

    def __init__(self, directory: str, revision_file: str) -> None:
        self._directory = directory
        self._file = revision_file
        #: The ids of the leases that are copied; None if copies may be missing.
        self._copied: set[str] | None = None

    def read(self) -> Copy | None:
        """Return the copies; None if they are or may be incomplete."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            value = _load(self._file)
            texts = self.texts()
            if len(texts) == value["count"]:
                self._copied = set(texts)
                return Copy(_revision_in(value), {LEASE_TABLE: texts})
        return None

    def exists(self) -> bool:
        return os.path.exists(self._file)

    def is_expected(self) -> bool:
        """Return whether copies should be there, because their revision is."""
        return self.exists()

    def texts(self) -> dict[str, str]:
        """Return the texts of the copies that can be read, by the id of the lease."""
        texts = {}
        for name in self._names():
            path = os.path.join(self._directory, name)
            with contextlib.suppress(OSError, UnicodeError), open(path, encoding="utf-8") as file:
                texts[name] = file.read()
        return texts

    def write(self, copy: Copy) -> None:
        leases = copy.tables[LEASE_TABLE]
        self._copied = None
        self._delete(set(self._names()) - leases.keys())
        for lease_id, text in leases.items():
            self._write(lease_id, text)
        self._write_revision(copy.revision, set(leases))

    def change(self, written: Mapping[str, str], deleted: Iterable[str], revision: Revision) -> bool:
        """Copy leases, and delete copies; return False if others are missing, so all have to be written."""
        if self._copied is None:
            return False
        copied = self._copied
        self._copied = None  # until all is written
        for lease_id, text in written.items():
            self._write(lease_id, text)
        self._delete(deleted)
        self._write_revision(revision, (copied | written.keys()).difference(deleted))
        return True

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self._directory) if not name.endswith(UNFINISHED))
        return []

    def _write(self, lease_id: str, text: str) -> None:
        if os.path.basename(lease_id) != lease_id:
            raise OSError(errno.EINVAL, "the id of a lease is no file name", lease_id)  # a damaged one
        write_atomically(os.path.join(self._directory, lease_id), text, directory_mode=0o700)

    def _delete(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory, lease_id))

    def _write_revision(self, revision: Revision, copied: set[str]) -> None:
        write_atomically(self._file, json.dumps({**revision._asdict(), "count": len(copied)}))
        self._copied = copied


def _load(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _revision_in(value: Any) -> Revision:
    return Revision(str(value["boot_id"]), int(value["number"]))
