"""The daemon's end before every step of its life, one after another, and what the next daemon makes of it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import statistics
import time

from faults.hands import Levers
from faults.scene import FORMER_MODE, Scene, shown_s, until
from integration.daemon_host import control_daemons

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
        struck_s = time.monotonic()
        self._begin()
        self._daemon.wait_ready()
        self._scene.all_available()
        self._times_s.append(time.monotonic() - struck_s)
        assert self._scene.limits() == BUDGETS[self._number], self._scene.trouble()
        assert self._scene.host.gpus[0].compute_mode == "exclusive_process"
        assert self._scene.control_daemons() == [self._scene.control]
        assert self._scene.keeps_the_lease, self._scene.trouble()
        events = self._scene.events()
        ids = [event["id"] for event in events]
        assert ids == list(range(ids[0], ids[-1] + 1))
        assert ids[0] <= self._last_event + 1 <= ids[-1], "events are gone"
        self._last_event = ids[-1]

    def _finish(self) -> None:
        if not self._daemon.running:
            self._begin()
            self._daemon.wait_ready()
        self._scene.budgets = BUDGETS[self._number]
        self._levers.close()
