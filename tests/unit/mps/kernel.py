"""A kernel that refuses a system call: to one thread alone, by seccomp(2), while one function runs."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
    """Have the calling thread's system calls go through this filter from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(count, instructions)
    assert libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)) == 0, ctypes.get_errno()
