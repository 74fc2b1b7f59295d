"""Memory that was needed for a moment goes back to the system, where glibc would keep it for the next one."""

from __future__ import annotations

import ctypes

#: mallopt(3): the numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Above what most objects take, and below the pieces that a scrape of thousands of devices is made of.
_LARGE_BYTES = 64 << 10


def give_back_early() -> None:
    """Have large pieces returned when they are freed, and one heap for all threads.

    Left to itself glibc raises the size from which it does so with each one that is freed, up to 32 MiB. A
    libc without these settings goes without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for setting, value in (
            (_TRIM_THRESHOLD, _LARGE_BYTES),
            (_MMAP_THRESHOLD, _LARGE_BYTES),
            (_ARENA_MAX, 1),
        ):
            mallopt(setting, value)
