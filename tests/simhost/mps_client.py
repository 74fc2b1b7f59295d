"""A stand-in for a CUDA client of MPS: attaches through the real control daemon, stays, and tells of it.

Usage: mps_client.py [UID | stubborn | careful | waiting]; the pipe directory is in CUDA_MPS_PIPE_DIRECTORY.

It prints a line each time that something happens to it: `asking`, `attached`, and then at its end one of
`refused` (the control daemon closed the connection), `terminated` (by `terminate_client`) or `server gone`.
SIGTERM ends it as a job ends. A stubborn one ignores SIGTERM, and continues whatever happens to it.
A careful one catches SIGTERM, and prints `saved` before it ends. A waiting one does the same, but blocks
SIGTERM, and has a thread that waits for it (sigwait(3)).
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading

_AS_CLIENT = struct.pack("i", 2)
_ATTACHED = struct.pack("i", 0)


def connect() -> socket.socket:
    """Connect to the control daemon as everyone does, and say who one is."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    control.recv(64)  # a greeting
    control.send(b"OUTBCRED\0")  # the kernel adds the credentials
    return control


def attach() -> socket.socket | None:
    """Wait for a server; the connection to it, None where the control daemon refused."""
    try:
        with connect() as control:
            control.send(_AS_CLIENT)
            say("asking")
            descriptors = socket.recv_fds(control, 64, 1)[1]
            if not descriptors:
                return None
            server = socket.socket(fileno=descriptors[0])
            server.send(b"client")  # the kernel adds who sends it
            control.send(_ATTACHED)
            return server
    except ConnectionError:
        return None


def live() -> str:
    server = attach()
    if server is None:
        return "refused"
    with server:
        while True:
            try:
                message = server.recv(64)
            except ConnectionError:
                return "server gone"
            if message != b"welcome":
                return "terminated" if message else "server gone"
            say("attached")


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def save(*_: object) -> None:
    say("saved")
    os._exit(0)


if __name__ == "__main__":
    is_stubborn = sys.argv[1:] == ["stubborn"]
    if is_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif sys.argv[1:] == ["careful"]:
        signal.signal(signal.SIGTERM, save)
    elif sys.argv[1:] == ["waiting"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=lambda: save(signal.sigwait({signal.SIGTERM})), daemon=True).start()
    elif len(sys.argv) > 1:
        os.setuid(int(sys.argv[1]))
    say(live())
    while is_stubborn:
        signal.pause()
