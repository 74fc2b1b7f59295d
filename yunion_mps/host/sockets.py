"""What the kernel reports about sockets: the process at the other end, and those that hold a Unix socket.

The other ends of connections are known from sock_diag(7), the processes from proc(5).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from yunion_mps.host.proc import all_pids

#: The uid of a client over TCP, which the kernel does not know.
UNKNOWN_UID = -1
#: The limit on the CPU time of the search through all processes' descriptors, which blocks the event loop. A
#: limit on elapsed time would end it too early on a host under load.
_SEARCH_S = 0.5
#: From linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h; Python has no names for them.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_SHOW_NAME = 1
_SHOW_PEER = 4
_SHOW_PENDING = 8
_NAME = 0
_PEER = 2
_PENDING = 3
_ESTABLISHED = 1
_LISTENING = 10
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBHIIIII")
_ANSWER = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 0.5


class Peer(NamedTuple):
    """The process at the other end of a socket."""

    #: 0 if our PID namespace does not show it.
    pid: int
    uid: int


def peer_credentials(connection: socket.socket) -> Peer:
    """Return the process at the other end as the kernel knows it (unix(7), SO_PEERCRED); unknown over TCP."""
    if connection.family != socket.AF_UNIX:
        return Peer(0, UNKNOWN_UID)
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def count_open(pid: int, links: Collection[str]) -> int:
    """Return how many of the process's descriptors link to any of `links`, as in /proc: `socket:[4711]`."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{pid}/fd/{name}") in links
    return count


def socket_holders(inodes: Collection[int], search_s: float = _SEARCH_S) -> dict[int, int]:
    """Return how many of these sockets each process has open, by PID, as found in `search_s` of CPU time."""
    end_s = time.thread_time() + search_s
    links = {f"socket:[{inode}]" for inode in inodes}
    counts: dict[int, int] = {}
    if not links:
        return counts
    for pid in all_pids():
        if time.thread_time() > end_s:
            break
        if count := count_open(pid, links):
            counts[pid] = count
    return counts


def connected_inodes(paths: Collection[str]) -> set[int]:
    """Return the inodes at the other ends of the connections to the Unix sockets there, accepted or not.

    Raises OSError if the kernel does not support the query.
    """
    names = {os.fsencode(path) for path in paths}
    connected: set[int] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        for state, attributes in unix_sockets(netlink):
            if attributes.get(_NAME, b"").rstrip(b"\0") in names:
                inodes = attributes.get(_PENDING if state == _LISTENING else _PEER, b"")
                connected.update(inode for (inode,) in struct.iter_unpack("=I", inodes))
    return connected


def unix_sockets(netlink: socket.socket) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Yield the state and the attributes of every Unix socket in this network namespace."""
    netlink.settimeout(_TIMEOUT_S)
    states = 1 << _ESTABLISHED | 1 << _LISTENING
    requested = _SHOW_NAME | _SHOW_PEER | _SHOW_PENDING
    any_cookie = 0xFFFFFFFF
    # struct unix_diag_req: family, protocol, padding, states, inode, what to show, and a cookie of two words.
    question_fields = (socket.AF_UNIX, 0, 0, states, 0, requested, any_cookie, any_cookie)
    question = _QUESTION.pack(*question_fields)
    size = _HEADER.size + len(question)
    netlink.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + question)
    while True:
        for (_, kind, *_), body in _records(netlink.recv(1 << 16), _HEADER):
            if kind != _SOCK_DIAG_BY_FAMILY:  # the end, or an error
                return
            attributes: dict[int, bytes] = {}
            for (_, name), value in _records(body[_ANSWER.size :], _ATTRIBUTE):
                attributes[name] = value
            yield _ANSWER.unpack_from(body)[2], attributes


def _records(text: bytes, header: struct.Struct) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield the header and the body of each record.

    A header begins with the length of both, which is padded to 4 bytes (netlink(7)).
    """
    offset = 0
    while offset + header.size <= len(text):
        fields = header.unpack_from(text, offset)
        if fields[0] < header.size:
            return
        yield fields, text[offset + header.size : offset + fields[0]]
        offset += (fields[0] + 3) & ~3
