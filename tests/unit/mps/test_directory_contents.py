"""What lies in a control daemon's directories: nothing of others is used, and the log is a file of ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from yunion_mps.errors import HostError
from yunion_mps.mps.directories import check_entries, make_directory, open_log

from unit.mps.hostile import STRANGER, everything_below, make, mode_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def put_file(path: Path) -> None:
    path.write_text("precious")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))


def put_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [put_file, put_socket, put_directory, os.mkfifo])
def test_something_of_a_stranger_in_the_directory_is_refused(
    place: Path, put: Callable[[Path], None]
) -> None:
    descriptor = make_directory(str(place / "pipe"))
    put(place / "pipe/control")
    check_entries(descriptor, str(place / "pipe"))
    os.chown(place / "pipe/control", STRANGER, STRANGER)
    before = everything_below(place)
    with pytest.raises(HostError) as caught:
        check_entries(descriptor, str(place / "pipe"))
    os.close(descriptor)
    assert caught.value.message == f"{place}/pipe/control belongs to another user (nobody)"
    control = f"{place}/pipe/control"
    assert caught.value.hint == f"look at it (ls -la {control}); remove it, or choose another directory"
    assert everything_below(place) == before


def test_a_symlink_in_the_directory_is_refused_even_when_it_is_ours(place: Path) -> None:
    descriptor = make_directory(str(place / "pipe"))
    (place / "pipe/log").symlink_to("/etc/passwd")
    with pytest.raises(HostError) as caught:
        check_entries(descriptor, str(place / "pipe"))
    os.close(descriptor)
    assert caught.value.message == f"{place}/pipe/log is a symlink, which is not followed"
    assert caught.value.hint == f"remove it: rm {place}/pipe/log"


def test_an_entry_that_vanishes_between_the_listing_and_the_look_is_no_matter() -> None:
    # The listing itself opens one descriptor more, which is in the list and gone at the look.
    descriptor = os.open("/proc/self/fdinfo", os.O_RDONLY)
    gone = [name for name in os.listdir(descriptor) if not os.path.exists(f"/proc/self/fdinfo/{name}")]
    assert gone != []
    check_entries(descriptor, "/proc/self/fdinfo")
    os.close(descriptor)


# -- the log


@pytest.fixture
def log_directory(place: Path) -> Path:
    return make(place / "log")


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
