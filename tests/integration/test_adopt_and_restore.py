"""`--adopt PID` makes another program's control daemon ours; `--restore` undoes what a killed daemon left."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
from contextlib import closing

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


def test_one_is_adopted_in_a_directory_that_its_script_opened_to_all(
    daemon: Daemon, stranger: subprocess.Popen[str]
) -> None:
    """It may have jobs, so no other directory is used, as it would be without it."""
    daemon.pipe_directory.chmod(0o777)
    assert daemon.run("--adopt", str(stranger.pid)) == 0, daemon.log
    daemon.start().wait_ready()
    assert daemon.control_pid() == stranger.pid
    codes = [problem["code"] for problem in daemon.status()["problems"]]
    assert "pipe_directory" in codes
    assert "directory_taken" not in codes
    assert daemon.stop() == 0
    assert stranger.wait(60) == 0, daemon.log


def test_restore_cleans_up_after_a_killed_daemon(daemon: Daemon, stranger: subprocess.Popen[str]) -> None:
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
        ({"cuda_mps_pipe_directory": "/run/mps/pipe"}, "no control daemon serves it"),
    ],
)
def test_a_control_daemon_that_contradicts_the_files_is_not_adopted(
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
    assert f"PID {stranger.pid} serves it" in daemon.log
    assert daemon.run("--adopt", "all") == 2


def test_our_own_control_daemon_is_not_adopted(ready_daemon: Daemon) -> None:
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


@pytest.fixture
def killed(daemon: Daemon) -> int:
    """A daemon was killed, and its files are broken since; the PID of its control daemon."""
    daemon.start().wait_ready()
    control = daemon.control_pid()
    daemon.kill()
    (daemon.host.root / "etc/yunion/host.conf").write_text("enable_cuda_mps: 3\ncuda_mps_stop_timeout_s: 1\n")
    assert is_running(control)
    return control


def test_its_control_daemon_is_ended_and_the_compute_mode_restored(daemon: Daemon, killed: int) -> None:
    assert daemon.run("--restore") == 0, daemon.log
    assert not is_running(killed)
    assert daemon.host.gpus[0].compute_mode == "default"
    assert f"stopping the control daemon (PID {killed})" in daemon.log
    assert "everything is restored" in daemon.log
    assert not daemon.socket_path.exists()
    assert "Traceback" not in daemon.log
    assert daemon.run("--restore") == 0, daemon.log


def test_a_compute_mode_without_control_daemon_is_restored(daemon: Daemon, killed: int) -> None:
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not is_running(killed))
    assert daemon.run("--restore") == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"


def test_a_copied_mode_counts_for_this_boot_whatever_its_boot_id(daemon: Daemon, killed: int) -> None:
    """As in a container, where the unit's sandbox shows another one than the shell."""
    note = daemon.host.root / "run/yunion-mps/former-compute-modes.json"
    for copy in (note, note.with_name("records.json"), note.with_name("leases.json")):
        copy.write_text(re.sub(r'"boot_id": "[^"]*"', '"boot_id": "another"', copy.read_text()))
    with closing(sqlite3.connect(daemon.host.root / "var/lib/yunion-mps/state.db")) as store, store:
        store.execute("UPDATE former_compute_mode SET boot_id = 'another'")
        store.execute("UPDATE revision SET boot_id = 'another'")
    assert daemon.run("--restore") == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"
    assert not note.exists()


def test_the_command_for_an_unrestored_mode_is_printed(daemon: Daemon, killed: int) -> None:
    daemon.host.fail("nvmlDeviceSetComputeMode", "no_permission")
    assert daemon.run("--restore") == 1
    uuid = daemon.host.gpus[0].uuid
    restore = f"restore it: nvidia-smi -i {uuid} -c DEFAULT"
    assert f"the compute mode of GPU 00:06.0 differs from the original; {restore}" in daemon.log
    assert not is_running(killed)
    daemon.host.clear()
    daemon.host.gpus[0].lose()
    assert daemon.run("--restore") == 1
    reset = f"reset the GPU (nvidia-smi --gpu-reset -i {uuid}) or reboot the host"
    assert f"differs from the original; {reset}, then {restore}" in daemon.log
    daemon.host.gpus[0].restore()
    assert daemon.run("--restore") == 0
    assert daemon.host.gpus[0].compute_mode == "default"


def test_restore_leaves_a_gpu_that_is_not_there_for_later(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    daemon.kill()
    daemon.host.gpus[0].bind("vfio-pci")
    assert daemon.run("--restore") == 0, daemon.log
    assert "its compute mode cannot be restored now: the GPU is bound to the driver vfio-pci" in daemon.log
    daemon.host.gpus[0].bind("nvidia")
    daemon.host.gpus[0].compute_mode = "exclusive_process"
    assert daemon.run("--restore") == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"


def test_restore_refuses_while_a_daemon_runs(ready_daemon: Daemon) -> None:
    other = Daemon(ready_daemon.host, notify=False)
    assert other.run("--restore") == 1
    assert f"another yunion-mps-daemon is already running (PID {ready_daemon.pid})" in other.log
    assert ready_daemon.status()["state"] == "ready"


def test_restore_does_nothing_if_no_daemon_ever_ran(daemon: Daemon) -> None:
    assert daemon.run("--restore") == 0
    assert "nothing to restore" in daemon.log
