"""The program yunion-mps-daemon: wiring, signals and the loop."""

from __future__ import annotations

import gc
import sys

#: mallopt(3): the numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Above what most objects take, and below the pieces that a scrape of thousands of devices is made of.
_LARGE_BYTES = 64 << 10
#: How long another thread, such as one that formats metrics, may keep the event loop waiting.
_SWITCH_S = 0.001


def main() -> None:
    """Run the daemon; exits 0 after a clean stop, and with the error's own code otherwise.

    The collector is off until the domains are started: it would run through every import, 2 ms of the start.
    """
    gc.disable()
    from yunion_mps.daemon.options import parse

    options = parse(sys.argv[1:])
    tune_malloc()  # before modules are read, which takes large pieces
    sys.setswitchinterval(_SWITCH_S)
    from yunion_mps.daemon.run import run

    sys.exit(run(options))


def tune_malloc() -> None:
    """Have glibc return large pieces to the system when they are freed, and use one heap for all threads.

    By default, glibc raises the size above which it does so whenever a large piece is freed, up to 32 MiB. A
    libc without these settings is not changed.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_ARENA_MAX, 1)
