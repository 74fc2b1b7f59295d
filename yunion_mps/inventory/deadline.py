"""Calls that may hang for good, as a driver's do when a GPU is ill, bounded by a deadline."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from yunion_mps.errors import DriverError, ShortageError
from yunion_mps.host import threads

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: A driver that has to wake many GPUs takes tens of seconds for its first call.
TIMEOUT_S = 60.0

_HINT = "see: dmesg | grep -iE 'nvrm|xid'; a driver that hangs is helped by a reboot alone"


class Deadline:
    """Makes calls one after another, each on a thread that nobody waits for longer than `timeout_s`."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._hanging: threading.Event | None = None
        #: Whether a call is made on the caller's thread if there is no other, with no deadline then.
        self.may_hang = False

    def call(self, work: Callable[[], T]) -> T:
        """Return what `work` returns and raise what it raises; DriverError when it takes too long.

        As long as an earlier call hangs, no other is made. Raises ShortageError if there is no thread for it.
        """
        if self._hanging and not self._hanging.is_set():
            raise DriverError("the NVIDIA driver still does not answer an earlier call", _HINT)
        ended = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def done(result: T, error: BaseException | None) -> None:
            if error:
                errors.append(error)
            else:
                results.append(result)
            ended.set()

        try:
            threads.start(work, done)
        except ShortageError:
            if not self.may_hang:
                raise
            return work()
        if not ended.wait(self._timeout_s):
            self._hanging = ended
            raise DriverError(f"the NVIDIA driver does not answer within {self._timeout_s:g} s", _HINT)
        if errors:
            raise errors[0]
        return results[0]


def bounded(method: F) -> F:
    """Let a method of an object with a `deadline` take no longer than that."""

    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any) -> Any:
        return self.deadline.call(lambda: method(self, *arguments))

    return wrapper  # type: ignore[return-value]
