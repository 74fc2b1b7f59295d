"""Ends of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_RETRY_S = 1.0


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Return once all tasks have ended, whatever they raise.

    Each is cancelled until it ends, because before Python 3.12 `asyncio.wait_for` loses a cancellation
    that comes just as what it waits for is there.
    """
    pending = set(tasks)
    while pending:
        for one in pending:
            one.cancel()
        done, pending = await asyncio.wait(pending, timeout=_RETRY_S)
        await asyncio.gather(*done, return_exceptions=True)
