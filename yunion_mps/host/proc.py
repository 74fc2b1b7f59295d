"""What proc(5) tells of other processes; of a process that has ended it tells nothing: "", 0, [] or None."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

from yunion_mps.errors import ShortageError
from yunion_mps.escaping import decoded, printable

#: Linux gives no program more than this (execve(2): three quarters of 8 MiB, the arguments with it). But a
#: process may say afterwards that any of its memory is its environment (prctl(2), PR_SET_MM).
_MAX_ENVIRONMENT = 6 << 20
#: A flag of the kernel's (include/linux/sched.h) that stat shows; a zombie has it, too.
_PF_EXITING = 0x4
#: The uid of a client over TCP, which the kernel does not know.
UNKNOWN_UID = -1


class Peer(NamedTuple):
    """The process at the other end of a socket; its PID is 0 if our PID namespace does not show it."""

    pid: int
    uid: int


class Credentials(NamedTuple):
    """The real, effective, saved and file system ids of a process, and its supplementary groups."""

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]


def _read(pid: int, name: str, most: int = -1, proc: str = "/proc") -> bytes:
    try:
        with open(f"{proc}/{pid}/{name}", "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _stat_of(pid: int, proc: str = "/proc") -> list[str]:
    """The fields of stat from the state on."""
    return _read(pid, "stat", proc=proc).decode(errors="replace").rpartition(")")[2].split()


def started_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the boot; None also for a zombie.

    With the PID it identifies a process for good, because PIDs are used again.
    """
    fields = _stat_of(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def is_exiting(pid: int, proc: str = "/proc") -> bool:
    """Whether the process has begun to exit, is a zombie or is gone.

    From its beginning to its end an exit may take seconds, if much memory is to be freed.
    """
    fields = _stat_of(pid, proc)
    return len(fields) < 7 or bool(int(fields[6]) & _PF_EXITING)


def parent_of(pid: int) -> int:
    """The PID of the parent."""
    fields = _stat_of(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal or a debugger."""
    return _stat_of(pid)[:1] in (["T"], ["t"])


def name_of(pid: int) -> str:
    """The kernel's name of the process, at most 15 characters before it is escaped; "" also for a zombie."""
    if _stat_of(pid)[:1] in ([], ["Z"], ["X"]):
        return ""
    return decoded(_read(pid, "comm").removesuffix(b"\n"))


def command_of(pid: int) -> str:
    """The command line, cut to 100 characters."""
    return decoded(_read(pid, "cmdline", 400).replace(b"\0", b" ").strip())[:100]


def program_of(pid: int) -> str:
    """The path of the program that the process runs; "" also if it may not be read. Takes no descriptor."""
    try:
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""


def program_name(pid: int) -> str:
    """The file name of that program."""
    return program_of(pid).rpartition("/")[2]


def credentials_of(pid: int) -> Credentials | None:
    """The ids of the process."""
    lines = _read(pid, "status").splitlines()
    rows = (line.split() for line in lines if line.startswith((b"Uid:", b"Gid:", b"Groups:")))
    ids = [tuple(map(int, row[1:])) for row in rows]  # in this order
    return Credentials(*ids) if len(ids) == 3 else None


def uid_of(pid: int) -> int | None:
    """The process' effective user.

    The owner of /proc/PID is no substitute: it is root if the process is not dumpable (proc(5)).
    """
    found = credentials_of(pid)
    return found.uids[1] if found else None


def peer_credentials(connection: socket.socket) -> Peer:
    """The process at the other end, according to the kernel (SO_PEERCRED, unix(7)); unknown over TCP."""
    if connection.family != socket.AF_UNIX:
        return Peer(0, UNKNOWN_UID)
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def user_name(uid: int) -> str:
    """The user's name, or `uid 1234` if it has none."""
    import pwd

    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"


def describe_process(pid: int) -> str:
    """`PID 4711 (python3, alice)`, with what is still known of it."""
    uid = uid_of(pid)
    about = [name_of(pid), "" if uid is None else user_name(uid)]
    return f"PID {pid} ({', '.join(filter(None, about))})"


def children_of(pid: int) -> list[int]:
    """The PIDs of the process' children.

    Raises ShortageError if no descriptor is left to read them with: that is not the same as none.
    """
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ShortageError(f"the children of PID {pid} cannot be read: {error.strerror}") from None
    return found


def all_pids() -> list[int]:
    """The PIDs of all processes, the newest numbers first; raises ShortageError if they cannot be read."""
    try:
        return sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
    except OSError as error:
        raise ShortageError(f"the processes cannot be listed: {error.strerror}") from None


def environment_of(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty also if it may not be read."""
    text = _environment(pid).decode(errors="replace")
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)


def variable_of(pid: int, name: str) -> str | None:
    """One variable of that environment, "" if it is not in it; for processes of any user.

    None if there is no environment: if it cannot be read now, and while a program is only just being started.
    Costs a few ms at most, whatever a process makes of its environment.
    """
    before = b"\0" + name.encode() + b"="
    text = b"\0" + _environment(pid)
    begin = text.find(before) + len(before)
    if begin < len(before):
        return "" if len(text) > 1 else None
    end = text.find(b"\0", begin)
    return text[begin : end if end >= 0 else None].decode(errors="replace")


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            found = b""  # in small pieces, for which there is memory even in a shortage
            while len(found) < _MAX_ENVIRONMENT and (piece := file.read(1 << 13)):
                found += piece
            return found
    except OSError:
        return b""


def count_open(pid: int, links: Collection[str]) -> int:
    """How many descriptors of the process are any of these (as /proc shows them: `socket:[4711]`)."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{pid}/fd/{name}") in links
    return count
