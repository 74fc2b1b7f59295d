"""A poll(2) loop of a few lines, for what cannot wait until asyncio is loaded, or goes on without it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol


class Driven(Protocol):
    """A state machine that never waits itself."""

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to be called again at the latest."""

    def descriptors(self) -> list[int]:
        """The descriptors to watch for reading; they may change with every tick."""


class Wakeup(Protocol):
    """A descriptor that also ends a wait, as for signals."""

    def fileno(self) -> int:
        """The descriptor."""

    def clear(self) -> None:
        """Empty it."""


def drive(driven: Driven, done: Callable[[], bool], wakeup: Wakeup | None = None) -> None:
    """Tick until `done`."""
    while True:
        if wakeup:
            wakeup.clear()
        due_s = driven.tick(time.monotonic())
        if done():
            return
        poll = select.poll()
        for descriptor in [*driven.descriptors(), *([wakeup.fileno()] if wakeup else [])]:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000)
