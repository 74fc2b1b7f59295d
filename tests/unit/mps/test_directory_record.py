"""What is recorded of the directories that are used, for a purge."""

from __future__ import annotations

import grp
import os
import re
import subprocess
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.mps.directories import set_access, use
from yunion_mps.mps.directory_record import DirectoryRecord
from yunion_mps.mps.obstacles import FILES

PURGE = Path(__file__).resolve().parents[3] / "packaging/scriptlets/purge.sh"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "state/directories"


@pytest.fixture
def mps(tmp_path: Path) -> Path:
    return tmp_path / "mps"


def make(path: Path, record: Path) -> None:
    with use(str(path), DirectoryRecord(str(record))):
        pass


def test_created_directories_and_their_parents_are_recorded_once(record: Path, mps: Path) -> None:
    make(mps / "pipe", record)
    make(mps / "pipe", record)
    make(mps / "log", record)
    assert record.read_text().splitlines() == [f"above {mps}", f"made {mps}/pipe", f"made {mps}/log"]
    assert record.stat().st_mode & 0o777 == 0o600


def test_existing_files_are_recorded_as_foreign(record: Path, mps: Path) -> None:
    mps.mkdir()
    (mps / "server.log").write_text("of a neighbour")
    (mps / "else").write_text("")
    make(mps, record)
    (mps / "control.log").write_text("ours")
    make(mps, record)
    assert record.read_text().splitlines() == [f"theirs {mps}/server.log", f"used {mps}"]


def test_refused_or_uncreated_directories_are_not_recorded(record: Path, mps: Path) -> None:
    mps.mkdir()
    (mps / "log").mkdir()
    (mps / "log").chmod(0o777)
    (mps / "gone").mkdir()
    for path in (mps / "log", Path("/proc/nothing")):
        with pytest.raises(HostError):
            make(path, record)
    assert not record.exists() or record.read_text() == ""


def test_a_recorded_parent_that_is_used_itself_gets_another_record(record: Path, mps: Path) -> None:
    make(mps / "pipe", record)
    make(mps, record)
    assert record.read_text().splitlines() == [f"above {mps}", f"made {mps}/pipe", f"used {mps}"]


def test_the_record_is_bounded_and_a_full_one_hinders_nothing(record: Path, mps: Path) -> None:
    make(mps / "first", record)
    record.write_text("".join(f"made /nowhere/{number}\n" for number in range(1000)))
    make(mps / "pipe", record)
    assert (mps / "pipe").is_dir()
    assert len(record.read_text().splitlines()) == 1000


def test_directories_are_made_even_if_nothing_can_be_recorded(
    record: Path, mps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record.parent.write_text("no directory")
    make(mps / "pipe", record)
    assert (mps / "pipe").is_dir()
    assert "a purge of the package leaves unrecorded files behind" in caplog.text


def test_a_purge_knows_the_same_names() -> None:
    (words,) = re.findall(r"for name in (control [^;]+);", PURGE.read_text())
    assert tuple(words.replace("\\\n", "").split()) == FILES


def _admit(path: Path, group: str, file: Path) -> os.stat_result:
    record = DirectoryRecord(str(file))
    with use(str(path), record) as directory:
        set_access(directory, str(path), group, record)
    return path.stat()


def test_our_directory_is_limited_to_a_group_and_opened_again(record: Path, mps: Path) -> None:
    closed = _admit(mps / "pipe", "daemon", record)
    assert (closed.st_mode & 0o777, closed.st_gid) == (0o710, grp.getgrnam("daemon").gr_gid)
    opened = _admit(mps / "pipe", "", record)
    assert (opened.st_mode & 0o777, opened.st_gid) == (0o755, os.getegid())


def test_only_the_operator_restricts_a_directory_that_we_did_not_make(record: Path, mps: Path) -> None:
    made = mps / "nvidia-mps"
    made.mkdir(mode=0o755, parents=True)
    with pytest.raises(HostError) as caught:
        _admit(made, "daemon", record)
    assert (
        caught.value.message
        == f"{made} was not created by yunion-mps, and is not limited to the group daemon"
    )
    assert made.stat().st_mode & 0o777 == 0o755
    subprocess.run(caught.value.hint.partition(": ")[2], shell=True, check=True)
    assert _admit(made, "daemon", record).st_mode & 0o777 == 0o710


def test_a_group_that_was_removed_is_named(record: Path, mps: Path) -> None:
    with pytest.raises(HostError, match="the group no-such-group does not exist"):
        _admit(mps / "pipe", "no-such-group", record)
