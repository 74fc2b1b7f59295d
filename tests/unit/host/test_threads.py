"""Threads are kept for the next work, so that a process limit stops only what needs another one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from yunion_mps.core.errors import ShortageError
from yunion_mps.host import threads
from yunion_mps.inventory.driver import Deadline

from integration.daemon_host import eventually

PATIENCE_S = 30
#: A user of no other test, whose processes are counted apart.
A_USER = 54321


def in_a_child(work: Callable[[], None]) -> None:
    """Call it in a fork of another user, whom the kernel refuses processes; fails if it raises."""
    pid = os.fork()
    if not pid:
        try:
            if os.geteuid() == 0:
                os.setuid(A_USER)
            work()
        except BaseException:  # noqa: BLE001 - shown here, and told by the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def refuse_processes() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def test_a_thread_that_cannot_be_started_is_a_shortage_in_words() -> None:
    def work() -> None:
        refuse_processes()
        with pytest.raises(ShortageError, match=r"^cannot start a thread: out of memory, ") as caught:
            Deadline().call(lambda: 4711)
        assert "systemctl show yunion-mps-daemon" in caught.value.hint

    in_a_child(work)


def test_kept_threads_work_at_a_process_limit() -> None:
    def work() -> None:
        deadline, gate = Deadline(), threading.Event()
        assert deadline.call(lambda: 1) == 1
        refuse_processes()
        for number in range(100):
            assert deadline.call(lambda number=number: number) == number  # type: ignore[misc]
        threads.start_thread(gate.wait, threads.ignore_outcome)
        with pytest.raises(ShortageError):
            deadline.call(lambda: 2)

    in_a_child(work)


def test_work_that_runs_out_of_memory_is_a_shortage_in_words() -> None:
    def work() -> None:
        raise MemoryError

    with pytest.raises(ShortageError, match=r"^out of memory$"):
        Deadline().call(work)


def test_few_threads_are_kept_after_a_crowd() -> None:
    gate, ended = threading.Event(), SimpleQueue[None]()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        threads.start_thread(gate.wait, lambda _, __: ended.put(None))
    gate.set()
    for _ in range(50):
        ended.get(timeout=PATIENCE_S)
    eventually(lambda: len(os.listdir("/proc/self/task")) <= before + 4)


#: A machine under load: what starts a thread goes on long before the thread does.
LATE_THREAD = """
import atexit, _thread, time
atexit.register(print, "end")
from yunion_mps.host import threads

def start_late(run, arguments, start=_thread.start_new_thread):
    def late():
        time.sleep(0.2)
        print("begun", flush=True)
        run(*arguments)
    start(late, ())

_thread.start_new_thread = start_late
threads.start_thread(time.time, threads.ignore_outcome)
"""


def test_the_end_of_the_process_waits_until_every_thread_has_begun() -> None:
    """In Python 3.11, one that begins later ends the process by SIGABRT."""
    done = subprocess.run([sys.executable, "-c", LATE_THREAD], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun", "end"]
