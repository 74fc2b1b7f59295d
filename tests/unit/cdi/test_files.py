"""The files that engines read: whole at every moment, and only ours are touched."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.cdi import files

SPECS = st.dictionaries(st.text(max_size=10), st.text(max_size=200), max_size=20)


@given(st.lists(SPECS, min_size=1, max_size=5))
def test_what_was_written_last_is_there_whole_and_nothing_beside_it(
    tmp_path_factory: pytest.TempPathFactory, specs: list[Any]
) -> None:
    directory = tmp_path_factory.mktemp("cdi")
    for spec in specs:
        files.write(str(directory), files.DEVICES, spec)
    assert json.loads((directory / files.DEVICES).read_text()) == specs[-1]
    assert os.listdir(directory) == [files.DEVICES]


def test_who_reads_meanwhile_never_finds_half_a_file(tmp_path: Path) -> None:
    specs = [{"devices": ["x" * 100_000] * number} for number in (1, 9)]
    files.write(str(tmp_path), files.DEVICES, specs[0])
    seen: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(len(json.loads((tmp_path / files.DEVICES).read_text())["devices"]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        files.write(str(tmp_path), files.DEVICES, specs[number % 2])
    is_over.set()
    reader.join()
    assert seen
    assert set(seen) <= {1, 9}


def test_a_directory_that_is_missing_is_made_and_every_user_reads_what_is_in_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write(str(tmp_path / "run/cdi"), files.DEVICES, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/cdi" / files.DEVICES).stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "run/cdi").stat().st_mode) == 0o755
    (tmp_path / "run/cdi").chmod(0o700)
    files.write(str(tmp_path / "run/cdi"), files.DEVICES, {})
    assert stat.S_IMODE((tmp_path / "run/cdi").stat().st_mode) == 0o700, "one that is there is another's"


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    files.write(str(tmp_path), files.DEVICES, {"a": "b"})
    with pytest.raises(TypeError):
        files.write(str(tmp_path), files.DEVICES, {"a": object()})
    assert json.loads((tmp_path / files.DEVICES).read_text()) == {"a": "b"}
    with pytest.raises(OSError, match="File exists"):
        files.write(str(tmp_path / files.DEVICES), files.DEVICES, {})


def test_a_mark_tells_whether_the_file_is_as_it_was_written(tmp_path: Path) -> None:
    written = files.write(str(tmp_path), files.DEVICES, {"a": "b"})
    assert files.mark(str(tmp_path), files.DEVICES) == written
    assert files.write(str(tmp_path), files.DEVICES, {"a": "b"}) != written
    (tmp_path / files.DEVICES).write_text("{")
    assert files.mark(str(tmp_path), files.DEVICES) not in (written, None)
    (tmp_path / files.DEVICES).unlink()
    assert files.mark(str(tmp_path), files.DEVICES) is None


def test_only_our_files_are_ours(tmp_path: Path) -> None:
    mine = [files.DEVICES, files.lease_file("7c1f"), f"{files.DEVICES}.new", f"{files.lease_file('a')}.new"]
    for name in [*mine, "nvidia.yaml", "yunion-mps.json.bak", "other-yunion-mps.json"]:
        (tmp_path / name).write_text("")
    assert sorted(files.ours(str(tmp_path))) == sorted(mine)
    for name in mine:
        files.remove(str(tmp_path), name)
        files.remove(str(tmp_path), name)
    assert sorted(os.listdir(tmp_path)) == ["nvidia.yaml", "other-yunion-mps.json", "yunion-mps.json.bak"]
    assert list(files.ours(str(tmp_path / "nowhere"))) == []
