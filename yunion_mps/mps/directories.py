"""Pipe and log directories, also below directories that other users can write to, such as /tmp.

Each component of the path is opened relative to its parent and checked by its descriptor, so that nothing can
be exchanged between check and use. Descriptors of the kind O_PATH are used for that: no file system is asked
to open anything before it is known that no other user has mounted it, so nothing here blocks because of one.
Only the administrator's symlinks are followed (root's, in a directory that only root can write to). Another
user's files are never used, changed or removed.

What other users can cause is an obstacle (UnsafePathError), because of which another directory is used: their
files, symlinks, modes and mounts, whatever is in the way in a directory that they can write to, and a full
file system. What only the administrator can cause is an error of the configuration (HostError): a file system
that is read-only, a name that is too long, a circular symlink, or a file in a directory that only root can
write to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from yunion_mps.core.errors import HostError, ShortageError, UnsafePathError
from yunion_mps.core.text import printable, shell_word
from yunion_mps.host.proc import credentials_of, user_name
from yunion_mps.mps.directory_record import NO_RECORD, DirectoryRecord
from yunion_mps.mps.obstacles import (
    CHOOSE_ANOTHER,
    FILES,
    close_command,
    enter_hint,
    limit_hint,
    mounting_user,
    move_command,
    replace_command,
    unsafe_path,
)

_MODE = 0o755
#: The mode of a pipe directory that only one group may enter.
_GROUP_MODE = 0o710
_MAX_LINKS = 40
#: Names an object, whatever it is, without opening it: its file system is not asked, and nothing blocks.
_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ALL_ENTER = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: How often a directory is tried to be created while another user creates and removes it.
_MAX_ATTEMPTS = 3
#: Errors of a directory that its owner, or who has mounted it, keeps even root from opening.
_CLOSED = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTCONN, errno.ESTALE)
#: Errors of a file system, or a directory, that users have filled.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK)
_FREE_SPACE = f"see which file system is full (df -h; df -i), and free space in it, or {CHOOSE_ANOTHER}"
#: What a control daemon needs to start: its files are six, and those of a server and the logs as many.
_MIN_FREE_FILES = 16
_MIN_FREE_BYTES = 64 << 10


@contextlib.contextmanager
def use(path: str, record: DirectoryRecord = NO_RECORD) -> Iterator[int]:
    """Yield a descriptor of the directory while it is used; it and its parents are created if missing (0755).

    record: that of the directories, for a purge

    Raises HostError for any OSError, and UnsafePathError if a component is a symlink, belongs to another
    user, or is writable by others, or if users have filled the file system. Existing directories keep their
    modes.
    """
    if ".." in path.split("/"):
        raise HostError(f"{path} contains ..", "write the path without ..")
    try:
        directory = _open_checked(path, make=True, record=record)
    except OSError as error:
        raise _host_error(error, f"{path} cannot be created or opened") from None
    try:
        yield directory
    except OSError as error:
        raise _host_error(error, f"{path} cannot be used") from None
    finally:
        os.close(directory)


def find_obstacle(
    path: str, *, make: bool = False, for_start: bool = False, record: DirectoryRecord = NO_RECORD
) -> UnsafePathError | None:
    """Return what `use` or `check_entries` raises because of other users; None if nothing.

    With `make`, the directory and its parents are created in the same step, so that no other user can create
    them afterwards; without it, nothing is changed, and parts that are missing are no obstacle. With
    `for_start`, a file system without space for the files of a control daemon is an obstacle, too. What is
    created is recorded in the `record`. Other errors are left to `use`.
    """
    try:
        directory = _open_checked(path, make=make, record=record)
        try:
            check_entries(directory, path)
            if for_start:
                _check_space(directory, path)
        finally:
            os.close(directory)
    except UnsafePathError as error:
        return error
    except (OSError, HostError):
        return None
    return None


def set_access(directory: int, path: str, group: str, record: DirectoryRecord = NO_RECORD) -> None:
    """Let only root and this group enter the directory, or every user if the group is empty.

    Only a directory that we created, as the `record` says, is changed. Raises HostError if another one
    excludes clients, or admits users outside the group.
    """
    info = os.fstat(directory)
    mode = stat.S_IMODE(info.st_mode)
    is_ours = record.has_made(os.readlink(f"/proc/self/fd/{directory}"))
    if group:
        gid = _gid(group)
        if info.st_gid == gid and mode & (_ALL_ENTER | _OTHERS_WRITE) == _GROUP_MODE & _ALL_ENTER:
            return
        if not is_ours:
            message = f"{path} was not created by yunion-mps, and is not limited to the group {group}"
            raise HostError(message, limit_hint(path, group, _GROUP_MODE))
        os.fchown(directory, -1, gid)
        os.fchmod(directory, _GROUP_MODE)
    elif is_ours and mode == _GROUP_MODE:  # as we left it while a group was set
        os.fchown(directory, -1, os.getegid())
        os.fchmod(directory, _MODE)
    elif mode & _ALL_ENTER != _ALL_ENTER:
        raise HostError(f"{path} is not accessible to other users", enter_hint(path))


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
    """Yield a descriptor (O_PATH) of the file's directory, which may be another user's, and the file's name.

    Raises OSError, and HostError if a component is a symlink that is not the administrator's, or a file
    system that another user has mounted.
    """
    parent, name = os.path.split(file)
    directory, _ = _walk(parent, make=False, checks=False)
    try:
        yield directory, name
    finally:
        os.close(directory)


@contextlib.contextmanager
def locate(file: str) -> Iterator[int]:
    """Yield a descriptor (O_PATH) of what is at this path, perhaps a symlink; it may be another user's.

    Raises OSError and HostError as `directory_of`.
    """
    with directory_of(file) as (directory, name):
        located = os.open(name, _NAME, dir_fd=directory)
        try:
            _check_mount(located, _mount_id(directory), file)
            yield located
        finally:
            os.close(located)


def open_file(path: str) -> BinaryIO:
    """Open a regular file for reading, which is not a symlink; never blocks because of another user.

    Raises OSError if that is impossible.
    """
    try:
        with locate(path) as located:
            if not stat.S_ISREG(os.fstat(located).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            return open(os.open(f"/proc/self/fd/{located}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except HostError as error:
        raise OSError(errno.EPERM, error.message, path) from None


def is_on_read_only(path: str) -> bool:
    """Whether the directory, or the one in which it would be created, is on a read-only file system."""
    place = path
    while True:
        try:
            directory, _ = _walk(place, make=False, checks=False)
        except FileNotFoundError:
            place = os.path.dirname(place)
            continue
        except (OSError, HostError):  # which `use` reports
            return False
        try:
            return bool(os.fstatvfs(directory).f_flag & os.ST_RDONLY)
        finally:
            os.close(directory)


def _open_checked(path: str, *, make: bool, record: DirectoryRecord) -> int:
    """Open the directory for reading, with all checks; with `make`, create and record what is missing."""
    named, place = _walk(path, make=make, checks=True, record=record)
    try:
        directory = os.open(".", _OPEN, dir_fd=named)
    finally:
        os.close(named)
    if make:
        try:
            _record_use(directory, place, record)
        except BaseException:
            os.close(directory)
            raise
    return directory


def _walk(path: str, *, make: bool, checks: bool, record: DirectoryRecord = NO_RECORD) -> tuple[int, str]:
    """Find the directory; may create what is missing, and may check each part of the path.

    Returns a descriptor (O_PATH), and the path without symlinks.
    """
    names = [name for name in path.split("/") if name][::-1]
    directory = os.open("/", _NAME)
    links = 0
    at = ""
    try:
        mount = _mount_id(directory)
        while names:
            name = names.pop()
            part = f"{at}/{name}"
            last = not names
            child = _open_child(directory, name, part, last=last, make=make, record=record)
            try:
                child_mount = _check_mount(child, mount, part)
                info = os.fstat(child)
                target = ""
                if stat.S_ISLNK(info.st_mode):
                    target = _read_trusted_link(child, os.fstat(directory), part, last=last)
                elif not stat.S_ISDIR(info.st_mode):
                    raise _no_directory(info, os.fstat(directory), part, last=last)
                elif checks:
                    _check_directory(info, os.fstat(directory), part, last=last)
            except BaseException:
                os.close(child)
                raise
            if target:
                os.close(child)
                links += 1
                if links > _MAX_LINKS:
                    raise HostError(f"{part} is a circular symlink", CHOOSE_ANOTHER)
                # The path so far contains no symlink any more, so `..` can be resolved by text.
                resolved = os.path.normpath(os.path.join(at or "/", target))
                names += [name for name in resolved.split("/") if name][::-1]
                child, part = os.open("/", _NAME), ""
                child_mount = _mount_id(child)
            os.close(directory)
            directory = child
            at = part
            mount = child_mount
    except BaseException:
        os.close(directory)
        raise
    return directory, at


def _open_child(
    directory: int, name: str, path: str, *, last: bool, make: bool, record: DirectoryRecord
) -> int:
    """Return a descriptor (O_PATH) of the child, whatever it is; created if missing and `make`."""
    try:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return _locate_child(directory, name)
            except FileNotFoundError:
                if not make:
                    raise
            # Another user may create it right now, and remove it before it is opened.
            with contextlib.suppress(FileExistsError):
                _mkdir(directory, name, path, last=last, record=record)
                child = _locate_child(directory, name)
                os.chmod(f"/proc/self/fd/{child}", _MODE)  # whatever the umask is
                return child
    except OSError as error:
        parent = os.fstat(directory)
        if error.errno in _CLOSED and parent.st_mode & _OTHERS_WRITE:
            message = f"cannot be opened, even by root ({error.strerror})"
            command = _replace_command(path, parent, last=last)
            raise unsafe_path(path, message, command, look="ls -ld") from None
        if not make:
            raise
        raise _host_error(error, f"{path} cannot be created or opened") from None
    message = "is created and removed again and again by another user"
    command = _replace_command(path, os.fstat(directory), last=last)
    raise unsafe_path(path, message, command, look="ls -ld")


def _locate_child(directory: int, name: str) -> int:
    """Return a descriptor (O_PATH); what the administrator mounts on demand (autofs) is mounted first."""
    try:
        return os.open(name, _NAME | os.O_DIRECTORY, dir_fd=directory)
    except NotADirectoryError:
        return os.open(name, _NAME, dir_fd=directory)


def _replace_command(path: str, parent: os.stat_result, *, last: bool) -> str:
    is_shared = bool(parent.st_mode & stat.S_ISVTX and parent.st_mode & stat.S_IWOTH)
    return replace_command(path, last=last, is_shared=is_shared)


def _mount_id(descriptor: int) -> str:
    """Return the id of the mount that the descriptor's object was found on (proc(5), fdinfo)."""
    info = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for line in os.read(info, 4096).splitlines():
            if line.startswith(b"mnt_id:"):
                return line.split()[1].decode()
    finally:
        os.close(info)
    return ""


def _check_mount(descriptor: int, parent_mount: str, path: str) -> str:
    """Return the id of the descriptor's mount; raise UnsafePathError if another user has mounted it.

    No command unmounts it: by the time it is pasted, a symlink may be there, and umount(8) follows symlinks.
    """
    mount = _mount_id(descriptor)
    if mount != parent_mount:
        uid = mounting_user(mount)
        if uid is None:
            raise unsafe_path(path, "is mounted and unmounted again and again", look="findmnt")
        if uid not in (0, os.geteuid()):
            message = f"is a file system that another user ({user_name(uid)}) has mounted"
            raise unsafe_path(path, message, look="findmnt")
    return mount


def _mkdir(directory: int, name: str, path: str, *, last: bool, record: DirectoryRecord) -> None:
    """Create the child, recorded before, so that a crash never leaves one without a record."""
    before = record.lines()
    record.add(before, [f"{'made' if last else 'above'} {path}"])
    try:
        os.mkdir(name, _MODE, dir_fd=directory)
    except OSError:
        record.remove_after(before)
        raise


def _record_use(directory: int, path: str, record: DirectoryRecord) -> None:
    """Record an existing directory, with the files in it that only look like ours."""
    before = record.lines()
    if before is None or {f"made {path}", f"used {path}"} & set(before):
        return
    theirs = [f"theirs {path}/{name}" for name in os.listdir(directory) if name in FILES]
    record.add(before, [*theirs, f"used {path}"])


def _read_trusted_link(link: int, parent: os.stat_result, path: str, *, last: bool) -> str:
    """Return the symlink's target; raise UnsafePathError if it is not the administrator's."""
    info = os.fstat(link)
    if is_foreign(info) or is_foreign(parent) or parent.st_mode & _OTHERS_WRITE:
        raise _symlink_error(info, path, _replace_command(path, parent, last=last))
    return os.readlink("", dir_fd=link)


def _no_directory(info: os.stat_result, parent: os.stat_result, path: str, *, last: bool) -> HostError:
    """Return the error for what is in a directory's place: an obstacle if another user can have put it there.

    A user can make a hard link to a file of root (proc(5), fs.protected_hardlinks).
    """
    message = "is not a directory"
    if is_foreign(info):
        message = f"is not a directory, and belongs to {user_name(info.st_uid)}"
    elif not parent.st_mode & _OTHERS_WRITE:
        return HostError(f"{path} {message}", f"check it (ls -ld {shell_word(path)}), and {CHOOSE_ANOTHER}")
    return unsafe_path(path, message, _replace_command(path, parent, last=last))


def _check_directory(info: os.stat_result, parent: os.stat_result, path: str, *, last: bool) -> None:
    if is_foreign(info):
        raise unsafe_path(path, _belongs_to(info), _replace_command(path, parent, last=last))
    if is_writable_by_others(info, last=last):
        message = f"is writable by other users (mode {stat.S_IMODE(info.st_mode):o})"
        raise unsafe_path(path, message, close_command(path))


def _check_space(directory: int, path: str) -> None:
    """Raise UnsafePathError if users have left no space for the files of a control daemon."""
    space = os.fstatvfs(directory)  # a tmpfs without a limit reports no blocks and no files at all
    if space.f_blocks and space.f_bfree * space.f_frsize < _MIN_FREE_BYTES:
        raise UnsafePathError(f"{path} is on a full file system", _FREE_SPACE)
    if space.f_files and space.f_ffree < _MIN_FREE_FILES:
        raise UnsafePathError(f"{path} is on a file system that can hold no more files", _FREE_SPACE)


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
    """Raise UnsafePathError if something in the directory is a symlink or belongs to another user.

    Raises HostError if it cannot be read.
    """
    try:
        names = os.listdir(directory)
        mount = _mount_id(directory)
    except OSError as error:
        raise _host_error(error, f"{path} cannot be read") from None
    for name in names:
        entry = f"{path}/{name}"
        try:
            located = os.open(name, _NAME, dir_fd=directory)
            try:
                _check_mount(located, mount, entry)
                info = os.fstat(located)
            finally:
                os.close(located)
        except FileNotFoundError:  # removed meanwhile, perhaps by a control daemon that ends
            continue
        except OSError as error:
            raise _host_error(error, f"{printable(entry)} cannot be read") from None
        if stat.S_ISLNK(info.st_mode):
            raise _symlink_error(info, entry, move_command(entry))
        if is_foreign(info):
            raise unsafe_path(entry, _belongs_to(info), move_command(entry))


def _belongs_to(info: os.stat_result) -> str:
    return f"belongs to another user ({user_name(info.st_uid)})"


def _symlink_error(link: os.stat_result, path: str, command: str) -> UnsafePathError:
    message = f"is a symlink of {user_name(link.st_uid)}, which is not followed"
    return unsafe_path(path, message, command, look="ls -ld")


def open_log(directory: int, path: str, name: str) -> int:
    """Open the log file for appending, created if missing; raises HostError if it is not ours."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log = os.open(name, flags, 0o640, dir_fd=directory)
    except OSError as error:
        if error.errno in _FULL:
            raise _host_error(error, f"{path}/{name} cannot be created") from None
        message = f"{path}/{name} cannot be written: {error.strerror}"
        raise HostError(message, f"check it: ls -l {shell_word(path)}") from None
    info = os.fstat(log)
    if not stat.S_ISREG(info.st_mode) or is_foreign(info):
        os.close(log)
        message = f"{path}/{name} was not created by yunion-mps"
        raise HostError(message, f"check it (ls -l {shell_word(path)}), and {CHOOSE_ANOTHER}")
    return log


def _host_error(error: OSError, problem: str) -> HostError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ShortageError(f"{problem}: {error.strerror}")
    if error.errno in _FULL:
        return UnsafePathError(f"{problem}: {error.strerror}", _FREE_SPACE)
    hint = "run as root; check with mount whether the file system is read-only"
    if error.errno == errno.EROFS:
        hint = (
            "set another directory in host.conf, such as /run/nvidia-mps/pipe: the service's unit forbids "
            "writing to /usr, /etc, /boot, /home and /root, and file systems mounted read-only cannot be "
            "written"
        )
    return HostError(f"{problem}: {error.strerror}", hint)
