"""The listening socket: private before it can be reached."""

from __future__ import annotations

import errno
import os
import socket
import stat

from yunion_mps.errors import HostError
from yunion_mps.paths import Paths

#: Members of this group may ask; where it does not exist, only root may.
GROUP = "yunion-mps"
_BACKLOG = 512


def listen(paths: Paths) -> socket.socket:
    """Return the API's socket, listening; raises HostError when it cannot be made.

    It is bound with no permissions at all, then given to root:yunion-mps with 0660, and only then does it
    listen. A socket that an earlier daemon left is replaced; anything else in its place is not touched.
    The caller holds the daemon's lock, so no other daemon of ours can be using it.
    """
    path = paths.socket
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    umask = os.umask(0o777)
    try:
        _remove_old(path)
        listener.bind(path)
        os.chown(path, -1, group_id())
        os.chmod(path, 0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise HostError(
            f"the socket {path} cannot be made: {error}", "run as root; look at: ls -ld " + path
        ) from None
    finally:
        os.umask(umask)
    return listener


def group_id() -> int:
    """The gid of the group that may ask, that of root where there is no such group."""
    import grp

    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return 0


def _remove_old(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "something that is no socket is in its place")
    os.unlink(path)
