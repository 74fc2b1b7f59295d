"""A process whose environment can be read."""

from __future__ import annotations

import subprocess

from yunion_mps.host.proc import started_ticks


class Job:
    """One that names these devices in its environment, and runs until `end`."""

    def __init__(self, names: str) -> None:
        environment = {"YUNION_MPS_DEVICE": names, "PATH": "/usr/bin:/bin"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(["cat"], env=environment, stdin=pipe, stdout=pipe)
        self.pid = self._process.pid
        self._answer()
        self.started = {self.pid: started_ticks(self.pid) or 0}

    def _answer(self) -> None:
        """Only once it runs has it an environment: a little later than its start returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"\n"

    def end(self) -> None:
        """End it."""
        self._process.communicate()
