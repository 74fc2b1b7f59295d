"""A healthy host for `yunion-mps doctor`, with or without its daemon, and what the doctor says of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from yunion_mps.doctor.checks import NAGIOS_CODES

from integration.daemon_host import Daemon, eventually
from simhost import SimHost
from simhost.mps import StandIns, program_version

CONTROL = "nvidia-cuda-mps-control"
#: nobody: a user who is neither root nor us.
STRANGER = 65534
#: Enough time for each check on a busy machine; the doctor's default of 5 s is made for monitoring.
PATIENT = ("--timeout", "60")
#: A process that says that it runs, and then waits.
SLEEP = [sys.executable, "-IS", "-c", "import time; print('ready', flush=True); time.sleep(600)"]


class Seen(NamedTuple):
    """What the doctor said: its exit status, and for each check the lines."""

    code: int
    checks: dict[str, list[dict[str, str]]]

    def bad(self) -> dict[str, str]:
        """All lines that are not ok, by check and level, joined."""
        lines = [(name, one) for name, found in self.checks.items() for one in found if one["level"] != "ok"]
        return {f"{one['level']} {name}": one["what"] for name, one in lines}

    def one(self, check: str, level: str) -> dict[str, str]:
        """The one line of a check, which has this level and, if it is bad, a hint."""
        (found,) = self.checks[check]
        assert found["level"] == level, found
        assert level in ("ok", "skipped") or found["hint"], found
        return found


class Scene:
    """A host on which every check is content, its MPS server a stand-in, and what may be done to it."""

    def __init__(self, stack: ExitStack, *gpus: dict[str, object]) -> None:
        """With these GPUs, or two T4, and a driver of the control program's version."""
        self._stack = stack
        self.host = stack.enter_context(
            SimHost.create(
                {
                    "driver": {"version": program_version(), "cuda": "12.2"},
                    "gpus": list(gpus) or [{"kind": "t4", "count": 2}],
                }
            )
        )
        self.stand_ins = stack.enter_context(StandIns(self.host))
        # What a driver's installation adds.
        library = self.host.root / f"lib/libcuda.so.{self.host.description.driver_version}"
        library.touch()
        (self.host.root / "lib/libcuda.so.1").symlink_to(library.name)
        self.daemon = stack.enter_context(Daemon(self.host))

    @property
    def pipe(self) -> Path:
        return self.daemon.pipe_directory

    def start(self) -> Scene:
        self.daemon.start().wait_ready()
        return self

    def look(self, *arguments: str, before: tuple[str, ...] = (), user: int = 0, **variables: str) -> Seen:
        """Run the doctor, perhaps behind other words (`unshare`) or as a user; it says nothing but JSON."""
        words = [*before, "yunion-mps", "doctor", "--nagios", "-o", "json", *PATIENT, *arguments]
        as_user = {"user": user, "group": user, "extra_groups": []} if user else {}
        done = self.host.run(words, env={**self.host.env, **variables}, **as_user)
        assert done.stderr == "", done.stderr
        answer = json.loads(done.stdout)
        assert NAGIOS_CODES[answer["state"]] == done.returncode
        checks: dict[str, list[dict[str, str]]] = {}
        for line in answer["checks"]:
            checks.setdefault(line["check"], []).append(line)
        return Seen(done.returncode, checks)

    def process(self, words: list[str], **environment: str) -> subprocess.Popen[str]:
        """A process that has printed its first line, and ends with the test."""
        process = self._started(words, environment)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def control_daemon(self, place: Path, **environment: str) -> int:
        """A control daemon of another program there; its PID."""
        place.mkdir(parents=True, exist_ok=True)
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        process = self._started([CONTROL, "-f"], {**dict.fromkeys(names, str(place)), **environment})
        eventually((place / "control").exists, "its socket")
        return process.pid

    def _started(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        env = {**self.host.env, **environment}
        process = self._stack.enter_context(self.host.popen(words, env=env, stderr=subprocess.DEVNULL))
        self._stack.callback(process.kill)
        return process

    def own_programs(self) -> Path:
        """A folder with NVIDIA's own programs for the daemon, which usually finds scripts around them."""
        folder = self.host.root / "opt"
        folder.mkdir()
        parts = self.host.env["PATH"].split(":")
        path = ":".join(part for part in parts if part != str(self.stand_ins.folder))
        real = shutil.which(CONTROL, path=path)
        assert real
        shutil.copy(real, folder)
        shutil.copy(self.stand_ins.folder / "nvidia-cuda-mps-server", folder)
        self.daemon.env["PATH"] = f"{folder}:{path}"
        return folder

    def device(self, slot: int) -> dict[str, str]:
        environment: dict[str, str] = self.daemon.get(f"/v1/devices/00:06.0-{slot}")[1]["client_environment"]
        return environment
