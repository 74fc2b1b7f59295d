"""What the kernel tells of processes in proc(5), where psutil does not serve us (see `process_info`).

For a process that has ended, functions return an empty value: "", 0, [] or None. Each function says why it
is ours. One reason holds for what commands need, too: importing psutil takes 16 ms, and users wait for
commands. docs/decisions/0025-psutil-and-sdnotify.md has the figures.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from yunion_mps.core.errors import ShortageError
from yunion_mps.core.text import command_line, decode_line, printable
from yunion_mps.host.control_groups import MOUNTS, is_made_by_root, parse_control_groups

#: The most that Linux passes to a program (execve(2): three quarters of 8 MiB, including the arguments).
#: A process may later declare any of its memory to be its environment (prctl(2), PR_SET_MM).
_MAX_ENVIRONMENT = 6 << 20
#: Kernel flag (include/linux/sched.h) in stat; also set for a zombie.
_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000
#: Positions of fields of stat (proc_pid_stat(5)) after the process's name.
_STATE = 0
_PARENT = 1
_GROUP = 2
_SESSION = 3
_FLAGS = 6
_THREADS = 17
_STARTED = 19
#: The control group of an instance of systemd/yunion-mps-job@.service, or a group below it.
_JOB_UNIT = re.compile(r"(?:^|/)system\.slice/(?:[^/]+\.slice/)*(yunion-mps-job@[^/]*\.service)(?=/|$)")
#: Requests to a namespace's descriptor (ioctl_ns(2)): its parent, and the user who made it.
_NS_GET_PARENT = 0xB702
_NS_GET_OWNER_UID = 0xB704
#: In place of a user who does not exist in our own user namespace.
_OVERFLOW_UID = 65534
#: The kernel nests user namespaces no deeper (user_namespaces(7)).
_MAX_NAMESPACES = 33


class Credentials(NamedTuple):
    """The users and groups of a process (credentials(7))."""

    #: The real, effective, saved and file system user id.
    uids: tuple[int, ...]
    #: The same of its group.
    gids: tuple[int, ...]
    #: Its supplementary groups.
    groups: tuple[int, ...]


def _contents(path: str, max_bytes: int = _MAX_ENVIRONMENT) -> bytes:
    """Return the beginning of a file; raises OSError.

    `open` would make twice as many system calls. The pieces are so small that they can be allocated even in a
    shortage of memory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < max_bytes and (piece := os.read(descriptor, 1 << 13)):
            data += piece
        return data[:max_bytes]
    finally:
        os.close(descriptor)


def _read(pid: int, name: str, max_bytes: int = _MAX_ENVIRONMENT, proc: str = "/proc") -> bytes:
    try:
        return _contents(f"{proc}/{pid}/{name}", max_bytes)
    except OSError:
        return b""


def _stat_fields(pid: int, proc: str = "/proc") -> list[str]:
    """Return the fields of stat, starting with the state."""
    return _read(pid, "stat", proc=proc).decode(errors="replace").rpartition(")")[2].split()


def _has_ended(pid: int, stat: Sequence[str], proc: str = "/proc") -> bool:
    """Return whether the process, with these fields of stat, has ended."""
    if len(stat) <= _STARTED:
        return True
    return stat[_STATE] in "ZX" and not _has_running_thread(pid, stat, proc)


def _has_running_thread(pid: int, stat: Sequence[str], proc: str) -> bool:
    """Return whether a thread of the process goes on although its main thread is exiting or a zombie.

    A program can end its main thread alone (pthread_exit(3)).
    """
    if int(stat[_THREADS]) <= 1:
        return False
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        thread_stat = _stat_fields(int(thread), f"{proc}/{pid}/task")
        if len(thread_stat) > _FLAGS and not int(thread_stat[_FLAGS]) & _PF_EXITING:
            return True
    return False


def started_ticks(pid: int) -> int | None:
    """Return the process's start time in clock ticks since boot; None also for a zombie.

    PID and start time together identify a process, because PIDs are reused. psutil's `create_time` is no such
    identity: it changes when the clock is set.
    """
    stat = _stat_fields(pid)
    return None if _has_ended(pid, stat) else int(stat[_STARTED])


def group_leaders_of(pid: int) -> tuple[int, ...]:
    """Return the PIDs of those that made the process's group and its session; empty if it has ended.

    They may have ended, but no other process gets these PIDs as long as the process is in the group and the
    session (credentials(7)). psutil tells neither groups nor sessions.
    """
    stat = _stat_fields(pid)
    return () if _has_ended(pid, stat) else (int(stat[_GROUP]), int(stat[_SESSION]))


def started_s(pid: int) -> float | None:
    """Return when the process started, in s since 1970, the same at every call; None also for a zombie.

    psutil's `create_time` changes when the clock is set.
    """
    ticks = started_ticks(pid)
    return None if ticks is None else _booted_s() + ticks / os.sysconf("SC_CLK_TCK")


@cache
def _booted_s() -> float:
    """Return when the host booted, in s since 1970; read once, because the clock may be corrected later."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def is_gone(pid: int) -> bool:
    """Return whether no process has this PID, not even a zombie.

    Works without free descriptors, which psutil's `pid_exists` needs.
    """
    try:
        os.stat(f"/proc/{pid}")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def is_exiting(pid: int, proc: str = "/proc") -> bool:
    """Return whether the process is exiting, is a zombie or is gone.

    An exit can take seconds if much memory is to be freed. psutil tells of zombies only.
    """
    stat = _stat_fields(pid, proc)
    if len(stat) <= _STARTED:
        return True
    return bool(int(stat[_FLAGS]) & _PF_EXITING) and not _has_running_thread(pid, stat, proc)


def job_unit_of(pid: int, proc: str = "/proc", mounts: str = MOUNTS) -> str | None:
    """Return the job unit of the process, such as `yunion-mps-job@train.service`; None if unknown.

    systemd creates a control group for each unit, and no job can leave its own. A group of that name that
    root did not make is no unit. Returns "" if the process is in no job unit, there are no control groups, or
    the process is in a PID namespace that is not visible here (PID 0). Unknown if the process is exiting or
    gone: control groups of version 1 then report `/`. psutil does not tell control groups.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        text = ""
    except OSError:  # for example, no descriptor is left
        return None
    if pid and is_exiting(pid, proc):  # checked last, because it may exit at any time
        return None
    for group in parse_control_groups(text):
        match = _JOB_UNIT.search(group.path)
        if match and is_made_by_root(group._replace(path=group.path[: match.end()]), mounts):
            return match[1]
    return ""


def is_kernel_thread(pid: int, proc: str = "/proc") -> bool:
    """Return whether the process is a thread of the kernel, which psutil does not tell."""
    fields = _stat_fields(pid, proc)
    return len(fields) > 6 and bool(int(fields[6]) & _PF_KTHREAD)


def is_in_inner_pid_namespace(pid: int, proc: str = "/proc") -> bool:
    """Return whether the process is in a PID namespace below ours, and so knows other PIDs than we do.

    psutil does not tell namespaces.
    """
    return len(_status_row(pid, b"NSpid:", proc)) > 1


def _status_row(pid: int, name: bytes, proc: str = "/proc") -> list[bytes]:
    """Return the words of a line of status (proc(5)), after its name; empty without such a line."""
    for line in _read(pid, "status", proc=proc).splitlines():
        if line.startswith(name):
            return line.split()[1:]
    return []


def parent_of(pid: int, proc: str = "/proc") -> int:
    """Return the PID of the process's parent; 0 if it is not visible here. Commands need it, too."""
    fields = _stat_fields(pid, proc)
    return int(fields[1]) if len(fields) > 1 else 0


def dies_of(pid: int, number: int) -> bool:
    """Return whether the process would die of the signal, because it does not handle it.

    It may catch it, ignore it, or wait for it (sigwait(3), signalfd(2)). In the last case, its main thread
    blocks it. Other threads show nothing: those of libraries often block all signals, and one that waits
    blocks none. psutil does not tell what a process does with signals.
    """
    for line in _read(pid, "status").splitlines():
        if line.startswith((b"SigCgt:", b"SigIgn:", b"SigBlk:")):
            mask = int(line.split()[1], 16)
            if mask >> (number - 1) & 1:
                return False
    return True


def process_name(pid: int) -> str:
    """Return the kernel's name of the process, at most 15 characters unescaped; "" also for a zombie.

    psutil's `name` reads the whole command line if the name has 15 characters: see `command_of`.
    """
    if _has_ended(pid, _stat_fields(pid)):
        return ""
    return decode_line(_read(pid, "comm").removesuffix(b"\n"))


def command_of(pid: int, most: int = 100) -> str:
    """Return the beginning of the process's command line, quoted as for a shell; at most so many letters.

    psutil's `cmdline` reads it whole. Any user can declare any of a process's memory to be its command line
    (prctl(2), PR_SET_MM): a daemon that read 512 MiB of it took 1 GiB and 4 s.
    """
    words = _read(pid, "cmdline", 4 * most).decode(errors="replace").rstrip("\0").split("\0")
    return command_line(words).strip()[:most]


def program_of(pid: int) -> str:
    """Return the path of the process's executable; "" also if access is denied.

    Needs no descriptor. psutil's `exe` reads the command line where access is denied: see `command_of`.
    """
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""


def program_name(pid: int) -> str:
    """Return the file name of the process's executable; "" also if access is denied."""
    return program_of(pid).rpartition("/")[2]


def credentials_of(pid: int) -> Credentials | None:
    """Return the users and groups of the process; psutil does not tell supplementary groups."""
    ids: dict[bytes, tuple[int, ...]] = {}
    for line in _read(pid, "status").splitlines():
        name, _, numbers = line.partition(b":")
        if name in (b"Uid", b"Gid", b"Groups"):
            ids[name] = tuple(map(int, numbers.split()))
    if len(ids) < 3:
        return None
    return Credentials(uids=ids[b"Uid"], gids=ids[b"Gid"], groups=ids[b"Groups"])


def users_of(pid: int) -> frozenset[int]:
    """Return the users whom the kernel lets signal the process; empty if it has ended.

    These are its real and saved users (kill(2)), and who made the user namespaces it is in
    (user_namespaces(7)): in a rootless container, most processes run as users whom the host does not know.
    """
    credentials = credentials_of(pid)
    if credentials is None:
        return frozenset()
    real, _, saved, *_ = credentials.uids
    return frozenset({real, saved, *_owners_of_namespaces(pid)})


def _owners_of_namespaces(pid: int) -> set[int]:
    """Return who made the user namespaces that the process is in, below our own."""
    owners: set[int] = set()
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        own_namespace = os.stat("/proc/self/ns/user")
        descriptor = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        for _ in range(_MAX_NAMESPACES):
            if os.path.samestat(os.fstat(descriptor), own_namespace):
                break
            owner = bytearray(4)
            fcntl.ioctl(descriptor, _NS_GET_OWNER_UID, owner)
            owners.add(int.from_bytes(owner, sys.byteorder))
            descriptor = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            stack.callback(os.close, descriptor)
    return owners - {_OVERFLOW_UID}


def user_name(uid: int) -> str:
    """Return the user's name, or `uid 1000` if the host does not know the user."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"


def children_of(pid: int) -> list[int]:
    """Return the PIDs of the process's children, as the kernel lists them.

    psutil's `children` reads the parent of every process of the host, which takes 100 times as long.

    Raises ShortageError if they cannot be read because no descriptor is left; [] would be wrong then.
    """
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, _contents(f"/proc/{pid}/task/{task}/children").split())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ShortageError(f"the children of PID {pid} cannot be read: {error.strerror}") from None
    return children


def descendants_of(pid: int) -> list[int]:
    """Return the PIDs of the process's descendants.

    Raises ShortageError like `children_of`.
    """
    descendants = children_of(pid)
    for child in descendants:  # which grows meanwhile
        descendants += children_of(child)
    return descendants


def all_pids() -> list[int]:
    """Return all PIDs in descending order. Commands need them, too.

    Raises ShortageError if they cannot be listed.
    """
    try:
        return sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True)
    except OSError as error:
        raise ShortageError(f"the processes cannot be listed: {error.strerror}") from None


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment the process was started with; empty also if access is denied.

    psutil's `environ` reads all that a process declares to be its environment, without a bound.
    """
    environment: dict[str, str] = {}
    for entry in _read(pid, "environ").decode(errors="replace").split("\0"):
        name, equals, value = entry.partition("=")
        if equals:
            environment[name] = value
    return environment


def variable_of(pid: int, name: str) -> str | None:
    """Return one variable of the process's environment, "" if it is not set; for processes of any user.

    Returns None if there is no environment: it cannot be read now, or the process has not yet reached exec.
    Takes a few ms at most, whatever a process declares to be its environment.
    """
    before = b"\0" + name.encode() + b"="
    text = b"\0" + _read(pid, "environ")
    begin = text.find(before) + len(before)
    if begin < len(before):
        return "" if len(text) > 1 else None
    end = text.find(b"\0", begin)
    return text[begin : end if end >= 0 else None].decode(errors="replace")
