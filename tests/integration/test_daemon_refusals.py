"""What keeps the daemon from serving: each ends with one clear message, and READY is never said."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from yunion_mps.host.processes import PROGRAM_DIRECTORIES

from integration.daemon_host import Daemon, control_daemons, eventually, is_running

PROGRAM = "nvidia-cuda-mps-control"
#: A control program by which the memory limit is another one than was set.
OTHER_LIMIT = '[ "$1" = -f ] && exec $REAL -f; $REAL | sed "s/^5G$/4G/"'


def refused(daemon: Daemon, code: int) -> list[str]:
    """Run it to its end; returns its last words, and nothing of it is left."""
    assert daemon.run() == code, daemon.log
    assert "READY=1" not in daemon.notifications
    assert "Traceback" not in daemon.log
    assert {gpu.compute_mode for gpu in daemon.host.gpus} == {"default"}
    assert not daemon.socket_path.exists()
    return daemon.log.splitlines()


def test_without_a_driver_it_says_so_and_ends_with_1(daemon: Daemon) -> None:
    daemon.host.hide_library()
    assert refused(daemon, 1) == [
        "<3>no NVIDIA driver: its library libnvidia-ml.so.1 is not installed",
        "<3>install the NVIDIA driver with its libraries, then check it with: nvidia-smi",
    ]


def test_a_bad_configuration_ends_with_6_and_all_its_problems(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_scope="node", cuda_mps_replicas=0)
    devices = daemon.host.root / "etc/yunion/host_container_device.yml"
    devices.write_text("devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: true\n")
    lines = refused(daemon, 6)
    conf = daemon.host.root / "etc/yunion/host.conf"
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"<3>{conf}:2", f"<3>{conf}:3", f"<3>{devices}:4"]
    assert lines[-1] == "<3>fix these lines, then run: yunion-mps config check"


def test_a_missing_control_program_is_named_with_its_packages(daemon: Daemon) -> None:
    if any(os.path.exists(f"{folder}/{PROGRAM}") for folder in PROGRAM_DIRECTORIES):
        pytest.skip("this machine has the program where drivers put it")
    daemon.env["PATH"] = str(Path(shutil.which("yunion-mps-daemon", path=daemon.env["PATH"]) or "").parent)
    *_, message, hint = refused(daemon, 1)
    assert message == f"<3>{PROGRAM} is not installed"
    assert hint.startswith("<3>install it: nvidia-cuda-mps on Debian")


def test_limits_that_are_not_in_effect_are_never_ready(daemon: Daemon) -> None:
    daemon.wrap_control_program(OTHER_LIMIT)
    lines = refused(daemon, 1)
    assert lines[-2] == (
        "<3>the memory limit of device 0 is not in effect: it was set to 5760M, "
        "but the control daemon reports '4G'"
    )
    assert control_daemons(daemon.host.root) == []


@pytest.mark.gpus({"kind": "h100", "count": 2})
def test_if_one_domain_cannot_serve_the_others_do_and_it_says_why(daemon: Daemon) -> None:
    host = daemon.host
    daemon.configure(cuda_mps_scope="gpu")
    link = daemon.pipe_directory / host.gpus[0].uuid
    link.parent.mkdir(parents=True)
    link.symlink_to(host.root)
    os.lchown(link, 65534, 65534)
    link.parent.chmod(0o1777)
    os.chmod(link.parent, 0o755)
    daemon.start()
    daemon.wait_ready()
    status = daemon.status()
    assert [domain["state"] for domain in status["domains"]] == ["failed", "ready"]
    assert status["domains"][0]["reason"] == f"{link} is a symlink, which is not followed"
    counts = {"total": 8, "available": 4, "unavailable": 4, "pending": 0, "used": 0, "free": 4}
    assert status["devices"] == counts
    assert any("4 of 8 devices available, 1 of 2" in line for line in daemon.notifications)
    assert daemon.stop() == 0


def test_another_programs_control_daemon_is_reported_and_left_alone(
    daemon: Daemon, stranger: subprocess.Popen[str]
) -> None:
    daemon.control("set_default_active_thread_percentage 77")
    *_, message, hint = refused(daemon, 1)
    who = f"a control daemon (PID {stranger.pid}, uid {os.getuid()}) not started by yunion-mps"
    assert message == f"<3>{who} serves {daemon.pipe_directory}"
    assert hint.startswith("<3>once its jobs have ended: ")
    assert stranger.poll() is None
    assert daemon.control("get_default_active_thread_percentage") == ["77.0"]
    daemon.control("quit")
    assert stranger.wait(60) == 0
    daemon.start().wait_ready()
    assert daemon.stop() == 0


def test_a_survivor_with_other_limits_is_spared_until_it_has_ours(daemon: Daemon) -> None:
    """Jobs may be at work on it: the daemon neither ends it nor leaves it to itself."""
    daemon.start().wait_ready()
    control = daemon.control_pid()
    daemon.kill()
    wrapper = daemon.wrap_control_program(OTHER_LIMIT)
    daemon.start().wait_ready()
    assert daemon.status()["state"] == "failed"
    assert daemon.get("/v1/devices")[1]["isolated_devices"][0]["state"] == "unavailable"
    assert is_running(control)
    assert daemon.host.gpus[0].compute_mode == "exclusive_process"
    wrapper.unlink()
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(lambda: daemon.status()["state"] == "ready", "the limits in effect")
    assert daemon.control_pid() == control
    assert daemon.stop(signal.SIGTERM) == 0
    assert not is_running(control)
    assert daemon.host.gpus[0].compute_mode == "default"
