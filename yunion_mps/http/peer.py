"""Who is at the other end of a connection: the kernel's word."""

from __future__ import annotations

import select
import socket
import struct

#: The uid of who comes over TCP: nobody whom the kernel knows.
STRANGER = -1


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The PID (0 where it is in a PID namespace that we cannot see) and the user (SO_PEERCRED, unix(7)).

    Of a connection over TCP nobody knows either.
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
