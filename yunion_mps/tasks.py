"""Ends of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

#: How soon a task that continues after its cancellation is cancelled again, in s.
_RETRY_S = 0.1


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until each has ended, ignoring their exceptions.

    Cancelling once is not enough: before Python 3.12, asyncio.wait_for loses a cancellation that coincides
    with its result (github.com/python/cpython/issues/86296).
    """
    pending = set(tasks)
    while pending:
        for one in pending:
            one.cancel()
        done, pending = await asyncio.wait(pending, timeout=_RETRY_S)
        await asyncio.gather(*done, return_exceptions=True)
