"""A process whose memory is short."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable

_PIECE = 64 << 10
_LEFT = 2
_ROOM = 8 << 20


def with_memory_short(work: Callable[[list[bytearray]], None]) -> None:
    """Call `work` in a forked child that can allocate little more than 128 KiB; fails if it raises.

    `work` gets what fills the memory, and may clear it.
    """
    pid = os.fork()
    if not pid:
        try:
            work(_fill_memory())
        except BaseException:  # noqa: BLE001 - shown here, and told by the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def _fill_memory() -> list[bytearray]:
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, resource.RLIM_INFINITY))
    pieces = []
    try:
        while True:
            pieces.append(bytearray(_PIECE))
    except MemoryError:
        del pieces[-_LEFT:]
    return pieces
