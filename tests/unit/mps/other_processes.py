"""What other processes do with a control daemon, and a kernel that refuses a system call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from yunion_mps.core.models import DomainPlan
from yunion_mps.host.process_info import is_stopped
from yunion_mps.mps.conversation import Conversation, peer_of
from yunion_mps.mps.processes import our_processes

from integration.daemon_host import eventually

PATIENCE_S = 60.0
#: nobody: a user who is neither root nor us.
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, and mount")


def running_here(plan: DomainPlan) -> list[tuple[int, tuple[str, ...]]]:
    """The PID and GPUs of every control daemon of ours on the plan's directory."""
    ours = [one for one in our_processes() if one.pipe_directory == plan.pipe_directory]
    return [(one.pid, one.gpu_uuids) for one in ours if not one.is_server]


def wait_until_it_answers(plan: DomainPlan, pid: int) -> None:
    eventually(lambda: (peer := peer_of(plan.pipe_directory)) is not None and peer.pid == pid)


def converse(program: str, plan: DomainPlan, *commands: str) -> list[str]:
    conversation = Conversation(program, plan.pipe_directory, commands, 0.0, 5.0)
    poll = select.poll()
    poll.register(conversation.fileno(), select.POLLIN)
    while (answer := conversation.poll(0.0)) is None:
        assert poll.poll(PATIENCE_S * 1000), "no answer"
    return answer


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: is_stopped(pid))


def silent_connection(plan: DomainPlan) -> socket.socket:
    """A connection to its control daemon that says nothing, which keeps it from all others (measured)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(f"{plan.pipe_directory}/control")
        connection.recv(64)  # its greeting, so that it is at this connection now
    except BaseException:
        connection.close()
        raise
    return connection


_SAY_NOTHING = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.recv(64)
print(flush=True)
sys.stdin.read()
"""
_FILL = """
import socket, sys
held = []
while True:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].setblocking(False)
    try:
        held[-1].connect(sys.argv[1])
    except BlockingIOError:
        break
print(flush=True)
sys.stdin.read()
"""
_FLOOD = """
import socket, sys, time
held = []
print(flush=True)
while True:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].setblocking(False)
    try:
        held[-1].connect(sys.argv[1])
    except BlockingIOError:
        held.pop()
        time.sleep(0.0005)
    except OSError:
        held = []
        time.sleep(0.0002)
"""


def silent_process(pipe_directory: str, first: str = "") -> contextlib.AbstractContextManager[int]:
    """Have a process connect that says nothing, which keeps the control daemon from all others; its PID.

    It executes the code `first` before.
    """
    return _connected(f"{first}\n{_SAY_NOTHING}", pipe_directory)


def full_queue(pipe_directory: str, uid: int | None = None) -> contextlib.AbstractContextManager[int]:
    """Have a process hold so many silent connections that no other can be made, as any user may; its PID."""
    return _connected(_FILL, pipe_directory, uid)


def flood(pipe_directory: str, uid: int) -> contextlib.AbstractContextManager[int]:
    """Have a process fill the queue of each control daemon that serves there; its PID."""
    return _connected(_FLOOD, pipe_directory, uid)


@contextlib.contextmanager
def _connected(script: str, pipe_directory: str, uid: int | None = None) -> Iterator[int]:
    # Another user may not reach the virtual environment.
    python = sys.executable if uid is None else os.path.realpath(sys.executable)
    command = [python, "-IS", "-c", script, f"{pipe_directory}/control"]
    with subprocess.Popen(command, user=uid, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As if this process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


T = TypeVar("T")

#: socket(2) is numbered by the architecture, pidfd_send_signal(2) everywhere alike.
SOCKET = {"x86_64": 41, "aarch64": 198}[platform.machine()]
PIDFD_SEND_SIGNAL = 424

# From linux/filter.h, linux/seccomp.h and linux/prctl.h; Python has no names for them.
_LOAD, _RETURN, _JUMP_IF_EQUAL = 0x20, 0x06, 0x15
_NUMBER_AT, _FIRST_ARGUMENT_AT = 0, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refusing(call: int, errno: int, run: Callable[[], T], first_argument: int | None = None) -> T:
    """Return what `run` returns where this call ends with this error; with 0 it succeeds and does nothing.

    With `first_argument`, only if the call has that.
    """
    argument = [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_JUMP_IF_EQUAL, 0, 1, first_argument)]
    program = [
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 1 if first_argument is None else 3, call),
        *([] if first_argument is None else argument),
        (_RETURN, 0, 0, _ERRNO | errno),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_install, instructions, len(program)).result()
        return thread.submit(run).result()


def _install(instructions: bytes, count: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(count, instructions)
    assert libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)) == 0, ctypes.get_errno()
