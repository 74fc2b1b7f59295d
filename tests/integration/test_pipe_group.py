"""`cuda_mps_pipe_group`: only members of a group reach the control daemon."""

from __future__ import annotations

import grp
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from integration.conftest import MakeAtWork, MakeDaemon
from integration.daemon_host import Daemon, eventually
from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.mps import StandIns

STRANGER = 65534
GROUP = "daemon"
GID = grp.getgrnam(GROUP).gr_gid

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users"),
    pytest.mark.gpus({"kind": "v100"}),
]


@pytest.fixture
def jobs(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as made:
        yield made


def end_servers(jobs: StandIns) -> None:
    """Have servers end, which stay when their last client is gone."""
    for pid in jobs.servers():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def restricted_daemon(jobs: StandIns, host: SimHost, make_daemon: MakeDaemon) -> Daemon:
    """A daemon whose pipe directory only one group may enter."""
    daemon = make_daemon(host)
    daemon.configure(cuda_mps_pipe_group=GROUP)
    return daemon.start().wait_ready()


def job_outcome(daemon: Daemon, *groups: int) -> str:
    """What becomes of a job of another user with these groups: the last thing that it says."""
    command = [os.path.realpath(sys.executable), "-IS", str(CHECKOUT / "tests/simhost/mps_client.py")]
    env = {**daemon.env, "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe_directory)}
    folder = os.open(CHECKOUT / "tests/simhost", os.O_PATH)  # which that user may not reach by its path
    command[-1] = f"/proc/self/fd/{folder}/mps_client.py"
    with subprocess.Popen(
        command, env=env, user=STRANGER, group=STRANGER, extra_groups=groups, pass_fds=[folder],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as job:  # fmt: skip
        os.close(folder)
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said = line.strip()
            if said == "attached":
                job.terminate()
    return said


def test_only_members_of_the_group_reach_the_control_daemon(restricted_daemon: Daemon) -> None:
    assert job_outcome(restricted_daemon).startswith("PermissionError: [Errno 13] Permission denied")
    assert job_outcome(restricted_daemon, GID) == "attached"
    assert restricted_daemon.stop() == 0


@pytest.mark.parametrize("restart", [False, True])
def test_a_control_daemon_without_the_group_is_replaced(
    jobs: StandIns, daemon: Daemon, restart: bool
) -> None:
    """Its servers would not have the group either, and could not serve in the closed directory."""
    daemon.configure()
    daemon.start().wait_ready()
    before = daemon.control_pid()
    assert job_outcome(daemon) == "attached"
    end_servers(jobs)
    daemon.configure(cuda_mps_pipe_group=GROUP)
    if restart:
        daemon.kill()
        daemon.start().wait_ready()
    else:
        assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(lambda: daemon.pipe_directory.stat().st_mode & 0o777 == 0o710, trouble=lambda: daemon.log)
    eventually(lambda: daemon.status()["state"] == "ready", trouble=lambda: daemon.log)
    assert daemon.control_pid() != before
    assert job_outcome(daemon, GID) == "attached"
    assert job_outcome(daemon).startswith("PermissionError")
    assert daemon.stop() == 0


@pytest.mark.parametrize("restart", [False, True])
def test_without_the_group_the_directory_is_open_again(restricted_daemon: Daemon, restart: bool) -> None:
    restricted_daemon.configure()
    if restart:
        restricted_daemon.kill()
        restricted_daemon.start().wait_ready()
    else:
        assert restricted_daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(
        lambda: restricted_daemon.pipe_directory.stat().st_mode & 0o777 == 0o755,
        trouble=lambda: restricted_daemon.log,
    )
    eventually(lambda: restricted_daemon.status()["state"] == "ready", trouble=lambda: restricted_daemon.log)
    assert job_outcome(restricted_daemon) == "attached"
    assert restricted_daemon.stop() == 0


def test_the_group_is_pending_while_a_job_runs(make_at_work: MakeAtWork) -> None:
    daemon, jobs, job = make_at_work()
    control = daemon.control_pid()
    daemon.configure(cuda_mps_pipe_group=GROUP)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    pending = [domain["pending"] for domain in daemon.status()["domains"] if domain["pid"] == control]
    assert "the control daemon waits for the MPS server (PID" in pending[0]
    assert daemon.pipe_directory.stat().st_mode & 0o777 == 0o755
    job.end()
    end_servers(jobs)
    eventually(lambda: daemon.pipe_directory.stat().st_mode & 0o777 == 0o710, trouble=lambda: daemon.log)
    assert daemon.stop() == 0
