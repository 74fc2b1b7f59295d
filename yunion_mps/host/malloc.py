"""Settings of glibc's malloc, for programs that need much memory for a moment."""

from __future__ import annotations

import ctypes

#: mallopt(3): the numbers of glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
#: Above what most objects take, and below the pieces that a scrape of thousands of devices is made of.
_LARGE_BYTES = 64 << 10


def tune_malloc() -> None:
    """Have glibc return large pieces to the system when they are freed, and use one heap for all threads.

    By default, glibc raises the size above which it does so whenever a large piece is freed, up to 32 MiB. A
    libc without these settings is not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_ARENA_MAX, 1)
