"""How asyncio tasks end: cancelled for certain, or with the first of them to end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

#: How long a cancelled task may take to end before it is cancelled again, in s. A gRPC server gives its calls
#: 2 s to finish, which a second cancellation would interrupt.
_RETRY_S = 3.0


async def cancel(tasks: Iterable[asyncio.Future[Any]], retry_s: float = _RETRY_S) -> None:
    """Cancel the tasks until each has ended, ignoring their exceptions.

    Cancelling once is not enough: before Python 3.12, asyncio.wait_for loses a cancellation that coincides
    with its result (github.com/python/cpython/issues/86296).

    retry_s: how long a cancelled task may take to end before it is cancelled again.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=retry_s)
        await asyncio.gather(*ended, return_exceptions=True)


async def within(timeout_s: float, work: Awaitable[T], error: Exception) -> T:
    """Return the result of the work, which is cancelled after the timeout.

    Unlike asyncio.wait_for, this loses no cancellation that coincides with the result.

    Raises `error` after the timeout, and what the work raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise error
        return task.result()
    finally:
        await cancel([task])


async def first_of(*work: Awaitable[object]) -> None:
    """Run all of them until one ends, then cancel the others.

    Raises what that one raises.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(tasks)
    for task in ended:
        task.result()
