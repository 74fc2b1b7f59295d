"""The open files of a test's process."""

from __future__ import annotations

import contextlib
import gc
import os


def open_descriptors() -> dict[int, str]:
    """Each open descriptor with what it leads to, once those that nothing refers to have been closed.

    Otherwise the garbage collector might close one of an earlier test while this one compares.
    """
    gc.collect()
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor with which this directory was read
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
