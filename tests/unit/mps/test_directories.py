"""Directories below /tmp, where all users write: made safely or refused, and nothing foreign changes."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError, UnsafePathError
from yunion_mps.core.reasons import SHORTAGE, hint_of
from yunion_mps.mps.conversation import Probe, UnresponsiveError, peer_of
from yunion_mps.mps.directories import (
    check_entries,
    find_obstacle,
    is_on_read_only,
    open_file,
    open_log,
    set_access,
    use,
)

from descriptors import open_descriptors
from unit.file_systems import file_system_of, fill, hung_mount

from .other_processes import STRANGER, no_descriptor_left

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def make(path: Path) -> Path:
    """Make it as the domain does, and close it."""
    with use(str(path)):
        return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


#: The hint where no command does certainly no harm.
CHOOSE = "choose another directory in host.conf"


def everything_below(path: Path) -> dict[str, tuple[object, ...]]:
    """Each name below with all that can be changed of it."""
    found: dict[str, tuple[object, ...]] = {}
    for inner in sorted(path.rglob("*")):
        info = inner.lstat()
        text = inner.read_bytes() if inner.is_file() and not inner.is_symlink() else b""
        found[str(inner)] = (info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_mtime_ns, text)
    return found


@pytest.fixture
def tmp(place: Path) -> Path:
    """A directory like /tmp: all users write, and the sticky bit is set."""
    path = place / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def refused(path: Path, watched: Path) -> HostError:
    """The error for the directory; everything below `watched` is as it was, and no descriptor is left."""
    before, descriptors = everything_below(watched), open_descriptors()
    with pytest.raises(HostError) as caught:
        make(path)
    assert (everything_below(watched), open_descriptors()) == (before, descriptors)
    return caught.value


def replaced(path: Path) -> str:
    """The command that puts root's directory in the place of a stranger's, whose contents it keeps."""
    return f'mv {path} "$(mktemp -d {path.parent}/old.XXXXXX)" && mkdir -m 755 {path}'


def run_hint(error: HostError) -> None:
    """Run the command that the hint names, as an operator does."""
    command = error.hint.partition("; then ")[2].partition(", or ")[0]
    subprocess.run(["bash", "-c", command], check=True)


def make_for_clients(path: Path) -> None:
    with use(str(path)) as directory:
        set_access(directory, str(path), "")


def test_missing_directories_can_be_entered_whatever_the_umask_is(tmp: Path) -> None:
    path = tmp / "nvidia-mps/pipe"
    before = os.umask(0o077)
    try:
        make_for_clients(path)
    finally:
        os.umask(before)
    assert (mode_of(path), mode_of(path.parent)) == (0o755, 0o755)


def test_creating_a_directory_twice_changes_nothing(tmp: Path) -> None:
    make(tmp / "nvidia-mps/pipe")
    before = everything_below(tmp)
    make(tmp / "nvidia-mps/pipe")
    assert everything_below(tmp) == before


@pytest.mark.parametrize("mode", [0o600, 0o700, 0o711, 0o750, 0o751, 0o755])
def test_an_existing_directory_keeps_its_mode(tmp: Path, mode: int) -> None:
    (tmp / "log").mkdir(mode=mode)
    assert mode_of(make(tmp / "log")) == mode


@pytest.mark.parametrize("mode", [0o600, 0o700, 0o750])
def test_a_directory_that_clients_cannot_enter_is_refused_if_they_must(tmp: Path, mode: int) -> None:
    path = tmp / "nvidia-mps"
    path.mkdir(mode=mode)
    descriptors = open_descriptors()
    with pytest.raises(HostError) as caught:
        make_for_clients(path)
    assert caught.value.message == f"{path} is not accessible to other users"
    assert caught.value.hint == f"chmod a+x {path}"
    assert mode_of(path) == mode
    assert open_descriptors() == descriptors
    subprocess.run(caught.value.hint, shell=True, check=True)
    make_for_clients(path)


def test_no_command_lets_all_users_enter_what_may_be_private(place: Path) -> None:
    (place / "srv").mkdir(mode=0o700)
    with pytest.raises(HostError) as caught:
        make_for_clients(place / "srv")
    assert caught.value.hint == "choose another directory in host.conf, which all users may enter"


def test_a_shortage_of_descriptors_is_an_error_of_its_own(tmp: Path) -> None:
    with pytest.raises(HostError) as caught, no_descriptor_left():
        make(tmp / "pipe")
    assert caught.value.message == f"{tmp}/pipe cannot be created or opened: Too many open files"
    assert caught.value.hint == hint_of(SHORTAGE)
    with use(f"{tmp}/pipe") as directory, pytest.raises(HostError) as caught, no_descriptor_left():
        check_entries(directory, f"{tmp}/pipe")
    assert caught.value.message == f"{tmp}/pipe cannot be read: Too many open files"
    assert caught.value.hint == hint_of(SHORTAGE)


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
    assert error.message == f"{link} is a symlink of nobody, which is not followed"
    assert error.hint == f"check it (ls -ld {link}); then {replaced(link)}, or choose another directory"


def test_a_symlink_of_root_in_a_world_writable_directory_is_refused(tmp: Path, place: Path) -> None:
    (tmp / "nvidia-mps").symlink_to(place)
    error = refused(tmp / "nvidia-mps/pipe", place)
    assert error.message == f"{tmp}/nvidia-mps is a symlink of root, which is not followed"


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
    assert error.message.endswith(" is a circular symlink")
    assert error.hint == CHOOSE


def test_a_path_that_goes_upwards_is_refused(place: Path) -> None:
    error = refused(Path(f"{place}/x/../../pipe"), place)
    assert error.message == f"{place}/x/../../pipe contains .."
    assert error.hint == "write the path without .."


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_strangers_directory_is_refused_at_every_level(tmp: Path, level: str, mode: int) -> None:
    path = tmp / level
    path.mkdir(parents=True)
    path.chmod(mode)
    os.chown(path, STRANGER, STRANGER)
    error = refused(tmp / LEVELS[-1], tmp)
    assert error.message == f"{path} belongs to another user (nobody)"
    assert error.hint == f"check it (ls -la {path}); then {replaced(path)}, or choose another directory"


def test_a_stranger_without_a_name_is_named_by_number(tmp: Path) -> None:
    (tmp / "pipe").mkdir()
    os.chown(tmp / "pipe", 54321, 54321)
    assert refused(tmp / "pipe", tmp).message == f"{tmp}/pipe belongs to another user (uid 54321)"


@pytest.mark.parametrize(
    ("mode", "last"), [(0o777, False), (0o775, False), (0o777, True), (0o1777, True), (0o775, True)]
)
def test_a_writable_directory_is_refused_unless_sticky_on_the_way(place: Path, mode: int, last: bool) -> None:
    path = place / "nvidia-mps"
    path.mkdir()
    path.chmod(mode)
    error = refused(path if last else path / "pipe", place)
    assert error.message == f"{path} is writable by other users (mode {mode:o})"
    assert error.hint == f"check it (ls -la {path}); then chmod go-w {path}, or choose another directory"


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_in_a_directorys_place_is_refused(tmp: Path, level: str) -> None:
    path = tmp / level
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    assert refused(tmp / LEVELS[-1], tmp).message == f"{path} is not a directory"


def put_file(path: Path) -> None:
    path.write_text("precious")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))


def check(path: Path) -> None:
    with use(str(path)) as directory:
        check_entries(directory, str(path))


@pytest.mark.parametrize("put", [put_file, put_socket, Path.mkdir, os.mkfifo])
def test_something_of_a_stranger_in_the_directory_is_refused(
    place: Path, put: Callable[[Path], None]
) -> None:
    pipe = make(place / "nvidia-mps/pipe")
    control = pipe / "control"
    put(control)
    check(pipe)
    os.chown(control, STRANGER, STRANGER)
    before = everything_below(place)
    with pytest.raises(HostError) as caught:
        check(pipe)
    assert caught.value.message == f"{control} belongs to another user (nobody)"
    command = f'mv {control} "$(mktemp -d {pipe}/old.XXXXXX)"'
    assert caught.value.hint == f"check it (ls -la {control}); then {command}, or choose another directory"
    assert everything_below(place) == before


def test_a_symlink_in_the_directory_is_refused_even_when_it_is_ours(place: Path) -> None:
    log = make(place / "pipe") / "log"
    log.symlink_to("/etc/passwd")
    with pytest.raises(HostError) as caught:
        check(place / "pipe")
    assert caught.value.message == f"{log} is a symlink of root, which is not followed"


# -- what others have made unsafe is known before the directory is used


def chown_to_stranger(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def close_to_others(path: Path) -> None:
    chown_to_stranger(path)
    path.chmod(0o700)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def replace_by_link(path: Path) -> None:
    path.rmdir()
    path.symlink_to("/run")


def replace_by_strangers_file(path: Path) -> None:
    path.rmdir()
    path.write_text("precious")
    chown_to_stranger(path)


OBSTACLES = (chown_to_stranger, close_to_others, open_to_all, replace_by_link, replace_by_strangers_file)


@pytest.mark.parametrize("spoil", OBSTACLES)
@pytest.mark.parametrize("level", LEVELS)
def test_what_others_have_spoilt_is_the_obstacle_that_a_use_meets(
    tmp: Path, level: str, spoil: Callable[[Path], None]
) -> None:
    (tmp / "nvidia-mps").mkdir()
    (tmp / "nvidia-mps").chmod(0o1777)  # so that a link in it is not followed, like one in /tmp
    path = tmp / LEVELS[-1]
    assert find_obstacle(str(path)) is None, "nothing is there yet"
    path.mkdir(parents=True)
    (tmp / LEVELS[1]).chmod(0o1777)
    assert find_obstacle(str(path)) is None
    rmtree_below(tmp / level)
    spoil(tmp / level)
    before = everything_below(tmp)
    obstacle = find_obstacle(str(path))
    assert everything_below(tmp) == before
    assert obstacle is not None
    error = refused(path, tmp)
    assert (obstacle.message, obstacle.hint) == (error.message, error.hint)


def rmtree_below(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir()


@pytest.mark.parametrize("put", [put_file, put_socket, Path.mkdir, os.mkfifo])
def test_something_of_a_stranger_in_the_directory_is_an_obstacle(
    place: Path, put: Callable[[Path], None]
) -> None:
    control = make(place / "pipe") / "control"
    put(control)
    assert find_obstacle(str(place / "pipe")) is None
    chown_to_stranger(control)
    obstacle = find_obstacle(str(place / "pipe"))
    assert obstacle is not None
    assert obstacle.message == f"{control} belongs to another user (nobody)"


def test_what_is_wrong_without_other_users_is_no_obstacle(place: Path) -> None:
    (place / "file").touch()
    (place / "circle").symlink_to(place / "circle")
    too_long = place / ("x" * 256)
    for path in (place / "file/pipe", place / "circle/pipe", place / "x/../pipe", too_long):
        assert find_obstacle(str(path)) is None
        assert refused(path, place)


def test_a_file_of_root_where_others_write_is_an_obstacle(tmp: Path) -> None:
    """A user can have made a link to it, where the kernel does not prevent that."""
    (tmp / "nvidia-mps").touch()
    obstacle = find_obstacle(f"{tmp}/nvidia-mps/pipe")
    assert obstacle is not None
    assert obstacle.message == f"{tmp}/nvidia-mps is not a directory"


NAMES = ("a b;reboot", "a'b", "a\\b", "a\nb\x1b[31m", "\udcff x", "\u202e")


@pytest.mark.parametrize("name", NAMES)
def test_the_hints_command_moves_an_entry_with_any_name_aside(tmp: Path, name: str) -> None:
    path = make(tmp / "nvidia-mps/pipe")
    (path / name).write_text("precious")
    chown_to_stranger(path / name)
    obstacle = find_obstacle(str(path))
    assert obstacle is not None
    assert obstacle.hint.isprintable()
    assert obstacle.message.isprintable()
    run_hint(obstacle)
    assert find_obstacle(str(path)) is None
    assert [kept.read_text() for kept in path.glob("old.*/*")] == ["precious"]


@pytest.mark.parametrize("spoil", OBSTACLES)
def test_the_hints_command_puts_roots_directory_in_its_place(
    tmp: Path, spoil: Callable[[Path], None]
) -> None:
    path = make(tmp / "nvidia-mps")
    spoil(path)
    obstacle = find_obstacle(str(path))
    assert obstacle is not None
    run_hint(obstacle)
    assert find_obstacle(str(path)) is None
    assert (path.stat().st_uid, mode_of(path)) == (os.geteuid(), 0o755)


def test_what_a_stranger_keeps_in_the_directory_is_moved_and_not_deleted(tmp: Path) -> None:
    path = tmp / "nvidia-mps"
    path.mkdir()
    (path / "theirs").write_text("precious")
    chown_to_stranger(path)
    run_hint(refused(path / "pipe", tmp))
    (kept,) = tmp.glob("old.*/nvidia-mps/theirs")
    assert kept.read_text() == "precious"
    make(path / "pipe")


def test_no_command_is_offered_for_a_strangers_directory_elsewhere(tmp: Path, place: Path) -> None:
    """Such as /home/alice for /home/alice/mps/pipe, /var/log/slurm, or /tmp/alice for /tmp/alice/pipe."""
    for theirs, path in ((place / "alice", "mps/pipe"), (place / "slurm", ""), (tmp / "alice", "pipe")):
        theirs.mkdir()
        chown_to_stranger(theirs)
        hint = refused(theirs / path, place).hint
        assert hint == f"check it (ls -la {theirs}), and choose another directory in host.conf"


@pytest.mark.parametrize("name", ["postgresql", "log", "control"])
def test_no_command_is_offered_for_what_may_not_be_of_mps(tmp: Path, place: Path, name: str) -> None:
    """Such as /srv/logs/log, or /tmp/scratch/alice if the pipe directory is /tmp/scratch."""
    for directory in (place / "srv/logs", tmp / "scratch"):
        entry = make(directory) / name
        entry.mkdir()
        chown_to_stranger(entry)
        obstacle = find_obstacle(str(directory))
        assert obstacle is not None
        assert obstacle.hint == f"check it (ls -la {entry}), and {CHOOSE}"


@pytest.mark.parametrize(("mode", "below"), [(0o777, "pipe"), (0o777, ""), (0o1777, ""), (0o2775, "")])
def test_no_command_closes_a_directory_that_others_may_need(place: Path, mode: int, below: str) -> None:
    """Such as /tmp, /run/lock, /var/mail, or a directory above the pipe directory."""
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(mode)
    assert refused(shared / below, place).hint == f"check it (ls -la {shared}), and {CHOOSE}"


# -- a file system that users have filled


def test_a_file_system_without_limits_is_not_full(tmp_path: Path) -> None:
    """It reports no blocks and no files, neither free ones nor others."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    with file_system_of(tmp, most_files=0, size="0"):
        assert find_obstacle(str(tmp / "nvidia-mps/pipe"), make=True, for_start=True) is None


@pytest.fixture
def full(tmp: Path) -> Iterator[Path]:
    """A directory like /tmp with a log directory, in which no file can be created any more."""
    with file_system_of(tmp, most_files=20):
        make(tmp / "nvidia-mps/log")
        fill(tmp)
        yield tmp


def test_a_full_file_system_is_an_obstacle_to_a_new_directory(full: Path) -> None:
    path = full / "nvidia-mps/pipe"
    obstacle = find_obstacle(str(path), make=True)
    assert obstacle is not None
    assert obstacle.message == f"{path} cannot be created or opened: No space left on device"
    assert "df -i" in obstacle.hint
    assert find_obstacle(str(path)) is None, "nothing is to be created"


def test_a_full_file_system_is_an_obstacle_to_a_start_in_a_directory(full: Path) -> None:
    """A control daemon would end at once, because it cannot create its socket."""
    path = str(full / "nvidia-mps/log")
    assert find_obstacle(path, make=True) is None
    obstacle = find_obstacle(path, make=True, for_start=True)
    assert obstacle is not None
    assert obstacle.message == f"{path} is on a file system that can hold no more files"
    with use(path) as directory, pytest.raises(UnsafePathError):
        open_log(directory, path, "control.log")


# -- a stranger who is quick, or who mounts something


def test_a_directory_that_a_stranger_creates_meanwhile_is_the_obstacle(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp / "nvidia-mps"
    mkdir = os.mkdir

    def be_overtaken(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, dir_fd=dir_fd)
        chown_to_stranger(path)
        mkdir(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", be_overtaken)
    obstacle = find_obstacle(f"{path}/pipe", make=True)
    assert obstacle is not None
    assert obstacle.message == f"{path} belongs to another user (nobody)"


def test_a_directory_that_comes_and_goes_is_an_obstacle(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_overtaken(name: str, mode: int, *, dir_fd: int) -> None:
        raise FileExistsError  # and it is gone when it is opened

    monkeypatch.setattr(os, "mkdir", be_overtaken)
    obstacle = find_obstacle(f"{tmp}/pipe", make=True)
    assert obstacle is not None
    assert obstacle.message == f"{tmp}/pipe is created and removed again and again by another user"


def test_a_directory_is_created_as_it_is_found_safe(tmp: Path) -> None:
    assert find_obstacle(f"{tmp}/nvidia-mps/pipe", make=True) is None
    assert [(tmp / level).stat().st_uid for level in LEVELS[:2]] == [os.geteuid()] * 2


@pytest.fixture
def mount() -> Iterator[Callable[[Path], None]]:
    """Mount a stranger's file system there; every call to it blocks."""
    with ExitStack() as stack:
        yield lambda path: stack.enter_context(hung_mount(path, STRANGER))


def test_a_strangers_mount_is_an_obstacle_that_nothing_unmounts(
    tmp: Path, mount: Callable[[Path], None]
) -> None:
    """A symlink may be there when the command is pasted, and umount(8) would follow it."""
    path = tmp / "nvidia-mps"
    path.mkdir()
    chown_to_stranger(path)
    mount(path)
    obstacle = find_obstacle(f"{path}/pipe")
    assert obstacle is not None
    assert obstacle.message == f"{path} is a file system that another user (nobody) has mounted"
    assert obstacle.hint == f"check it (findmnt {path}), and {CHOOSE}"


def test_a_strangers_mount_in_the_directory_is_an_obstacle(tmp: Path, mount: Callable[[Path], None]) -> None:
    entry = make(tmp / "pipe") / "the irs"
    entry.mkdir()
    chown_to_stranger(entry)
    mount(entry)
    obstacle = find_obstacle(f"{tmp}/pipe")
    assert obstacle is not None
    assert obstacle.message.startswith(f"{entry} is a file system")


def test_a_mount_that_is_made_while_it_is_opened_is_an_obstacle(
    tmp: Path, mount: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp / "pipe")
    is_open = os.open

    def be_overtaken(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if name == "pipe":
            mount(path)
        return is_open(name, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", be_overtaken)
        obstacle = find_obstacle(str(path))
    assert obstacle is not None
    assert obstacle.message.startswith(f"{path} is a file system")


def test_neither_connections_nor_logs_touch_a_strangers_mount(
    tmp: Path, mount: Callable[[Path], None]
) -> None:
    path = tmp / "nvidia-mps"
    path.mkdir()
    chown_to_stranger(path)
    mount(path)
    assert peer_of(str(path)) is None
    with pytest.raises(UnresponsiveError):
        Probe(str(path), os.getpid(), 0, 1)
    with pytest.raises(OSError, match="has mounted"):
        open_file(f"{path}/log/control.log")
    assert not is_on_read_only(f"{path}/pipe")


def test_a_read_only_file_system_is_known_before_a_directory_is_created(tmp: Path) -> None:
    assert is_on_read_only("/proc/sys/kernel/pipe") is bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY)
    assert not is_on_read_only(str(tmp / "nvidia-mps/pipe"))


def test_an_entry_that_vanishes_after_the_listing_is_ignored() -> None:
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


def write_log(directory: Path, text: bytes) -> None:
    with use(str(directory)) as descriptor:
        output = open_log(descriptor, str(directory), "control.log")
        os.write(output, text)
        os.close(output)


def test_the_log_is_made_unreadable_to_others_and_appended_to_later(log_directory: Path) -> None:
    log = log_directory / "control.log"
    for text in (b"first\n", b"second\n"):
        write_log(log_directory, text)
    assert mode_of(log) & 0o007 == 0
    assert log.read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("file of a stranger", "was not created by yunion-mps"),
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
        write_log(log_directory, b"")
    assert caught.value.message == f"{log} {message}"
    assert everything_below(log_directory) == before
