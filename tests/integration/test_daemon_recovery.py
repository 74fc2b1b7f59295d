"""What the daemon survives: the control daemon's death, its own, and being told to do nothing at all."""

from __future__ import annotations

import os
import signal

import pytest

from integration.conftest import MakeAtWork
from integration.daemon_host import Daemon, control_daemons, eventually
from unit.mps.front_ends import full_queue

LIMITS = ("get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage")


def descriptors_of(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_systemd_is_told_of_lost_control_daemons_and_nothing_leaks(ready_daemon: Daemon) -> None:
    """The second death in a row is followed by a pause, so that there is something to see."""

    def recovered(restarts: int) -> bool:
        status = ready_daemon.status()
        return bool(status["state"] == "ready" and status["domains"][0]["restarts"] == restarts)

    nothing = "STATUS=0 of 4 devices available, 0 of 1 control daemons serving; "
    first, before = ready_daemon.control_pid(), descriptors_of(ready_daemon)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: recovered(1), "another control daemon")
    second = ready_daemon.control_pid()
    os.kill(second, signal.SIGKILL)
    ready_daemon.wait_message(f"{nothing}the control daemon (PID {second}) was killed by signal 9")
    eventually(lambda: recovered(2), "a third one")
    eventually(lambda: descriptors_of(ready_daemon) <= before, "no more descriptors than before")
    assert ready_daemon.notifications.count("READY=1") == 1
    assert ready_daemon.stop() == 0


def test_the_next_daemon_starts_also_if_what_it_finds_is_just_ending(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    control = daemon.control_pid()
    daemon.kill()
    os.kill(control, signal.SIGSTOP)  # so that it is found, and does not answer before its end
    daemon.start().wait_log(f"adopted the running control daemon (PID {control})")
    os.kill(control, signal.SIGKILL)
    daemon.wait_ready()
    assert daemon.control_pid() != control
    assert daemon.control(*LIMITS) == ["5G", "25.0"]
    assert daemon.stop() == 0


@pytest.mark.parametrize("driver", [True, False])
def test_disabled_it_stays_up_serves_an_empty_list_and_says_why(daemon: Daemon, driver: bool) -> None:
    if not driver:
        daemon.host.hide_library()
    daemon.write_host_conf({"enable_cuda_mps": False})
    daemon.start().wait_ready()
    conf = f"{daemon.host.root}/etc/yunion/host.conf"
    why = f"MPS is disabled: enable_cuda_mps is false in {conf}"
    assert daemon.get("/v1/devices") == (200, {"isolated_devices": [], "total": 0, "limit": 20, "offset": 0})
    status = daemon.status()
    assert (status["state"], status["notice"]) == ("disabled", why)
    assert f"STATUS={why}" in daemon.notifications
    assert why in daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"
    assert control_daemons(daemon.host.root) == []
    assert daemon.stop() == 0
    assert not (daemon.host.root / "tmp/nvidia-mps").exists()


def test_a_hidden_control_daemon_outlives_a_re_exec_but_not_a_stop(make_at_work: MakeAtWork) -> None:
    daemon, jobs, job = make_at_work(cuda_mps_stop_timeout_s=1)
    control = daemon.control_pid()
    with full_queue(str(daemon.pipe_directory)):
        assert daemon.ask("POST", "/v1/reexec")[0] == 200
        eventually(
            lambda: "its queue is full" in daemon.status()["domains"][0]["reason"],
            "its cause",
            trouble=lambda: daemon.log,
        )
        assert daemon.control_pid() == control
        assert daemon.host.gpus[0].compute_mode == "exclusive_process"
        assert daemon.stop() == 0
    assert control_daemons(daemon.host.root) == []
    assert job.says() == "server gone"
    assert jobs.servers() == []
    assert daemon.host.gpus[0].compute_mode == "default"
