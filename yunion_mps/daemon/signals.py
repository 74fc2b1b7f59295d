"""Signals: the handlers only note what came, and a descriptor ends the wait."""

from __future__ import annotations

import contextlib
import os
import signal

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
