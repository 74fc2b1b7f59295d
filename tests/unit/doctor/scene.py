"""A healthy host with its daemon, and what may be done to it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from integration.daemon_host import Daemon, eventually
from simhost import SimHost
from simhost.mps import StandIns
from unit.doctor.healthy import CONTROL, described, finish

#: A process that says that it runs, and then waits.
SLEEP = [sys.executable, "-IS", "-c", "import time; print('ready', flush=True); time.sleep(600)"]


class Scene:
    """A healthy host with its daemon, and what may be done to it."""

    def __init__(self, stack: ExitStack, *gpus: dict[str, object]) -> None:
        self._stack = stack
        self.host = stack.enter_context(SimHost.create(described(*gpus)))
        self.stand_ins = stack.enter_context(StandIns(self.host))
        finish(self.host)
        self.daemon = stack.enter_context(Daemon(self.host))

    @property
    def pipe(self) -> Path:
        return self.daemon.pipe_directory

    def start(self) -> Scene:
        self.daemon.start().wait_ready()
        return self

    def process(self, words: list[str], **environment: str) -> subprocess.Popen[str]:
        """A process that has printed its first line, and ends with the test."""
        env = {**self.host.env, **environment}
        process = self._stack.enter_context(self.host.popen(words, env=env))
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def control_daemon(self, place: Path, **environment: str) -> int:
        """A control daemon of another program there; its PID."""
        place.mkdir(parents=True, exist_ok=True)
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        env = {**self.host.env, **dict.fromkeys(names, str(place)), **environment}
        process = self._stack.enter_context(
            self.host.popen([CONTROL, "-f"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        self._stack.callback(process.kill)
        eventually((place / "control").exists, "its socket")
        return process.pid

    def device(self, slot: int) -> dict[str, str]:
        """The environment of a device of the first GPU."""
        environment: dict[str, str] = self.daemon.get(f"/v1/devices/00:06.0-{slot}")[1]["client_environment"]
        return environment
