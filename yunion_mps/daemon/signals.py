"""Signals, whose handlers only note what came, and the poll(2) loop that serves without asyncio."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Protocol

_STOP = (signal.SIGTERM, signal.SIGINT)
ALL = (*_STOP, signal.SIGHUP)


class Signals:
    """SIGTERM and SIGINT ask for a stop, SIGHUP for a reload."""

    def __init__(self) -> None:
        #: The name of the signal that asked for a stop, empty before that.
        self.stop = ""
        self._reload = False
        self._wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _STOP:
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGHUP, self._request_reload)
        # A re-exec has blocked them, so that none is lost or ends the process in between.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)

    def fileno(self) -> int:
        """A descriptor that becomes readable with a signal; `clear` makes it wait for the next one."""
        return self._wake

    def clear(self) -> None:
        """Empty the descriptor; what was asked for is not forgotten."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        asked, self._reload = self._reload, False
        return asked

    def close(self) -> None:
        """Go back to the system's own handling."""
        signal.set_wakeup_fd(-1)
        for number in ALL:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._write)

    def _request_stop(self, number: int, _: object) -> None:
        self.stop = signal.Signals(number).name

    def _request_reload(self, number: int, _: object) -> None:
        del number
        self._reload = True


class Driven(Protocol):
    """A state machine that never waits itself: the supervisor, or a domain."""

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to be called again at the latest."""

    def descriptors(self) -> list[int]:
        """The descriptors to watch for reading; they may change with every tick."""


def drive(driven: Driven, done: Callable[[], bool], wake: Signals | None = None) -> None:
    """Tick until `done`, by poll(2): what the event loop does while there is one."""
    while True:
        if wake:
            wake.clear()
        due_s = driven.tick(time.monotonic())
        if done():
            return
        poll = select.poll()
        for descriptor in [*driven.descriptors(), *([] if wake is None else [wake.fileno()])]:
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000)
