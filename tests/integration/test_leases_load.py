"""Leases under load: many jobs at a time, and deaths of jobs and of the daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, eventually
from integration.test_leases import ADDRESSES, ask, end, given, start
from simhost import SimHost

#: As many jobs as there are devices and a few more, each a process of its own, over and over.
_RUNS, _AT_A_TIME, _DEVICES = 500, 50, 48
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
time.sleep(random.Random(int(number)).uniform(0, 0.05))
if int(number) % 5 == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_of_500_jobs_on_48_devices_none_shares_and_all_end_whatever_is_killed(
    make_host: MakeHost, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    host = make_host([{"kind": "v100"}])
    divide(host, _DEVICES)
    daemon = make_daemon(host).start().wait_ready()
    job = tmp_path / "job.py"
    job.write_text(_JOB)
    running: list[subprocess.Popen[str]] = []
    statuses: list[int] = []
    begun = kills = 0
    while begun < _RUNS or running:
        while begun < _RUNS and len(running) < _AT_A_TIME:
            command = [
                "yunion-mps",
                "run",
                "--wait=120",
                "--",
                sys.executable,
                "-IS",
                job,
                tmp_path,
                str(begun),
            ]
            running.append(host.popen(command, stderr=subprocess.PIPE))
            begun += 1
        if begun >= (kills + 1) * 100 and kills < 4:
            kills += 1
            daemon.kill()
            daemon.start().wait_ready()
        finished = [one for one in running if one.poll() is not None]
        for one in finished:
            running.remove(one)
            one.communicate()
            statuses.append(one.returncode)
        if not finished:
            running[0].wait(60)
    assert not (tmp_path / "twice").exists(), (tmp_path / "twice").read_text()
    assert sorted(set(statuses)) == [-signal.SIGKILL, 0]
    assert statuses.count(-signal.SIGKILL) == _RUNS // 5, "each of them has begun"
    eventually(lambda: given(daemon) == [], "that all is free")
    assert daemon.get("/v1/devices?unused=true&limit=0")[1]["total"] == _DEVICES


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


def divide(host: SimHost, number: int) -> None:
    (host.root / "etc/yunion/host_container_device.yml").write_text(
        f"devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: {number}\n"
    )
