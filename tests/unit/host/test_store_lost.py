"""A state file that is lost, damaged or older than it was: what is ours, and was before us, stays known."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import MIG, Store

OTHER_BOOT = "00000000-0000-0000-0000-000000000000"
ENDS = ("", "-wal", "-shm")


class Known(NamedTuple):
    """Everything in the state file that says what is ours, or was before us."""

    modes: Mapping[str, str]
    slices: Mapping[str, str]
    mig: Mapping[str, str]
    limits: Mapping[str, object]
    leases: Mapping[str, str]


def known_to(store: Store) -> Known:
    return Known(
        modes=Originals(store).of("compute_mode"),
        slices=Originals(store).of("time_slice"),
        mig=store.records(MIG),
        limits={directory: store.recorded_limits(directory) for directory in store.recorded_domains()},
        leases=dict(store.read("SELECT id, value FROM lease")),
    )


#: What a daemon has recorded at first, and what it has changed since then.
FIRST = Known({"GPU-1": "Default"}, {"GPU-2": "long"}, {"GPU-1": '{"a":1}'}, {"/pipe": [1]}, {"a": "{}"})
LAST = Known({"GPU-3": "Prohibited"}, {}, {"GPU-1": '{"a":2}', "GPU-4": "{}"}, {"/new": [2]}, {"b": "[]"})


def record_first(store: Store) -> None:
    Originals(store).remember("compute_mode", FIRST.modes)
    Originals(store).remember("time_slice", FIRST.slices)
    store.record(MIG, FIRST.mig)
    store.record_limits("/pipe", [1])  # type: ignore[arg-type]
    store.record_lease("a", "{}")


def record_last(store: Store) -> None:
    Originals(store).forget("compute_mode", "GPU-1")
    Originals(store).remember("compute_mode", LAST.modes)
    Originals(store).forget("time_slice", "GPU-2")
    store.record(MIG, LAST.mig)
    store.forget_limits("/pipe")
    store.record_limits("/new", [2])  # type: ignore[arg-type]
    store.read("PRAGMA wal_checkpoint(TRUNCATE)")  # the log has only what follows
    store.record_lease("b", "[]")
    store.forget_leases(["a"])


Files = Mapping[str, bytes]


def files(paths: Paths) -> Files:
    """The files as they are, also while they are in use."""
    return {end: Path(paths.store + end).read_bytes() for end in ENDS if os.path.exists(paths.store + end)}


def put(paths: Paths, content: Files) -> None:
    for end in ENDS:
        Path(paths.store + end).unlink(missing_ok=True)
    for end, data in content.items():
        Path(paths.store + end).write_bytes(data)


class Killed(NamedTuple):
    """The files of a daemon that was killed, at first and at last."""

    paths: Paths
    first: Files
    last: Files


@pytest.fixture
def killed(paths: Paths) -> Killed:
    with closing(Store(paths)) as store:
        record_first(store)
        store.read("PRAGMA wal_checkpoint(TRUNCATE)")
        first = files(paths)
        record_last(store)
        assert known_to(store) == LAST
        last = files(paths)
    put(paths, last)
    return Killed(paths, first, last)


def checkpointed(killed: Killed) -> None:
    """Write the log into the file, as SQLite does when the last connection is closed."""
    with closing(sqlite3.connect(killed.paths.store)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _remove(killed: Killed) -> None:
    put(killed.paths, {})


def _remove_without_log(killed: Killed) -> None:
    os.unlink(killed.paths.store)


def _remove_directory(killed: Killed) -> None:
    shutil.rmtree(killed.paths.state_directory)


def _truncate(killed: Killed) -> None:
    put(killed.paths, {"": b""})


def _halve(killed: Killed) -> None:
    checkpointed(killed)
    os.truncate(killed.paths.store, os.stat(killed.paths.store).st_size // 2)


def _zero(killed: Killed) -> None:
    checkpointed(killed)
    put(killed.paths, {"": bytes(os.stat(killed.paths.store).st_size)})


def _zero_all_but_the_header(killed: Killed) -> None:
    checkpointed(killed)
    whole = Path(killed.paths.store).read_bytes()
    put(killed.paths, {"": whole[:4096] + bytes(len(whole) - 4096)})


def _roll_back(killed: Killed) -> None:
    put(killed.paths, killed.first)


def _roll_back_without_log(killed: Killed) -> None:
    """The newer log stays: SQLite applies it to the older file, and the result is a mixture."""
    put(killed.paths, {**killed.last, "": killed.first[""]})


def _edit_a_row(killed: Killed) -> None:
    """As a disk that returns wrong bytes: the revision is the same."""
    checkpointed(killed)
    whole = Path(killed.paths.store).read_bytes()
    assert b'{"a":2}' in whole
    put(killed.paths, {"": whole.replace(b'{"a":2}', b'{"a"#2}')})


def _spoil_text(killed: Killed) -> None:
    """Bytes that are no text."""
    checkpointed(killed)
    whole = Path(killed.paths.store).read_bytes()
    put(killed.paths, {"": whole.replace(b'{"a":2}', b'\xff\xfe\xff\xfe"2}').replace(b"/new", b"/n\xffw")})


WAYS: list[Callable[[Killed], None]] = [
    _remove, _remove_without_log, _remove_directory, _truncate, _halve, _zero, _zero_all_but_the_header,
    _roll_back, _roll_back_without_log, _edit_a_row, _spoil_text,
]  # fmt: skip


@pytest.mark.parametrize("lose", WAYS, ids=[way.__name__.strip("_") for way in WAYS])
def test_what_is_ours_is_known_after_the_file_is(
    killed: Killed, lose: Callable[[Killed], None], caplog: pytest.LogCaptureFixture
) -> None:
    lose(killed)
    caplog.clear()
    with closing(Store(killed.paths)) as store:
        assert known_to(store) == LAST
        (rebuilt,) = store.rebuilt
        assert rebuilt.has_copies
        assert rebuilt.what in caplog.text
    with closing(Store(killed.paths)) as store:
        assert (known_to(store), store.rebuilt) == (LAST, []), "the file itself has it again"


def test_a_file_in_order_is_not_written_when_it_is_opened(killed: Killed) -> None:
    """On a full disk, a daemon has to start as ever."""
    with closing(Store(killed.paths)) as store:
        assert (known_to(store), store.rebuilt) == (LAST, [])
        written = files(killed.paths)
    assert (written[""], written["-wal"]) == (killed.last[""], killed.last["-wal"])


@pytest.mark.parametrize("file", ["settings_copy", "lease_revision"])
def test_a_file_that_is_newer_than_its_copy_is_used(paths: Paths, file: str) -> None:
    """As after a kill between both writes, or if the run directory was full."""
    with closing(Store(paths)) as store:
        record_first(store)
        copy = Path(getattr(paths, file)).read_bytes()
        record_last(store)
    Path(getattr(paths, file)).write_bytes(copy)
    with closing(Store(paths)) as store:
        assert (known_to(store), store.rebuilt) == (LAST, [])
    _remove(Killed(paths, {}, {}))
    with closing(Store(paths)) as store:
        assert known_to(store) == LAST, "it was copied again"


def test_copies_that_are_damaged_themselves_are_not_used(killed: Killed) -> None:
    paths = killed.paths
    for file in (paths.settings_copy, paths.lease_revision):
        Path(file).write_text(Path(file).read_text()[:-5])
    with closing(Store(paths)) as store:
        assert (known_to(store), store.rebuilt) == (LAST, [])
    _remove(killed)
    with closing(Store(paths)) as store:
        assert known_to(store) == LAST, "they were written again"


def test_copies_of_leases_that_were_removed_end_no_lease(killed: Killed) -> None:
    shutil.rmtree(killed.paths.lease_copies)
    with closing(Store(killed.paths)) as store:
        assert known_to(store) == LAST


def test_what_an_earlier_version_writes_is_newer_than_the_copy(killed: Killed) -> None:
    """It makes no copy of MIG records; triggers in the file count its changes."""
    with closing(sqlite3.connect(killed.paths.store)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO mig VALUES ('GPU-1', '{}')")
        connection.execute("DELETE FROM lease")
    with closing(Store(killed.paths)) as store:
        assert (known_to(store).mig["GPU-1"], known_to(store).leases) == ("{}", {})
        assert store.rebuilt == []


def test_copies_of_an_earlier_version_restore_a_lost_file(killed: Killed) -> None:
    paths = killed.paths
    os.unlink(paths.settings_copy)
    os.unlink(paths.lease_revision)
    _remove(killed)
    with closing(Store(paths)) as store:
        known = known_to(store)
        assert (known.modes, known.leases) == (LAST.modes, LAST.leases)
        assert store.rebuilt[0].what == "the state file was missing"


def test_a_new_host_has_nothing_to_rebuild(paths: Paths) -> None:
    with closing(Store(paths)) as store:
        assert (store.rebuilt, store.has_lost_records) == ([], False)


@pytest.fixture
def rebooted(killed: Killed) -> Paths:
    """The host after a boot: the run directory is empty, and the records name another boot."""
    with closing(sqlite3.connect(killed.paths.store)) as connection, connection:
        connection.execute("UPDATE revision SET boot_id = ?", (OTHER_BOOT,))
        connection.execute("UPDATE former_compute_mode SET boot_id = ?", (OTHER_BOOT,))
    shutil.rmtree(killed.paths.run_directory)
    return killed.paths


def test_the_first_start_after_a_boot_copies_what_is_still_valid(rebooted: Paths) -> None:
    after = LAST._replace(modes={})
    with closing(Store(rebooted)) as store:
        assert (known_to(store), store.rebuilt) == (after, [])
    put(rebooted, {})
    with closing(Store(rebooted)) as store:
        assert known_to(store) == after


def test_records_that_were_lost_with_a_damaged_file_are_reported(
    rebooted: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    put(rebooted, {"": b"no database" * 1000})
    with closing(Store(rebooted)) as store:
        assert store.has_lost_records
        assert "there are no copies of its records" in caplog.text


def test_an_older_file_of_another_boot_is_not_newer_than_a_copy(killed: Killed) -> None:
    """A backup of the time before the boot may have been changed more often."""
    with closing(sqlite3.connect(killed.paths.store)) as connection, connection:
        connection.execute("UPDATE revision SET boot_id = ?, number = 1000000", (OTHER_BOOT,))
        connection.execute("DELETE FROM mig")
    with closing(Store(killed.paths)) as store:
        assert known_to(store) == LAST
        assert "(mig)" in store.rebuilt[0].what


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_file_that_goes_while_it_is_used_is_written_again(paths: Paths, way: str) -> None:
    with closing(Store(paths)) as store:
        record_first(store)
        store.read("PRAGMA wal_checkpoint(TRUNCATE)")
        content = files(paths)[""]
        record_last(store)
        put(paths, {"": content} if way == "replaced" else {})
        store.record(MIG, {"GPU-5": "{}"})
        assert known_to(store) == LAST._replace(mig={**LAST.mig, "GPU-5": "{}"})
        assert len(store.rebuilt) == 1
    with closing(Store(paths)) as store:
        assert known_to(store).mig["GPU-5"] == "{}"


def test_a_shell_of_a_container_leaves_the_copies_of_the_daemon(killed: Killed) -> None:
    """It may see another boot id than the daemon, which finds its own copies again."""
    paths = killed.paths
    copy = Path(paths.settings_copy)
    before = json.loads(copy.read_text())
    copy.write_text(json.dumps({**before, "boot_id": OTHER_BOOT}))
    _remove(killed)
    with closing(Store(paths)) as shell:
        shell.forget_limits("/nosuch")
        assert json.loads(copy.read_text())["tables"] == before["tables"]
        shell.trust_copy()
        assert known_to(shell)._replace(leases={}) == LAST._replace(leases={})
