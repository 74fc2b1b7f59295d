"""Event loops with clocks of the test, for what has to happen within a time, or without waiting for one."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class StoppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still: nothing that waits for a time ever goes on."""

    def time(self) -> float:
        return 0.0


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop that skips the times in which nothing happens, so other processes have no time to answer."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


class SetLoop(asyncio.SelectorEventLoop):
    """A loop whose clock the test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _SkippingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(timeout and 0)
        if timeout and not ready:
            self.now_s += timeout
        return ready
