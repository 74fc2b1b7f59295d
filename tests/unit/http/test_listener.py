"""The socket is private before it can be reached, and takes no other program's place."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths
from yunion_mps.http.listener import GROUP, group_id, listen

from unit.http.server_host import short_root

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes this socket")


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_root() as found:
        yield found


def has_group() -> bool:
    with contextlib.suppress(KeyError):
        return bool(grp.getgrnam(GROUP))
    return False


def test_the_socket_belongs_to_root_and_the_group_alone(paths: Paths) -> None:
    with listen(paths):
        status = os.stat(paths.socket)
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert status.st_uid == 0
        assert status.st_gid == group_id() == (grp.getgrnam(GROUP).gr_gid if has_group() else 0)


def test_the_socket_is_never_open_to_more_than_it_is_at_last(paths: Paths) -> None:
    """Whatever the umask that the daemon is started with, which is as before afterwards."""
    before = os.umask(0)
    try:
        with listen(paths):
            assert stat.S_IMODE(os.stat(paths.socket).st_mode) == 0o660
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_the_socket_gets_its_name_when_it_is_finished(paths: Paths) -> None:
    """Seen by what Python asks the kernel for, in that order, and what is there at each moment."""
    seen: list[tuple[str, int, bool]] = []
    watching = True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("os.chown", "os.chmod", "os.rename"):
            place = str(arguments[0])
            seen.append((event, stat.S_IMODE(os.lstat(place).st_mode), answers(place)))
            assert not os.path.exists(paths.socket)

    sys.addaudithook(note)  # for good, therefore the switch
    try:
        listen(paths).close()
    finally:
        watching = False
    assert seen == [("os.chown", 0, False), ("os.chmod", 0, False), ("os.rename", 0o660, True)]
    assert [entry.name for entry in Path(paths.socket).parent.iterdir()] == [Path(paths.socket).name]


def answers(place: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(place) == 0


def test_a_half_created_socket_of_a_killed_daemon_is_replaced(paths: Paths) -> None:
    place = Path(paths.socket)
    place.with_name("." + place.name).write_text("")
    with listen(paths):
        assert answers(paths.socket)
        assert list(place.parent.iterdir()) == [place]


def test_a_socket_that_an_earlier_daemon_left_is_replaced(paths: Paths) -> None:
    listen(paths).close()
    old = os.stat(paths.socket).st_ino, os.stat(paths.socket).st_ctime_ns
    with listen(paths):
        new = os.stat(paths.socket)
        assert (new.st_ino, new.st_ctime_ns) != old
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(paths.socket)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_file_that_is_not_a_socket_is_not_removed(paths: Paths, kind: str) -> None:
    place = Path(paths.socket)
    if kind == "file":
        place.write_text("kept")
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/etc/hostname")
    before = os.lstat(place)
    with pytest.raises(HostError) as caught:
        listen(paths)
    assert os.lstat(place) == before
    assert caught.value.message == (
        f"the socket {place} cannot be created: [Errno 17] something that is not a socket already exists "
        "there"
    )
    assert caught.value.hint == f"run as root; check its directory: ls -ld {place}"


def test_without_its_directory_the_error_names_the_socket(paths: Paths) -> None:
    os.rmdir(paths.run_directory)
    with pytest.raises(HostError) as caught:
        listen(paths)
    assert caught.value.message == (
        f"the socket {paths.socket} cannot be created: [Errno 2] No such file or directory"
    )
