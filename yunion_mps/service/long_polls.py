"""Long polls: requests that wait for a change, each until its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LongPolls:
    """Requests that evaluate their answer again at each notification, until it is complete."""

    def __init__(self) -> None:
        #: What wakes each of them.
        self.waiting: set[Callable[[], None]] = set()
        self._is_closed = False

    async def wait_for(self, evaluate: Callable[[], T], is_complete: Callable[[T], bool], wait_s: float) -> T:
        """The result of `evaluate` once it is complete; after `wait_s` or a close, whatever it is then."""
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            result = evaluate()
            left_s = deadline_s - asyncio.get_running_loop().time()
            if is_complete(result) or left_s <= 0 or self._is_closed:
                return result
            notified = asyncio.Event()
            self.waiting.add(notified.set)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(notified.wait(), left_s)
            finally:
                self.waiting.discard(notified.set)

    def notify(self) -> None:
        """Have all waiting requests evaluate their answers again; call it on the event loop's thread.

        Its callers guarantee that: work on other threads (`on_thread`) only returns what it has found, and
        the event loop then records events and changes the ledger.
        """
        for wake in self.waiting:
            wake()

    def close(self) -> None:
        """Answer all waiting requests now, and let none wait from now on."""
        self._is_closed = True
        self.notify()
