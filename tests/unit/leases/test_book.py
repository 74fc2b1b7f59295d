"""Leases in the state file: what one daemon wrote, the next one knows."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.host.store import Store
from yunion_mps.leases.book import Book
from yunion_mps.models import Holder
from yunion_mps.paths import Paths

from unit.leases.shares import device, lease


def test_leases_are_there_for_the_next_daemon(tmp_path: Path) -> None:
    first = lease("a", device(0, 0), device(0, 1))._replace(environment={"CUDA_VISIBLE_DEVICES": "GPU-0"})
    second = lease("b", device(1, 0))._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))
    with closing(Store(Paths(str(tmp_path)))) as store:
        book = Book(store, str(tmp_path / "copies"))
        book.write(first)
        book.write(second)
        book.write(lease("c", device(1, 1)))
        book.strike("c")
    with closing(Store(Paths(str(tmp_path)))) as store:
        assert Book(store, str(tmp_path / "copies")).read() == [first, second]


def test_what_nobody_can_understand_is_passed_over(tmp_path: Path) -> None:
    with closing(Store(Paths(str(tmp_path)))) as store:
        book = Book(store, str(tmp_path / "copies"))
        book.write(lease("a", device(0, 0)))
        for value in ("", "{}", '{"id":"x","devices":[{"other":1}],"holder":{},"since_s":1}', "[1]"):
            store.write("INSERT INTO lease VALUES (?, ?)", [(f"bad {value}", value)])
        assert [one.id for one in book.read()] == ["a"]


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        ("holder", "binding", []),
        ("holder", "uid", None),
        ("holder", "pid", "4260"),
        ("holder", "started", {}),
        ("holder", "ttl_s", None),
        ("holder", "unit", None),
        ("device", "addr", 7),
        ("device", "gpu_uuid", []),
        ("device", "memory_limit_mib", "4G"),
        ("device", "reserve_mib", None),
        ("lease", "since_s", "now"),
        ("lease", "environment", {"A": 1}),
        ("lease", "devices", []),
        ("lease", "ends_s", "soon"),
    ],
)
def test_what_is_of_another_kind_is_passed_over(tmp_path: Path, of: str, name: str, value: object) -> None:
    """Each of these would have ended the daemon at its start, and the next one."""
    with closing(Store(Paths(str(tmp_path)))) as store:
        book = Book(store, str(tmp_path / "copies"))
        book.write(lease("a", device(0, 0)))
        book.write(lease("b", device(0, 1)))
        ((text,),) = store.read("SELECT value FROM lease WHERE id = 'b'")
        row = json.loads(text)
        {"lease": row, "holder": row["holder"], "device": row["devices"][0]}[of][name] = value
        store.write("UPDATE lease SET value = ? WHERE id = 'b'", [(json.dumps(row),)])
        assert [one.id for one in book.read()] == ["a"]


def test_a_copy_that_is_no_text_is_passed_over(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    with closing(Store(paths)) as store:
        Book(store, paths.lease_copies).write(lease("a", device(0, 0)))
    Path(paths.lease_copies, "b").write_bytes(b"\xff\xfe")
    Path(paths.store).write_bytes(b"torn" * 1024)
    with closing(Store(paths)) as store:
        assert [one.id for one in Book(store, paths.lease_copies).read()] == ["a"]


def test_a_damaged_file_that_is_begun_anew_has_the_leases_of_which_there_is_a_copy(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    kept = [lease("a", device(0, 0)), lease("b", device(0, 1))]
    with closing(Store(paths)) as store:
        book = Book(store, paths.lease_copies)
        for one in (*kept, lease("c", device(0, 2))):
            book.write(one)
        book.strike("c")
    Path(paths.store).write_bytes(b"torn" * 1024)
    with closing(Store(paths)) as store:
        assert Book(store, paths.lease_copies).read() == kept
    with closing(Store(paths)) as store:
        assert Book(store, "/nosuch").read() == kept, "they are in the file again"


def test_a_lease_is_kept_also_where_no_copy_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with closing(Store(Paths(str(tmp_path)))) as store:
        book = Book(store, str(tmp_path / "file"))
        book.write(lease("a", device(0, 0)))
        assert book.read() == [lease("a", device(0, 0))]
        book.strike("a")
        assert book.read() == []


def test_of_another_boot_only_leases_of_names_are_known(tmp_path: Path) -> None:
    """A process of the same number may have started at the same tick: some machines boot alike."""
    paths = Paths(str(tmp_path))
    named = lease("b", device(0, 1))._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))
    with closing(Store(paths)) as store:
        book = Book(store, paths.lease_copies)
        book.write(lease("a", device(0, 0)))
        book.write(named)
        store.write("UPDATE lease SET value = replace(value, ?, 'another')", [(store.boot_id,)])
        assert book.read() == [named]
