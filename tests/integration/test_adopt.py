"""`yunion-mps-daemon --adopt PID`: somebody else's control daemon becomes ours, or it is said why not."""

from __future__ import annotations

import os
import subprocess

import pytest

from integration.conftest import StartStranger
from integration.daemon_host import Daemon, eventually, is_running

LIMITS = [f"get_default_device_pinned_mem_limit {number}" for number in (0, 1)]


def test_it_becomes_ours_and_stays_so_through_a_crash_and_a_reexec(
    daemon: Daemon, stranger: subprocess.Popen[str]
) -> None:
    assert daemon.run("--adopt", str(stranger.pid)) == 0, daemon.log
    assert stranger.poll() is None
    assert daemon.host.gpus[0].compute_mode == "default", "nothing is changed yet"
    daemon.start().wait_ready()
    assert f"adopted the running control daemon (PID {stranger.pid})" in daemon.log
    assert daemon.control_pid() == stranger.pid
    assert daemon.control("get_default_active_thread_percentage") == ["25.0"]
    daemon.kill()
    daemon.start().wait_ready()
    assert daemon.control_pid() == stranger.pid
    assert daemon.ask("POST", "/v1/reexec")[0] in (200, 202)
    daemon.wait_log("re-executing")
    assert daemon.control_pid() == stranger.pid
    assert daemon.stop() == 0
    assert stranger.wait(60) == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default", "we have changed it, so it is restored"


def test_what_a_killed_daemon_left_is_restored_with_it(
    daemon: Daemon, stranger: subprocess.Popen[str]
) -> None:
    assert daemon.run("--adopt", str(stranger.pid)) == 0, daemon.log
    daemon.start().wait_ready()
    daemon.kill()
    assert daemon.run("--restore") == 0, daemon.log
    assert stranger.wait(60) == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"cuda_mps_scope": "gpu"}, "cannot be adopted: cuda_mps_scope is gpu"),
        ({"cuda_mps_pipe_directory": "/run/mps/pipe"}, "none serves there"),
    ],
)
def test_where_the_configuration_asks_for_another_it_is_left_alone(
    daemon: Daemon, stranger: subprocess.Popen[str], keys: dict[str, str], why: str
) -> None:
    daemon.configure(**keys)
    assert daemon.run("--adopt", str(stranger.pid)) == 1
    assert why in daemon.log
    assert "Traceback" not in daemon.log
    assert not (daemon.host.root / "run/yunion-mps/adopted.json").exists()
    assert stranger.poll() is None


def test_only_the_one_that_serves_our_directory_can_be_named(
    daemon: Daemon, stranger: subprocess.Popen[str]
) -> None:
    assert daemon.run("--adopt", str(os.getpid())) == 1
    assert f"PID {stranger.pid} serves there" in daemon.log
    assert daemon.run("--adopt", "all") == 2


def test_one_that_is_ours_is_refused(ready_daemon: Daemon) -> None:
    control = ready_daemon.control_pid()
    other = Daemon(ready_daemon.host, notify=False)
    assert other.run("--adopt", str(control)) == 1
    assert f"the control daemon (PID {control}) is already managed by yunion-mps" in other.log
    assert is_running(control)


@pytest.mark.gpus({"kind": "t4"}, {"kind": "t4"})
def test_if_its_gpu_order_is_uncertain_unequal_limits_wait_for_its_end(
    daemon: Daemon, start_stranger: StartStranger
) -> None:
    """Limits are named by the GPU's number: equal ones can be set in any order, unequal ones cannot."""
    host = daemon.host
    host.divide(4, 4)
    stranger = start_stranger(host)
    assert daemon.run("--adopt", str(stranger.pid)) == 0, daemon.log
    daemon.start().wait_ready()
    assert daemon.control_pid() == stranger.pid
    host.divide(2, 2)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(lambda: daemon.control(*LIMITS) == ["7G", "7G"], "the other limits")
    assert daemon.control_pid() == stranger.pid
    host.divide(2, 4)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert stranger.wait(60) == 0, daemon.log
    eventually(lambda: daemon.status()["state"] == "ready", "another")
    assert daemon.control(*LIMITS) == ["7G", "3G"]
