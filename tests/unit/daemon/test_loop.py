"""The event loop: what a fault of our own ends, and the end of its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Collection

import pytest
from yunion_mps.daemon.loop import cancel_all, serve
from yunion_mps.daemon.process import DaemonParts, Signals
from yunion_mps.host.processes import Watchable, drive
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.listener import Listener
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor import Supervisor

from unit.supervised import MakeHost, Supervise, modes


class Faulty(Supervisor):
    """A supervisor with a fault in it, once it is told to have one."""

    fault = False

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        if self.fault:
            raise ZeroDivisionError("a fault of our own")
        return super().tick(now_s, readable)


def test_a_fault_in_a_tick_ends_the_loop_and_no_control_daemon(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "v100"}])
    made = supervise(host)
    made.supervisor = faulty = Faulty(made.paths, made.preflight)
    made.start()
    pid = made.snapshot.domains[0].pid
    os.makedirs(made.paths.run_directory, exist_ok=True)
    signals = Signals()
    faulty.fault = True
    try:
        service = Queries(faulty.snapshot, time.time(), os.getpid())
        fault = pytest.raises(ZeroDivisionError, match="a fault of our own")
        with contextlib.closing(Listener(made.paths)) as listener, fault:
            serve(DaemonParts(made.paths, listener, faulty, service, Notifier(), signals))
    finally:
        signals.close()
        gc.unfreeze()
        faulty.fault = False
    drive(faulty, lambda: True)
    assert made.snapshot.domains[0].pid == pid
    assert made.snapshot.domains[0].state == "ready"
    assert modes(host) == ["exclusive_process"]


_PATIENCE_S = 60.0


async def turns_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(6))
def test_a_task_ends_also_when_it_is_woken_just_then(turns: int) -> None:
    """In some of these turns asyncio.wait_for forgets its cancellation, before Python 3.12."""

    async def main() -> None:
        wake = asyncio.Event()

        async def work() -> None:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(wake.wait(), _PATIENCE_S)
                wake.clear()

        task = asyncio.create_task(work())
        await turns_of_the_loop(5)  # until it waits
        wake.set()
        await turns_of_the_loop(turns)
        await asyncio.wait({asyncio.ensure_future(cancel_all([task]))}, timeout=_PATIENCE_S / 2)
        assert task.cancelled()

    asyncio.run(main())


def test_an_ended_task_keeps_its_fault() -> None:
    async def main() -> None:
        async def work() -> None:
            raise ValueError("a fault")

        task = asyncio.create_task(work())
        await turns_of_the_loop(1)
        await cancel_all([task])
        assert str(task.exception()) == "a fault"

    asyncio.run(main())
