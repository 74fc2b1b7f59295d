"""`yunion-mps-daemon --restore`: what a daemon that was killed has left is undone, with broken files too."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from contextlib import closing

import pytest

from integration.daemon_host import Daemon, eventually, is_running


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
    assert f"ending the control daemon (PID {killed})" in daemon.log
    assert "everything is restored" in daemon.log
    assert not daemon.socket_path.exists()
    assert "Traceback" not in daemon.log
    assert daemon.run("--restore") == 0, daemon.log


def test_where_only_the_mode_is_left_it_is_restored(daemon: Daemon, killed: int) -> None:
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not is_running(killed))
    assert daemon.run("--restore") == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"


def test_a_note_is_of_this_boot_whatever_boot_id_it_has(daemon: Daemon, killed: int) -> None:
    """As in a container, where the unit's sandbox shows another one than the shell."""
    note = daemon.host.root / "run/yunion-mps/former-compute-modes.json"
    other = re.sub(r'"boot_id": "[^"]*"', '"boot_id": "another"', note.read_text())
    note.write_text(other)
    with closing(sqlite3.connect(daemon.host.root / "var/lib/yunion-mps/state.db")) as store, store:
        store.execute("UPDATE former_compute_mode SET boot_id = 'another'")
    assert daemon.run("--restore") == 0, daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"
    assert not note.exists()


def test_where_a_mode_cannot_be_restored_the_command_is_named(daemon: Daemon, killed: int) -> None:
    daemon.host.fail("nvmlDeviceSetComputeMode", "no_permission")
    assert daemon.run("--restore") == 1
    uuid = daemon.host.gpus[0].uuid
    assert f"restore it: nvidia-smi -i {uuid} -c DEFAULT" in daemon.log
    assert not is_running(killed)
    daemon.host.clear()
    assert daemon.run("--restore") == 0
    assert daemon.host.gpus[0].compute_mode == "default"


def test_while_a_daemon_runs_it_refuses(ready_daemon: Daemon) -> None:
    other = Daemon(ready_daemon.host, notify=False)
    assert other.run("--restore") == 1
    assert f"another yunion-mps-daemon is already running (PID {ready_daemon.pid})" in other.log
    assert ready_daemon.status()["state"] == "ready"


def test_where_no_daemon_has_ever_run_there_is_nothing_to_do(daemon: Daemon) -> None:
    assert daemon.run("--restore") == 0
    assert "nothing to restore" in daemon.log
