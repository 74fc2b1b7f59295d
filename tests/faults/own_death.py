"""Faults of the daemon itself: its death at every step, its stop, and its clock."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import signal
import statistics
import time

from yunion_mps.core.units import seconds

from faults.fault_table import OURSELVES, fault
from faults.scene import FORMER_MODE, Scene, shown_s, until
from faults.tampering import Levers
from integration.daemon_host import control_daemons
from unit.mps.other_processes import STRANGER, flood, full_queue, stop_process

DAY_S = 86_400
_ADOPTED = "adopted the running control daemon"


@fault(OURSELVES, "it is killed (SIGKILL) while a job runs")
def killed(scene: Scene) -> None:
    scene.serve().job()
    control = scene.control
    scene.inject(scene.daemon.kill)
    _is_adopted(scene, control)


def _is_adopted(scene: Scene, control: int) -> None:
    """The next daemon goes on with the same control daemon."""
    scene.serve()
    scene.serves_again(lambda: scene.control == control)
    scene.record_report(_ADOPTED)


@fault(OURSELVES, "it is stopped (SIGSTOP), and systemd's watchdog kills it")
def stopped(scene: Scene) -> None:
    scene.serve(WATCHDOG_USEC="200000").job()
    control = scene.control
    until(lambda: scene.daemon.notifications.count("WATCHDOG=1") > 2, "signs of life")
    scene.remember_events()
    stop_process(scene.daemon.pid)
    until(lambda: _is_silent(scene), "the end of its signs of life")
    # systemd sends SIGABRT first, which a stopped process does not heed.
    scene.inject(scene.daemon.kill, answers=False)
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
    scene.recovery = sweep.recovery
    scene.words = scene.words or scene.find(_ADOPTED)
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
        scene.inject(scene.daemon.kill, answers=False)
        for _ in range(299):
            scene.daemon.start()
            time.sleep(chance.uniform(0, 0.15))  # the moment of its death, which is what varies
            scene.daemon.kill()
            assert scene.control_daemons() == [control], scene.daemon.log
            assert scene.host.gpus[0].compute_mode == "exclusive_process"
        scene.daemon.start().wait_ready()
        scene.expect_report("its queue is full, so")
    scene.repair(lambda: None, "they are closed")
    scene.serves_again(lambda: scene.control == control)
    assert scene.control_daemons() == [control]


@fault(OURSELVES, "it is started while a user fills the queue of every control daemon", takes_s=20)
def flooded_at_a_start(scene: Scene) -> None:
    """It waits and names the user's process, and the compute modes stay set."""
    scene.serve()
    place = str(scene.pipe_directory)
    assert scene.daemon.stop() == 0
    with flood(place, STRANGER):
        scene.inject(lambda: scene.daemon.start().wait_ready(), answers=False)
        scene.expect_report("its queue is full, so")
        assert scene.host.gpus[0].compute_mode == "exclusive_process"
    scene.repair(lambda: None, "the user's process has ended")
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
    scene.inject(lambda: None)
    scene.note_recovery("the next daemon continues with it each time")
    scene.record_report("host: applying -> ready")


@fault(OURSELVES, "it is killed while the driver sets a compute mode, at a start and at a stop")
def in_a_mode_change(scene: Scene) -> None:
    daemon = scene.daemon

    def kill_in_the_call() -> None:
        until(lambda: not scene.host.show()["failures"], "the call", scene.trouble)
        scene.inject(daemon.kill, answers=False)

    _let_the_next_change_hang(scene)
    daemon.start()
    kill_in_the_call()
    scene.serve()
    _let_the_next_change_hang(scene)
    daemon.signal(signal.SIGTERM)
    kill_in_the_call()
    scene.serve()
    scene.serves_again()
    scene.record_report("stopped -> starting")


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
    scene.inject(lambda: levers.set_clock(offset_s))
    signs = scene.daemon.notifications.count("WATCHDOG=1")
    until(lambda: scene.daemon.notifications.count("WATCHDOG=1") > signs + 2, "signs of life")
    assert scene.control == old
    assert scene.daemon.status()["devices"]["available"] == 4
    scene.host.divide(2)
    scene.daemon.signal(signal.SIGHUP)
    until(lambda: scene.domain["pending"], "the new budget", scene.trouble)
    scene.budgets = ["8G", "50.0"]
    ahead_s = seconds(scene.events()[-1]["time"]) - time.time()
    assert round(ahead_s / DAY_S) == offset_s / DAY_S, "it is dated by that clock"
    scene.note_recovery()
    scene.record_report("change of limits")
    levers.close()


#: What the numbers of devices mean for the control daemon of one V100 (16 GiB).
BUDGETS = {4: ["4G", "25.0"], 2: ["8G", "50.0"]}
#: What makes the state file grow by some pages, and the distance of the steps that are tried.
_RELOADS_FOR_GROWTH, _STRIDE = 16, 4


class Sweep:
    """Kills, counted; after each the next daemon has to find everything in order."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._daemon = scene.daemon
        self._levers = Levers(scene.host.root)
        self._number = 4
        self._times_s: list[float] = []
        self._last_event = 0
        self.kills = 0

    @property
    def recovery(self) -> str:
        """For the table."""
        times = f"{shown_s(statistics.median(self._times_s))}, at most {shown_s(max(self._times_s))}"
        return f"after each of {self.kills} kills the next daemon serves after {times}"

    def without_a_job(self) -> None:
        """Before each step of a start, of a reload that changes budgets, and of a stop."""
        starting, reloading, stopping = self._count()
        for start, reload, stop in itertools.zip_longest(*map(range, (starting, reloading, stopping))):
            if start is not None:
                self._begin(start + 1)
                self._wait_for_its_end()
                self._next_daemon()
            else:
                self._begin()
                self._daemon.wait_ready()
            if reload is not None:
                self._reload(reload + 1)
                self._wait_for_its_end()
                self._next_daemon()
            if stop is not None:
                self._levers.kill_before(self._levers.steps + stop + 1)
                if self._daemon.stop() != 0:
                    self._count_kill()
                    self._next_daemon()
                    assert self._daemon.stop() == 0, self._daemon.log
            else:
                assert self._daemon.stop() == 0, self._daemon.log
            assert self._scene.host.gpus[0].compute_mode == FORMER_MODE, self._daemon.log
            assert control_daemons(self._scene.host.root) == []
        self._finish()

    def with_a_job(self) -> None:
        """Before each step of a reload that must wait for the job, and of the start that adopts then."""
        self._serve()
        self._scene.job()
        control = self._scene.control
        for step in itertools.count(1):
            self._reload(step)
            killed = self._wait_for_its_end()
            self._begin(step)
            killed = self._wait_for_its_end() or killed
            self._next_daemon()
            assert self._scene.control == control
            in_effect = self._scene.domain["memory_limits_mib"]
            assert in_effect == [4096], (
                f"not what the job's server has, after step {step}\n{self._scene.trouble()}"
            )
            if not killed:
                break
        self._finish()

    def through_checkpoints(self) -> None:
        """Before steps of a stop that has many events to move into the file itself, which grows by them."""
        step = 1
        while True:
            self._serve()
            for _ in range(_RELOADS_FOR_GROWTH):
                self._reload()
            self._last_event = self._scene.events()[-1]["id"]
            self._levers.kill_before(self._levers.steps + step)
            if self._daemon.stop() == 0:
                break
            self._count_kill()
            self._next_daemon()
            assert self._daemon.stop() == 0, self._daemon.log
            step += _STRIDE
        self._finish()

    def _count(self) -> tuple[int, int, int]:
        """How many steps a start, a reload and a stop have."""
        self._serve()
        started = self._levers.steps
        self._reload()
        reloaded = self._levers.steps
        assert self._daemon.stop() == 0, self._daemon.log
        return started, reloaded - started, self._levers.steps - reloaded

    def _serve(self) -> None:
        self._begin()
        self._daemon.wait_ready()
        self._scene.all_available()
        self._scene.hold_a_lease()

    def _begin(self, last_step: int = 0) -> None:
        self._daemon.start(**self._levers.environment)
        self._levers.kill_before(last_step)

    def _reload(self, steps: int = 0) -> None:
        """Change the budgets, so many steps before the end."""
        self._number = 6 - self._number
        self._scene.host.divide(self._number)
        if steps:
            self._levers.kill_before(self._levers.steps + steps)
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._daemon.ask("POST", "/v1/reload")

    def _wait_for_its_end(self) -> bool:
        """Wait until it has been killed at its step; if it got by without that step, it is killed now."""

        def is_over() -> bool:
            if not self._daemon.running:
                return True
            with contextlib.suppress(OSError, http.client.HTTPException):
                return bool(self._daemon.get("/v1/status"))
            return False

        until(is_over, "its end, or its service", self._scene.trouble)
        killed = not self._daemon.running
        if not killed:
            self._daemon.kill()
        self._daemon.wait()
        self._count_kill()
        return killed

    def _count_kill(self) -> None:
        assert self._daemon.returncode == -9, self._daemon.log
        self.kills += 1

    def _next_daemon(self) -> None:
        """It has to adopt, or to start again, and to have all budgets and events."""
        begin_s = time.monotonic()
        self._begin()
        self._daemon.wait_ready()
        self._scene.all_available()
        self._times_s.append(time.monotonic() - begin_s)
        assert self._scene.limits() == BUDGETS[self._number], self._scene.trouble()
        assert self._scene.host.gpus[0].compute_mode == "exclusive_process"
        assert self._scene.control_daemons() == [self._scene.control]
        assert self._scene.keeps_the_lease, self._scene.trouble()
        events = self._scene.events()
        ids = [event["id"] for event in events]
        assert ids == list(range(ids[0], ids[-1] + 1))
        assert ids[0] <= self._last_event + 1 <= ids[-1], "events are gone"
        self._last_event = ids[-1]
        # Seen at once, because later events displace it from those that are asked for.
        self._scene.words = self._scene.words or self._scene.find(_ADOPTED)

    def _finish(self) -> None:
        if not self._daemon.running:
            self._begin()
            self._daemon.wait_ready()
        self._scene.budgets = BUDGETS[self._number]
        self._levers.close()
