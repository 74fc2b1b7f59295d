"""Tasks that run for good, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

#: How soon one that goes on is told again.
_AGAIN_S = 0.1


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them until each has ended; what they raised stays with them.

    To cancel once is not enough: before Python 3.12, asyncio.wait_for forgets it where what it waits for
    comes at the same moment (github.com/python/cpython/issues/86296), and a stop would never end.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
