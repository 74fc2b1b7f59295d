"""Listening sockets: the Unix socket, never reachable without its permissions, with its peers; and TCP."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import select
import socket
import stat

from yunion_mps.config.values import split_endpoint
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths

#: Members of this group may connect; if it does not exist, only root may.
GROUP = "yunion-mps"
_BACKLOG = 512


class Listener:
    """The API's listening socket with its name; it is the daemon's, or was inherited at a re-exec."""

    def __init__(self, paths: Paths, inherited_fd: int | None = None) -> None:
        """Listen, or continue with the descriptor of a listening socket; raises HostError."""
        self._paths = paths
        self.socket = listen(paths) if inherited_fd is None else socket.socket(fileno=inherited_fd)
        self.socket.settimeout(0)
        self._identity = _identity(paths.socket)

    @property
    def is_reachable(self) -> bool:
        """Whether clients can connect to it: its name may have been removed or replaced."""
        return self._identity is not None and _identity(self._paths.socket) == self._identity

    def renew(self) -> None:
        """Listen on a new socket of the same name; existing connections stay. Raises HostError."""
        renewed = listen(self._paths)
        self.socket.close()
        self.socket = renewed
        self._identity = _identity(self._paths.socket)

    def close(self) -> None:
        """Stop listening, and remove the name if it is still ours."""
        self.socket.close()
        if self.is_reachable:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths.socket)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def listen(paths: Paths) -> socket.socket:
    """Return the API's listening socket; raises HostError if it cannot be created.

    It is bound under a temporary name without permissions, gets root:yunion-mps and 0660, listens, and is
    then renamed: a client that finds it is neither refused nor let in too early. An earlier daemon's socket
    is replaced; any other file is left alone. The caller holds the daemon's lock, so no other daemon uses it.
    """
    path = paths.socket
    unfinished = os.path.join(os.path.dirname(path), "." + os.path.basename(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    umask = os.umask(0o777)
    try:
        _refuse_non_socket(path)
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
            f"the socket {path} cannot be created: {error}",
            "run as root; check its directory: ls -ld " + path,
        ) from None
    finally:
        os.umask(umask)
    return listener


def group_id() -> int:
    """Return the gid of the group that may connect; root's gid if there is no such group."""
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return 0


def _refuse_non_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "something that is not a socket already exists there")


def is_disconnected(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection, rather than only shut down sending."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def listen_on(address: str) -> socket.socket:
    """Return a socket that listens at `127.0.0.1:9434` or `[::1]:9434`; raises OSError."""
    host, port = split_endpoint(address)
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:  # whose text repeats the address
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None
    listener.settimeout(0)
    return listener
