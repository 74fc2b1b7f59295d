"""The state that outlives the daemon, in SQLite: GPUs' settings, limits in effect, leases and events.

While another process locks the file, no call blocks the event loop: it raises LockedError at once, and the
caller tries again later. Other threads wait, but all calls together for at most `LOCK_WAIT_S` in an outage.

Every write survives however the daemon ends. A damaged file is set aside and created again; settings and
leases are then restored from their copies in the run directory, which suffices because both are only valid
until the next boot.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from yunion_mps.errors import HostError, LockedError, ShortageError
from yunion_mps.host.files import UNFINISHED, write_atomically
from yunion_mps.host.processes import refuse_if_no_file_can_be_opened
from yunion_mps.paths import Paths

#: The settings of GPUs that are recorded before they change.
COMPUTE_MODE, TIME_SLICE = "compute_mode", "time_slice"
#: The column of each setting's table, which is also its key in the copy.
_COLUMNS = {COMPUTE_MODE: "mode", TIME_SLICE: "time_slice"}

_SCHEMA_VERSION = 2
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS former_compute_mode (
    gpu_uuid TEXT NOT NULL PRIMARY KEY,
    mode TEXT NOT NULL,
    boot_id TEXT NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS former_time_slice (
    gpu_uuid TEXT NOT NULL PRIMARY KEY,
    time_slice TEXT NOT NULL,
    boot_id TEXT NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS limits_in_effect (
    pipe_directory TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS mig (
    gpu_uuid TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS lease (
    id TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
)""",
    """CREATE TABLE IF NOT EXISTS memory_peak (
    lease TEXT NOT NULL,
    device TEXT NOT NULL,
    mib INTEGER NOT NULL,
    PRIMARY KEY (lease, device)
) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS queued_request (
    position INTEGER PRIMARY KEY,
    uid INTEGER NOT NULL,
    idempotency_key TEXT NOT NULL,
    since_s REAL NOT NULL,
    boot_id TEXT NOT NULL,
    UNIQUE (uid, idempotency_key)
)""",
    """CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time_s REAL NOT NULL,
    severity TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    what TEXT NOT NULL,
    cause TEXT NOT NULL,
    consequence TEXT NOT NULL,
    code TEXT NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS event_of_kind ON event (kind, severity)",
    """CREATE TABLE IF NOT EXISTS event_repeat (
    event INTEGER PRIMARY KEY,
    count INTEGER NOT NULL,
    last_s REAL NOT NULL
)""",
)
#: How long another process may lock the file before that is an error; in s.
LOCK_WAIT_S = 5.0
#: How often it is tried again until then.
_RETRY_S = 0.05
#: SQLite's page cache; by default it grows to 2 MiB as events are written.
_CACHE_KIB = 256
_HINT = "move the file away; then restore changed compute modes: nvidia-smi -c DEFAULT"
_BUSY, _LOCKED, _READONLY, _FULL = 5, 6, 8, 13
#: Before Python 3.11, an error of sqlite3 has only the text of its result code.
_CODES_OF_TEXTS = {
    "database is locked": _BUSY,
    "database table is locked": _LOCKED,
    "attempt to write a readonly database": _READONLY,
    "database or disk is full": _FULL,
}


class Store:
    """The state file; safe to use from several threads."""

    def __init__(
        self,
        paths: Paths,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the file, and create it if it is missing; raises HostError."""
        self._clock = clock
        self._sleep = sleep
        #: The thread of the event loop, which never waits for the file; None while there is no loop.
        self.loop_thread: int | None = None
        #: Until when another process may lock the file in this outage; None if none does.
        self._lock_deadline_s: float | None = None
        self._lock_seen_s = 0.0
        #: How many calls of this object are in progress, one within the other.
        self._depth = 0
        self._file = paths.store
        self._copy = paths.former_modes
        self._lease_copies = paths.lease_copies
        self._lock = threading.RLock()
        self._is_closed = False
        #: Path under which an unreadable file was set aside; empty if there was none.
        self.set_aside = ""
        try:
            os.makedirs(paths.state_directory, mode=0o700, exist_ok=True)
            with open(paths.boot_id, encoding="ascii") as file:
                self.boot_id = file.read().strip()
            self._connection = self._open_unlocked()
        except (OSError, sqlite3.Error) as error:
            # SQLite reports a shortage of descriptors as a file that cannot be opened.
            refuse_if_no_file_can_be_opened("the state file cannot be opened")
            raise self._error("used", error) from None

    @staticmethod
    def exists(paths: Paths) -> bool:
        """Whether there is a state file, or a copy of the compute modes from which to create one."""
        return os.path.exists(paths.store) or os.path.exists(paths.former_modes)

    def close(self) -> None:
        """Close the file; later reads and writes raise HostError."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    # -- while another process locks the file

    @property
    def lock_error(self) -> LockedError | None:
        """The error if another process keeps the file from being written now; None if none does."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                refusal = self._error("written", error)
                return refusal if isinstance(refusal, LockedError) else None
            self._lock_deadline_s = None
            return None

    async def until_unlocked(self) -> None:
        """Wait while another process locks the file; raises LockedError after the outage's deadline."""
        import asyncio  # loaded by the daemon only once it is ready

        while error := self.lock_error:
            if not error.is_brief:
                raise error
            await asyncio.sleep(_RETRY_S)

    @property
    def _is_brief(self) -> bool:
        return self._lock_deadline_s is not None and self._clock() < self._lock_deadline_s

    def _note_lock(self, error: Exception) -> bool:
        """Whether the error means that another process locks the file; the first one begins an outage."""
        if _result_code(error) not in (_BUSY, _LOCKED):
            return False
        now_s = self._clock()
        is_another = now_s > self._lock_seen_s + LOCK_WAIT_S  # nothing was written since the last outage
        if self._lock_deadline_s is None or is_another:
            self._lock_deadline_s = now_s + LOCK_WAIT_S
        self._lock_seen_s = now_s
        return True

    # -- settings of GPUs

    def remember(self, setting: str, values: Mapping[str, str]) -> None:
        """Record a setting's values (by GPU UUID) before they change; keeps earlier records of this boot."""
        rows = [(uuid, value, self.boot_id) for uuid, value in values.items()]

        def record() -> list[Any]:
            self.write(f"DELETE FROM former_{setting} WHERE boot_id != ?", [(self.boot_id,)])
            self.write(_insert_former(setting), rows)
            self._copy_settings()
            return []

        self._retry_if_locked("written", record)

    def former(self, setting: str) -> dict[str, str]:
        """Return the recorded values of a setting, by GPU UUID."""
        query = f"SELECT gpu_uuid, {_COLUMNS[setting]} FROM former_{setting} WHERE boot_id = ?"
        return {row[0]: row[1] for row in self.read(query, self.boot_id)}

    def trust_copy(self) -> None:
        """Record the copied settings as this boot's, which they always are: a reboot deletes the copy.

        In a container, a sandboxed unit sees a different boot id (measured: systemd-nspawn) than a shell
        does.
        """
        for setting in _COLUMNS:
            if values := self._copied(setting, of_any_boot=True):
                self.remember(setting, values)

    def forget(self, setting: str, uuid: str) -> None:
        def delete() -> list[Any]:
            self.write(f"DELETE FROM former_{setting} WHERE gpu_uuid = ?", [(uuid,)])
            self._copy_settings()
            return []

        self._retry_if_locked("written", delete)

    # -- domains

    def record_limits(self, pipe_directory: str, value: Mapping[str, object]) -> None:
        row = (pipe_directory, json.dumps(value, separators=(",", ":")))
        self.write("INSERT OR REPLACE INTO limits_in_effect (pipe_directory, value) VALUES (?, ?)", [row])

    def recorded_limits(self, pipe_directory: str) -> Any:
        """Return the value recorded last; None if there is none or it cannot be parsed."""
        for row in self.read("SELECT value FROM limits_in_effect WHERE pipe_directory = ?", pipe_directory):
            with contextlib.suppress(ValueError):
                return json.loads(row[0])
        return None

    def recorded_domains(self) -> list[str]:
        return [row[0] for row in self.read("SELECT pipe_directory FROM limits_in_effect ORDER BY 1")]

    def forget_limits(self, pipe_directory: str) -> None:
        self.write("DELETE FROM limits_in_effect WHERE pipe_directory = ?", [(pipe_directory,)])

    # -- MIG

    def record_mig(self, gpu_uuid: str, value: Mapping[str, object]) -> None:
        row = (gpu_uuid, json.dumps(value, separators=(",", ":")))
        self.write("INSERT OR REPLACE INTO mig (gpu_uuid, value) VALUES (?, ?)", [row])

    def recorded_mig(self, gpu_uuid: str) -> Any:
        """Return the value recorded last; None if there is none or it cannot be parsed."""
        for row in self.read("SELECT value FROM mig WHERE gpu_uuid = ?", gpu_uuid):
            with contextlib.suppress(ValueError):
                return json.loads(row[0])
        return None

    def gpus_with_mig(self) -> list[str]:
        """Return the UUIDs of the GPUs with a record."""
        return [row[0] for row in self.read("SELECT gpu_uuid FROM mig")]

    def forget_mig(self, gpu_uuid: str) -> None:
        self.write("DELETE FROM mig WHERE gpu_uuid = ?", [(gpu_uuid,)])

    # -- the file

    def _open_unlocked(self) -> sqlite3.Connection:
        while True:
            try:
                connection = self._open()
            except sqlite3.Error as error:
                if not (self._note_lock(error) and self._is_brief):
                    raise
            else:
                self._lock_deadline_s = None
                return connection
            self._sleep(_RETRY_S)

    def _open(self) -> sqlite3.Connection:
        try:
            if _is_torn(self._file):
                return self._recreate()
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return self._recreate()

    def _connect(self) -> sqlite3.Connection:
        had_log = os.path.exists(f"{self._file}-wal")
        connection = sqlite3.connect(self._file, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > _SCHEMA_VERSION:
                raise HostError(
                    f"{self._file} was written by a newer yunion-mps (format {version})",
                    "install that version again, or " + _HINT,
                )
            connection.execute("PRAGMA journal_mode = WAL")
            # Loses nothing without a power failure, and keeps the file intact with one (SQLite's
            # documentation).
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            for statement in _SCHEMA:
                connection.execute(statement)
            if version == 0:  # new, or truncated to nothing, which looks the same
                self._import_copies(connection)
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")  # marks the file as complete
            if had_log and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("it is damaged")
        except BaseException:
            connection.close()
            raise
        return connection

    def _recreate(self) -> sqlite3.Connection:
        """Set the unreadable file aside, and restore settings and leases from their copies."""
        self.set_aside = f"{self._file}.unreadable"
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._file + end, self.set_aside + end)
        return self._connect()

    def _import_copies(self, connection: sqlite3.Connection) -> None:
        for setting in _COLUMNS:
            rows = [(uuid, value, self.boot_id) for uuid, value in self._copied(setting).items()]
            connection.executemany(_insert_former(setting), rows)
        leases = []
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._lease_copies)):
                path = os.path.join(self._lease_copies, name)
                with contextlib.suppress(OSError, UnicodeError), open(path, encoding="utf-8") as file:
                    leases += [] if name.endswith(UNFINISHED) else [(name, file.read())]
        connection.executemany("INSERT OR IGNORE INTO lease (id, value) VALUES (?, ?)", leases)

    def read(self, query: str, *values: object) -> list[Any]:
        return self._retry_if_locked("read", lambda: self._connection.execute(query, values).fetchall())

    def write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Run the statement for all rows or none; raises HostError."""
        self._retry_if_locked("written", lambda: self._write_all(statement, rows))

    def _write_all(self, statement: str, rows: Sequence[tuple[object, ...]]) -> list[Any]:
        if len(rows) == 1:
            self._connection.execute(statement, rows[0])
            return []
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(statement, rows)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return []

    def _retry_if_locked(self, what: str, work: Callable[[], list[Any]]) -> list[Any]:
        """Do the work, and wait for other processes' locks, except on the event loop's thread.

        While it waits, other threads can use this object: the event loop is not blocked by them.
        """
        while True:
            with self._lock:
                is_within_another = self._depth > 0
                self._depth += 1
                try:
                    return self._retry_if_damaged(what, work)
                except LockedError as error:
                    is_on_loop = threading.get_ident() == self.loop_thread
                    if is_within_another or is_on_loop or not error.is_brief:
                        raise
                finally:
                    self._depth -= 1
            self._sleep(_RETRY_S)

    def _retry_if_damaged(self, what: str, work: Callable[[], list[Any]]) -> list[Any]:
        with self._lock:
            try:
                try:
                    rows = work()
                except sqlite3.DatabaseError as error:
                    if self._is_closed or not _is_damage(error):
                        raise
                    self._connection.close()  # it was damaged while in use
                    self._connection = self._recreate()
                    rows = work()
            except MemoryError:
                raise ShortageError(f"the state file cannot be {what}: out of memory") from None
            except (OSError, sqlite3.Error) as error:
                raise self._error(what, error) from None
            if what == "written":  # most locks let others read
                self._lock_deadline_s = None
            return rows

    def _error(self, what: str, error: Exception) -> HostError:
        code = _result_code(error)
        hint = "free disk space: df" if code == _FULL else _HINT
        message = f"the state file {self._file} cannot be {what}: {error}"
        if self._note_lock(error):
            hint = f"end the other process that has locked it, and keep the file: lslocks | grep {self._file}"
            return LockedError(message, hint, is_brief=self._is_brief)
        directory = os.path.dirname(self._file)
        is_read_only = os.path.isdir(directory) and not os.access(directory, os.W_OK)
        if is_read_only or code == _READONLY or getattr(error, "errno", None) == errno.EROFS:
            hint = f"make it writable for root: findmnt -T {directory}; ls -l {self._file}"
        return HostError(message, hint)

    def _copy_settings(self) -> None:
        """Update the copy in the run directory; a failure is ignored."""
        copy = {f"{column}s": self.former(setting) for setting, column in _COLUMNS.items()}
        with contextlib.suppress(OSError):
            if not any(copy.values()):
                os.unlink(self._copy)
                return
            write_atomically(self._copy, json.dumps({"boot_id": self.boot_id, **copy}))

    def _copied(self, setting: str, *, of_any_boot: bool = False) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError), open(self._copy) as file:
            copy = json.load(file)
            if of_any_boot or copy["boot_id"] == self.boot_id:
                return {str(uuid): str(value) for uuid, value in copy[f"{_COLUMNS[setting]}s"].items()}
        return {}


def _insert_former(setting: str) -> str:
    """The statement that records a setting; it names the columns, because a newer version may have more."""
    columns = f"gpu_uuid, {_COLUMNS[setting]}, boot_id"
    return f"INSERT OR IGNORE INTO former_{setting} ({columns}) VALUES (?, ?, ?)"


def _result_code(error: Exception) -> int:
    """SQLite's primary result code (https://www.sqlite.org/rescode.html); 0 if it is unknown."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return _CODES_OF_TEXTS.get(str(error), 0) if code is None else code & 0xFF


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is damaged or not SQLite's; subclasses of the error have other meanings."""
    return type(error) is sqlite3.DatabaseError


def _is_torn(path: str) -> bool:
    """Whether the file is shorter than its header says, which SQLite does not always notice.

    https://www.sqlite.org/fileformat.html: the page size is at byte 16 (1 for 65536), the number of pages at
    byte 28. With a non-empty log (`-wal`), the missing pages may be in there, and SQLite's own check decides.
    """
    try:
        if os.path.exists(f"{path}-wal") and os.path.getsize(f"{path}-wal"):
            return False
        with open(path, "rb") as file:
            header = file.read(100)
            length = os.fstat(file.fileno()).st_size
    except OSError:  # SQLite reports it with more detail
        return False
    if len(header) < 100:
        return len(header) > 0
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    return length < pages * (65536 if page == 1 else page)
