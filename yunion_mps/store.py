"""What must outlive the daemon, in SQLite: the GPUs' compute modes from before we first touched them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence

from yunion_mps.errors import HostError, ShortageError
from yunion_mps.paths import Paths

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS former_compute_mode (
    gpu_uuid TEXT NOT NULL PRIMARY KEY,
    mode TEXT NOT NULL,
    boot_id TEXT NOT NULL
) WITHOUT ROWID
"""
_DOMAINS = """
CREATE TABLE IF NOT EXISTS domain (
    pipe_directory TEXT NOT NULL PRIMARY KEY
) WITHOUT ROWID
"""
_HINT = "move the file away; a compute mode that was changed is then put back by: nvidia-smi -c DEFAULT"


class Store:
    """The state file. Every write is there for the next daemon however this one ends."""

    def __init__(self, paths: Paths) -> None:
        """Open the file, making it where it is missing; raises HostError when that cannot be done."""
        self._file = paths.store
        try:
            os.makedirs(paths.state_directory, mode=0o700, exist_ok=True)
            # A compute mode ends with the boot, so a write need not survive a power failure, only us.
            self._connection = sqlite3.connect(self._file, isolation_level=None, timeout=5)
            try:
                self._prepare()
                with open(paths.boot_id, encoding="ascii") as file:
                    self._boot_id = file.read().strip()
            except BaseException:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            _refuse_shortage()
            raise HostError(f"the state file {self._file} cannot be used: {error}", _HINT) from None

    @staticmethod
    def exists(paths: Paths) -> bool:
        """Whether there is a state file; opening it is only worth while then, or to write."""
        return os.path.exists(paths.store)

    def remember_modes(self, modes: dict[str, str]) -> None:
        """Note the modes (by GPU UUID) before they are changed; an earlier note of this boot is kept."""
        rows = [(uuid, mode, self._boot_id) for uuid, mode in modes.items()]
        self._write("DELETE FROM former_compute_mode WHERE boot_id != ?", [(self._boot_id,)])
        self._write("INSERT OR IGNORE INTO former_compute_mode VALUES (?, ?, ?)", rows)

    def former_modes(self) -> dict[str, str]:
        """The modes noted since this boot, by GPU UUID."""
        query = "SELECT gpu_uuid, mode FROM former_compute_mode WHERE boot_id = ?"
        return {row[0]: row[1] for row in self._read(query, self._boot_id)}

    def remember_domain(self, pipe_directory: str) -> None:
        """Note where a control daemon of ours is about to be started, so that it is never forgotten."""
        self._write("INSERT OR IGNORE INTO domain VALUES (?)", [(pipe_directory,)])

    def domains(self) -> list[str]:
        """The pipe directories where a control daemon of ours may run."""
        return [row[0] for row in self._read("SELECT pipe_directory FROM domain ORDER BY 1")]

    def forget_domain(self, pipe_directory: str) -> None:
        """Remove the note of a control daemon that has ended."""
        self._write("DELETE FROM domain WHERE pipe_directory = ?", [(pipe_directory,)])

    def forget_mode(self, uuid: str) -> None:
        """Remove the note of a GPU whose mode is what it was."""
        self._write("DELETE FROM former_compute_mode WHERE gpu_uuid = ?", [(uuid,)])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _prepare(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > _SCHEMA_VERSION:
            raise HostError(
                f"{self._file} was written by a newer yunion-mps (format {version})",
                "install that version again, or " + _HINT,
            )
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(_SCHEMA)
        self._connection.execute(_DOMAINS)
        self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def _read(self, query: str, *values: str) -> list[tuple[str, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise HostError(f"the state file {self._file} cannot be read: {error}", _HINT) from None

    def _write(self, statement: str, rows: Sequence[tuple[str, ...]]) -> None:
        try:
            self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            raise HostError(f"the state file {self._file} cannot be written: {error}", _HINT) from None


def _refuse_shortage() -> None:
    """Raise ShortageError where descriptors are short, which SQLite takes for a file that it cannot open."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise ShortageError(f"the state file cannot be opened: {error.strerror}") from None
