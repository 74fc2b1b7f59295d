"""Files that are written in one step, and the lock, whose file is for one daemon alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.errors import HostError, NotAllowedError
from yunion_mps.host.files import UNFINISHED, take_lock, version_of, write_atomically
from yunion_mps.paths import Paths


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


#: nobody: a user who is neither root nor us.
STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(str(tmp_path))


@pytest.fixture
def lock(paths: Paths) -> Path:
    """Where the lock will be, in a directory that is there."""
    path = Path(paths.lock)
    path.parent.mkdir(parents=True)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(paths: Paths) -> HostError:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HostError) as caught:
        take_lock(paths)
    assert os.listdir("/proc/self/fd") == before
    return caught.value


def test_the_lock_names_our_pid_in_a_file_that_no_other_user_can_open(paths: Paths) -> None:
    before = os.umask(0)
    try:
        os.close(take_lock(paths))
    finally:
        os.umask(before)
    assert Path(paths.lock).read_text() == f"{os.getpid()}\n"
    assert mode_of(Path(paths.lock)) == 0o600


def test_a_lock_that_an_older_daemon_left_open_to_others_is_closed_to_them(paths: Paths, lock: Path) -> None:
    lock.write_text("4000000\n")
    lock.chmod(0o644)
    os.close(take_lock(paths))
    assert (mode_of(lock), lock.read_text()) == (0o600, f"{os.getpid()}\n")


@needs_root
def test_another_user_cannot_take_the_lock(paths: Paths, tmp_path: Path) -> None:
    os.close(take_lock(paths))
    directory = os.open(Path(paths.lock).parent, os.O_PATH)  # pytest's own folders are closed to other users
    code = f"import os; os.setuid({STRANGER}); os.open('daemon.lock', os.O_RDONLY, dir_fd={directory})"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], pass_fds=[directory], capture_output=True, text=True, timeout=60
    )
    os.close(directory)
    assert "PermissionError: [Errno 13] Permission denied: 'daemon.lock'" in result.stderr.splitlines()


def test_the_last_child_of_a_daemon_that_is_gone_lets_go_of_the_lock(paths: Paths, tmp_path: Path) -> None:
    """It has the lock until it has loaded its program, and our PID is in the file no more."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = take_lock(paths)
    Path(paths.lock).write_text("4194305\n")  # above any PID
    child = os.fork()
    if child == 0:
        fifo.read_bytes()
        os.execv("/bin/true", ["true"])
    os.close(held)
    fifo.write_bytes(b"")
    os.close(take_lock(paths))
    os.waitpid(child, 0)


@needs_root
def test_another_users_file_is_refused_and_not_changed(paths: Paths, lock: Path) -> None:
    lock.write_text("precious")
    lock.chmod(0o666)
    os.chown(lock, STRANGER, STRANGER)
    error = refused(paths)
    assert error.message == f"{lock} was not created by yunion-mps"
    assert error.hint == f"check it (ls -l {lock}), and remove it"
    assert (lock.read_text(), mode_of(lock), lock.stat().st_uid) == ("precious", 0o666, STRANGER)


@pytest.mark.parametrize(
    ("make", "message"),
    [(os.mkfifo, "was not created by yunion-mps"), (os.mkdir, "cannot be opened: Is a directory")],
)
def test_a_path_that_is_not_a_file_is_refused(
    paths: Paths, lock: Path, make: Callable[[Path], None], message: str
) -> None:
    make(lock)
    assert refused(paths).message == f"{lock} {message}"


def test_a_symlink_is_not_followed(paths: Paths, lock: Path, tmp_path: Path) -> None:
    lock.symlink_to(tmp_path / "target")
    error = refused(paths)
    assert error.message == f"{lock} cannot be opened: Too many levels of symbolic links"
    assert error.hint == f"check it: ls -ld {lock}"
    assert not (tmp_path / "target").exists()


@needs_root
def test_another_user_is_told_that_it_is_not_allowed(paths: Paths) -> None:
    os.makedirs(paths.run_directory)
    os.seteuid(STRANGER)
    try:
        with pytest.raises(NotAllowedError) as caught:
            take_lock(paths)
    finally:
        os.seteuid(0)
    error = caught.value
    assert error.message == f"{paths.lock} cannot be opened: Permission denied"
    assert (error.exit_code, error.hint) == (4, "run as root")
