"""The lock, whose file is for one daemon alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError, NotAllowedError
from yunion_mps.core.paths import Paths
from yunion_mps.host.lock import take_lock

from descriptors import open_descriptors

#: nobody: a user who is neither root nor us.
STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def lock(paths: Paths) -> Path:
    """Where the lock will be, in a directory that is there."""
    path = Path(paths.lock)
    path.parent.mkdir(parents=True)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(paths: Paths) -> HostError:
    before = open_descriptors()
    with pytest.raises(HostError) as caught:
        take_lock(paths)
    assert open_descriptors() == before
    return caught.value


def test_the_lock_names_our_pid_in_a_file_that_no_other_user_can_open(paths: Paths) -> None:
    before = os.umask(0)
    try:
        os.close(take_lock(paths))
    finally:
        os.umask(before)
    assert Path(paths.lock).read_text() == f"{os.getpid()}\n"
    assert mode_of(Path(paths.lock)) == 0o600


def test_a_lock_that_others_could_open_is_closed_to_them(paths: Paths, lock: Path) -> None:
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


def test_the_last_child_of_an_ended_daemon_releases_the_lock(paths: Paths, tmp_path: Path) -> None:
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
def test_another_user_is_refused_as_not_allowed(paths: Paths) -> None:
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
