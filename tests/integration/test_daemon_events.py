"""The record of what happened, and the daemon's own health."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from typing import Any

from integration.conftest import MakeAtWork
from integration.daemon_host import PATIENCE_S, Daemon, eventually


def events(daemon: Daemon, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.get(f"/v1/events?limit=1000{query}")[1]["events"]
    return found


RECOVERY = ["ready -> backoff", "backoff -> starting", "starting -> applying", "applying -> ready"]


def test_a_death_and_the_recovery_are_told_with_cause_and_consequence(ready_daemon: Daemon) -> None:
    """A client that waits hears of the death at once."""
    control = ready_daemon.control_pid()
    last = ready_daemon.get("/v1/events")[1]["last"]
    heard: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: heard.extend(events(ready_daemon, f"&after={last}&wait_s=60")))
    waiter.start()
    os.kill(control, signal.SIGKILL)
    waiter.join(PATIENCE_S)
    assert heard[0]["what"] == RECOVERY[0]
    eventually(lambda: ready_daemon.status()["domains"][0]["restarts"] == 1, "another control daemon")
    eventually(lambda: ready_daemon.status()["state"] == "ready", "ready")
    told = events(ready_daemon, f"&after={last}&kind=domain")
    assert [event["what"] for event in told] == RECOVERY
    assert told[0]["cause"] == f"the control daemon (PID {control}) was killed by signal 9"
    assert told[0]["consequence"] == "its devices are not served until it has restarted"


def test_events_that_cannot_be_written_are_written_later_in_order(ready_daemon: Daemon) -> None:
    file = ready_daemon.host.root / "var/lib/yunion-mps/state.db"
    control = ready_daemon.control_pid()
    last = ready_daemon.get("/v1/events")[1]["last"]
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("ALTER TABLE event RENAME TO hidden")
        os.kill(control, signal.SIGKILL)
        ready_daemon.wait_log("events cannot be written to disk and are kept in")
        eventually(lambda: ready_daemon.status()["state"] == "ready", "ready: nothing waits for the record")
        other.execute("ALTER TABLE hidden RENAME TO event")
    other.close()
    again = ready_daemon.control_pid()
    os.kill(again, signal.SIGKILL)
    eventually(lambda: ready_daemon.status()["domains"][0]["pid"] not in (None, again), "a third one")
    told = [event["what"] for event in events(ready_daemon, f"&after={last}&kind=domain")]
    assert told[:5] == [*RECOVERY, RECOVERY[0]]


def test_a_stop_waits_for_jobs_as_configured_and_names_those_it_ended(
    make_at_work: MakeAtWork,
) -> None:
    daemon, jobs, client = make_at_work(cuda_mps_stop_timeout_s=1)
    daemon.host.gpus[0].add_process(client.pid, 100, "M+C")
    assert daemon.stop() == 0
    assert client.says() == "server gone"
    assert f"(PID {client.pid}, root) did not end in time: ended its MPS server" in daemon.log
    assert jobs.servers() == []
    assert daemon.host.gpus[0].compute_mode == "default"
