"""Work that may take long, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from yunion_mps.host import threads

T = TypeVar("T")


async def on_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that nobody waits for at the end: a call of the driver may hang for good.

    Raises ShortageError if there is no thread for it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(outcome: T, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error:
            result.set_exception(error)
        else:
            result.set_result(outcome)

    def done(outcome: T, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome, error)

    threads.start(work, done)
    return await result
