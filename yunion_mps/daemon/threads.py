"""Work that may take long, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that nobody waits for at the end: a call of the driver may hang for good."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(outcome: T | None, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error:
            result.set_exception(error)
        else:
            result.set_result(outcome)  # type: ignore[arg-type]

    def run() -> None:
        outcome: T | None = None
        failure: Exception | None = None
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - it is raised again where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome, failure)

    threading.Thread(target=run, name="work", daemon=True).start()
    return await result
