"""The Unix socket: private before it can be reached, and the processes at its other end."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import struct

from yunion_mps.errors import HostError
from yunion_mps.paths import Paths

#: The uid of a client over TCP, which the kernel does not know.
STRANGER = -1

#: Members of this group may ask; if it does not exist, only root may.
GROUP = "yunion-mps"
_BACKLOG = 512


class Listener:
    """The socket that the API is served on, and its name in the file system."""

    def __init__(self, paths: Paths, handed_over: int | None = None) -> None:
        """Listen, or go on with the descriptor of a socket that listens already; raises HostError."""
        self._paths = paths
        self.socket = listen(paths) if handed_over is None else socket.socket(fileno=handed_over)
        self.socket.settimeout(0)
        self._place = _place(paths.socket)

    @property
    def is_found(self) -> bool:
        """Whether clients find it: its name may have been removed, or be that of something else."""
        return self._place is not None and _place(self._paths.socket) == self._place

    def renew(self) -> None:
        """Listen on a new socket under the name; connected clients stay connected. Raises HostError."""
        renewed = listen(self._paths)
        self.socket.close()
        self.socket = renewed
        self._place = _place(self._paths.socket)

    def close(self) -> None:
        """Listen no more, and remove the name if it is still ours."""
        self.socket.close()
        if self.is_found:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths.socket)


def _place(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def listen(paths: Paths) -> socket.socket:
    """Return the API's socket, listening; raises HostError when it cannot be made.

    It is bound beside its place with no permissions at all, given to root:yunion-mps with 0660, listens, and
    only then gets its name: a client that finds it is neither refused nor let in too early. A socket that an
    earlier daemon left is replaced; anything else in its place is not touched. The caller holds the daemon's
    lock, so no other daemon of ours can be using it.
    """
    path = paths.socket
    unfinished = os.path.join(os.path.dirname(path), "." + os.path.basename(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    umask = os.umask(0o777)
    try:
        _refuse_what_is_no_socket(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        listener.bind(unfinished)
        os.chown(unfinished, -1, group_id())
        os.chmod(unfinished, 0o660)
        listener.listen(_BACKLOG)
        os.rename(unfinished, path)
    except OSError as error:
        listener.close()
        raise HostError(
            f"the socket {path} cannot be made: {error}", "run as root; look at: ls -ld " + path
        ) from None
    finally:
        os.umask(umask)
    return listener


def group_id() -> int:
    """The gid of the group that may ask, that of root if there is no such group."""
    import grp

    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return 0


def _refuse_what_is_no_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "something that is no socket is in its place")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The PID (0 if it is in a PID namespace that we cannot see) and the user (SO_PEERCRED, unix(7)).

    Over TCP both are unknown.
    """
    if connection.family != socket.AF_UNIX:
        return 0, STRANGER
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end was closed, and not only shut for sending."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
