"""Leases under load: many jobs at a time, and deaths of jobs and of the daemon."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.units import seconds

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually
from integration.lease_host import (
    ADDRESSES,
    await_queue,
    end_job,
    holders,
    leased_addresses,
    queued_requests,
    start_job,
)

pytestmark = pytest.mark.gpus({"kind": "v100"})

#: More jobs at a time than there are devices, each a process of its own, over and over.
_RUNS, _AT_A_TIME, _DEVICES = 60, 16, 8
#: So many devices are leased to others at first, and one fewer after so many jobs: so there is a queue.
_HELD, _A_DEVICE_MORE_AFTER = 7, 8
#: The daemon is killed with every twentieth job, and one of those who wait or run with every tenth.
_DAEMON_KILLS, _CLIENT_KILLS = 20, 10
#: Says which device it has, holds a lock on it that no other job may hold, and ends in one of several ways.
_JOB = """\
import fcntl, os, random, signal, sys, time
folder, number = sys.argv[1:]
device = os.environ["YUNION_MPS_DEVICE"]
lock = os.open(os.path.join(folder, device), os.O_CREAT | os.O_RDWR)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open(os.path.join(folder, "twice"), "a").write(f"{device} {number}\\n")
time.sleep(random.Random(int(number)).uniform(0, 0.3))
if int(number) % 5 == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


#: Of the times of the API.
_TIME_UNIT_S = 0.001


class Order:
    """Knows who waits since when, and checks at the end whether each lease was given to whose turn it was.

    Regular listings show who waits, and the daemon's events show when and to whom each lease was granted.
    If a job got its lease between two listings, its place is unknown, but is no earlier than the job's start.
    """

    def __init__(self) -> None:
        self.begun_s: dict[int, float] = {}
        self.killed: set[int] = set()
        self.longest = 0
        self._since_s: dict[int, float] = {}
        #: For each daemon: its start, and when each job was first seen to wait for it.
        self._daemons: list[tuple[float, dict[int, float]]] = []

    def begin(self, pid: int) -> None:
        """A job was begun just now."""
        self.begun_s[pid] = time.time()

    def another_daemon(self) -> None:
        """Those who wait come back to it one after another; who is not back yet has no turn."""
        self._daemons.append((time.time(), {}))

    def look(self, daemon: Daemon) -> None:
        waiting = queued_requests(daemon)
        for one in waiting:
            since_s = self._since_s.setdefault(one["pid"], seconds(one["since"]))
            assert since_s == seconds(one["since"]), "a place that was kept, also by the next daemon"
            self._daemons[-1][1].setdefault(one["pid"], time.time())
        assert waiting == sorted(waiting, key=lambda one: str(one["since"]))
        self.longest = max(self.longest, len(waiting))

    def check(self, given_s: dict[int, float]) -> int:
        """Assert that no job was passed, by when each job (PID) was given its lease.

        Returns how many waited while another job was served.
        """
        kept_waiting = set()
        for pid, at_s in given_s.items():
            place_s = self._since_s.get(pid, self.begun_s[pid])
            _, seen_s = [one for one in self._daemons if one[0] <= at_s][-1]
            for other, other_seen_s in seen_s.items():
                if other_seen_s < at_s < given_s.get(other, 0.0) and other not in self.killed:
                    ahead_s = place_s - self._since_s[other]
                    assert ahead_s < _TIME_UNIT_S, f"PID {pid} was served before PID {other}"
                    kept_waiting.add(other)
        return len(kept_waiting)


def given_in_all(daemon: Daemon) -> dict[int, float]:
    """When each process (PID) was given its lease, by the daemon's events, in s since 1970."""
    found: dict[int, float] = {}
    after = 0
    while True:
        answer = daemon.get(f"/v1/events?kind=lease&limit=1000&after={after}")[1]
        if not answer["events"]:
            return found
        for event in answer["events"]:
            to = re.match(r"granted to .*\(PID (\d+), ", event["what"])
            if to:
                found[int(to[1])] = seconds(event["time"])
        after = answer["events"][-1]["id"]


@pytest.fixture
def running() -> Iterator[dict[int, subprocess.Popen[str]]]:
    """The jobs that run, by number; a test that fails leaves none behind."""
    jobs: dict[int, subprocess.Popen[str]] = {}
    yield jobs
    for job in jobs.values():
        end_job(job)


def test_60_jobs_on_8_devices_share_none_and_keep_their_order(
    make_host: MakeHost, make_daemon: MakeDaemon, running: dict[int, subprocess.Popen[str]], tmp_path: Path
) -> None:
    host = make_host([{"kind": "v100"}])
    host.divide(_DEVICES)
    daemon = make_daemon(host).start().wait_ready()
    job = tmp_path / "job.py"
    job.write_text(_JOB)
    held = [
        daemon.ask("POST", "/v1/leases", f"holder.name=held-{number}&holder.ttl_s=600")[1]["id"]
        for number in range(_HELD)
    ]
    chance, order = random.Random(5), Order()
    order.another_daemon()
    statuses: dict[int, int] = {}
    begun = daemon_kills = client_kills = 0
    while begun < _RUNS or running:
        order.look(daemon)
        while begun < _RUNS and len(running) < _AT_A_TIME:
            job_words = [sys.executable, "-IS", job, tmp_path, str(begun)]
            command = ["yunion-mps", "run", "--wait=200", "--", *job_words]
            running[begun] = host.popen(command, stderr=subprocess.DEVNULL)
            order.begin(running[begun].pid)
            begun += 1
        if begun >= (client_kills + 1) * _CLIENT_KILLS and client_kills < _RUNS // _CLIENT_KILLS - 1:
            client_kills += 1
            one = running[chance.choice(sorted(running))]
            order.killed.add(one.pid)
            one.kill()
        if begun >= (daemon_kills + 1) * _DAEMON_KILLS and daemon_kills < _RUNS // _DAEMON_KILLS - 1:
            daemon_kills += 1
            daemon.kill()
            order.another_daemon()
            daemon.start().wait_ready()
        for number in [number for number, one in running.items() if one.poll() is not None]:
            one = running.pop(number)
            one.communicate()
            statuses[number] = one.returncode
            if held and len(statuses) % _A_DEVICE_MORE_AFTER == 0:
                daemon.ask("DELETE", f"/v1/leases/{held.pop()}")
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(iter(running.values())).wait(0.03)
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    killed_themselves = {number for number in range(_RUNS) if number % 5 == 0}
    died = {number for number, status in statuses.items() if status == -signal.SIGKILL}
    assert killed_themselves <= died, "each of them has begun"
    assert len(died - killed_themselves) <= client_kills
    assert {status for number, status in statuses.items() if number not in died} == {0}
    assert not held
    eventually(lambda: leased_addresses(daemon) == [], "that all is free")
    assert daemon.get("/v1/devices?unused=true&limit=0")[1]["total"] == _DEVICES
    assert order.longest > _AT_A_TIME // 4, "there was a queue"
    given_s = given_in_all(daemon)
    # A daemon that is killed after it stored a lease and before it recorded that loses the event of this one.
    assert len(given_s) >= _RUNS - client_kills - daemon_kills, "each job that was not killed before"
    assert order.check(given_s) > _RUNS // 25, "so many waited, and were served in their turn"


@pytest.mark.parametrize("how", ["kill", "re-exec", "restart"])
def test_the_next_daemon_serves_the_queue_in_its_order(ready_daemon: Daemon, how: str) -> None:
    host = ready_daemon.host
    jobs = [start_job(host) for _ in ADDRESSES]
    waiting: list[subprocess.Popen[str]] = []
    for _ in ADDRESSES:
        waiting.append(host.popen(["yunion-mps", "run", "--wait", "--", "cat"], stdin=-1, stderr=-1))
        await_queue(ready_daemon, len(waiting))
    if how == "re-exec":
        ready_daemon.messages.clear()
        assert ready_daemon.ask("POST", "/v1/reexec")[0] == 200
        ready_daemon.wait_message("READY=1")
    else:
        ready_daemon.signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        ready_daemon.wait()
        ready_daemon.start().wait_ready()
    await_queue(ready_daemon, len(waiting))
    left = list(waiting)
    for job in jobs:
        end_job(job)
        first = left.pop(0).pid
        eventually(lambda: first in holders(ready_daemon), "that the next one is served")  # noqa: B023 - it is called at once
        assert holders(ready_daemon) & {one.pid for one in left} == set()
    for one in waiting:
        end_job(one)
