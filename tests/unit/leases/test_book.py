"""Leases in the state file: what one daemon wrote, the next one knows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from yunion_mps.leases.book import Book
from yunion_mps.models import Holder
from yunion_mps.paths import Paths
from yunion_mps.store import Store

from unit.leases.shares import device, lease


def test_leases_are_there_for_the_next_daemon(tmp_path: Path) -> None:
    first = lease("a", device(0, 0), device(0, 1))._replace(environment={"CUDA_VISIBLE_DEVICES": "GPU-0"})
    second = lease("b", device(1, 0))._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))
    with closing(Store(Paths(str(tmp_path)))) as store:
        book = Book(store)
        book.write(first)
        book.write(second)
        book.write(lease("c", device(1, 1)))
        book.strike("c")
    with closing(Store(Paths(str(tmp_path)))) as store:
        assert Book(store).read() == [first, second]


def test_what_nobody_can_understand_is_passed_over(tmp_path: Path) -> None:
    with closing(Store(Paths(str(tmp_path)))) as store:
        Book(store).write(lease("a", device(0, 0)))
        for value in ("", "{}", '{"id":"x","devices":[{"other":1}],"holder":{},"since_s":1}', "[1]"):
            store.write("INSERT INTO lease VALUES (?, ?)", [(f"bad {value}", value)])
        assert [one.id for one in Book(store).read()] == ["a"]
