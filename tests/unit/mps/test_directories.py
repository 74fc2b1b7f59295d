"""Directories below /tmp, where everybody writes: made safely or refused, and nothing foreign changes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.mps.directories import check_entries, make_directory, open_log

#: nobody: a user who is neither root nor us.
STRANGER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def tmp(place: Path) -> Path:
    """A directory like /tmp: everybody writes, and the sticky bit is set."""
    path = place / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def make(path: Path) -> Path:
    """Make it as the domain does, and close it."""
    os.close(make_directory(str(path)))
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything_below(path: Path) -> dict[str, tuple[object, ...]]:
    """Each name below with all that somebody could have changed of it."""
    found: dict[str, tuple[object, ...]] = {}
    for inner in sorted(path.rglob("*")):
        info = inner.lstat()
        text = inner.read_bytes() if inner.is_file() and not inner.is_symlink() else b""
        found[str(inner)] = (info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_mtime_ns, text)
    return found


def refused(path: Path, watched: Path) -> HostError:
    """The error for the directory; everything below `watched` is as it was."""
    before = everything_below(watched)
    with pytest.raises(HostError) as caught:
        make_directory(str(path))
    assert everything_below(watched) == before
    return caught.value


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_missing_directories_are_made_for_others_to_traverse_whatever_the_umask_is(tmp: Path) -> None:
    before = os.umask(0o077)
    try:
        path = make(tmp / "nvidia-mps/pipe")
    finally:
        os.umask(before)
    assert (mode_of(path), mode_of(path.parent)) == (0o755, 0o755)


def test_made_a_second_time_it_stays_what_it_was(tmp: Path) -> None:
    make(tmp / "nvidia-mps/pipe")
    before = everything_below(tmp)
    make(tmp / "nvidia-mps/pipe")
    assert everything_below(tmp) == before


def test_the_descriptor_is_the_directory(tmp: Path) -> None:
    descriptor = make_directory(str(tmp / "pipe"))
    assert os.fstat(descriptor).st_ino == (tmp / "pipe").stat().st_ino
    os.close(descriptor)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o600])
def test_a_directory_of_ours_that_others_cannot_traverse_is_opened_to_them(tmp: Path, mode: int) -> None:
    (tmp / "pipe").mkdir(mode=mode)
    assert mode_of(make(tmp / "pipe")) == 0o755


@pytest.mark.parametrize("mode", [0o711, 0o755, 0o751])
def test_a_directory_of_ours_that_others_can_traverse_keeps_its_mode(tmp: Path, mode: int) -> None:
    (tmp / "pipe").mkdir()
    (tmp / "pipe").chmod(mode)
    assert mode_of(make(tmp / "pipe")) == mode


def test_the_directories_above_keep_their_modes(place: Path) -> None:
    (place / "private").mkdir(mode=0o700)
    make(place / "private/pipe")
    assert mode_of(place / "private") == 0o700


LEVELS = ("nvidia-mps", "nvidia-mps/pipe", "nvidia-mps/pipe/GPU-0")


@pytest.mark.parametrize("level", LEVELS)
def test_a_strangers_symlink_is_refused_at_every_level(tmp: Path, place: Path, level: str) -> None:
    (place / "victim").mkdir()
    link = tmp / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(place / "victim")
    os.lchown(link, STRANGER, STRANGER)
    error = refused(tmp / LEVELS[-1], place)
    assert error.message == f"{link} is a symlink, which is not followed"
    assert error.hint == f"look who made it (ls -l {link}), and remove it: others can write there"


def test_a_symlink_of_roots_is_refused_too_where_everybody_can_write(tmp: Path, place: Path) -> None:
    (tmp / "nvidia-mps").symlink_to(place)
    assert "is a symlink, which is not followed" in refused(tmp / "nvidia-mps/pipe", place).message


def test_a_strangers_symlink_to_nothing_makes_nothing(tmp: Path, place: Path) -> None:
    (tmp / "nvidia-mps").symlink_to(place / "made-by-us")
    os.lchown(tmp / "nvidia-mps", STRANGER, STRANGER)
    refused(tmp / "nvidia-mps", place)
    assert not (place / "made-by-us").exists()


@pytest.mark.parametrize("target", ["{place}/real", "../real", "./../real/."])
def test_roots_symlink_in_roots_directory_is_followed(place: Path, target: str) -> None:
    (place / "etc").mkdir()
    (place / "real").mkdir()
    (place / "etc/link").symlink_to(target.format(place=place))
    make(place / "etc/link/pipe")
    assert (place / "real/pipe").is_dir()


def test_symlinks_in_a_circle_end_with_an_error(place: Path) -> None:
    (place / "a").symlink_to(place / "b")
    (place / "b").symlink_to(place / "a")
    error = refused(place / "a/pipe", place)
    assert error.message.endswith(" is a symlink in a circle")
    assert error.hint == "remove it"


def test_a_path_that_goes_upwards_is_refused(place: Path) -> None:
    error = refused(Path(f"{place}/x/../../pipe"), place)
    assert error.message == f"{place}/x/../../pipe goes upwards"
    assert error.hint == "name the directory without .."


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_strangers_directory_is_refused_at_every_level(tmp: Path, level: str, mode: int) -> None:
    path = tmp / level
    path.mkdir(parents=True)
    path.chmod(mode)
    os.chown(path, STRANGER, STRANGER)
    error = refused(tmp / LEVELS[-1], tmp)
    assert error.message == f"{path} belongs to another user (nobody)"
    assert error.hint == f"look what is in it, then remove it: rm -r {path}"


def test_a_stranger_without_a_name_is_named_by_number(tmp: Path) -> None:
    (tmp / "pipe").mkdir()
    os.chown(tmp / "pipe", 54321, 54321)
    assert refused(tmp / "pipe", tmp).message == f"{tmp}/pipe belongs to another user (uid 54321)"


@pytest.mark.parametrize(
    ("mode", "last"), [(0o777, False), (0o775, False), (0o777, True), (0o1777, True), (0o775, True)]
)
def test_a_directory_that_others_can_write_is_refused_unless_sticky_on_the_way(
    place: Path, mode: int, last: bool
) -> None:
    path = place / "nvidia-mps"
    path.mkdir()
    path.chmod(mode)
    error = refused(path if last else path / "pipe", place)
    assert error.message == f"{path} may be written by other users"
    assert error.hint == f"look what is in it, then: chmod go-w {path}"


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_in_a_directorys_place_is_refused(tmp: Path, level: str) -> None:
    path = tmp / level
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    assert refused(tmp / LEVELS[-1], tmp).message == f"{path} is not a directory"


def test_a_refusal_leaves_no_descriptor_open(tmp: Path) -> None:
    (tmp / "nvidia-mps").symlink_to("/")
    before = open_descriptors()
    for _ in range(3):
        refused(tmp / "nvidia-mps/pipe", tmp)
    assert open_descriptors() == before


# -- what lies in a directory


def put_file(path: Path) -> None:
    path.write_text("precious")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))


def put_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [put_file, put_socket, put_directory, os.mkfifo])
def test_something_of_a_stranger_in_the_directory_is_refused(tmp: Path, put: Callable[[Path], None]) -> None:
    descriptor = make_directory(str(tmp / "pipe"))
    put(tmp / "pipe/control")
    check_entries(descriptor, str(tmp / "pipe"))
    os.chown(tmp / "pipe/control", STRANGER, STRANGER)
    before = everything_below(tmp)
    with pytest.raises(HostError) as caught:
        check_entries(descriptor, str(tmp / "pipe"))
    os.close(descriptor)
    assert caught.value.message == f"{tmp}/pipe/control belongs to another user (nobody)"
    assert caught.value.hint == f"end what made it, then remove it: rm -r {tmp}/pipe/control"
    assert everything_below(tmp) == before


def test_a_symlink_in_the_directory_is_refused_even_when_it_is_ours(tmp: Path) -> None:
    descriptor = make_directory(str(tmp / "pipe"))
    (tmp / "pipe/log").symlink_to("/etc/passwd")
    with pytest.raises(HostError) as caught:
        check_entries(descriptor, str(tmp / "pipe"))
    os.close(descriptor)
    assert caught.value.message == f"{tmp}/pipe/log is a symlink, which is not followed"
    assert caught.value.hint == f"remove it: rm {tmp}/pipe/log"


# -- the log


@pytest.fixture
def log_directory(tmp: Path) -> Path:
    return make(tmp / "log")


def open_it(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.close(open_log(descriptor, str(directory), "control.log"))
    finally:
        os.close(descriptor)


def test_the_log_is_made_unreadable_to_others_and_appended_to_later(log_directory: Path) -> None:
    open_it(log_directory)
    log = log_directory / "control.log"
    assert mode_of(log) & 0o007 == 0
    log.write_text("first\n")
    descriptor = os.open(log_directory, os.O_RDONLY)
    output = open_log(descriptor, str(log_directory), "control.log")
    os.write(output, b"second\n")
    os.close(output)
    os.close(descriptor)
    assert log.read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("file of a stranger", "is not a file of ours"),
        ("symlink", "cannot be written: Too many levels of symbolic links"),
        ("fifo", "cannot be written: No such device or address"),
        ("directory", "cannot be written: Is a directory"),
    ],
)
def test_a_log_that_is_not_a_file_of_ours_is_refused(log_directory: Path, what: str, message: str) -> None:
    log = log_directory / "control.log"
    if what == "symlink":
        (log_directory / "target").write_text("precious")
        log.symlink_to("target")
    elif what == "fifo":
        os.mkfifo(log)
    elif what == "directory":
        log.mkdir()
    else:
        log.write_text("precious")
        os.chown(log, STRANGER, STRANGER)
    before = everything_below(log_directory)
    with pytest.raises(HostError) as caught:
        open_it(log_directory)
    assert caught.value.message == f"{log} {message}"
    assert everything_below(log_directory) == before
