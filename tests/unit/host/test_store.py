from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError, LockedError
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import LOCK_WAIT_S, Store

from descriptors import open_descriptors

HINT = "move the file away; then restore changed compute modes: nvidia-smi -c DEFAULT"
OTHER_BOOT = "00000000-0000-0000-0000-000000000000"

#: A statement for as much as fits into the file.
EVENT = "INSERT INTO event VALUES (NULL, 1.0, 'info', 'domain', 'host', ?, '', '', '')"

OpenStore = Callable[[], Store]

#: A daemon that notes a mode and is killed at once.
CRASH = """
import os, signal, sys
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
Originals(Store(Paths(sys.argv[1]))).remember("compute_mode", {"GPU-1": "Default", "GPU-2": "Prohibited"})
os.kill(os.getpid(), signal.SIGKILL)
"""

#: What is wrong with opening it, and what to do; as a user, if there is one.
OPEN = """
import os, sys
if len(sys.argv) > 2:
    os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths
from yunion_mps.host.store import Store
try:
    Store(Paths(sys.argv[1]))
except HostError as error:
    print(error.message, error.hint, sep="\\n")
"""


@pytest.fixture
def store(paths: Paths) -> Iterator[OpenStore]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Store(paths)))


def note(store: OpenStore, **modes: str) -> None:
    """A daemon that notes the modes and ends; without any, that of one GPU."""
    opened = store()
    Originals(opened).remember("compute_mode", modes or {"GPU-1": "Default"})
    opened.close()


def error_of(paths: Paths) -> HostError:
    with pytest.raises(HostError) as caught:
        Store(paths)
    assert not any(file.startswith(paths.root) for file in open_descriptors().values())
    return caught.value


def read_modes(paths: Paths) -> dict[str, str]:
    with closing(Store(paths)) as opened:
        return Originals(opened).of("compute_mode")


def test_a_missing_file_is_made_in_a_directory_of_root_s_own(paths: Paths, store: OpenStore) -> None:
    assert not Store.exists(paths)
    assert Originals(store()).of("compute_mode") == {}
    assert Store.exists(paths)
    assert os.stat(paths.state_directory).st_mode & 0o777 == 0o700


def test_modes_survive_a_killed_daemon(paths: Paths, store: OpenStore) -> None:
    killed = subprocess.run([sys.executable, "-c", CRASH, paths.root], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Originals(store()).of("compute_mode") == {"GPU-1": "Default", "GPU-2": "Prohibited"}


def test_the_mode_from_before_our_first_change_is_kept(store: OpenStore) -> None:
    opened = store()
    Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    Originals(opened).remember("compute_mode", {"GPU-1": "Exclusive_Process", "GPU-2": "Prohibited"})
    assert Originals(opened).of("compute_mode") == {"GPU-1": "Default", "GPU-2": "Prohibited"}


def test_a_mode_that_was_restored_is_forgotten_and_can_be_noted_again(store: OpenStore) -> None:
    opened = store()
    Originals(opened).remember("compute_mode", {"GPU-1": "Default", "GPU-2": "Default"})
    Originals(opened).forget("compute_mode", "GPU-1")
    Originals(opened).forget("compute_mode", "GPU-9")
    assert Originals(opened).of("compute_mode") == {"GPU-2": "Default"}
    Originals(opened).remember("compute_mode", {"GPU-1": "Prohibited"})
    assert Originals(opened).of("compute_mode") == {"GPU-1": "Prohibited", "GPU-2": "Default"}


def rows(paths: Paths) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(paths.store)) as connection:
        return connection.execute("SELECT gpu_uuid, mode FROM former_compute_mode ORDER BY 1").fetchall()


def test_modes_of_another_boot_are_ignored_and_deleted_by_the_next_write(
    paths: Paths, store: OpenStore
) -> None:
    opened = store()
    with closing(sqlite3.connect(paths.store)) as connection, connection:
        rows_of_old = [("GPU-1", "Prohibited", OTHER_BOOT), ("GPU-2", "Prohibited", OTHER_BOOT)]
        connection.executemany("INSERT INTO former_compute_mode VALUES (?, ?, ?)", rows_of_old)
    assert Originals(opened).of("compute_mode") == {}
    Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    assert Originals(opened).of("compute_mode") == {"GPU-1": "Default"}
    assert rows(paths) == [("GPU-1", "Default")]


def test_a_newer_format_is_left_alone_and_reported(paths: Paths, store: OpenStore) -> None:
    note(store)
    with closing(sqlite3.connect(paths.store)) as connection:
        connection.execute("PRAGMA user_version = 3")
    error = error_of(paths)
    assert error.message == f"{paths.store} was written by a newer yunion-mps (format 3)"
    assert error.hint == f"install that version again, or {HINT}"
    assert rows(paths) == [("GPU-1", "Default")]


@pytest.mark.parametrize("content", [b"no database at all, but some text" * 99, b"\0" * 4096])
def test_a_file_that_is_not_a_database_is_set_aside_with_modes_copied(
    paths: Paths, store: OpenStore, content: bytes
) -> None:
    note(store)
    Path(paths.store).write_bytes(content)
    opened = store()
    set_aside = f"{paths.store}.unreadable"
    assert set_aside in opened.rebuilt[0].what
    assert Path(set_aside).read_bytes() == content
    assert Originals(opened).of("compute_mode") == {"GPU-1": "Default"}


def test_no_torn_file_loses_a_mode(paths: Paths, store: OpenStore) -> None:
    noted = {f"GPU-{number}": "Default" for number in range(100)}
    note(store, **noted)
    whole = Path(paths.store).read_bytes()
    for length in range(0, len(whole), 1024):
        Path(paths.store).write_bytes(whole[:length])
        assert read_modes(paths) == noted, length


def test_a_file_that_is_damaged_while_in_use_is_replaced(paths: Paths, store: OpenStore) -> None:
    opened = store()
    Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    opened.write(EVENT, [("one",)])
    with closing(sqlite3.connect(paths.store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(paths.store, "r+b") as file:
        file.seek(0)
        file.write(b"\xff" * os.stat(paths.store).st_size)
    Originals(opened).remember("compute_mode", {"GPU-2": "Prohibited"})
    assert Originals(opened).of("compute_mode") == {"GPU-1": "Default", "GPU-2": "Prohibited"}
    assert f"{paths.store}.unreadable" in opened.rebuilt[0].what


def test_no_kill_during_a_checkpoint_makes_a_healthy_file_look_torn(paths: Paths, store: OpenStore) -> None:
    """A checkpoint writes the first page, which has the file's length, before the pages at its end."""
    opened = store()
    opened.write(EVENT, [("one of many",)] * 500)
    log = Path(f"{paths.store}-wal").read_bytes()
    with closing(sqlite3.connect(paths.store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    opened.close()
    os.truncate(paths.store, 4096)
    Path(f"{paths.store}-wal").write_bytes(log)
    again = store()
    assert (again.rebuilt, again.read("SELECT count(*) FROM event")) == ([], [(500,)])


def test_a_closed_store_refuses_writes_without_damage(paths: Paths, store: OpenStore) -> None:
    opened = store()
    Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    opened.close()
    with pytest.raises(HostError, match="closed database"):
        opened.write(EVENT, [("one",)])
    assert opened.rebuilt == []
    assert read_modes(paths) == {"GPU-1": "Default"}


def test_a_copy_of_another_boot_does_not_count(paths: Paths, store: OpenStore) -> None:
    note(store)
    for copy in (Path(paths.former_modes), Path(paths.settings_copy)):
        copy.write_text(copy.read_text().replace(Path(paths.boot_id).read_text().strip(), OTHER_BOOT))
    Path(paths.store).write_bytes(b"torn" * 1024)
    assert read_modes(paths) == {}


def test_limits_in_effect_survive_for_the_next_daemon(paths: Paths, store: OpenStore) -> None:
    opened = store()
    assert opened.recorded_limits("/pipe") is None
    opened.record_limits("/pipe", {"plan": [1, None, "x"]})
    opened.close()
    again = store()
    assert (again.recorded_domains(), again.recorded_limits("/pipe")) == (["/pipe"], {"plan": [1, None, "x"]})
    again.forget_limits("/pipe")
    assert (again.recorded_domains(), again.recorded_limits("/pipe")) == ([], None)


def test_rows_are_written_all_or_none(store: OpenStore) -> None:
    opened = store()
    with pytest.raises(HostError, match="NOT NULL"):
        opened.write(EVENT, [("right",), (None,)])
    assert opened.rebuilt == []
    assert opened.read("SELECT * FROM event") == []


def test_a_directory_in_place_of_the_file_is_set_aside(paths: Paths) -> None:
    os.makedirs(paths.store)
    (rebuilt,) = Store(paths).rebuilt
    assert rebuilt.what == f"the state file could not be read and was set aside as {paths.store}.unreadable"
    assert rebuilt.cause == "it was a directory"
    assert os.path.isfile(paths.store)


def test_a_file_that_is_gone_with_its_copies_is_no_first_start(paths: Paths) -> None:
    """The copy of the events shows that a daemon has run since the boot."""
    os.makedirs(os.path.dirname(paths.events_copy))
    Path(paths.events_copy).write_text("")
    store = Store(paths)
    assert [one.what for one in store.rebuilt] == ["the state file was missing"]
    assert store.has_lost_records


def test_a_text_that_is_no_utf_8_keeps_no_other_row_from_being_read(paths: Paths) -> None:
    store = Store(paths)
    store.record_lease("a", "{}")
    with closing(sqlite3.connect(paths.store)) as connection, connection:
        connection.execute("UPDATE lease SET value = CAST(x'7bff7d' AS TEXT)")
    store.record_lease("b", "{}")
    assert store.read("SELECT id, value FROM lease ORDER BY id") == [("a", "{\ufffd}"), ("b", "{}")]


def test_a_file_in_place_of_the_directory_is_named(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var/lib").write_text("")
    assert error_of(paths).message == (
        f"the state file {paths.store} cannot be used: [Errno 20] Not a directory: '{paths.state_directory}'"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_directory_that_may_not_be_written_is_named(
    tmp_path_factory: pytest.TempPathFactory, mode: int
) -> None:
    root = tmp_path_factory.mktemp("root")
    for folder in (root, *list(root.parents)[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    state = root / "var/lib/yunion-mps"
    state.mkdir(parents=True)
    state.chmod(mode)
    command = [sys.executable, "-c", OPEN, str(root), "65534"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    expected = f"the state file {state}/state.db cannot be used: unable to open database file"
    assert done.stdout.splitlines()[0] == expected


def test_a_file_that_can_no_longer_be_written_is_an_error(paths: Paths, store: OpenStore) -> None:
    opened = store()
    with closing(sqlite3.connect(paths.store)) as connection:
        connection.execute("DROP TABLE former_compute_mode")
    with pytest.raises(HostError) as caught:
        Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    expected = f"the state file {paths.store} cannot be written: no such table: former_compute_mode"
    assert (caught.value.message, caught.value.hint) == (expected, HINT)
    with pytest.raises(HostError, match="cannot be read: no such table"):
        Originals(opened).of("compute_mode")


def test_a_locked_file_is_kept_and_the_hint_is_to_end_its_lock(paths: Paths, store: OpenStore) -> None:
    opened = store()
    refusal = pytest.raises(LockedError, match="cannot be written: database is locked")
    with opened.without_waiting(), locked(paths), refusal as caught:
        Originals(opened).remember("compute_mode", {"GPU-1": "Default"})
    hint = "end the other process that has locked it, and keep the file"
    assert caught.value.hint == f"{hint}: lslocks | grep {paths.store}"


@contextmanager
def locked(paths: Paths) -> Iterator[sqlite3.Connection]:
    """Another process that locks the state file, as an open transaction of sqlite3 does."""
    with closing(sqlite3.connect(paths.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


class Clock:
    """A clock that only sleeping advances; `then` is called after each time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.then: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.then()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(paths: Paths, clock: Clock) -> Iterator[Store]:
    with closing(Store(paths, clock, clock.sleep)) as opened:
        yield opened


def write_event(opened: Store) -> None:
    opened.write(EVENT, [("one",)])


def test_sqlite_itself_waits_for_no_lock(store: OpenStore) -> None:
    assert store().read("PRAGMA busy_timeout") == [(0,)]


def test_the_event_loop_never_waits_for_a_lock(paths: Paths, timed: Store, clock: Clock) -> None:
    with timed.without_waiting(), locked(paths):
        for _ in range(3):
            with pytest.raises(LockedError) as caught:
                write_event(timed)
            assert caught.value.is_brief
        clock.now_s += LOCK_WAIT_S
        with pytest.raises(LockedError) as caught:
            write_event(timed)
        assert not caught.value.is_brief
    assert clock.now_s == LOCK_WAIT_S, "no call has slept"
    write_event(timed)


def test_all_calls_in_an_outage_wait_for_one_deadline(paths: Paths, timed: Store, clock: Clock) -> None:
    for outage in (1, 2):
        with locked(paths):
            for _ in range(10):
                with pytest.raises(LockedError):
                    write_event(timed)
                assert Originals(timed).of("compute_mode") == {}, "which can be read"
            assert clock.now_s == pytest.approx(outage * LOCK_WAIT_S, rel=0.1)
        if outage == 1:
            write_event(timed)
        clock.now_s += 100 * (outage - 1)
    with timed.without_waiting(), locked(paths):
        with pytest.raises(LockedError) as caught:
            write_event(timed)
        assert caught.value.is_brief, "another outage, although nothing was written between"


def test_a_short_lock_delays_a_thread_and_fails_nothing(paths: Paths, timed: Store, clock: Clock) -> None:
    with locked(paths) as other:
        clock.then = lambda: other.execute("ROLLBACK") if other.in_transaction else None
        Originals(timed).remember("compute_mode", {"GPU-1": "Default"})
    assert Originals(timed).of("compute_mode") == {"GPU-1": "Default"}


def test_a_thread_that_waits_for_a_lock_blocks_no_other(paths: Paths, timed: Store, clock: Clock) -> None:
    """Otherwise the event loop would wait for that thread."""
    read: list[object] = []

    def read_meanwhile() -> None:
        thread = threading.Thread(
            target=lambda: read.append(Originals(timed).of("compute_mode")), daemon=True
        )
        thread.start()
        thread.join(60)

    clock.then = read_meanwhile
    with locked(paths), pytest.raises(LockedError):
        Originals(timed).remember("compute_mode", {"GPU-1": "Default"})
    assert read[:2] == [{}, {}]


def test_a_file_that_is_locked_for_long_cannot_be_opened(paths: Paths, clock: Clock) -> None:
    Store(paths).close()
    with closing(sqlite3.connect(paths.store, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LockedError, match="cannot be used: database is locked"):
            Store(paths, clock, clock.sleep)
        assert clock.now_s == pytest.approx(LOCK_WAIT_S, rel=0.1)
        clock.then = other.close
        Store(paths, clock, clock.sleep).close()


def test_a_coroutine_waits_for_a_lock_until_the_deadline(paths: Paths, timed: Store, clock: Clock) -> None:
    async def wait() -> None:
        with locked(paths) as other:
            asyncio.get_running_loop().call_soon(other.execute, "ROLLBACK")
            await timed.until_unlocked()
        with locked(paths):
            asyncio.get_running_loop().call_soon(clock.sleep, LOCK_WAIT_S)
            with pytest.raises(LockedError):
                await timed.until_unlocked()

    asyncio.run(wait())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_read_only_state_file_is_not_moved_away(paths: Paths, store: OpenStore) -> None:
    """As on a file system that was remounted, read-only, after an error of its disk."""
    store().close()
    steps = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@" "$0"'
    command = ["unshare", "--mount", "sh", "-c", steps, paths.root, sys.executable, "-c", OPEN]
    message, hint = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert message == f"the state file {paths.store} cannot be used: unable to open database file"
    assert hint.startswith(f"make it writable for root: findmnt -T {paths.state_directory}; ls -l ")
