"""The event loop: what a fault of our own ends."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Collection

import pytest
from yunion_mps.daemon.loop import serve_until_stop
from yunion_mps.daemon.process import DaemonParts, Signals
from yunion_mps.host.processes import Watchable, drive
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.listener import Listener
from yunion_mps.supervisor import Supervisor

from unit.supervised import MakeHost, Supervise, modes


class Faulty(Supervisor):
    """A supervisor with a fault in it, once it is told to have one."""

    fault = False
    #: Whether the last tick could wait for the state file.
    may_wait = False

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        self.may_wait = self.store().may_wait
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
    faulty.fault = faulty.may_wait = True
    try:
        fault = pytest.raises(ZeroDivisionError, match="a fault of our own")
        with contextlib.closing(Listener(made.paths)) as listener, fault:
            serve_until_stop(DaemonParts(made.paths, listener, faulty, Notifier(), signals, time.time()))
    finally:
        signals.close()
        gc.unfreeze()
        faulty.fault = False
    assert not faulty.may_wait
    drive(faulty, lambda: True)
    assert faulty.may_wait, "a stop waits for a lock, until its deadline"
    assert made.snapshot.domains[0].pid == pid
    assert made.snapshot.domains[0].state == "ready"
    assert modes(host) == ["exclusive_process"]
