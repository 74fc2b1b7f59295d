"""`yunion-mps top`, `who` and `status` with the real daemon, its leases, and jobs that come and go."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest

from integration.conftest import MakeDaemon
from integration.daemon_host import Daemon, is_running
from integration.test_cli_host import output_of
from integration.test_screens import TOP
from integration.tmux import Tmux
from simhost import SimHost
from simhost.host import IN_UNITS
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100", "virtual_number": 2})


@pytest.fixture
def busy(host: SimHost, make_daemon: MakeDaemon) -> Iterator[tuple[Daemon, StandIns]]:
    """A V100 divided by two, whose budgets are kept, with stand-ins for jobs."""
    with StandIns(host) as jobs:
        yield make_daemon(host).start().wait_ready(), jobs


def test_jobs_of_the_real_daemon_come_and_go_and_use_outside_mps_is_named(
    busy: tuple[Daemon, StandIns],
) -> None:
    daemon, jobs = busy
    host = daemon.host
    with Tmux(host.env, 100, 30) as screen:
        screen.type(TOP, "Enter")
        screen.wait(r"1 GPU; 2 devices: 0 used, 2 free; 0 leases; 0 processes")
        host.env["YUNION_MPS_DEVICE"] = "00:06.0-1"
        job = jobs.attached(daemon.pipe_directory)
        host.gpus[0].add_process(job.pid, 4096, "M+C")
        screen.wait(rf"^00:06\.0-1 .* 4\.0 .* root +{job.pid} ")
        screen.wait(r"2 devices: 1 used, 1 free; 0 leases; 1 process$")
        host.gpus[0].add_process(os.getpid(), 700, "C")
        screen.wait(rf"^Problem: PID {os.getpid()} of root .* uses GPU 00:06.0 \(700 MiB\)")
        host.gpus[0].add_process(job.pid, 9000, "M+C")
        screen.wait(rf"^Problem: 00:06.0-1 uses 9000 of \d+ MiB: PID {job.pid} of root")
        status, who = output_of(host, "status"), output_of(host, "who")
        for text in (status, who):
            over = rf"^Problem: +00:06.0-1 uses 9000 of \d+ MiB: PID {job.pid} "
            assert re.search(over, text, re.MULTILINE)
            assert re.search(rf"^Problem: +PID {os.getpid()} of root .*uses GPU ", text, re.MULTILINE)
        assert "; 2 processes, 1 outside MPS\n" in status
        assert re.search(rf"^00:06.0-1 +root +{job.pid} .* over budget ", who, re.MULTILINE)
        host.gpus[0].remove_process(os.getpid())
        job.end()
        host.gpus[0].remove_process(job.pid)
        screen.wait(r"2 devices: 0 used, 2 free; 0 leases; 0 processes")
        assert not any("Problem" in line for line in screen.lines())
        assert daemon.stop() == 0


def test_every_screen_shows_the_free_memory_of_pools(daemon: Daemon) -> None:
    host = daemon.host
    host.divide(IN_UNITS)
    daemon.start().wait_ready()
    with Tmux(host.env, 80, 24) as screen:
        screen.type(TOP, "Enter")
        screen.wait("^1 GPU; 0 devices: 0 used, 0 free; 16.0 GiB free in pools; 0 leases; 0 processes$")
        screen.wait(r"^00:06\.0-m\* +\S+ +16\.0 +free +pool$")
        command = host.popen(["yunion-mps", "run", "--gpu-mem", "6GiB", "--", "sleep", "600"])
        try:
            screen.wait("^1 GPU; 1 device: 1 used, 0 free; 10.0 GiB free in pools; 1 lease; 0 processes$")
            screen.wait(r"^00:06\.0-m\* +\S+ +10\.0 +free +pool$")
            screen.wait(rf"^00:06\.0-m0 .* 6\.0 +root +{command.pid} ")
            for name in ("gpus", "status"):
                assert (
                    "00:06.0: 10240 of 16384 MiB can be leased by root only; "
                    "to lease some: yunion-mps run --gpu-mem SIZE COMMAND\n" in output_of(host, name)
                )
            host.gpus[0].lose()
            screen.wait(r"^00:06\.0-m\* +\S+ +0\.0 +unavail")
            assert "can be leased" not in output_of(host, "gpus") + output_of(host, "status")
        finally:
            command.kill()
            command.communicate()


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop])
def test_top_continues_after_an_interruption_of_the_daemon(
    busy: tuple[Daemon, StandIns], end: Callable[[Daemon], object]
) -> None:
    daemon, _ = busy
    with Tmux(daemon.host.env, 100, 30) as screen:
        screen.type(f"{TOP}; echo left with $?", "Enter")
        screen.wait(r"2 devices: 0 used, 2 free")
        pid = int(screen.tell("pane_pid"))
        end(daemon)
        screen.wait("^Problem: the daemon is not running: ")
        lines = screen.wait(r"^yunion-mps \S+  \S+  no answer since [\d:]{8}; showing the last data$")
        assert "ready" not in lines[0]
        assert any(line.startswith("00:06.0-1 ") for line in lines)
        screen.type("s")
        screen.wait("sort: device")
        daemon.start().wait_ready()
        screen.wait_without("no answer since")
        screen.wait(r"^yunion-mps \S+  \S+  ready ")
        screen.wait("2 devices: 0 used, 2 free")
        assert is_running(pid)
        end(daemon)
        screen.wait("^Problem: the daemon is not running: ")
        screen.type("q")
        screen.wait("^left with 0$")
