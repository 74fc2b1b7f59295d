"""Leases under load: many jobs at a time, and deaths of jobs and of the daemon."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually
from integration.test_leases import ADDRESSES, ask, end, given, start
from simhost import SimHost


@pytest.fixture
def host(make_host: MakeHost) -> SimHost:
    """One Tesla V100, divided by four: `run` starts nothing on the reference case, which has no limits."""
    return make_host([{"kind": "v100"}])


#: More jobs at a time than there are devices, each a process of its own, over and over.
_RUNS, _AT_A_TIME, _DEVICES = 500, 50, 48
#: So many devices are somebody else's at first, and one fewer after so many jobs: so there is a queue.
_HELD, _A_DEVICE_MORE_AFTER = 44, 11
#: The daemon is killed with every hundredth job, and one of those who wait or run with every twentieth.
_DAEMON_KILLS, _CLIENT_KILLS = 100, 20
#: Says which device it has, holds a lock on it that nobody else may hold, and ends in one of several ways.
_JOB = """\
import fcntl, os, random, signal, sys, time
folder, number = sys.argv[1:]
device = os.environ["YUNION_MPS_DEVICE"]
lock = os.open(os.path.join(folder, device), os.O_CREAT | os.O_RDWR)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open(os.path.join(folder, "twice"), "a").write(f"{device} {number}\\n")
time.sleep(random.Random(int(number)).uniform(0, 0.6))
if int(number) % 5 == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Order:
    """Looks, as often as it is asked to, whether those who wait for the same are served as they came.

    What it compares are two looks at the same daemon: who waits in the first and not in the second has been
    served or was killed, and must have come before all who still wait; who has come and been served between
    the two must not have passed one who waits in both.
    """

    def __init__(self) -> None:
        self.killed: set[int] = set()
        self.longest = self.served = 0
        self._since_s: dict[int, float] = {}
        self._waiting: list[int] = []
        self._known: set[int] | None = None
        self._straddling: set[int] = set()

    def look(self, daemon: Daemon) -> None:
        answer = ask(daemon, "GET", "/v1/leases")[1]
        waiting = [one["pid"] for one in answer["waiting"]]
        for one in answer["waiting"]:
            since_s = self._since_s.setdefault(one["pid"], one["since"])
            assert since_s == one["since"], "a place that was kept, also by the next daemon"
        assert waiting == sorted(waiting, key=lambda pid: self._since_s[pid])
        holders = {lease["pid"] for lease in answer["leases"]}
        if self._known is not None:
            gone = [pid for pid in self._waiting if pid not in waiting and pid not in self.killed]
            still = [pid for pid in self._waiting if pid in waiting]
            if gone and still:
                assert self._waiting.index(gone[-1]) < self._waiting.index(still[0]), (
                    "first come, first served"
                )
            if still:
                known = self._known | self.killed | self._straddling
                assert holders <= known, "who comes now passes nobody"
            self.served += len(gone)
        self.longest = max(self.longest, len(waiting))
        self._waiting, self._known = waiting, {*waiting, *holders}

    def forget(self, begun: Iterable[int]) -> None:
        """The daemon is another: of those `begun` (PIDs) before, one may come back to a place never seen."""
        self._known = None
        self._straddling = set(begun)


def test_of_500_jobs_on_48_devices_none_shares_all_end_and_the_queue_is_in_order_whatever_is_killed(
    make_host: MakeHost, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    host = make_host([{"kind": "v100"}])
    host.divide(_DEVICES)
    daemon = make_daemon(host).start().wait_ready()
    job = tmp_path / "job.py"
    job.write_text(_JOB)
    held = [ask(daemon, "POST", f"/v1/leases?name=held-{number}&ttl=600")[1]["id"] for number in range(_HELD)]
    chance, order = random.Random(5), Order()
    running: dict[int, subprocess.Popen[str]] = {}
    statuses: dict[int, int] = {}
    begun = daemon_kills = client_kills = 0
    while begun < _RUNS or running:
        order.look(daemon)
        while begun < _RUNS and len(running) < _AT_A_TIME:
            command = [
                "yunion-mps",
                "run",
                "--wait=200",
                "--",
                sys.executable,
                "-IS",
                job,
                tmp_path,
                str(begun),
            ]
            running[begun] = host.popen(command, stderr=subprocess.DEVNULL)
            begun += 1
        if begun >= (client_kills + 1) * _CLIENT_KILLS and client_kills < _RUNS // _CLIENT_KILLS - 1:
            client_kills += 1
            one = running[chance.choice(sorted(running))]
            order.killed.add(one.pid)
            one.kill()
        if begun >= (daemon_kills + 1) * _DAEMON_KILLS and daemon_kills < _RUNS // _DAEMON_KILLS - 1:
            daemon_kills += 1
            daemon.kill()
            daemon.start().wait_ready()
            order.forget(one.pid for one in running.values())
        for number in [number for number, one in running.items() if one.poll() is not None]:
            one = running.pop(number)
            one.communicate()
            statuses[number] = one.returncode
            if held and len(statuses) % _A_DEVICE_MORE_AFTER == 0:
                ask(daemon, "DELETE", f"/v1/leases/{held.pop()}")
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(iter(running.values())).wait(0.01)
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    killed_themselves = {number for number in range(_RUNS) if number % 5 == 0}
    died = {number for number, status in statuses.items() if status == -signal.SIGKILL}
    assert killed_themselves <= died, "each of them has begun"
    assert len(died - killed_themselves) <= client_kills
    assert {status for number, status in statuses.items() if number not in died} == {0}
    assert not held
    eventually(lambda: given(daemon) == [], "that all is free")
    assert daemon.get("/v1/devices?unused=true&limit=0")[1]["total"] == _DEVICES
    assert order.longest > _AT_A_TIME // 2, "there was a queue"
    assert order.served > _RUNS // 20, "so many were seen to be served in their order"


def test_those_who_wait_are_served_in_the_order_of_their_coming_also_by_the_next_daemon(
    ready_daemon: Daemon,
) -> None:
    host = ready_daemon.host
    jobs = [start(host) for _ in ADDRESSES]
    waiting: list[subprocess.Popen[str]] = []
    for _ in ADDRESSES:
        waiting.append(host.popen(["yunion-mps", "run", "--wait", "--", "cat"], stdin=-1, stderr=-1))
        wait_until_wait(ready_daemon, len(waiting))
    ready_daemon.kill()
    ready_daemon.start().wait_ready()
    wait_until_wait(ready_daemon, len(waiting))
    left = list(waiting)
    for job in jobs:
        end(job)
        first = left.pop(0).pid
        eventually(lambda: first in holders(ready_daemon), "that the next one is served")  # noqa: B023 - it is called at once
        assert holders(ready_daemon) & {one.pid for one in left} == set()
    for one in waiting:
        end(one)


def wait_until_wait(daemon: Daemon, number: int) -> None:
    """Wait until so many wait for a device."""
    eventually(lambda: len(ask(daemon, "GET", "/v1/leases")[1]["waiting"]) == number, f"{number} that wait")


def holders(daemon: Daemon) -> set[int]:
    return {lease["pid"] for lease in ask(daemon, "GET", "/v1/leases")[1]["leases"]}
