"""Faults of the daemon itself: its death at every step, its stop, and its clock."""

from __future__ import annotations

import os
import random
import signal
import time

from yunion_mps.units import seconds

from faults.hands import Levers
from faults.rows import OURSELVES, fault
from faults.scene import FORMER_MODE, Scene, until
from faults.sweep import Sweep
from unit.mps.front_ends import STRANGER, flood, full_queue, stop_process

DAY_S = 86_400
_ADOPTED = "adopted the running control daemon"


@fault(OURSELVES, "it is killed (SIGKILL) while a job runs")
def killed(scene: Scene) -> None:
    scene.serve().job()
    control = scene.control
    scene.strike(scene.daemon.kill)
    _is_adopted(scene, control)


def _is_adopted(scene: Scene, control: int) -> None:
    """The next daemon goes on with the same control daemon."""
    scene.serve()
    scene.serves_again(lambda: scene.control == control)
    scene.saw(_ADOPTED)


@fault(OURSELVES, "it is stopped (SIGSTOP), and systemd's watchdog kills it")
def stopped(scene: Scene) -> None:
    scene.serve(WATCHDOG_USEC="200000").job()
    control = scene.control
    until(lambda: scene.daemon.notifications.count("WATCHDOG=1") > 2, "signs of life")
    scene.remember_events()
    stop_process(scene.daemon.pid)
    until(lambda: _is_silent(scene), "the end of its signs of life")
    # systemd sends SIGABRT first, which a stopped process does not heed.
    scene.strike(scene.daemon.kill, answers=False)
    _is_adopted(scene, control)


def _is_silent(scene: Scene) -> bool:
    """Whether no sign of life came for as long as systemd waits for one."""
    before = scene.daemon.notifications.count("WATCHDOG=1")
    time.sleep(0.2)
    return scene.daemon.notifications.count("WATCHDOG=1") == before


@fault(OURSELVES, "it is killed before each step of a start, a reload and a stop", takes_s=40)
def every_step(scene: Scene) -> None:
    sweep = Sweep(scene)
    sweep.without_a_job()
    _tell(scene, sweep, at_least=150)


@fault(OURSELVES, "it is killed before each step of a reload and of the next start; a job runs", takes_s=40)
def every_step_with_a_job(scene: Scene) -> None:
    sweep = Sweep(scene)
    sweep.with_a_job()
    _tell(scene, sweep, at_least=50)


def _tell(scene: Scene, sweep: Sweep, at_least: int) -> None:
    """Note what the sweep found, which is nothing unless it has killed so often."""
    scene.recovery, scene.words = sweep.recovery, scene.find(_ADOPTED)
    assert sweep.kills >= at_least, sweep.kills


@fault(
    OURSELVES, "it is killed 300 times while a user fills the control daemon's queue; a job runs", takes_s=60
)
def hidden(scene: Scene) -> None:
    """At any moment of its start: none of them starts a second control daemon, or restores a mode."""
    scene.serve().job()
    scene.remember_events()
    control = scene.control
    chance = random.Random(12)
    with full_queue(str(scene.pipe_directory), STRANGER):
        scene.strike(scene.daemon.kill, answers=False)
        for _ in range(299):
            scene.daemon.start()
            time.sleep(chance.uniform(0, 0.15))  # the moment of its death, which is what varies
            scene.daemon.kill()
            assert scene.control_daemons() == [control], scene.daemon.log
            assert scene.host.gpus[0].compute_mode == "exclusive_process"
        scene.daemon.start().wait_ready()
        scene.is_told("its queue is full, so")
    scene.mend(lambda: None, "they are closed")
    scene.serves_again(lambda: scene.control == control)
    assert scene.control_daemons() == [control]


@fault(OURSELVES, "it is started while a user fills the queue of every control daemon", takes_s=20)
def flooded_at_a_start(scene: Scene) -> None:
    """It waits and names the user's process, and the compute modes stay set."""
    scene.serve()
    place = str(scene.pipe_directory)
    assert scene.daemon.stop() == 0
    with flood(place, STRANGER):
        scene.strike(lambda: scene.daemon.start().wait_ready(), answers=False)
        scene.is_told("its queue is full, so")
        assert scene.host.gpus[0].compute_mode == "exclusive_process"
    scene.mend(lambda: None, "the user's process has ended")
    scene.serves_again()
    scene.hold_a_lease()


@fault(OURSELVES, "it is killed while it starts a control daemon, which is stopped at some stage", takes_s=30)
def while_it_starts_one(scene: Scene) -> None:
    """Fifty times: the next daemon finds it whatever it has come to, and goes on with it."""
    for stage in range(50):
        scene.daemon.start()
        (control,) = until(scene.control_daemons, "a control daemon", scene.trouble, pause_s=0)
        time.sleep(stage * 0.0001)  # the stage, which is what varies
        os.kill(control, signal.SIGSTOP)
        scene.daemon.kill()
        scene.daemon.start()
        scene.daemon.wait_log(f"{_ADOPTED} (PID {control})")
        os.kill(control, signal.SIGCONT)
        scene.daemon.wait_ready()
        scene.all_available()
        assert scene.control_daemons() == [control], scene.daemon.log
        assert scene.daemon.stop() == 0, scene.daemon.log
        assert scene.host.gpus[0].compute_mode == FORMER_MODE
    scene.serve()
    scene.strike(lambda: None)
    scene.goes_on("the next daemon continues with it each time")
    scene.saw("host: applying -> ready")


@fault(OURSELVES, "it is killed while the driver sets a compute mode, at a start and at a stop")
def in_a_mode_change(scene: Scene) -> None:
    daemon = scene.daemon

    def kill_in_the_call() -> None:
        until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
        scene.strike(daemon.kill, answers=False)

    _let_the_next_change_hang(scene)
    daemon.start()
    kill_in_the_call()
    scene.serve()
    _let_the_next_change_hang(scene)
    daemon.signal(signal.SIGTERM)
    kill_in_the_call()
    scene.serve()
    scene.serves_again()
    scene.saw("stopped -> starting")


def _let_the_next_change_hang(scene: Scene) -> None:
    """The rule is gone once the call is made."""
    scene.host.fail("nvmlDeviceSetComputeMode", "success", times=1, delay_ms=60_000)


@fault(OURSELVES, "it is killed during checkpoints of the SQLite database", takes_s=15)
def checkpoint(scene: Scene) -> None:
    sweep = Sweep(scene)
    sweep.through_checkpoints()
    _tell(scene, sweep, at_least=10)


@fault(OURSELVES, "the clock is set back by a day")
def clock_back(scene: Scene) -> None:
    _with_the_clock_at(scene, -DAY_S)


@fault(OURSELVES, "the clock is set forward by a day")
def clock_forward(scene: Scene) -> None:
    _with_the_clock_at(scene, DAY_S)


def _with_the_clock_at(scene: Scene, offset_s: int) -> None:
    """What is due comes all the same, and the next reload and death of the control daemon are as ever."""
    levers = Levers(scene.host.root)
    scene.serve(WATCHDOG_USEC="200000", **levers.environment).job()
    old = scene.control
    scene.strike(lambda: levers.set_clock(offset_s))
    signs = scene.daemon.notifications.count("WATCHDOG=1")
    until(lambda: scene.daemon.notifications.count("WATCHDOG=1") > signs + 2, "signs of life")
    assert scene.control == old
    assert scene.daemon.status()["devices"]["available"] == 4
    scene.host.divide(2)
    scene.daemon.signal(signal.SIGHUP)
    until(lambda: scene.domain["pending"], "the new budget", scene.trouble)
    scene.budgets = ["8G", "50.0"]
    event = scene.events()[-1]
    assert abs(seconds(event["time"]) - offset_s - time.time()) < DAY_S / 2, "it is dated by that clock"
    scene.goes_on()
    scene.saw("new limits")
    levers.close()
