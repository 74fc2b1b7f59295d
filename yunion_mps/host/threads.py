"""Threads for work that may hang for good: nothing waits for them at the end of the process.

A few are kept for reuse, so that what was done before can still be done once a process limit is reached.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from yunion_mps.errors import ShortageError

T = TypeVar("T")

#: More than the daemon usually has at work at once.
_KEPT = 4

#: What is called with the result and the exception, one of them None.
Done = Callable[[Any, "BaseException | None"], None]
_Inbox = SimpleQueue["tuple[Callable[[], Any], Done]"]

#: How long the end of the process waits for threads that were started and do not run yet.
_BEGIN_S = 10.0

_idle: list[_Inbox] = []
_starting: list[_Inbox] = []
# A forked child has only the thread that forked.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_starting.clear)


@atexit.register
def _await_begun() -> None:
    """Let every thread begin: one that begins while Python ends aborts the process (seen beside load)."""
    end_s = time.monotonic() + _BEGIN_S
    while _starting and time.monotonic() < end_s:
        time.sleep(0.001)


def start(work: Callable[[], Any], done: Done) -> None:
    """Call `work` on a thread, then `done`, which must neither wait nor raise; raises ShortageError."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = _Inbox()
        _starting.append(inbox)
        try:
            # Not threading.Thread, whose start waits for a sign of the thread: for good if memory is short.
            _thread.start_new_thread(_run, (inbox,))
        except (RuntimeError, MemoryError) as error:
            _starting.remove(inbox)
            what = f"no thread can be started: memory, processes or threads have run out ({error})"
            raise ShortageError(what) from None
    inbox.put((work, done))


async def on_thread(work: Callable[[], T]) -> T:
    """Call `work` on a thread that the end of the process does not wait for: a driver call may hang forever.

    Raises ShortageError if no thread can be started.
    """
    import asyncio  # which the daemon loads only once it is ready

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

    start(work, done)
    return await result


def ignore_outcome(result: Any, error: BaseException | None) -> None:
    """A `Done` for work whose result and error do not matter."""


def _run(inbox: _Inbox) -> None:
    _starting.remove(inbox)
    sys.settrace(getattr(threading, "_trace_hook", None))  # as threading.Thread does, for coverage
    is_kept = True
    while is_kept:
        work, done = inbox.get()
        result = None
        error: BaseException | None = None
        try:
            result = work()
        except MemoryError:
            error = ShortageError("memory is short")
        except BaseException as raised:  # noqa: BLE001 - `done` is told
            error = raised
        is_kept = len(_idle) < _KEPT
        if is_kept:  # before `done`, whose caller may start more work at once
            _idle.append(inbox)
        done(result, error)
        del work, done, result, error  # nothing is held while it waits
