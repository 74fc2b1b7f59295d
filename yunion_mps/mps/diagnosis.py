"""Diagnose why a control daemon does not answer.

It serves all processes from one loop, which blocks on the connected one (measured): a process that connects
and sends nothing blocks all others. The kernel knows which are connected (sock_diag(7)).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator

from yunion_mps.host.proc import all_pids, count_open, describe_process, is_stopped, program_name
from yunion_mps.mps.processes import PROGRAM, server_pids
from yunion_mps.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, NO_REASON, Reason

#: How many connections a control daemon's queue holds (measured); another one is refused.
QUEUE = 128
#: The time limit of the search of all processes' descriptors, because it blocks the event loop.
_SEARCH_S = 0.5
#: From linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h; Python has no names for them.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_SHOW_NAME, _SHOW_PEER, _SHOW_PENDING = 1, 4, 8
_NAME, _PEER, _PENDING = 0, 2, 3
_ESTABLISHED, _LISTENING = 1, 10
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBHIIIII")
_ANSWER = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 0.5


def diagnose(pid: int, pipe_directory: str) -> Reason:
    """The cause, empty if none is found. Never raises; takes up to half a second."""
    with contextlib.suppress(Exception):
        stopped = _stopped_process(pid)
        if stopped:
            return Reason(stopped, CONTROL_DAEMON_SILENT)
        return Reason(_blocking_connection(pid, pipe_directory), CONTROL_DAEMON_BUSY)
    return NO_REASON


def front_end_at(pipe_directory: str) -> str:
    """The front-ends that are connected there, as text; empty if there are none. Never raises."""
    with contextlib.suppress(Exception):
        connected = _connections(pipe_directory)
        return ", ".join(describe_process(pid) for pid in connected if program_name(pid) == PROGRAM)
    return ""


def _stopped_process(pid: int) -> str:
    if is_stopped(pid):
        return "it was stopped by a signal (SIGSTOP) or a debugger"
    for server in server_pids(pid):
        if is_stopped(server):
            return f"its MPS server (PID {server}) was stopped by a signal (SIGSTOP) or a debugger"
    return ""


def _blocking_connection(pid: int, pipe_directory: str) -> str:
    """Servers, front-ends and this process may be connected and idle; any other may be the cause."""
    known = {pid, os.getpid(), *server_pids(pid)}
    connections = _connections(pipe_directory)
    strangers = [other for other in connections if other not in known and program_name(other) != PROGRAM]
    if sum(connections.values()) > QUEUE:
        most = sorted(strangers, key=lambda other: -connections[other])[:5]
        who = ", ".join(f"{describe_process(other)} has {connections[other]} connections" for other in most)
        return f"its queue is full, so no other process can connect: {who}"
    stopped = [other for other in strangers if is_stopped(other)]
    who = ", ".join(describe_process(other) for other in stopped[:1] or strangers[:5])
    if stopped:
        return f"{who} is connected to it and was stopped, so all others wait for that process"
    if strangers:
        one_of = "one of " if len(strangers) > 1 else ""
        return f"{one_of}{who} is connected to it but sends nothing, so all others wait for that process"
    return ""


def _connections(pipe_directory: str) -> dict[int, int]:
    """The number of connections that each process has to the control daemon, by PID, accepted or not."""
    return holders(set(peers(pipe_directory)))


def peers(pipe_directory: str) -> Iterator[int]:
    """The inodes at the other ends of the connections, accepted or not.

    Raises OSError if the kernel does not support the query.
    """
    # The second is where root's front-ends connect (measured).
    paths = {f"{pipe_directory}/{name}".encode() for name in ("control", "control_privileged")}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        for state, attributes in _sockets(netlink):
            name = attributes.get(_NAME, b"").rstrip(b"\0")
            if name in paths:
                inodes = attributes.get(_PENDING if state == _LISTENING else _PEER, b"")
                yield from (inode for (inode,) in struct.iter_unpack("=I", inodes))


def _sockets(netlink: socket.socket) -> Iterator[tuple[int, dict[int, bytes]]]:
    """State and attributes of every Unix socket in this network namespace."""
    netlink.settimeout(_TIMEOUT_S)
    any_inode, requested = 0xFFFFFFFF, _SHOW_NAME | _SHOW_PEER | _SHOW_PENDING
    question = _QUESTION.pack(
        socket.AF_UNIX, 0, 0, 1 << _ESTABLISHED | 1 << _LISTENING, 0, requested, any_inode, any_inode
    )
    size = _HEADER.size + len(question)
    netlink.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + question)
    while True:
        for (_, kind, *_), body in _records(netlink.recv(1 << 16), _HEADER):
            if kind != _SOCK_DIAG_BY_FAMILY:  # the end, or an error
                return
            attributes = {name: value for (_, name), value in _records(body[_ANSWER.size :], _ATTRIBUTE)}
            yield _ANSWER.unpack_from(body)[2], attributes


def _records(text: bytes, header: struct.Struct) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Header and body of each record; a header begins with the length of both, which is padded to 4 bytes."""
    offset = 0
    while offset + header.size <= len(text):
        fields = header.unpack_from(text, offset)
        if fields[0] < header.size:
            return
        yield fields, text[offset + header.size : offset + fields[0]]
        offset += (fields[0] + 3) & ~3


def holders(inodes: Collection[int], search_s: float = _SEARCH_S) -> dict[int, int]:
    """The number of these sockets that each process has open, by PID, as far as found within `search_s`."""
    end_s = time.monotonic() + search_s
    links = {f"socket:[{inode}]" for inode in inodes}
    counts = {}
    for pid in all_pids() if links else []:
        if time.monotonic() > end_s:
            break
        if count := count_open(pid, links):
            counts[pid] = count
    return counts
