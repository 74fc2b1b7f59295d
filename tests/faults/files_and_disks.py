"""Faults of files, directories and disks."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

from faults.fault_table import PLACES, fault
from faults.scene import FORMER_MODE, Scene, until
from faults.tampering import FullDisk, hang
from simhost.mps import Client


def _clean(scene: Scene) -> None:
    """Remove the sockets as an age-based cleaning of /tmp does: what is open stays open."""
    for name in ("control", "control_privileged"):
        (scene.pipe_directory / name).unlink()


@fault(PLACES, "the control daemon's sockets are removed (cleaning of /tmp), no job", takes_s=13)
def sockets_removed(scene: Scene) -> None:
    scene.serve()
    old = scene.control
    scene.inject(lambda: _clean(scene))
    scene.another_serves(old)
    scene.record_report("does not serve")


@fault(PLACES, "the control daemon's sockets are removed (cleaning of /tmp) while a job runs", takes_s=20)
def sockets_removed_with_a_job(scene: Scene) -> None:
    _removed_under(scene, scene.serve().job())


@fault(PLACES, "the same, and NVML hangs for 30 s from before the job starts", takes_s=45)
def sockets_removed_while_nvml_hangs(scene: Scene) -> None:
    """It is unknown then which processes use the GPUs, so nothing is ended."""
    scene.serve()
    hang(scene, "*RunningProcesses*")
    _removed_under(scene, scene.job())


def _removed_under(scene: Scene, job: Client) -> None:
    """Nothing is ended that may serve the job."""
    old = scene.control
    scene.inject(lambda: _clean(scene))
    scene.expect_report("which may have jobs")
    assert scene.control == old
    scene.repair(lambda: scene.end(job), "the job has ended")
    scene.another_serves(old)


@fault(PLACES, "the pipe directory is replaced by a symlink of another user", takes_s=13)
def symlink(scene: Scene) -> None:
    scene.serve()
    pipes, elsewhere = _elsewhere(scene)
    scene.inject(lambda: _replace(pipes, elsewhere, owner=65534))
    # Not the report on the path, which may come before or after.
    scene.expect_report("is a symlink of nobody, which is not followed): its devices are not served")
    scene.serves_again()
    assert list(elsewhere.iterdir()) == [], "it was not followed"


@fault(PLACES, "the pipe directory is replaced by a symlink of the administrator", takes_s=13)
def own_symlink(scene: Scene) -> None:
    scene.serve()
    old = scene.control
    pipes, elsewhere = _elsewhere(scene)
    scene.inject(lambda: _replace(pipes, elsewhere, owner=0))
    scene.another_serves(old)
    scene.record_report("does not serve")
    assert (elsewhere / "control").exists(), "it was followed"


def _elsewhere(scene: Scene) -> tuple[Path, Path]:
    """The pipe directory, and an empty one."""
    pipes = scene.pipe_directory
    elsewhere = pipes.with_name("elsewhere")
    elsewhere.mkdir()
    return pipes, elsewhere


def _replace(pipes: Path, elsewhere: Path, owner: int) -> None:
    pipes.rename(pipes.with_name("aside"))
    pipes.symlink_to(elsewhere)
    os.lchown(pipes, owner, owner)


@fault(PLACES, "the disk of the log directory is full, and the control daemon is killed")
def log_disk(scene: Scene) -> None:
    _with_a_full_disk(scene, "tmp/nvidia-mps/log")
    scene.record_report("was killed by signal 9")


@fault(PLACES, "the disk of the state directory is full, and the control daemon is killed")
def state_disk(scene: Scene) -> None:
    _with_a_full_disk(scene, "var/lib/yunion-mps")
    scene.record_report("disk is full")


@fault(PLACES, "the disk of the state directory is full, the control daemon is killed, and then the daemon")
def state_disk_and_death(scene: Scene) -> None:
    """What happened while nothing could be written is in the record of the next daemon."""
    disk = scene.stack.enter_context(FullDisk(scene, "var/lib/yunion-mps"))
    scene.serve()
    disk.fill()
    scene.kill_control_daemon()
    assert "events_not_written" in scene.daemon.warnings().values()
    scene.remember_events()
    assert any("was killed by signal 9" in event["cause"] for event in scene.known_events)
    scene.record_report("disk is full")
    scene.daemon.kill()
    disk.make_room()
    scene.serve()


@fault(PLACES, "the disk of the state directory is full, and the daemon is stopped")
def state_disk_at_stop(scene: Scene) -> None:
    disk = scene.stack.enter_context(FullDisk(scene, "var/lib/yunion-mps"))
    scene.serve()
    disk.fill()
    scene.inject(lambda: None)
    assert scene.daemon.stop() == 0
    assert scene.host.gpus[0].compute_mode == FORMER_MODE
    scene.note_recovery("the compute modes are restored; ")
    scene.expect_report("its record could not be deleted")
    disk.make_room()
    scene.repair(scene.serve, "there is room again")
    scene.serves_again()


@fault(PLACES, "the disk of the run directory is full, and the control daemon is killed")
def run_disk(scene: Scene) -> None:
    _with_a_full_disk(scene, "run/yunion-mps")
    scene.record_report("was killed by signal 9")


def _with_a_full_disk(scene: Scene, directory: str) -> None:
    disk = scene.stack.enter_context(FullDisk(scene, directory))
    scene.serve()
    disk.fill()
    scene.kill_control_daemon()
    disk.make_room()


@fault(PLACES, "the disks of log, state and run directories are full, and the daemon is killed")
def all_disks(scene: Scene) -> None:
    places = ("tmp/nvidia-mps/log", "var/lib/yunion-mps", "run/yunion-mps")
    disk = scene.stack.enter_context(FullDisk(scene, *places))
    scene.serve()
    control = scene.control
    disk.fill()
    scene.inject(scene.daemon.kill)
    scene.serve()
    scene.serves_again(lambda: scene.control == control)
    scene.record_report("disk is full")
    assert "events_not_written" in scene.daemon.warnings().values()
    disk.make_room()
    scene.repair(lambda: None, "there is room again")
    until(lambda: not scene.daemon.warnings(), "no warning", scene.trouble)
    scene.note("all is recorded after {}")


@fault(PLACES, "the daemon is killed, and its state file is damaged")
def torn(scene: Scene) -> None:
    """Events since the boot are known from their copy, older ones are in the file that is kept aside."""
    scene.serve()
    scene.remember_events()
    state = scene.host.root / "var/lib/yunion-mps/state.db"
    scene.daemon.kill()
    with sqlite3.connect(state) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    os.truncate(state, state.stat().st_size // 2)
    scene.inject(scene.serve)
    scene.serves_again()
    scene.record_report("could not be read")


@fault(PLACES, "the daemon is killed, and the state file is of a newer version")
def newer(scene: Scene) -> None:
    scene.serve()
    scene.remember_events()
    scene.daemon.kill()
    state = scene.host.root / "var/lib/yunion-mps/state.db"
    _set_version(state, 99)
    scene.inject(lambda: None)
    assert scene.daemon.run() == 1
    scene.expect_report("was written by a newer yunion-mps")
    _set_version(state, 2)
    scene.repair(scene.serve, "that version is installed")
    scene.serves_again()


def _set_version(state: object, version: int) -> None:
    connection = sqlite3.connect(str(state))
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


@fault(PLACES, "the API's socket is removed")
def api_socket_removed(scene: Scene) -> None:
    scene.serve(WATCHDOG_USEC="400000")
    scene.inject(scene.daemon.socket_path.unlink)
    until(scene.daemon.socket_path.exists, "another socket", scene.trouble)
    scene.serves_again()
    scene.record_report("was removed; creating it again")


@fault(PLACES, "the pipe and log directories are removed")
def directories_removed(scene: Scene) -> None:
    scene.serve()
    shutil.rmtree(scene.host.root / "tmp/nvidia-mps")
    scene.kill_control_daemon()
    scene.record_report("was killed by signal 9")
