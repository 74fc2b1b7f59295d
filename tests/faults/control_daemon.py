"""Faults of NVIDIA's control daemon itself, and of its program file."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from faults.fault_table import CONTROL_DAEMON, fault
from faults.scene import FORMER_MODE, Scene, until
from faults.tampering import FailingProgram, Tracer
from simhost.mps import CONTROL
from unit.mps.other_processes import stop_process


@fault(CONTROL_DAEMON, "it is killed (SIGKILL)")
def killed(scene: Scene) -> None:
    scene.serve()
    scene.kill_control_daemon()
    scene.record_report("was killed by signal 9")


@fault(CONTROL_DAEMON, "it is stopped (SIGSTOP) while a job runs", takes_s=16)
def stopped(scene: Scene) -> None:
    scene.serve().job()
    old = scene.control
    scene.inject(lambda: stop_process(old))
    scene.expect_report("does not serve")
    scene.serves_again(lambda: scene.control == old)


@fault(CONTROL_DAEMON, "it is stopped again each time it is told to continue", takes_s=18)
def kept_stopped(scene: Scene) -> None:
    """A tracer holds it: no signal but SIGKILL helps then."""
    scene.serve()
    old = scene.control
    with_tracer = Tracer(old)
    scene.inject(with_tracer.attach)
    scene.expect_report("does not serve")
    scene.another_serves(old)
    with_tracer.close()


@fault(CONTROL_DAEMON, "it was killed, and its program exits at the next start")
def exits_once(scene: Scene) -> None:
    scene.serve()
    program = FailingProgram(scene)
    program.fails(once=True)
    scene.kill_control_daemon()
    scene.record_report("exited with status 3")


@fault(CONTROL_DAEMON, "it was killed, and its program exits at every start")
def exits_always(scene: Scene) -> None:
    scene.serve()
    program = FailingProgram(scene)
    program.fails(once=False)
    old = scene.control
    scene.inject(lambda: os.kill(old, signal.SIGKILL))
    scene.expect_report("exited with status 3")
    until(lambda: scene.domain["restarts"] >= 3, "three attempts", scene.trouble)
    scene.repair(program.works, "that is fixed")
    scene.serves_again()


@fault(CONTROL_DAEMON, "its program exits when the daemon starts, and systemd starts the daemon again")
def exits_at_our_start(scene: Scene) -> None:
    program = FailingProgram(scene)
    program.fails(once=False)
    scene.inject(lambda: None)
    assert scene.daemon.run() == 1
    assert scene.host.gpus[0].compute_mode == FORMER_MODE
    scene.expect_report("exited with status 3")
    program.works()
    scene.repair(scene.serve, "that is fixed")
    scene.serves_again()


@fault(CONTROL_DAEMON, "its program exits once when the daemon starts")
def exits_once_at_our_start(scene: Scene) -> None:
    FailingProgram(scene).fails(once=True)
    scene.inject(scene.serve, answers=False)
    scene.serves_again()
    scene.record_report("exited with status 3")


@fault(CONTROL_DAEMON, "it was killed, and its program is missing", takes_s=61)
def missing(scene: Scene) -> None:
    scene.serve()
    old, away = scene.control, scene.control_program.with_name("away")
    scene.control_program.rename(away)
    scene.inject(lambda: os.kill(old, signal.SIGKILL))
    scene.expect_report("cannot be started")
    scene.repair(lambda: away.rename(scene.control_program), "it is installed again")
    scene.serves_again()


@fault(CONTROL_DAEMON, "its program is replaced by a newer version while it runs")
def replaced(scene: Scene) -> None:
    """The running one goes on, also under the next daemon; after its death the new one serves."""
    program = _copied_program(scene)
    scene.serve()
    old, inode = scene.control, program.stat().st_ino
    newer = program.with_name("newer")
    newer.write_bytes(program.read_bytes() + b"\0")
    newer.chmod(0o755)
    scene.inject(lambda: newer.replace(program))
    assert Path(f"/proc/{old}/exe").stat().st_ino == inode
    scene.daemon.kill()
    scene.serve()
    assert scene.control == old
    scene.record_report("adopted the running control daemon")
    scene.note_recovery("the running one continues; once it ends, the new one ")
    scene.kill_control_daemon()
    assert Path(f"/proc/{scene.control}/exe").stat().st_ino == program.stat().st_ino != inode


def _copied_program(scene: Scene) -> Path:
    """NVIDIA's program in a place of the scene's own, in the place of the wrapper there."""
    path = scene.daemon.env["PATH"].split(os.pathsep, 1)[1]
    original = shutil.which(CONTROL, path=path)
    assert original
    made = scene.control_program.with_name("copy")
    shutil.copy(original, made)
    made.replace(scene.control_program)
    return scene.control_program
