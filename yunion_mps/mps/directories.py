"""Pipe and log directories, also below directories that other users can write to, such as /tmp.

Each component of the path is opened relative to its parent and checked by its descriptor, so that nothing can
be exchanged between check and use. Only the administrator's symlinks are followed (root's, in a directory
that only root can write to). Another user's files are never used, changed or removed.

Each directory is recorded on a line for a purge of the package (packaging/scriptlets/purge.sh):
`made DIRECTORY`, `used DIRECTORY` if it existed before, `theirs FILE` for a file in an existing directory
whose name is like one of ours, and `above DIRECTORY` for a parent that we created for another.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence

from yunion_mps.core.errors import HostError, ShortageError, UnsafePathError
from yunion_mps.core.text import printable
from yunion_mps.host.proc import credentials_of, user_name
from yunion_mps.mps.obstacles import (
    FILES,
    close_command,
    remove_command,
    replace_command,
    unsafe_path,
    user_mounts,
)

log = logging.getLogger(__name__)

_MODE = 0o755
#: The mode of a pipe directory that only one group may enter.
_GROUP_MODE = 0o710
_MAX_RECORDED = 1000
_UNRECORDED = "%s cannot be %s: %s; a purge of the package leaves unrecorded files behind"
_MAX_LINKS = 40
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ALL_ENTER = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: How often a directory is tried to be created while another user creates and removes it.
_MAX_ATTEMPTS = 3
#: Errors of a directory that its owner, or who has mounted it, keeps even root from opening.
_CLOSED = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTCONN, errno.ESTALE)

#: The file of the record; empty if none is kept.
_record = ""


def set_record_file(path: str) -> None:
    """Record directories in the file `path` from now on; its lines are never removed."""
    global _record
    _record = path


@contextlib.contextmanager
def use(path: str) -> Iterator[int]:
    """Yield a descriptor of the directory while it is used; it and its parents are created if missing (0755).

    Raises HostError for any OSError, and UnsafePathError if a component is a symlink, belongs to another
    user, or is writable by others. Existing directories keep their modes.
    """
    if ".." in path.split("/"):
        raise HostError(f"{path} contains ..", "write the path without ..")
    try:
        directory = _walk(path, make=True, checks=True)
    except OSError as error:
        raise _host_error(error, f"{path} cannot be created or opened") from None
    try:
        yield directory
    except OSError as error:
        raise _host_error(error, f"{path} cannot be used") from None
    finally:
        os.close(directory)


def find_obstacle(path: str, *, make: bool = False) -> UnsafePathError | None:
    """Return what `use` or `check_entries` raises because of other users; None if nothing.

    With `make`, the directory and its parents are created in the same step, so that no other user can create
    them afterwards; without it, nothing is changed, and parts that are missing are no obstacle. Other errors
    are left to `use`.
    """
    try:
        directory = _walk(path, make=make, checks=True)
        try:
            check_entries(directory, path)
        finally:
            os.close(directory)
    except UnsafePathError as error:
        return error
    except (OSError, HostError):
        return None
    return None


def set_access(directory: int, path: str, group: str) -> None:
    """Let only root and this group enter the directory, or every user if the group is empty.

    Only a directory that we created is changed. Raises HostError if another one excludes clients, or admits
    users outside the group.
    """
    info = os.fstat(directory)
    mode = stat.S_IMODE(info.st_mode)
    is_ours = f"made {os.readlink(f'/proc/self/fd/{directory}')}" in (_read_record() or ())
    if group:
        gid = _gid(group)
        if info.st_gid == gid and mode & (_ALL_ENTER | _OTHERS_WRITE) == _GROUP_MODE & _ALL_ENTER:
            return
        if not is_ours:
            what = f"{path} was not created by yunion-mps, and is not limited to the group {group}"
            raise HostError(what, f"limit it: chgrp {group} {path} && chmod {_GROUP_MODE:o} {path}")
        os.fchown(directory, -1, gid)
        os.fchmod(directory, _GROUP_MODE)
    elif is_ours and mode == _GROUP_MODE:  # as we left it while a group was set
        os.fchown(directory, -1, os.getegid())
        os.fchmod(directory, _MODE)
    elif mode & _ALL_ENTER != _ALL_ENTER:
        raise HostError(f"{path} is not accessible to other users", f"make it accessible: chmod a+x {path}")


def join(group: str) -> None:
    """Add this process, and so its children, to the group; raises HostError.

    MPS servers run as their clients' users with the groups of their control daemon (measured), and must be
    able to enter the pipe directory.
    """
    gid = _gid(group)
    try:
        if gid not in os.getgroups():
            os.setgroups([*os.getgroups(), gid])
    except OSError as error:
        raise _host_error(error, f"the daemon cannot join the group {group}") from None


def is_member(pid: int, group: str) -> bool:
    """Whether the process has the group; raises HostError if there is no such group."""
    credentials = credentials_of(pid)
    return bool(group) and credentials is not None and _gid(group) in credentials.groups


def _gid(group: str) -> int:
    import grp  # few hosts set a group

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        hint = f"create it (groupadd --system {group}), or set another cuda_mps_pipe_group in host.conf"
        raise HostError(f"the group {group} does not exist", hint) from None


@contextlib.contextmanager
def directory_of(file: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the file's directory, which may be another user's, and the file's name in it.

    Raises OSError, and HostError if a component is a symlink that is not the administrator's.
    """
    parent, name = os.path.split(file)
    directory = _walk(parent, make=False, checks=False)
    try:
        yield directory, name
    finally:
        os.close(directory)


def _walk(path: str, *, make: bool, checks: bool) -> int:
    """Open the directory; may create and record what is missing, and may check each part of the path."""
    names = [name for name in path.split("/") if name][::-1]
    directory = os.open("/", _OPEN)
    links = 0
    at = ""
    try:
        while names:
            name = names.pop()
            if checks:
                _check_mount(directory, f"{at}/{name}", last=not names)
            child = _open_child(directory, name, f"{at}/{name}", last=not names, make=make, checks=checks)
            if isinstance(child, str):
                links += 1
                if links > _MAX_LINKS:
                    raise HostError(f"{at}/{name} is a circular symlink", "remove it")
                # The path so far contains no symlink any more, so `..` can be resolved by text.
                target = os.path.normpath(os.path.join(at or "/", child))
                names += [part for part in target.split("/") if part][::-1]
                root = os.open("/", _OPEN)
                os.close(directory)
                directory, at = root, ""
                continue
            os.close(directory)
            directory, at = child, f"{at}/{name}"
            if checks:
                _check_directory(directory, at, last=not names)
        if make:
            _record_use(directory, at)
    except BaseException:
        os.close(directory)
        raise
    return directory


def _open_child(directory: int, name: str, path: str, *, last: bool, make: bool, checks: bool) -> int | str:
    """Open the child, created if missing and `make`; or return the target of a symlink to follow."""
    try:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return os.open(name, _OPEN, dir_fd=directory)
            except FileNotFoundError:
                if not make:
                    raise
            # Another user may create it right now, and remove it before it is opened.
            with contextlib.suppress(FileExistsError):
                _mkdir(directory, name, path, last=last)
                child = os.open(name, _OPEN, dir_fd=directory)
                os.fchmod(child, _MODE)  # whatever the umask is
                return child
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return _read_trusted_link(directory, name, path, last=last)
        if checks and error.errno in _CLOSED:
            _check_closed(directory, name, path, error, last=last)
        if not make:
            raise
        raise _host_error(error, f"{path} cannot be created or opened") from None
    what = "is created and removed again and again by another user"
    raise unsafe_path(path, what, replace_command(path, last=last), look="ls -ld")


def _check_closed(directory: int, name: str, path: str, error: OSError, *, last: bool) -> None:
    """Raise UnsafePathError if another user has closed the directory to us."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:  # it could not be created
        return
    except OSError:
        if os.fstat(directory).st_mode & _OTHERS_WRITE:
            what = f"cannot be opened, even by root ({error.strerror})"
            raise unsafe_path(path, what, replace_command(path, last=last), look="ls -ld") from None
        return
    _check_owner(info, path, last=last)


def _check_mount(directory: int, path: str, *, last: bool) -> None:
    """Raise UnsafePathError if another user has mounted a file system there."""
    if not os.fstat(directory).st_mode & _OTHERS_WRITE:
        return  # only root can create a directory there, to mount something on
    uid = user_mounts().get(path, os.geteuid())
    if uid != os.geteuid():
        command = replace_command(path, last=last, mounted=True)
        raise unsafe_path(path, _is_mount_of(uid), command, look="findmnt")


def _mkdir(directory: int, name: str, path: str, *, last: bool) -> None:
    """Create the child, recorded before, so that a crash never leaves one without a record."""
    before = _read_record()
    _write_record(before, [f"{'made' if last else 'above'} {path}"])
    try:
        os.mkdir(name, _MODE, dir_fd=directory)
    except OSError:
        if before is not None:
            os.truncate(_record, sum(len(os.fsencode(line)) + 1 for line in before))
        raise


def _record_use(directory: int, path: str) -> None:
    """Record an existing directory, with the files in it that only look like ours."""
    before = _read_record()
    if before is None or {f"made {path}", f"used {path}"} & set(before):
        return
    theirs = [f"theirs {path}/{name}" for name in os.listdir(directory) if name in FILES]
    _write_record(before, [*theirs, f"used {path}"])


def _read_record() -> list[str] | None:
    """Return the record's lines; None if there is no record, or it cannot be read."""
    try:
        with open(_record, "rb") as file:
            return [os.fsdecode(line) for line in file.read().split(b"\n")[:-1]]
    except FileNotFoundError:
        return [] if _record else None
    except OSError as error:
        log.warning(_UNRECORDED, _record, "read", error.strerror)
        return None


def _write_record(before: Sequence[str] | None, lines: Sequence[str]) -> None:
    """Add new lines to the record; a failure is only logged."""
    new = [line for line in lines if before is not None and line not in before]
    if not new or len(before or ()) + len(new) > _MAX_RECORDED:
        return
    try:
        os.makedirs(os.path.dirname(_record), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(_record, flags, 0o600), "ab") as file:
            file.write(b"".join(os.fsencode(line) + b"\n" for line in new))
    except OSError as error:
        log.warning(_UNRECORDED, _record, "written", error.strerror)


def _read_trusted_link(directory: int, name: str, path: str, *, last: bool) -> str:
    link = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISLNK(link.st_mode):
        if is_foreign(link):
            what = f"is not a directory, and belongs to {user_name(link.st_uid)}"
            raise unsafe_path(path, what, replace_command(path, last=last))
        raise HostError(f"{path} is not a directory", f"check it (ls -ld {path}), and remove it")
    place = os.fstat(directory)
    if is_foreign(link) or is_foreign(place) or place.st_mode & _OTHERS_WRITE:
        raise _symlink_error(link, path, replace_command(path, last=last))
    return os.readlink(name, dir_fd=directory)


def _check_directory(directory: int, path: str, *, last: bool) -> None:
    info = os.fstat(directory)
    _check_owner(info, path, last=last)
    if is_writable_by_others(info, last=last):
        what = f"is writable by other users (mode {stat.S_IMODE(info.st_mode):o})"
        raise unsafe_path(path, what, close_command(path, last=last))


def is_foreign(info: os.stat_result) -> bool:
    """Whether the file belongs to another user than root and ours."""
    return info.st_uid not in (0, os.geteuid())


def is_writable_by_others(info: os.stat_result, *, last: bool) -> bool:
    """Whether others can replace what is in the directory.

    The sticky bit prevents that, but not what others create first, so it does not suffice for the last
    directory of a path.
    """
    is_protected = info.st_mode & stat.S_ISVTX and not last
    return bool(info.st_mode & _OTHERS_WRITE and not is_protected)


def check_entries(directory: int, path: str) -> None:
    """Raise UnsafePathError if something in the directory is a symlink or belongs to another user."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise _host_error(error, f"{path} cannot be read") from None
    mounts = user_mounts()
    for name in names:
        entry = f"{path}/{name}"
        if mounts.get(entry, os.geteuid()) != os.geteuid():
            what = _is_mount_of(mounts[entry])
            raise unsafe_path(entry, what, remove_command(entry, mounted=True), look="findmnt")
        try:
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # removed meanwhile, perhaps by a control daemon that ends
            continue
        except OSError as error:
            raise _host_error(error, f"{printable(entry)} cannot be read") from None
        if stat.S_ISLNK(info.st_mode):
            raise _symlink_error(info, entry, remove_command(entry))
        if is_foreign(info):
            raise unsafe_path(entry, _belongs_to(info), remove_command(entry))


def _check_owner(info: os.stat_result, path: str, *, last: bool) -> None:
    if is_foreign(info):
        raise unsafe_path(path, _belongs_to(info), replace_command(path, last=last))


def _belongs_to(info: os.stat_result) -> str:
    return f"belongs to another user ({user_name(info.st_uid)})"


def _is_mount_of(uid: int) -> str:
    return f"is a file system that another user ({user_name(uid)}) has mounted"


def _symlink_error(link: os.stat_result, path: str, command: str) -> UnsafePathError:
    what = f"is a symlink of {user_name(link.st_uid)}, which is not followed"
    return unsafe_path(path, what, command, look="ls -ld")


def open_log(directory: int, path: str, name: str) -> int:
    """Open the log file for appending, created if missing; raises HostError if it is not ours."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log = os.open(name, flags, 0o640, dir_fd=directory)
    except OSError as error:
        what = f"{path}/{name} cannot be written: {error.strerror}"
        raise HostError(what, f"check it: ls -l {path}") from None
    info = os.fstat(log)
    if not stat.S_ISREG(info.st_mode) or is_foreign(info):
        os.close(log)
        raise HostError(
            f"{path}/{name} was not created by yunion-mps", f"check it (ls -l {path}), and remove it"
        )
    return log


def _host_error(error: OSError, what: str) -> HostError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ShortageError(f"{what}: {error.strerror}")
    hint = "run as root; check with df and mount whether the file system is full or read-only"
    if error.errno == errno.EROFS:
        hint = (
            "set another directory in host.conf, such as /run/nvidia-mps/pipe: the service's unit forbids "
            "writing to /usr, /etc, /boot, /home and /root, and file systems mounted read-only cannot be "
            "written"
        )
    return HostError(f"{what}: {error.strerror}", hint)
