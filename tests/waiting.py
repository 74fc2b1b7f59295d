"""Waiting for what another process writes."""

from __future__ import annotations

import select
from typing import Any


def readable(file: Any, timeout_s: float) -> bool:
    """Whether `file` can be read, or has ended, within so many seconds.

    By poll(2): select(2) fails on descriptors from 1024 on, and the faults are played side by side in one
    process, some of them with thousands of connections.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
