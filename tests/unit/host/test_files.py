"""Files that are written in one step."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest
from yunion_mps.host.files import UNFINISHED, open_regular, read_text, version_of, write_atomically


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "directory" / "file"


def test_a_file_is_written_whole_with_its_directory_and_mode(file: Path) -> None:
    umask = os.umask(0o077)
    try:
        version = write_atomically(str(file), "é", directory_mode=0o700)
    finally:
        os.umask(umask)
    assert file.read_bytes() == "é".encode()
    assert version == version_of(str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_link_or_pipe_in_the_place_of_the_new_file_is_replaced(file: Path) -> None:
    file.parent.mkdir()
    theirs = file.with_name("theirs")
    theirs.write_text("theirs")
    new = file.with_name(file.name + UNFINISHED)
    for is_link in (True, False):
        os.symlink(theirs, new) if is_link else os.mkfifo(new)
        write_atomically(str(file), "ours")
        assert (file.read_text(), theirs.read_text()) == ("ours", "theirs")
        assert sorted(os.listdir(file.parent)) == ["file", "theirs"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_text(str(tmp_path / "pipe")) == ""
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(str(tmp_path / "pipe"))
    assert read_text("/proc/self/comm"), "files of the kernel are regular"


def test_a_short_text_is_read_without_memory_for_a_long_one(tmp_path: Path) -> None:
    """Otherwise a shortage of memory would end the daemon at its next look into sysfs."""
    (tmp_path / "class").write_text("0x030200\n")
    tracemalloc.start()
    try:
        assert read_text(str(tmp_path / "class")) == "0x030200\n"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_only_the_beginning_of_a_long_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a" * 20_000 + "b" * 20_000)
    assert read_text(str(tmp_path / "log"), 20_001) == "a" * 20_000 + "b"


def test_a_failed_write_leaves_the_old_file_and_nothing_new(file: Path) -> None:
    file.mkdir(parents=True)  # nothing can take its place
    with pytest.raises(OSError, match="Is a directory"):
        write_atomically(str(file), b"ours")
    assert os.listdir(file.parent) == ["file"]


def test_a_path_below_a_directorys_descriptor_is_written_there(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        write_atomically("file", "ours", dir_fd=directory)
    finally:
        os.close(directory)
    assert (tmp_path / "file").read_text() == "ours"
