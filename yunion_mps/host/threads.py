"""Threads for work that may hang forever: the process's exit does not wait for them.

A few are kept for reuse, so that work can continue after a process limit is reached.
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

from yunion_mps.core.errors import ShortageError

T = TypeVar("T")

#: How many threads are kept idle at most: more than the daemon usually runs at once.
MOST_IDLE = 4

#: Called with the result and the exception, one of which is None.
Report = Callable[[Any, "BaseException | None"], None]
_Inbox = SimpleQueue["tuple[Callable[[], Any], Report]"]

#: How long the process's exit waits for threads that were created but have not begun to run.
_BEGIN_S = 10.0

_idle: list[_Inbox] = []
_starting: list[_Inbox] = []
# A forked child has only the thread that forked.
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_starting.clear)


@atexit.register
def _await_start_of_threads() -> None:
    """Wait until every thread runs: one that begins while Python exits aborts the process."""
    end_s = time.monotonic() + _BEGIN_S
    while _starting and time.monotonic() < end_s:
        time.sleep(0.001)


def start_thread(work: Callable[[], Any], report: Report) -> None:
    """Call `work` on a thread, then `report`, which must neither block nor raise.

    Raises ShortageError if no thread can be started.
    """
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = _Inbox()
        _starting.append(inbox)
        try:
            # threading.Thread.start waits for a sign from the thread: forever if memory is short.
            _thread.start_new_thread(_run, (inbox,))
        except (RuntimeError, MemoryError) as error:
            _starting.remove(inbox)
            message = f"cannot start a thread: out of memory, processes or threads ({error})"
            raise ShortageError(message) from None
    inbox.put((work, report))


async def on_thread(work: Callable[[], T]) -> T:
    """Await `work` on a thread that the process's exit does not wait for: a driver call may hang forever.

    Raises ShortageError if no thread can be started.
    """
    import asyncio  # loaded by the daemon only once it is ready

    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(outcome: T, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error:
            result.set_exception(error)
        else:
            result.set_result(outcome)

    def report(outcome: T, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome, error)

    start_thread(work, report)
    return await result


def ignore_outcome(result: Any, error: BaseException | None) -> None:
    """Do nothing: a `Report` for work whose result and error do not matter."""


def _run(inbox: _Inbox) -> None:
    _starting.remove(inbox)
    sys.settrace(getattr(threading, "_trace_hook", None))  # as threading.Thread does, for coverage
    is_kept = True
    while is_kept:
        work, report = inbox.get()
        result = None
        error: BaseException | None = None
        try:
            result = work()
        except MemoryError:
            error = ShortageError("out of memory")
        except BaseException as raised:  # noqa: BLE001 - `report` is told
            error = raised
        is_kept = len(_idle) < MOST_IDLE
        if is_kept:  # before `report`, whose caller may start more work immediately
            _idle.append(inbox)
        report(result, error)
        del work, report, result, error  # keep no reference while waiting
