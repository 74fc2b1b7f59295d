"""A fault of our own ends the loop, and so the daemon, but no control daemon and no job."""

from __future__ import annotations

import gc
import os
import time
from contextlib import closing

import pytest
from yunion_mps.daemon.loop import serve
from yunion_mps.daemon.process import Signals
from yunion_mps.host.processes import drive
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.listener import Listener
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor import Supervisor

from unit.supervised import MakeHost, Supervise, modes


class Faulty(Supervisor):
    """A supervisor with a fault in it, once it is told to have one."""

    fault = False

    def tick(self, now_s: float) -> float | None:
        if self.fault:
            raise ZeroDivisionError("a fault of our own")
        return super().tick(now_s)


def test_a_fault_in_a_tick_ends_the_loop_and_leaves_control_daemon_and_modes_as_they_are(
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
        with closing(Listener(made.paths)) as listener, fault:
            serve(made.paths, listener, faulty, service, Notifier(), signals)
    finally:
        signals.close()
        gc.unfreeze()
        faulty.fault = False
    drive(faulty, lambda: True)
    assert made.snapshot.domains[0].pid == pid
    assert made.snapshot.domains[0].state == "ready"
    assert modes(host) == ["exclusive_process"]
