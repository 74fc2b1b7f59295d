"""Waits: requests that wait for something to happen, each within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Waits:
    """Requests that look again whenever they are woken, until they have found enough."""

    def __init__(self) -> None:
        #: What wakes each of them.
        self.waiting: set[Callable[[], None]] = set()
        self._is_ending = False

    async def until(self, look: Callable[[], T], is_enough: Callable[[T], bool], wait_s: float) -> T:
        """What `look` finds once it is enough; after `wait_s`, or at the end of all waits, what there is."""
        end_s = asyncio.get_running_loop().time() + wait_s
        while True:
            found = look()
            left_s = end_s - asyncio.get_running_loop().time()
            if is_enough(found) or left_s <= 0 or self._is_ending:
                return found
            more = asyncio.Event()
            self.waiting.add(more.set)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(more.wait(), left_s)
            finally:
                self.waiting.discard(more.set)

    def wake(self) -> None:
        """Let the requests that wait look again."""
        for wake in [*self.waiting]:  # events are also recorded on other threads
            wake()

    def end_waits(self) -> None:
        """Answer requests that wait with what there is, and let none wait any more."""
        self._is_ending = True
        self.wake()
