"""Waiting for what another process does."""

from __future__ import annotations

import select
import time
from typing import Any


def pause(since_s: float, most_s: float = 0.1) -> None:
    """Sleep before a condition is looked at again: the longer, the longer it has not come about.

    `since_s` is when it was first looked at (time.monotonic()). Each look slows down what is waited for.
    """
    time.sleep(min(most_s, 0.002 + (time.monotonic() - since_s) / 20))


def readable(file: Any, timeout_s: float) -> bool:
    """Whether `file` can be read, or has ended, within so many seconds.

    By poll(2): select(2) fails on descriptors from 1024 on, and the faults are played side by side in one
    process, some of them with thousands of connections.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
