"""The state that outlives the daemon, in SQLite: GPUs' settings, limits in effect, leases and events.

While another process locks the file, no call blocks the event loop: it raises LockedError at once, and the
caller tries again later. Other threads wait, but all calls together for at most `LOCK_WAIT_S` in an outage.

Every write survives however the daemon ends. What says what is ours, or was there before us, has a copy in
the run directory (`copies`). If the file is lost or damaged, or is an older version of itself, these records
are taken from the copy, and `rebuilt` says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from yunion_mps.core.errors import HostError, LockedError, ShortageError
from yunion_mps.core.paths import Paths
from yunion_mps.host.copies import LEASE_TABLE, LEASES, SETTINGS, Copy, LeaseCopies, Revision, SettingsCopy
from yunion_mps.host.files import write_atomically
from yunion_mps.host.processes import refuse_if_no_file_can_be_opened

log = logging.getLogger(__name__)

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
    """CREATE TABLE IF NOT EXISTS former_setting (
    setting TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL,
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


class Table(NamedTuple):
    """A table that says what is ours or was there before us: a text for each key, copied with others."""

    name: str
    key: str
    value: str
    copied_with: str
    #: Whether a row is valid only in the boot that it names.
    has_boot_id: bool = False


#: What GPUs had before our first change, by UUID: the compute mode, and the time slice.
FORMER_COMPUTE_MODES = Table("former_compute_mode", "gpu_uuid", "mode", SETTINGS, has_boot_id=True)
FORMER_TIME_SLICES = Table("former_time_slice", "gpu_uuid", "time_slice", SETTINGS, has_boot_id=True)
#: The same of all other settings, which earlier versions do not have; by the setting's name and the UUID.
FORMER_SETTINGS = Table("former_setting", "setting", "value", SETTINGS, has_boot_id=True)
#: MIG layouts, by GPU UUID, and the limits of control daemons, by pipe directory; as JSON.
MIG = Table("mig", "gpu_uuid", "value", SETTINGS)
LIMITS = Table("limits_in_effect", "pipe_directory", "value", SETTINGS)
_LEASE = Table(LEASE_TABLE, "id", "value", LEASES)
_COPIED = (FORMER_COMPUTE_MODES, FORMER_TIME_SLICES, FORMER_SETTINGS, MIG, LIMITS, _LEASE)
#: What the file for scripts and earlier versions has, by its members.
_FORMER = {"modes": FORMER_COMPUTE_MODES, "time_slices": FORMER_TIME_SLICES, "settings": FORMER_SETTINGS}


def _triggers(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the statements by which SQLite counts the changes, so that those of an earlier version count."""
    for table in tables:
        for change in ("INSERT", "UPDATE", "DELETE"):
            name = f"count_{change}_of_{table.name}"
            count = f"UPDATE revision SET number = number + 1 WHERE part = '{table.copied_with}'"
            yield (f"CREATE TRIGGER IF NOT EXISTS {name} AFTER {change} ON {table.name} BEGIN {count}; END")


#: Counters of the changes to the records of each part that has copies.
_REVISIONS = (
    """CREATE TABLE IF NOT EXISTS revision (
    part TEXT NOT NULL PRIMARY KEY,
    boot_id TEXT NOT NULL,
    number INTEGER NOT NULL
) WITHOUT ROWID""",
    f"INSERT OR IGNORE INTO revision (part, boot_id, number) VALUES ('{SETTINGS}', '', 0)",
    f"INSERT OR IGNORE INTO revision (part, boot_id, number) VALUES ('{LEASES}', '', 0)",
    *_triggers(_COPIED),
)
#: SQLite's page cache; by default it grows to 2 MiB as events are written.
_CACHE_KIB = 256
_HINT = "move the file away; then restore changed compute modes: nvidia-smi -c DEFAULT"
#: The identity of no file, not even of a missing one.
_NO_FILE = (-1, -1)
#: SQLite's primary result codes (https://www.sqlite.org/rescode.html).
_BUSY = 5
_LOCKED = 6
_READONLY = 8
_FULL = 13
#: Before Python 3.11, an error of sqlite3 has only the text of its result code.
_CODES_OF_TEXTS = {
    "database is locked": _BUSY,
    "database table is locked": _LOCKED,
    "attempt to write a readonly database": _READONLY,
    "database or disk is full": _FULL,
}


class Rebuilt(NamedTuple):
    """That the file, or records in it, had to be replaced by their copies."""

    #: What was wrong, such as `the state file was missing`, and why it may have been.
    what: str
    cause: str
    #: Whether there were copies of this boot; otherwise, what the file had recorded is lost.
    has_copies: bool


class _Copied(NamedTuple):
    """What became of the copies when the file was opened: the tables whose records differed."""

    exists: bool
    #: Whether nothing that is in the file can be missing from a new one.
    is_complete: bool
    differs: tuple[str, ...]


_REMOVED = "another program removed it, or its disk lost it"
_REPLACED = "another program replaced it, for example by a backup"


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
        #: The thread that never waits for the file; None if every thread does.
        self._impatient_thread: int | None = None
        #: Until when another process may lock the file in this outage; None if none does.
        self._lock_deadline_s: float | None = None
        self._lock_seen_s = 0.0
        #: How many calls of this object are in progress, one within the other.
        self._depth = 0
        self._file = paths.store
        self._former_modes = paths.former_modes
        #: It shows that a daemon has run since the boot.
        self._events_copy = paths.events_copy
        self._settings = SettingsCopy(paths.settings_copy)
        self._leases = LeaseCopies(paths.lease_copies, paths.lease_revision)
        self._lock = threading.RLock()
        self._is_closed = False
        #: Each time that the file or its records were replaced by copies.
        self.rebuilt: list[Rebuilt] = []
        self._identity: tuple[int, int] | None = _NO_FILE
        try:
            with open(paths.boot_id, encoding="ascii") as file:
                self.boot_id = file.read().strip()
            self._connection = self._open_unlocked()
        except (OSError, sqlite3.Error) as error:
            # SQLite reports a shortage of descriptors as a file that cannot be opened.
            refuse_if_no_file_can_be_opened("the state file cannot be opened")
            raise self._error("used", error) from None

    @staticmethod
    def exists(paths: Paths) -> bool:
        """Whether there is a state file, or a copy from which to create one."""
        copies = (paths.former_modes, paths.settings_copy, paths.lease_revision)
        return any(os.path.exists(path) for path in (paths.store, *copies))

    @property
    def has_lost_records(self) -> bool:
        """Whether the file was damaged, and there were no copies of what it had recorded."""
        return any(not rebuilt.has_copies for rebuilt in self.rebuilt)

    def close(self) -> None:
        """Close the file; later reads and writes raise HostError."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    # -- while another process locks the file

    def check_lock(self) -> LockedError | None:
        """Try to lock the file; return the error if another process keeps it from being written now."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                refusal = self._error("written", error)
                return refusal if isinstance(refusal, LockedError) else None
            self._lock_deadline_s = None
            return None

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Let no call on this thread, which is that of the event loop, wait for the file in the block."""
        self._impatient_thread = threading.get_ident()
        try:
            yield
        finally:
            self._impatient_thread = None

    @property
    def may_wait(self) -> bool:
        """Whether calls on this thread wait while another process locks the file."""
        return threading.get_ident() != self._impatient_thread

    async def until_unlocked(self) -> None:
        """Wait while another process locks the file; raises LockedError after the outage's deadline."""
        import asyncio  # loaded by the daemon only once it is ready

        while error := self.check_lock():
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

    # -- what is ours, or was there before us

    def records(self, table: Table) -> dict[str, str]:
        """Return the recorded texts by their key; of this boot, if a record is valid only in its boot."""
        query = f"SELECT {table.key}, {table.value} FROM {table.name}"
        if table.has_boot_id:
            return dict(self.read(f"{query} WHERE boot_id = ?", (self.boot_id,)))
        return dict(self.read(f"{query} ORDER BY 1"))

    def record(self, table: Table, texts: Mapping[str, str], *, keeps_first: bool = False) -> None:
        """Record texts by their key; with `keeps_first`, those that are recorded already stay as they are."""
        rows = [self._row(table, key, text) for key, text in texts.items()]

        def write() -> list[Any]:
            if table.has_boot_id:
                self.write(f"DELETE FROM {table.name} WHERE boot_id != ?", [(self.boot_id,)])
            self.write(_insert(table, "IGNORE" if keeps_first else "REPLACE"), rows)
            self._copy_records(table)
            return []

        self._retry_if_locked("written", write)

    def forget(self, table: Table, key: str) -> None:
        """Delete the record with this key, if there is one."""

        def delete() -> list[Any]:
            self.write(f"DELETE FROM {table.name} WHERE {table.key} = ?", [(key,)])
            self._copy_records(table)
            return []

        self._retry_if_locked("written", delete)

    def trust_copy(self) -> None:
        """Record what is copied as this boot's, which it always is: a reboot deletes the copies.

        In a container, a sandboxed unit sees a different boot id (measured: systemd-nspawn) than a shell
        does.
        """

        def record() -> list[Any]:
            for part in (self._settings, self._leases):
                copy = part.read()
                if copy and not self._revision(part.name).is_newer_than(copy.revision):
                    self._replace(self._connection, part.name, copy)
            for member, table in _FORMER.items():
                if values := self._copied(member, of_any_boot=True):
                    self.record(table, values, keeps_first=True)
            return []

        self._retry_if_locked("written", record)

    def _row(self, table: Table, key: str, text: str) -> tuple[str, ...]:
        return (key, text, self.boot_id) if table.has_boot_id else (key, text)

    # -- domains

    def record_limits(self, pipe_directory: str, value: Mapping[str, object]) -> None:
        self.record(LIMITS, {pipe_directory: json.dumps(value, separators=(",", ":"))})

    def recorded_limits(self, pipe_directory: str) -> Any:
        """Return the value recorded last; None if there is none or it cannot be parsed."""
        text = self.records(LIMITS).get(pipe_directory)
        if text is None:
            return None
        try:
            return json.loads(text)
        except ValueError:
            log.error("the record of the limits in effect in %s cannot be read", pipe_directory)
            return None

    def recorded_domains(self) -> list[str]:
        return list(self.records(LIMITS))

    def forget_limits(self, pipe_directory: str) -> None:
        self.forget(LIMITS, pipe_directory)

    # -- leases

    def record_lease(self, lease_id: str, text: str) -> None:
        def record() -> list[Any]:
            self.write("INSERT OR REPLACE INTO lease (id, value) VALUES (?, ?)", [(lease_id, text)])
            self._copy_leases({lease_id: text}, ())
            return []

        self._retry_if_locked("written", record)

    def forget_leases(self, lease_ids: Sequence[str]) -> None:
        def delete() -> list[Any]:
            self.write("DELETE FROM lease WHERE id = ?", [(lease_id,) for lease_id in lease_ids])
            self._copy_leases({}, lease_ids)
            return []

        self._retry_if_locked("written", delete)

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
        os.makedirs(os.path.dirname(self._file), mode=0o700, exist_ok=True)
        try:
            if os.path.isdir(self._file):
                return self._recreate("it was a directory")
            if _is_torn(self._file):
                return self._recreate("it is shorter than its header says")
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return self._recreate(str(error))

    def _connect(self, set_aside: str = "", cause: str = "") -> sqlite3.Connection:
        """Open the file, and replace records of which there is a newer copy.

        `set_aside` is the path of a damaged file in whose place this one is created, and `cause` says what
        was wrong with it.
        """
        had_log = os.path.exists(f"{self._file}-wal")
        was_there = os.path.exists(self._file)
        connection = sqlite3.connect(self._file, isolation_level=None, timeout=0, check_same_thread=False)
        connection.text_factory = _decode
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
            for statement in (*_SCHEMA, *_REVISIONS):
                connection.execute(statement)
            if had_log and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("it is damaged")
            is_new = version == 0  # or truncated to nothing, which looks the same
            copied = self._use_copies(connection, is_new=is_new)
            if version != _SCHEMA_VERSION:
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")  # marks the file as complete
        except BaseException:
            connection.close()
            raise
        if set_aside:
            problem = f"the state file could not be read and was set aside as {set_aside}"
            self._note_rebuilt(Rebuilt(problem, cause, copied.is_complete))
        elif is_new and (copied.exists or os.path.exists(self._events_copy)):
            problem = f"the state file was {'empty' if was_there else 'missing'}"
            self._note_rebuilt(Rebuilt(problem, _REMOVED, copied.exists and copied.is_complete))
        elif copied.differs:
            problem = f"records in the state file differed from their copies ({', '.join(copied.differs)})"
            self._note_rebuilt(Rebuilt(problem, _REPLACED, copied.is_complete))
        self._identity = _identity_of(self._file)
        return connection

    def _recreate(self, cause: str) -> sqlite3.Connection:
        """Set the unreadable file aside, and create another one from the copies."""
        set_aside = f"{self._file}.unreadable"
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._file + end, set_aside + end)
        return self._connect(set_aside, cause)

    def _note_rebuilt(self, rebuilt: Rebuilt) -> None:
        self.rebuilt.append(rebuilt)
        means = "it is rebuilt from copies" if rebuilt.has_copies else "there are no copies of its records"
        log.error("%s (%s); %s", rebuilt.what, rebuilt.cause, means)

    # -- the copies

    def _use_copies(self, connection: sqlite3.Connection, *, is_new: bool) -> _Copied:
        """Replace records by their copies, unless the file's are newer; then write copies that are missing.

        If the file `is_new`, copies of leases that may be incomplete, or are an earlier version's, are used,
        too.
        """
        exists, is_complete = False, True
        differs: list[str] = []
        for part in (self._settings, self._leases):
            copy = part.read()
            exists = exists or part.exists()
            if copy and copy.revision.boot_id != self.boot_id:
                continue  # in a container, a shell sees another boot id than the daemon: see trust_copy()
            if copy and not _revision_in(connection, part.name).is_newer_than(copy.revision):
                differs += self._replace(connection, part.name, copy)
                continue
            if is_new:
                is_imported = self._import_uncounted(connection, part.name)
                exists = exists or is_imported
                is_complete = is_complete and (is_imported or not part.is_expected())
            self._begin_boot(connection, part)
        return _Copied(exists, is_complete, tuple(differs))

    def _replace(self, connection: sqlite3.Connection, part: str, copy: Copy) -> list[str]:
        """Replace the records of a part by those of its copy; return the tables that differed."""
        after = Revision(self.boot_id, copy.revision.number)
        # An earlier version's copy does not have the tables that it does not know.
        tables = [table for table in _COPIED if table.copied_with == part and table.name in copy.tables]
        differs = [table for table in tables if not self._is_as_copied(connection, table, copy)]
        if not differs and _revision_in(connection, part) == after:
            return []  # a full disk, to which nothing can be written, does not matter then
        connection.execute("BEGIN IMMEDIATE")
        try:
            for table in differs:
                rows = [self._row(table, key, text) for key, text in copy.tables[table.name].items()]
                connection.execute(f"DELETE FROM {table.name}")
                connection.executemany(_insert(table, "REPLACE"), rows)
            connection.execute("UPDATE revision SET boot_id = ?, number = ? WHERE part = ?", (*after, part))
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return [table.name for table in differs]

    def _is_as_copied(self, connection: sqlite3.Connection, table: Table, copy: Copy) -> bool:
        return _rows_in(connection, table, self.boot_id) == copy.tables[table.name]

    def _import_uncounted(self, connection: sqlite3.Connection, part: str) -> bool:
        """Add records of copies that have no revision, or may be incomplete; return whether there were any.

        Such are those of an earlier version.
        """
        if part == LEASES:
            texts = self._leases.texts()
            connection.executemany(_insert(_LEASE, "IGNORE"), list(texts.items()))
            return bool(texts)
        has_any = False
        for member, table in _FORMER.items():
            values = self._copied(member)
            has_any = has_any or bool(values)
            rows = [self._row(table, key, value) for key, value in values.items()]
            connection.executemany(_insert(table, "IGNORE"), rows)
        return has_any

    def _begin_boot(self, connection: sqlite3.Connection, part: SettingsCopy | LeaseCopies) -> None:
        """Count changes of this boot from now on, and copy the records that there are."""
        statement = "UPDATE revision SET boot_id = ? WHERE part = ? AND boot_id != ?"
        connection.execute(statement, (self.boot_id, part.name, self.boot_id))
        with contextlib.suppress(OSError):
            part.write(_copy_of(connection, part.name))

    def _copy_records(self, changed: Table) -> None:
        """Copy the settings, of which one table has changed."""
        self._copy_settings()
        if changed.has_boot_id:
            self._copy_former_modes()

    def _copy_settings(self) -> None:
        """Copy the settings; if that fails, the file's are newer than the copy from now on."""
        with contextlib.suppress(OSError, sqlite3.Error):
            if self._revision(SETTINGS).boot_id:
                self._settings.write(_copy_of(self._connection, SETTINGS))

    def _copy_leases(self, written: Mapping[str, str], deleted: Iterable[str]) -> None:
        """Copy what has changed; if that fails, the file's are newer than the copies from now on."""
        with contextlib.suppress(OSError, sqlite3.Error):
            revision = self._revision(LEASES)
            if revision.boot_id and not self._leases.change(written, deleted, revision):
                self._leases.write(_copy_of(self._connection, LEASES))

    def _revision(self, part: str) -> Revision:
        return _revision_in(self._connection, part)

    # -- reads and writes

    def read(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
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

    def _retry_if_locked(self, access: str, work: Callable[[], list[Any]]) -> list[Any]:
        """Do the work, and wait for other processes' locks, except on the event loop's thread.

        While it waits, other threads can use this object: the event loop is not blocked by them.
        """
        while True:
            with self._lock:
                is_within_another = self._depth > 0
                self._depth += 1
                try:
                    return self._retry_if_damaged(access, work)
                except LockedError as error:
                    if is_within_another or not self.may_wait or not error.is_brief:
                        raise
                finally:
                    self._depth -= 1
            self._sleep(_RETRY_S)

    def _retry_if_damaged(self, access: str, work: Callable[[], list[Any]]) -> list[Any]:
        with self._lock:
            try:
                try:
                    self._open_again_if_removed()
                    rows = work()
                except sqlite3.DatabaseError as error:
                    if self._is_closed or not _is_damage(error):
                        raise
                    self._connection.close()  # it was damaged while in use
                    self._connection = self._recreate(str(error))
                    rows = work()
            except MemoryError:
                raise ShortageError(f"the state file cannot be {access}: out of memory") from None
            except (OSError, sqlite3.Error) as error:
                raise self._error(access, error) from None
            if access == "written":  # most locks let others read
                self._lock_deadline_s = None
            return rows

    def _open_again_if_removed(self) -> None:
        """Use the file at our path if ours is no longer there: what we write would be lost with us."""
        if not self._is_closed and _identity_of(self._file) != self._identity:
            self._connection.close()
            self._identity = _NO_FILE
            self._connection = self._open()

    def _error(self, access: str, error: Exception) -> HostError:
        code = _result_code(error)
        hint = "free disk space: df" if code == _FULL else _HINT
        message = f"the state file {self._file} cannot be {access}: {error}"
        if self._note_lock(error):
            hint = f"end the other process that has locked it, and keep the file: lslocks | grep {self._file}"
            return LockedError(message, hint, is_brief=self._is_brief)
        directory = os.path.dirname(self._file)
        is_read_only = os.path.isdir(directory) and not os.access(directory, os.W_OK)
        if is_read_only or code == _READONLY or getattr(error, "errno", None) == errno.EROFS:
            hint = f"make it writable for root: findmnt -T {directory}; ls -l {self._file}"
        return HostError(message, hint)

    def _copy_former_modes(self) -> None:
        """Update the file that scripts of the packages, and earlier versions, read; a failure is ignored."""
        copy = {member: self.records(table) for member, table in _FORMER.items()}
        with contextlib.suppress(OSError):
            if not any(copy.values()):
                os.unlink(self._former_modes)
                return
            write_atomically(self._former_modes, json.dumps({"boot_id": self.boot_id, **copy}))

    def _copied(self, member: str, *, of_any_boot: bool = False) -> dict[str, str]:
        with (
            contextlib.suppress(OSError, ValueError, KeyError, AttributeError),
            open(self._former_modes) as file,
        ):
            copy = json.load(file)
            if of_any_boot or copy["boot_id"] == self.boot_id:
                return {str(uuid): str(value) for uuid, value in copy[member].items()}
        return {}


def _insert(table: Table, otherwise: str) -> str:
    """Return the statement that inserts a row, and does what `otherwise` says if the key is recorded already.

    It names the columns, because a newer version may have more.
    """
    columns, marks = f"{table.key}, {table.value}", "?, ?"
    if table.has_boot_id:
        columns, marks = f"{columns}, boot_id", f"{marks}, ?"
    return f"INSERT OR {otherwise} INTO {table.name} ({columns}) VALUES ({marks})"


def _decode(text: bytes) -> str:
    """Decode the text of a row; damaged bytes must not keep the other rows from being read."""
    return text.decode(errors="replace")


def _revision_in(connection: sqlite3.Connection, part: str) -> Revision:
    query = "SELECT boot_id, number FROM revision WHERE part = ?"
    return Revision(*connection.execute(query, (part,)).fetchone())


def _rows_in(connection: sqlite3.Connection, table: Table, boot_id: str) -> dict[str, str]:
    """Return the texts by key; bytes of a damaged file that are no text differ from every copy."""
    query = f"SELECT CAST({table.key} AS BLOB), CAST({table.value} AS BLOB) FROM {table.name}"
    values: tuple[str, ...] = ()
    if table.has_boot_id:
        query, values = f"{query} WHERE boot_id = ?", (boot_id,)
    rows = connection.execute(query, values).fetchall()
    return {key.decode(errors="replace"): text.decode(errors="replace") for key, text in rows}


def _copy_of(connection: sqlite3.Connection, part: str) -> Copy:
    """Return what to copy; the revision is read first, so another process' change makes the file newer."""
    revision = _revision_in(connection, part)
    tables = {}
    for table in _COPIED:
        if table.copied_with == part:
            tables[table.name] = _rows_in(connection, table, revision.boot_id)
    return Copy(revision, tables)


def _identity_of(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if it is missing."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


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
