"""Who is at the other end of a connection: the kernel's word."""

from __future__ import annotations

import select
import socket
import struct


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The PID (0 where it is in a PID namespace that we cannot see) and the user (SO_PEERCRED, unix(7))."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end was closed, and not only shut for sending."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
